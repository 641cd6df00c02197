// Fused products: no tile of decoded weights. Each simdgroup decodes pieces of B, 8 x 8, into staging of its own behind simdgroup
// barriers, while x comes through a threadgroup tile of 64 x 32. B is words of eight nibbles of one column,
// `words[k / 8 * k_stride + n * n_stride]`: strides (1, n) are the [k/8, n] order, (k/8, 1) the order of rows.
//
// Matrices are float32 throughout: the specification has a product of matrices of one type, sums must be float32, and the scaled
// weight of every 4-bit codec is exact there (but for a bias, which rounds once).

namespace halfbyte {

template <typename Element, typename Scale, int Addend, int G> struct packed_words {
  typedef Scale scale;
  typedef typename Scale::stored stored;
  typedef typename addend_type<Addend, stored>::type added;
  static constant constexpr int addend = Addend;

  const device uint* words;
  const device stored* scales;
  const device added* addends;
  ulong n_stride, k_stride;              // of words
  ulong scale_n_stride, scale_g_stride;  // of scales and addends
  uint units;
  Element decode;

  eight_codes load(uint n, uint unit) const { return {words[n * n_stride + unit * k_stride], 0}; }
  uint group_of(uint unit) const { return G == 0 ? 0 : unit / (G / 8 > 0 ? G / 8 : 1); }
  ulong entry(uint n, uint unit) const { return n * scale_n_stride + group_of(unit) * scale_g_stride; }
};

constant constexpr uint FUSED_K = 32, FUSED_ROW = FUSED_K + TILE_PAD;

// Word (n, unit) decoded, zeros beyond the last column and unit.
template <typename W> inline void decode_word(W w, uint column, uint n, uint unit, thread float* v) {
  for (int j = 0; j < 8; ++j) v[j] = 0.0f;
  if (column < n && unit < w.units) decode_unit(w, column, unit, v);
}

// The plain design. Simdgroups own 32 x 32 outputs; for each row tile and each column tile, lanes 0 to 7 decode one word each,
// a column of eight codes, into 64 numbers of staging, `stage[k][column]`. x_tile: 64 x 36 floats, stages: 4 x 64.
template <typename W, typename T, int op>
inline void gemm_fused(W w, const device T* x, ulong x_stride, const device float* bias, bool has_bias, float factor, float divisor,
                       device T* y, uint m, uint n, threadgroup float* x_tile, threadgroup float* stages, uint2 group,
                       uint simdgroup, uint lane) {
  const uint m0 = group.y * TILE_M, n0 = group.x * TILE_N, thread_index = simdgroup * 32 + lane;
  const uint row0 = simdgroup / 2 * 32, column0 = simdgroup % 2 * 32;
  threadgroup float* stage = stages + 64 * simdgroup;
  accumulators sum;
  clear(sum);
  for (uint unit0 = 0; unit0 < w.units; unit0 += FUSED_K / 8) {
    load_x_tile<T, FUSED_K>(x, x_stride, m, w.units, m0, 8 * unit0, x_tile, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint u = 0; u < FUSED_K / 8; ++u) {
      matrix8x8 a[4], b;
      for (int i = 0; i < 4; ++i) simdgroup_load(a[i], x_tile + (row0 + 8 * i) * FUSED_ROW + 8 * u, FUSED_ROW);
      for (int j = 0; j < 4; ++j)
        for (int i = 0; i < 4; ++i) {
          if (lane < 8) {
            float v[8];
            decode_word(w, n0 + column0 + 8 * j + lane, n, unit0 + u, v);
            for (int k = 0; k < 8; ++k) stage[8 * k + lane] = v[k];
          }
          simdgroup_barrier(mem_flags::mem_threadgroup);
          simdgroup_load(b, stage, 8);
          simdgroup_multiply_accumulate(sum.at[i][j], a[i], b, sum.at[i][j]);
          simdgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store_tile<T, op>(sum, stages, y, m, n, m0, n0, bias, has_bias, factor, divisor, simdgroup, lane);
}

// The improved design (docs/design/metal.md has the counts). A simdgroup owns 64 x 16 outputs, so that a threadgroup decodes each word
// once, and a piece serves all eight row tiles. The 16 columns of two units are 32 words, one a lane: four pieces a pair of
// barriers.
//
//   staging of a simdgroup: 2 units x 16 columns x 12 floats, eight of them used. A lane writes its eight as two float4. Eight
//   neighbouring lanes write to 32 different banks (12 c mod 32 for c = 0 .. 7 is 0 12 24 4 16 28 8 20), and the 64 numbers of a
//   piece lie in each bank twice.
constant constexpr uint WIDE_COLUMN = 12, WIDE_UNIT = 16 * WIDE_COLUMN;

template <typename W, typename T, int op>
inline void gemm_fused_wide(W w, const device T* x, ulong x_stride, const device float* bias, bool has_bias, float factor,
                            float divisor, device T* y, uint m, uint n, threadgroup float* x_tile, threadgroup float* stages,
                            uint2 group, uint simdgroup, uint lane) {
  const uint m0 = group.y * TILE_M, n0 = group.x * TILE_N + 16 * simdgroup, thread_index = simdgroup * 32 + lane;
  threadgroup float* stage = stages + 2 * WIDE_UNIT * simdgroup;
  matrix8x8 sum[8][2];  // [row tile][column tile]
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 2; ++j) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint unit0 = 0; unit0 < w.units; unit0 += FUSED_K / 8) {
    load_x_tile<T, FUSED_K>(x, x_stride, m, w.units, m0, 8 * unit0, x_tile, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint u = 0; u < FUSED_K / 8; u += 2) {
      float v[8];
      decode_word(w, n0 + lane % 16, n, unit0 + u + lane / 16, v);
      store_eight(stage + lane / 16 * WIDE_UNIT + lane % 16 * WIDE_COLUMN, v);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      matrix8x8 b[2][2];  // [unit][column tile]
      for (uint p = 0; p < 2; ++p)
        for (uint j = 0; j < 2; ++j)
          simdgroup_load(b[p][j], stage + p * WIDE_UNIT + 8 * j * WIDE_COLUMN, WIDE_COLUMN, ulong2(0), true);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint p = 0; p < 2; ++p)
        for (uint i = 0; i < 8; ++i) {
          matrix8x8 a;
          simdgroup_load(a, x_tile + 8 * i * FUSED_ROW + 8 * (u + p), FUSED_ROW);
          for (uint j = 0; j < 2; ++j) simdgroup_multiply_accumulate(sum[i][j], a, b[p][j], sum[i][j]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = 0; i < 8; ++i)
    for (uint j = 0; j < 2; ++j)
      store_matrix<T, op>(sum[i][j], stage, y, m, n, m0 + 8 * i, n0 + 8 * j, bias, has_bias, factor, divisor, lane);
}

}  // namespace halfbyte
