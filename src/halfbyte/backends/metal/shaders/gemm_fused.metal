// Fused products: no tile of decoded weights. Each simdgroup decodes an 8 x 8 piece of B into its own few bytes of staging, behind a
// simdgroup barrier, while x comes through a threadgroup tile of 64 x 32. B is words of eight nibbles of one column,
// `words[k / 8 * k_stride + n * n_stride]`: strides (1, n) are the [k/8, n] order, (k/8, 1) the order of rows.
//
// What is staged is the code's own number (e2m1, q - z, q), exact in half and bfloat, so that the product of a group is exact
// up to its float32 sum. Scale and bias meet that sum: total += scale (sum of the group) + bias (sum of the group's x). Which two
// elements of a matrix a lane holds is Apple's secret; a matrix of indices, stored plainly and loaded as a matrix, tells.

namespace halfbyte {

template <typename Element, typename Scale, int Addend, int G> struct packed_words {
  typedef Element element;
  typedef Scale scale;
  typedef typename Scale::stored stored;
  typedef typename addend_type<Addend, stored>::type added;
  static constant constexpr int addend = Addend;
  static constant constexpr int group = G;

  const device uint* words;
  const device stored* scales;
  const device added* addends;
  ulong n_stride, k_stride;              // of words
  ulong scale_n_stride, scale_g_stride;  // of scales and addends
  uint units;

  uint word(uint n, uint unit) const { return words[n * n_stride + unit * k_stride]; }
  ulong entry(uint n, uint unit) const { return n * scale_n_stride + (G == 0 ? 0 : unit / (G / 8 > 0 ? G / 8 : 1)) * scale_g_stride; }
  // The staged number of a code; `zero` is 0 but for ZEROS.
  float number(uint code, float zero) const { return Element::value(code) - zero; }
  float zero(uint n, uint unit) const { return Addend == ZEROS ? float(addends[entry(n, unit)]) : 0.0f; }
  bool group_ends(uint unit) const { return unit + 1 == units || (G != 0 && (unit + 1) % (G / 8 > 0 ? G / 8 : 1) == 0); }
};

constant constexpr uint FUSED_K = 32, FUSED_PAD = 8;

// Rows of x in its own dtype, zeros beyond m and k.
template <typename T>
METAL_FUNC void load_x_rows(const device T* x, ulong x_stride, uint m, uint units, uint m0, uint unit0, threadgroup T* tile,
                            uint thread_index) {
  for (uint i = thread_index; i < TILE_M * FUSED_K / 8; i += TILE_THREADS) {
    const uint row = i / (FUSED_K / 8), unit = i % (FUSED_K / 8);
    const bool inside = m0 + row < m && unit0 + unit < units;
    const device T* source = x + (m0 + row) * x_stride + 8 * (unit0 + unit);
    threadgroup T* target = tile + row * (FUSED_K + FUSED_PAD) + 8 * unit;
    for (int j = 0; j < 8; ++j) target[j] = inside ? source[j] : T(0.0f);
  }
}

// Row and column of a lane's two elements of an 8 x 8 matrix. `stage` holds 64 numbers of the simdgroup's own; the threadgroup
// barrier behind the first x tile stands between this and the first piece staged there.
template <typename T> METAL_FUNC void find_elements(threadgroup T* stage, uint lane, thread uint* rows, thread uint* columns) {
  stage[lane] = T(float(lane));  // 0 to 63 are exact in half and bfloat
  stage[lane + 32] = T(float(lane + 32));
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<T, 8, 8> index;
  simdgroup_load(index, stage, 8);
  for (int i = 0; i < 2; ++i) {
    const uint at = uint(float(index.thread_elements()[i]));
    rows[i] = at / 8;
    columns[i] = at % 8;
  }
}

// total += scale part + bias sums, for the matrices of one column block, and part = 0.
template <typename W, int M>
METAL_FUNC void fold_group(W w, uint n, uint column0, uint unit, thread matrix8x8* part, thread matrix8x8* sums, thread matrix8x8* total,
                           const thread uint* columns) {
  for (int e = 0; e < 2; ++e) {
    const uint column = min(column0 + columns[e], n - 1);
    const ulong at = w.entry(column, unit);
    const typename W::stored scale = w.scales[at];
    for (int i = 0; i < M; ++i) {
      const float p = part[i].thread_elements()[e];
      float t = total[i].thread_elements()[e];
      if (W::addend == BIASES)
        t += fma(p, W::scale::value(scale), sums[i].thread_elements()[e] * float(w.addends[at]));
      else
        t += W::scale::times(p, scale);
      total[i].thread_elements()[e] = t;
      part[i].thread_elements()[e] = 0.0f;
    }
  }
}

// The finished elements of one matrix, from registers.
template <typename T, int op>
METAL_FUNC void store_elements(thread matrix8x8& sum, device T* y, uint m, uint n, uint row0, uint column0, const device float* bias,
                               bool has_bias, float factor, float divisor, const thread uint* rows, const thread uint* columns) {
  for (int e = 0; e < 2; ++e) {
    const uint row = row0 + rows[e], column = column0 + columns[e];
    if (row < m && column < n)
      y[ulong(row) * n + column] =
          finish<T, op>(sum.thread_elements()[e], factor, divisor, has_bias, has_bias ? bias[column] : 0.0f);
  }
}

// The plain design. Simdgroups own 32 x 32 outputs; for each row tile and each column tile, lanes 0 to 7 decode one word each,
// a column of eight codes, into 64 numbers of staging (128 bytes in half and bfloat). x_tile: 64 x 40, stage: 4 x 64 numbers.
template <typename W, typename T, int op>
METAL_FUNC void gemm_fused(W w, const device T* x, ulong x_stride, const device float* bias, bool has_bias, float factor,
                           float divisor, device T* y, uint m, uint n, threadgroup T* x_tile, threadgroup T* stages, uint2 group,
                           uint simdgroup, uint lane) {
  const uint m0 = group.y * TILE_M, n0 = group.x * TILE_N, thread_index = simdgroup * 32 + lane;
  const uint row0 = simdgroup / 2 * 32, column0 = simdgroup % 2 * 32;
  threadgroup T* stage = stages + 64 * simdgroup;
  uint rows[2], columns[2];
  find_elements(stage, lane, rows, columns);
  matrix8x8 total[4][4], part[4][4], sums[4];  // [column tile][row tile]
  simdgroup_matrix<T, 8, 8> ones = make_filled_simdgroup_matrix<T, 8, 8>(T(1.0f));
  for (int j = 0; j < 4; ++j) {
    sums[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int i = 0; i < 4; ++i) {
      total[j][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      part[j][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
  for (uint unit0 = 0; unit0 < w.units; unit0 += FUSED_K / 8) {
    load_x_rows(x, x_stride, m, w.units, m0, unit0, x_tile, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint u = 0; u < FUSED_K / 8 && unit0 + u < w.units; ++u) {
      const uint unit = unit0 + u;
      simdgroup_matrix<T, 8, 8> a[4], b;
      for (int i = 0; i < 4; ++i) {
        simdgroup_load(a[i], x_tile + (row0 + 8 * i) * (FUSED_K + FUSED_PAD) + 8 * u, FUSED_K + FUSED_PAD);
        if (W::addend == BIASES) simdgroup_multiply_accumulate(sums[i], a[i], ones, sums[i]);
      }
      for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < 4; ++i) {
          if (lane < 8) {
            const uint column = min(n0 + column0 + 8 * j + lane, n - 1), word = w.word(column, unit);
            const float zero = w.zero(column, unit);
            for (uint k = 0; k < 8; ++k) stage[8 * k + lane] = T(w.number((word >> (4 * k)) & 15, zero));
          }
          simdgroup_barrier(mem_flags::mem_threadgroup);
          simdgroup_load(b, stage, 8);
          simdgroup_multiply_accumulate(part[j][i], a[i], b, part[j][i]);
          simdgroup_barrier(mem_flags::mem_threadgroup);
        }
      }
      if (w.group_ends(unit)) {
        for (int j = 0; j < 4; ++j) fold_group<W, 4>(w, n, n0 + column0 + 8 * j, unit, part[j], sums, total[j], columns);
        for (int i = 0; W::addend == BIASES && i < 4; ++i) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i)
      store_elements<T, op>(total[j][i], y, m, n, m0 + row0 + 8 * i, n0 + column0 + 8 * j, bias, has_bias, factor, divisor, rows,
                            columns);
}

// The 8 x 8 piece of B at `column0` and `unit`, decoded once by all 32 lanes.
//
//   staged       lane l decodes codes 2 (l % 4) and the next of column l / 4 and writes them as one pair, `stage[column][k]`:
//                32 pairs in 32 banks, no conflict
//   not staged   each lane decodes the two elements it will hold, straight into the matrix: no barrier, more reads
template <typename W, typename T, bool staged>
METAL_FUNC void decode_piece(W w, uint column0, uint n, uint unit, threadgroup T* stage, const thread uint* rows,
                             const thread uint* columns, uint lane, thread simdgroup_matrix<T, 8, 8>& b) {
  if (staged) {
    const uint column = lane / 4, pair = lane % 4, at = min(column0 + column, n - 1);
    const uint two = w.word(at, unit) >> (8 * pair);
    const float zero = w.zero(at, unit);
    threadgroup T* target = stage + 8 * column + 2 * pair;
    target[0] = T(w.number(two & 15, zero));
    target[1] = T(w.number((two >> 4) & 15, zero));
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(b, stage, 8, ulong2(0), true);
  } else {
    for (int e = 0; e < 2; ++e) {
      const uint at = min(column0 + columns[e], n - 1);
      b.thread_elements()[e] = T(w.number((w.word(at, unit) >> (4 * rows[e])) & 15, w.zero(at, unit)));
    }
  }
}

// The improved design (docs/metal.md has the counts). A simdgroup owns 64 x 16 outputs, so that a threadgroup decodes each code
// once, and a piece serves all eight row tiles. The two pieces of a step have 64 numbers of staging each: one simdgroup barrier a
// piece is enough, since a piece is overwritten only behind the next one's barrier.
template <typename W, typename T, int op, bool staged>
METAL_FUNC void gemm_fused_columns(W w, const device T* x, ulong x_stride, const device float* bias, bool has_bias, float factor,
                                   float divisor, device T* y, uint m, uint n, threadgroup T* x_tile, threadgroup T* stage,
                                   uint2 group, uint simdgroup, uint lane) {
  const uint m0 = group.y * TILE_M, n0 = group.x * TILE_N + 16 * simdgroup, thread_index = simdgroup * 32 + lane;
  uint rows[2], columns[2];
  find_elements(stage, lane, rows, columns);
  matrix8x8 total[2][8], part[2][8], sums[8];  // [column tile][row tile]
  simdgroup_matrix<T, 8, 8> ones = make_filled_simdgroup_matrix<T, 8, 8>(T(1.0f));
  for (int i = 0; i < 8; ++i) {
    sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int j = 0; j < 2; ++j) {
      total[j][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      part[j][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
  for (uint unit0 = 0; unit0 < w.units; unit0 += FUSED_K / 8) {
    load_x_rows(x, x_stride, m, w.units, m0, unit0, x_tile, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint u = 0; u < FUSED_K / 8 && unit0 + u < w.units; ++u) {
      const uint unit = unit0 + u;
      simdgroup_matrix<T, 8, 8> b[2];
      for (int j = 0; j < 2; ++j)
        decode_piece<W, T, staged>(w, n0 + 8 * j, n, unit, stage + (staged ? 64 * j : 0), rows, columns, lane, b[j]);
      for (int i = 0; i < 8; ++i) {
        simdgroup_matrix<T, 8, 8> a;
        simdgroup_load(a, x_tile + 8 * i * (FUSED_K + FUSED_PAD) + 8 * u, FUSED_K + FUSED_PAD);
        if (W::addend == BIASES) simdgroup_multiply_accumulate(sums[i], a, ones, sums[i]);
        for (int j = 0; j < 2; ++j) simdgroup_multiply_accumulate(part[j][i], a, b[j], part[j][i]);
      }
      if (w.group_ends(unit)) {
        for (int j = 0; j < 2; ++j) fold_group<W, 8>(w, n, n0 + 8 * j, unit, part[j], sums, total[j], columns);
        for (int i = 0; W::addend == BIASES && i < 8; ++i) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int j = 0; j < 2; ++j)
    for (int i = 0; i < 8; ++i)
      store_elements<T, op>(total[j][i], y, m, n, m0 + 8 * i, n0 + 8 * j, bias, has_bias, factor, divisor, rows, columns);
}

template <typename W, typename T, int op>
METAL_FUNC void gemm_fused_wide(W w, const device T* x, ulong x_stride, const device float* bias, bool has_bias, float factor,
                                float divisor, device T* y, uint m, uint n, threadgroup T* x_tile, threadgroup T* stages,
                                uint2 group, uint simdgroup, uint lane) {
  gemm_fused_columns<W, T, op, true>(w, x, x_stride, bias, has_bias, factor, divisor, y, m, n, x_tile, stages + 128 * simdgroup,
                                     group, simdgroup, lane);
}

template <typename W, typename T, int op>
METAL_FUNC void gemm_fused_registers(W w, const device T* x, ulong x_stride, const device float* bias, bool has_bias,
                                     float factor, float divisor, device T* y, uint m, uint n, threadgroup T* x_tile,
                                     threadgroup T* stages, uint2 group, uint simdgroup, uint lane) {
  gemm_fused_columns<W, T, op, false>(w, x, x_stride, bias, has_bias, factor, divisor, y, m, n, x_tile, stages + 64 * simdgroup,
                                      group, simdgroup, lane);
}

}  // namespace halfbyte
