// What the tiled products share: 64 x 64 outputs a threadgroup, four simdgroups of 32 x 32 each (4 x 4 matrices of 8 x 8), tiles of
// x and of decoded weights in threadgroup memory as float32, so that every product is the exact one.
//
//              n ->  64
//            +---------+---------+
//     m      | simd 0  | simd 1  |      x tile [64][K + 4], w tile [64][K + 4]: both along k, four floats of padding so that the
//     64     +---------+---------+      rows of an 8 x 8 matrix start in different banks. The w matrix is loaded transposed.
//            | simd 2  | simd 3  |
//            +---------+---------+

namespace halfbyte {

constant constexpr uint TILE_M = 64, TILE_N = 64, TILE_PAD = 4, TILE_THREADS = 128;

typedef simdgroup_float8x8 matrix8x8;

struct accumulators {
  matrix8x8 at[4][4];
};

inline void clear(thread accumulators& sum) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) sum.at[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

// Eight numbers as two float4: `target` lies at a multiple of four floats of an array of float4.
inline void store_eight(threadgroup float* target, const thread float* v) {
  threadgroup float4* fours = (threadgroup float4*)target;
  fours[0] = float4(v[0], v[1], v[2], v[3]);
  fours[1] = float4(v[4], v[5], v[6], v[7]);
}

// Rows m0 .. m0 + 63 of x, inputs k0 .. k0 + K - 1, zeros beyond m and beyond the last unit.
template <typename T, uint K>
inline void load_x_tile(const device T* x, ulong x_stride, uint m, uint units, uint m0, uint k0, threadgroup float* tile,
                        uint thread_index) {
  for (uint i = thread_index; i < TILE_M * K / 8; i += TILE_THREADS) {
    const uint row = i / (K / 8), unit = i % (K / 8);
    float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (m0 + row < m && k0 / 8 + unit < units) load_eight_x(x + (m0 + row) * x_stride + k0 + 8 * unit, v);
    store_eight(tile + row * (K + TILE_PAD) + 8 * unit, v);
  }
}

// Row of w that makes output i: i itself, or, where the gates are the first `half_rows` rows and the ups the rest, gate and up of
// one unit side by side.
inline uint paired_row(uint i, uint half_rows) { return half_rows == 0 ? i : i / 2 + i % 2 * half_rows; }

// Outputs n0 .. n0 + 63 decoded, zeros beyond n and beyond the last unit.
template <typename W, uint K>
inline void load_w_tile(W w, uint n, uint n0, uint k0, threadgroup float* tile, uint thread_index, uint half_rows = 0) {
  for (uint i = thread_index; i < TILE_N * K / 8; i += TILE_THREADS) {
    const uint row = i / (K / 8), unit = k0 / 8 + i % (K / 8);
    float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (n0 + row < n && unit < w.units) decode_unit(w, paired_row(n0 + row, half_rows), unit, v);
    store_eight(tile + row * (K + TILE_PAD) + 8 * (i % (K / 8)), v);
  }
}

template <uint K>
inline void multiply_tiles(const threadgroup float* x_tile, const threadgroup float* w_tile, thread accumulators& sum,
                           uint simdgroup) {
  const uint row = simdgroup / 2 * 32, column = simdgroup % 2 * 32;
  for (uint k = 0; k < K; k += 8) {
    matrix8x8 a[4], b[4];
    for (int i = 0; i < 4; ++i) simdgroup_load(a[i], x_tile + (row + 8 * i) * (K + TILE_PAD) + k, K + TILE_PAD);
    for (int j = 0; j < 4; ++j) simdgroup_load(b[j], w_tile + (column + 8 * j) * (K + TILE_PAD) + k, K + TILE_PAD, ulong2(0), true);
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j) simdgroup_multiply_accumulate(sum.at[i][j], a[i], b[j], sum.at[i][j]);
  }
}

// One 8 x 8 matrix to y through 64 floats of the simdgroup's own; rows and columns beyond m and n are dropped.
template <typename T, int op>
inline void store_matrix(matrix8x8 sum, threadgroup float* stage, device T* y, uint m, uint n, uint row0, uint column0,
                         const device float* bias, bool has_bias, float factor, float divisor, uint lane) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_store(sum, stage, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; i < 64; i += 32) {
    const uint row = row0 + i / 8, column = column0 + i % 8;
    if (row < m && column < n)
      y[ulong(row) * n + column] = finish<T, op>(stage[i], factor, divisor, has_bias, has_bias ? bias[column] : 0.0f);
  }
}

// All of a threadgroup's outputs. `stage` holds 4 x 64 floats that no other thread still reads.
template <typename T, int op>
inline void store_tile(thread accumulators& sum, threadgroup float* stage, device T* y, uint m, uint n, uint m0, uint n0,
                       const device float* bias, bool has_bias, float factor, float divisor, uint simdgroup, uint lane) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      store_matrix<T, op>(sum.at[i][j], stage + 64 * simdgroup, y, m, n, m0 + simdgroup / 2 * 32 + 8 * i,
                          n0 + simdgroup % 2 * 32 + 8 * j, bias, has_bias, factor, divisor, lane);
}

}  // namespace halfbyte
