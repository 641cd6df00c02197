// Part of kernels.inl: the products of attention and its weights, float32 throughout.

// Sixteen partial sums become one: each half is added to the other until one is left, so that every
// vector width adds the same numbers in the same order. This adds whole vectors; `V::total` and
// `V::totals` go on inside of one.
template <class V, int COUNT>
HB_INLINE typename V::F halved(typename V::F (&parts)[COUNT]) {
  if constexpr (COUNT == 1) {
    return parts[0];
  } else {
    typename V::F halves[COUNT / 2];
    HB_UNROLL_FOR (int i = 0; i < COUNT / 2; ++i)
      halves[i] = V::fadd(parts[i], parts[i + COUNT / 2]);
    return halved<V>(halves);
  }
}

// ROWS rows of k against HEADS rows of q, so that a vector of k serves all heads and one of q all
// rows. Product j is added to partial sum j mod 16, whatever the instruction set.
template <class V, int HEADS, int ROWS>
HB_INLINE void dots_tile(const float *q, const float *k, int64_t d, float *out, int64_t stride) {
  constexpr int H = kPanelRows / V::W;
  typename V::F sums[HEADS][ROWS][H];
  HB_UNROLL_FOR (int h = 0; h < HEADS; ++h)
    HB_UNROLL_FOR (int r = 0; r < ROWS; ++r)
      HB_UNROLL_FOR (int i = 0; i < H; ++i) sums[h][r][i] = V::fzero();
  int64_t j = 0;
  for (; j + kPanelRows <= d; j += kPanelRows)
    HB_UNROLL_FOR (int i = 0; i < H; ++i) {
      typename V::F keys[ROWS];
      HB_UNROLL_FOR (int r = 0; r < ROWS; ++r) keys[r] = V::fload(k + r * d + j + i * V::W);
      HB_UNROLL_FOR (int h = 0; h < HEADS; ++h) {
        const typename V::F query = V::fload(q + h * d + j + i * V::W);
        HB_UNROLL_FOR (int r = 0; r < ROWS; ++r)
          sums[h][r][i] = V::fma(query, keys[r], sums[h][r][i]);
      }
    }
  typename V::F each[HEADS * ROWS];
  HB_UNROLL_FOR (int h = 0; h < HEADS; ++h)
    HB_UNROLL_FOR (int r = 0; r < ROWS; ++r) each[h * ROWS + r] = halved<V>(sums[h][r]);
  if constexpr (HEADS * ROWS == V::sums_together)
    V::totals(each, out, HEADS == 1 ? 1 : stride);
  else
    HB_UNROLL_FOR (int h = 0; h < HEADS; ++h)
      HB_UNROLL_FOR (int r = 0; r < ROWS; ++r) out[h * stride + r] = V::total(each[h * ROWS + r]);
  for (; j < d; ++j)
    for (int h = 0; h < HEADS; ++h)
      for (int r = 0; r < ROWS; ++r) out[h * stride + r] += q[h * d + j] * k[r * d + j];
}

template <class V, int HEADS>
void dots_heads(const float *q, const float *k, int64_t rows, int64_t d, float *out,
                int64_t stride) {
  // The sums of `together` rows and a vector of each row are in registers.
  constexpr int H = kPanelRows / V::W, room = V::registers / (HEADS * H + 1);
  constexpr int together = room >= 4 ? 4 : room >= 2 ? 2 : 1;
  int64_t t = 0;
  for (; t + together <= rows; t += together)
    dots_tile<V, HEADS, together>(q, k + t * d, d, out + t, stride);
  for (; t < rows; ++t) dots_tile<V, HEADS, 1>(q, k + t * d, d, out + t, stride);
}

// out[h * stride + t] = q[h] . k[t], q [heads][d], k [rows][d].
template <class V>
void dots(const float *q, int64_t heads, const float *k, int64_t rows, int64_t d, float *out,
          int64_t stride) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) dots_heads<V, 4>(q + h * d, k, rows, d, out + h * stride, stride);
  for (; h < heads; ++h) dots_heads<V, 1>(q + h * d, k, rows, d, out + h * stride, stride);
}

