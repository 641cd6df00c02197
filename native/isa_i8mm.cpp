// i8mm: the int8 class by products of matrices of bytes (SMMLA), for tiles of sixteen tokens;
// everything else is NEON's.
//
// One instruction multiplies eight inputs of two tokens by those of two rows and adds to four sums.
// Sixteen tokens by four rows are sixteen registers of sums. The activations are stored as
// [input / 8][token][8], so that one load is an operand; the decoded codes are [input / 4][row][4],
// and two vectors of four rows, zipped by their lanes, are two operands. The segment's integer sums
// are exact; `matrix.inl` applies both scales to them.
#include <arm_neon.h>

#include "kernels.h"

namespace halfbyte {
namespace {

#include "matrix.inl"

struct V {
  static constexpr int W = 4;
  using F = float32x4_t;
  using I = int32x4_t;
  static F fzero() { return vdupq_n_f32(0.0f); }
  static F fset(float x) { return vdupq_n_f32(x); }
  static F fload(const float *p) { return vld1q_f32(p); }
  static void fstore(float *p, F v) { vst1q_f32(p, v); }
  static F fmul(F a, F b) { return vmulq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F fnma(F a, F b, F c) { return vfmsq_f32(c, a, b); }
  static F cvt(I v) { return vcvtq_f32_s32(v); }
  static I plus(I a, int b) { return vaddq_s32(a, vdupq_n_s32(b)); }
};

constexpr int kInputs = 8;    // of one product
constexpr int kTogether = 4;  // segments whose sums are kept before scales are applied to them
constexpr int kPairs = kTokens / 2;

// The products of `inputs` inputs of sixteen tokens and four rows, as sums[token][row].
HB_INLINE void segment(const int8_t *x, const uint8_t *w, int inputs,
                       int32_t (&sums)[kTokens][V::W]) {
  int32x4_t left[kPairs], right[kPairs];  // two tokens by the first two rows and by the others
  HB_UNROLL_FOR (int p = 0; p < kPairs; ++p) left[p] = right[p] = vdupq_n_s32(0);
  for (int i = 0; i < inputs; i += kInputs) {
    const uint32x4_t low = vreinterpretq_u32_u8(vld1q_u8(w)),
                     high = vreinterpretq_u32_u8(vld1q_u8(w + kUnitBytes));
    const int8x16_t first = vreinterpretq_s8_u32(vzip1q_u32(low, high)),
                    second = vreinterpretq_s8_u32(vzip2q_u32(low, high));
    HB_UNROLL_FOR (int p = 0; p < kPairs; ++p) {
      const int8x16_t pair = vld1q_s8(x + p * 2 * kInputs);
      left[p] = vmmlaq_s32(left[p], pair, first);
      right[p] = vmmlaq_s32(right[p], pair, second);
    }
    x += kTokens * kInputs, w += kInputs / 4 * kUnitBytes;
  }
  HB_UNROLL_FOR (int p = 0; p < kPairs; ++p) {
    const int64x2_t a = vreinterpretq_s64_s32(left[p]), b = vreinterpretq_s64_s32(right[p]);
    vst1q_s32(sums[2 * p], vreinterpretq_s32_s64(vtrn1q_s64(a, b)));
    vst1q_s32(sums[2 * p + 1], vreinterpretq_s32_s64(vtrn2q_s64(a, b)));
  }
}

// Sixteen tokens from t0 on by four rows of one panel.
template <bool STARTS, bool SPANS>
void multiply(const Block &b, int t0, int panel, int row) {
  const int seg = b.seg, segments = b.segments;
  const int8_t *x = (const int8_t *)b.x + t0 * b.x_stride;
  const uint8_t *w = (const uint8_t *)b.w + panel * b.w_stride + row * 4;
  int32_t sums[kTogether][kTokens][V::W];
  MatrixTotal<V, STARTS, SPANS> total(b, t0, panel, row);
  for (int s0 = 0; s0 < segments; s0 += kTogether) {
    const int count = segments - s0 < kTogether ? segments - s0 : kTogether;
    for (int i = 0; i < count; ++i) {
      segment(x, w, seg, sums[i]);
      x += seg * kTokens, w += seg * kPanelRows;
    }
    total.begin();
    for (int i = 0; i < count; ++i)
      total.add(s0 + i, [&](int t) HB_INLINE_LAMBDA { return vld1q_s32(sums[i][t]); });
    total.end();
  }
}

void multiply_tiles(const Block &b, int tokens, bool starts) {
  each_tile(b, tokens, starts, [&](auto with_starts, auto with_spans, int t0, int panel) {
    for (int row = 0; row < kPanelRows; row += V::W)
      multiply<with_starts.value, with_spans.value>(b, t0, panel, row);
  });
}

}  // namespace

// A segment of s inputs of such a tile takes 2 s products, 1.5 s other instructions and about 48 to
// bring its sums to memory and back; NEON's tiles take 4 s products and 2 s loads. Counted, not
// measured.
constexpr int kShortestSegment = 32;

const MatrixKernels kernels_i8mm = {multiply_tiles, kInputs, kShortestSegment};

}  // namespace halfbyte
