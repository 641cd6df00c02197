// More than a product in one kernel, the page to start from: RMSNorm, dequantize and matrix-vector product.
//
//   y[n] = r sum_k (x[k] gain[k]) w[n, k],   r = 1 / sqrt(mean(x^2) + eps)
//
// The norm's factor r is one number, so it may come after the sum: the same pass that multiplies also sums the squares, x is read
// from memory once, and the normalised vector never exists. Everything between x and y is float32.

namespace halfbyte {

template <typename W, typename T, int op>
inline void rmsnorm_matvec(W w, const device T* x, const device T* gain, float factor, float divisor, float eps, device T* y,
                           uint n, uint k, threadgroup float* partial, uint row_block, uint simdgroup, uint lane) {
  float squares = 0.0f, sums[MATVEC_ROWS];
  for (int r = 0; r < MATVEC_ROWS; ++r) sums[r] = 0.0f;
  for (uint unit = simdgroup * 32 + lane; unit < w.units; unit += 32 * MATVEC_SIMDGROUPS) {
    float v[8], g[8];
    load_eight_x(x + 8 * unit, v);
    load_eight_x(gain + 8 * unit, g);
    for (int j = 0; j < 8; ++j) {
      squares = fma(v[j], v[j], squares);
      v[j] *= g[j];
    }
    for (int r = 0; r < MATVEC_ROWS; ++r) {
      const uint row = min(row_block * MATVEC_ROWS + r, n - 1);
      float q[8];
      decode_unit(w, row, unit, q);
      for (int j = 0; j < 8; ++j) sums[r] = fma(v[j], q[j], sums[r]);
    }
  }
  squares = simd_sum(squares);
  for (int r = 0; r < MATVEC_ROWS; ++r) sums[r] = simd_sum(sums[r]);
  if (lane == 0) {
    threadgroup float* own = partial + simdgroup * (MATVEC_ROWS + 1);
    for (int r = 0; r < MATVEC_ROWS; ++r) own[r] = sums[r];
    own[MATVEC_ROWS] = squares;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint i = simdgroup * 32 + lane, row = row_block * MATVEC_ROWS + i;
  if (i >= uint(MATVEC_ROWS) || row >= n) return;
  float sum = 0.0f, total = 0.0f;
  for (int s = 0; s < MATVEC_SIMDGROUPS; ++s) {
    sum += partial[s * (MATVEC_ROWS + 1) + i];
    total += partial[s * (MATVEC_ROWS + 1) + MATVEC_ROWS];
  }
  y[row] = finish<T, op>(sum * rsqrt(total / float(k) + eps), factor, divisor, false, 0.0f);
}

}  // namespace halfbyte