// HEADS heads of COUNT vectors of sums in registers, over all rows.
template <class V, int HEADS, int COUNT>
HB_INLINE void mix_tile(const float *p, int64_t stride, const float *v, int64_t rows, int64_t d,
                        float *out) {
  typename V::F sums[HEADS][COUNT];
  HB_UNROLL_FOR (int h = 0; h < HEADS; ++h) {
    HB_UNROLL_FOR (int i = 0; i < COUNT; ++i) sums[h][i] = V::fzero();
  }
  for (int64_t t = 0; t < rows; ++t) {
    typename V::F values[COUNT];
    HB_UNROLL_FOR (int i = 0; i < COUNT; ++i) values[i] = V::fload(v + t * d + i * V::W);
    HB_UNROLL_FOR (int h = 0; h < HEADS; ++h) {
      const typename V::F weight = V::fset(p[h * stride + t]);
      HB_UNROLL_FOR (int i = 0; i < COUNT; ++i) sums[h][i] = V::fma(weight, values[i], sums[h][i]);
    }
  }
  HB_UNROLL_FOR (int h = 0; h < HEADS; ++h) {
    HB_UNROLL_FOR (int i = 0; i < COUNT; ++i) V::fstore(out + h * d + i * V::W, sums[h][i]);
  }
}

template <class V, int HEADS>
void mix_heads(const float *p, int64_t stride, const float *v, int64_t rows, int64_t d,
               float *out) {
  constexpr int together = V::registers >= 32 ? 4 : 2;
  int64_t j = 0;
  for (; j + together * V::W <= d / kPanelRows * kPanelRows; j += together * V::W)
    mix_tile<V, HEADS, together>(p, stride, v + j, rows, d, out + j);
  // Whole sixteens, so that every instruction set leaves the same columns to the loop below.
  for (; j + V::W <= d / kPanelRows * kPanelRows; j += V::W)
    mix_tile<V, HEADS, 1>(p, stride, v + j, rows, d, out + j);
  for (; j < d; ++j)
    for (int h = 0; h < HEADS; ++h) {
      float sum = 0.0f;
      for (int64_t t = 0; t < rows; ++t) sum += p[h * stride + t] * v[t * d + j];
      out[h * d + j] = sum;
    }
}

// out[h] = sum over t of p[h * stride + t] v[t], in order of t; out [heads][d], v [rows][d].
template <class V>
void mix(const float *p, int64_t stride, int64_t heads, const float *v, int64_t rows, int64_t d,
         float *out) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) mix_heads<V, 4>(p + h * stride, stride, v, rows, d, out + h * d);
  for (; h < heads; ++h) mix_heads<V, 1>(p + h * stride, stride, v, rows, d, out + h * d);
}

// Scores to weights, in place: exp((score - peak) * scale), peak the largest score, NaN where one
// is. In lanes and without branches, which compilers vectorize.
template <class V>
void weigh(float *line, int64_t count, float scale, float *peak, float *sum) {
  constexpr int lanes = 16;
  float most[lanes];
  int32_t nan[lanes] = {};
  for (int j = 0; j < lanes; ++j) most[j] = line[0];
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    for (int j = 0; j < lanes; ++j) {
      const float one = line[i + j];
      most[j] = one > most[j] ? one : most[j];
      nan[j] |= one != one;
    }
  float largest = most[0];
  for (; i < count; ++i) {
    largest = line[i] > largest ? line[i] : largest;
    nan[0] |= line[i] != line[i];
  }
  for (int j = 0; j < lanes; ++j) {
    largest = most[j] > largest ? most[j] : largest;
    nan[0] |= nan[j];
  }
  if (nan[0]) largest = __builtin_nanf("");
  for (i = 0; i < count; ++i) line[i] = exponential((line[i] - largest) * scale);
  *peak = largest, *sum = sum_of<V>(line, count);
}
