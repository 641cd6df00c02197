// Part of kernels.inl: one token's attention over the keys and values of those before it, float32 throughout.

// The lanes of a vector added up, half by half.
template <class V>
HB_INLINE float lanes_sum(typename V::F v) {
  alignas(64) float lanes[V::W];
  V::fstore(lanes, v);
  HB_UNROLL
  for (int half = V::W / 2; half; half /= 2) {
    HB_UNROLL
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// ROWS rows of k against HEADS rows of q, so that a vector of k serves all heads and one of q all rows.
template <class V, int HEADS, int ROWS>
HB_INLINE void dots_tile(const float *q, const float *k, int64_t d, float *out, int64_t stride) {
  typename V::F sums[HEADS][ROWS];
  HB_UNROLL
  for (int h = 0; h < HEADS; ++h) {
    HB_UNROLL
    for (int r = 0; r < ROWS; ++r) sums[h][r] = V::fzero();
  }
  int64_t j = 0;
  for (; j + V::W <= d; j += V::W) {
    typename V::F keys[ROWS];
    HB_UNROLL
    for (int r = 0; r < ROWS; ++r) keys[r] = V::fload(k + r * d + j);
    HB_UNROLL
    for (int h = 0; h < HEADS; ++h) {
      const typename V::F query = V::fload(q + h * d + j);
      HB_UNROLL
      for (int r = 0; r < ROWS; ++r) sums[h][r] = V::fma(query, keys[r], sums[h][r]);
    }
  }
  HB_UNROLL
  for (int h = 0; h < HEADS; ++h) {
    HB_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      float total = lanes_sum<V>(sums[h][r]);
      for (int64_t i = j; i < d; ++i) total += q[h * d + i] * k[r * d + i];
      out[h * stride + r] = total;
    }
  }
}

template <class V, int HEADS>
void dots_heads(const float *q, const float *k, int64_t rows, int64_t d, float *out, int64_t stride) {
  constexpr int together = V::registers >= 32 ? 4 : 2;  // HEADS * together sums and `together` keys in registers
  int64_t t = 0;
  for (; t + together <= rows; t += together) dots_tile<V, HEADS, together>(q, k + t * d, d, out + t, stride);
  for (; t < rows; ++t) dots_tile<V, HEADS, 1>(q, k + t * d, d, out + t, stride);
}

// out[h * stride + t] = q[h] . k[t], q [heads][d], k [rows][d].
template <class V>
void dots(const float *q, int64_t heads, const float *k, int64_t rows, int64_t d, float *out, int64_t stride) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) dots_heads<V, 4>(q + h * d, k, rows, d, out + h * stride, stride);
  for (; h < heads; ++h) dots_heads<V, 1>(q + h * d, k, rows, d, out + h * stride, stride);
}

// out[h] = sum over t of p[h * stride + t] v[t], in order of t; out [heads][d], v [rows][d].
template <class V>
void mix(const float *p, int64_t stride, int64_t heads, const float *v, int64_t rows, int64_t d, float *out) {
  constexpr int together = 4;  // rows of v taken before a sum goes back to memory
  for (int64_t i = 0; i < heads * d; ++i) out[i] = 0.0f;
  const int64_t whole = d / V::W * V::W;
  for (int64_t t = 0; t < rows; t += together) {
    const int count = rows - t < together ? (int)(rows - t) : together;
    const float *from = v + t * d;
    for (int64_t h = 0; h < heads; ++h) {
      float *to = out + h * d;
      typename V::F weights[together];
      for (int r = 0; r < count; ++r) weights[r] = V::fset(p[h * stride + t + r]);
      if (count == together) {
        for (int64_t j = 0; j < whole; j += V::W) {
          typename V::F sum = V::fload(to + j);
          HB_UNROLL
          for (int r = 0; r < together; ++r) sum = V::fma(weights[r], V::fload(from + r * d + j), sum);
          V::fstore(to + j, sum);
        }
      } else {
        for (int64_t j = 0; j < whole; j += V::W) {
          typename V::F sum = V::fload(to + j);
          for (int r = 0; r < count; ++r) sum = V::fma(weights[r], V::fload(from + r * d + j), sum);
          V::fstore(to + j, sum);
        }
      }
      for (int64_t j = whole; j < d; ++j)
        for (int r = 0; r < count; ++r) to[j] += p[h * stride + t + r] * from[r * d + j];
    }
  }
}
