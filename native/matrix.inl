// What the instruction sets with products of matrices (isa_amx.cpp, isa_i8mm.cpp) share: both
// scales, zero points and added terms are applied to a segment's exact integer sums as in
// products.inl, in the same order, so that results have the same bits as those of the other sets.
// Included by one translation unit a set, inside an unnamed namespace.
//
// V has W lanes of 32 bits, a lane a row of the weight. Types: F floats, I int32.

#if defined(__clang__)
#define HB_UNROLL_FOR _Pragma("unroll") for
#else
#define HB_UNROLL_FOR _Pragma("GCC unroll 16") for
#endif
#define HB_INLINE inline __attribute__((always_inline))
#define HB_INLINE_LAMBDA __attribute__((always_inline))

constexpr int kTokens = kMatrixTokens;

// The totals of kTokens tokens from t0 on by rows `row` .. row + W of one panel. STARTS: the stored
// bytes have an offset. SPANS: one scale of the activations covers several segments.
template <class V, bool STARTS, bool SPANS>
struct MatrixTotal {
  using F = typename V::F;
  const Block &b;
  const float *x_scale, *x_sum;
  const int32_t *x_start;
  int64_t entries;  // index of the rows in the scales of a segment
  float *total;
  F now[kTokens];  // totals; with SPANS the sum of a span's segments
  int left;        // with SPANS: segments of the span that are still to come

  HB_INLINE MatrixTotal(const Block &block, int t0, int panel, int row)
      : b(block),
        x_scale(b.x_scale + b.entry(t0, kTokens)),
        x_sum(b.x_sum + b.entry(t0, kTokens)),
        x_start(b.x_start + b.entry(t0, kTokens)),
        entries(panel * b.s_stride + row),
        total(b.total + t0 * b.total_stride + panel * kPanelRows + row),
        left(b.span) {
    if constexpr (SPANS)
      HB_UNROLL_FOR (int t = 0; t < kTokens; ++t) now[t] = V::fzero();
  }

  // Before and after the segments whose sums are at hand together.
  HB_INLINE void begin() {
    if constexpr (!SPANS)
      HB_UNROLL_FOR (int t = 0; t < kTokens; ++t) now[t] = V::fload(total + t * b.total_stride);
  }
  HB_INLINE void end() {
    if constexpr (!SPANS)
      HB_UNROLL_FOR (int t = 0; t < kTokens; ++t) V::fstore(total + t * b.total_stride, now[t]);
  }

  // Adds segment s of the block, whose sums of products are sums(token).
  template <class Sums>
  HB_INLINE void add(int s, Sums &&sums) {
    const int of = s * kTokens;
    const int64_t at = entries + s * kPanelRows;
    const F scale = V::fload(b.scales + at);
    F sum[kTokens];
    HB_UNROLL_FOR (int t = 0; t < kTokens; ++t) {
      typename V::I whole = sums(t);
      if constexpr (STARTS) whole = V::plus(whole, x_start[of + t]);
      sum[t] = V::cvt(whole);
      if constexpr (!SPANS) sum[t] = V::fmul(sum[t], V::fset(x_scale[of + t]));
    }
    if (b.zeros) {
      const F zero = V::fload(b.zeros + at);
      HB_UNROLL_FOR (int t = 0; t < kTokens; ++t)
        sum[t] = V::fnma(zero, V::fset(x_sum[of + t]), sum[t]);
    }
    if constexpr (!SPANS) {
      if (b.biases) {
        const F bias = V::fload(b.biases + at);
        HB_UNROLL_FOR (int t = 0; t < kTokens; ++t)
          now[t] = V::fma(bias, V::fset(x_sum[of + t]), now[t]);
      }
    }
    HB_UNROLL_FOR (int t = 0; t < kTokens; ++t) now[t] = V::fma(sum[t], scale, now[t]);
    if constexpr (SPANS) {
      if (--left && s + 1 < b.segments) return;
      left = b.span;
      HB_UNROLL_FOR (int t = 0; t < kTokens; ++t) {
        float *to = total + t * b.total_stride;
        V::fstore(to, V::fma(now[t], V::fset(x_scale[of + t]), V::fload(to)));
        now[t] = V::fzero();
      }
    }
  }
};

template <bool VALUE>
struct Flag {
  static constexpr bool value = VALUE;
};

// Calls multiply(starts, spans, t0, panel), the first two as Flags, for every tile of the first
// `tokens` of a block.
template <class Multiply>
void each_tile(const Block &b, int tokens, bool starts, Multiply &&multiply) {
  for (int t = 0; t < tokens; t += kTokens) {
    prefetch_next(b, t, t + kTokens);
    for (int panel = 0; panel < b.panels; ++panel) {
      if (b.span > 1)
        starts ? multiply(Flag<true>(), Flag<true>(), t, panel)
               : multiply(Flag<false>(), Flag<true>(), t, panel);
      else
        starts ? multiply(Flag<true>(), Flag<false>(), t, panel)
               : multiply(Flag<false>(), Flag<false>(), t, panel);
    }
  }
}
