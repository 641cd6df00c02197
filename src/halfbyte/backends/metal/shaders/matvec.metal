// y[m, n] = sum_k x[m, k] w[n, k] for few tokens: every code is read once and meets TOKENS rows of x.
//
// A threadgroup owns ROWS outputs. Its SIMDGROUPS share k: lane l of simdgroup s takes units of eight codes s 32 + l, then on by
// 32 SIMDGROUPS, so that a simdgroup reads 32 bits x 8 consecutive bytes of a row. Sums are float32: eight products, then times
// the scale, then simd_sum over the lanes and one pass through threadgroup memory over the simdgroups.
//
// A zero point or bias is applied to the sum of the eight activations rather than to each product.

namespace halfbyte {

constant constexpr int MATVEC_ROWS = 4;
constant constexpr int MATVEC_SIMDGROUPS = 2;

// One number at a time: a view of x may begin at any element. The compiler joins what it knows to be aligned.
template <typename T> inline void load_eight_x(const device T* x, thread float* v) {
  for (int j = 0; j < 8; ++j) v[j] = float(x[j]);
}

// Sum over one row's units of one lane, for each token.
template <typename W, typename T, int TOKENS>
inline void row_sums(W w, const device T* x, ulong x_stride, uint n, uint tokens, uint first, uint step, thread float* sums) {
  for (int t = 0; t < TOKENS; ++t) sums[t] = 0.0f;
  for (uint unit = first; unit < w.units; unit += step) {
    const eight_codes codes = w.load(n, unit);
    const ulong at = w.entry(n, unit);
    const typename W::stored scale = w.scales[at];
    float q[8];
    w.decode.eight(codes, q);
    for (int t = 0; t < TOKENS; ++t) {
      if (t && uint(t) >= tokens) break;
      float v[8];
      load_eight_x(x + t * x_stride + 8 * unit, v);
      float products = 0.0f, plain = 0.0f;
      for (int j = 0; j < 8; ++j) {
        products = fma(v[j], q[j], products);
        if (W::addend != NO_ADDEND) plain += v[j];
      }
      if (W::addend == ZEROS) products = fma(-float(w.addends[at]), plain, products);
      if (W::addend == BIASES) sums[t] += fma(products, W::scale::value(scale), plain * float(w.addends[at]));
      else sums[t] += W::scale::times(products, scale);
    }
  }
}

// `partial` holds SIMDGROUPS x ROWS x TOKENS floats.
template <typename W, typename T, int op, int TOKENS>
inline void matvec(W w, const device T* x, ulong x_stride, const device float* bias, bool has_bias, float factor, float divisor,
                   device T* y, uint m, uint n, threadgroup float* partial, uint row_block, uint token_block, uint simdgroup,
                   uint lane) {
  const uint token = token_block * TOKENS, tokens = m - token;
  for (int r = 0; r < MATVEC_ROWS; ++r) {
    const uint row = row_block * MATVEC_ROWS + r;
    float sums[TOKENS];
    for (int t = 0; t < TOKENS; ++t) sums[t] = 0.0f;
    if (row < n)
      row_sums<W, T, TOKENS>(w, x + token * x_stride, x_stride, row, tokens, simdgroup * 32 + lane, 32 * MATVEC_SIMDGROUPS, sums);
    for (int t = 0; t < TOKENS; ++t) {
      const float sum = simd_sum(sums[t]);
      if (lane == 0) partial[(simdgroup * MATVEC_ROWS + r) * TOKENS + t] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint i = simdgroup * 32 + lane, r = i / TOKENS, t = i % TOKENS, row = row_block * MATVEC_ROWS + r;
  if (i < MATVEC_ROWS * TOKENS && row < n && t < tokens) {
    float sum = 0.0f;
    for (int s = 0; s < MATVEC_SIMDGROUPS; ++s) sum += partial[(s * MATVEC_ROWS + r) * TOKENS + t];
    y[ulong(token + t) * n + row] = finish<T, op>(sum, factor, divisor, has_bias, has_bias ? bias[row] : 0.0f);
  }
}

}  // namespace halfbyte
