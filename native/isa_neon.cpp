// NEON with the dot-product instructions: four lanes.
#include <arm_neon.h>

#include "kernels.h"

namespace halfbyte {
namespace {

struct V {
  static constexpr int W = 4, registers = 32;
  static constexpr bool unsigned_bytes = false, integer_tables = true, sums_in_16_bits = false,
                        fuses = true, blends = false;
  static constexpr int permuted_bits = 0;
  static constexpr bool one_panel_tiles = false;
  static constexpr Tiles i8 = kNeonInt8, f32 = kNeonFloat;
  using F = float32x4_t;
  using I = int32x4_t;
  using B = uint8x16_t;
  using P = int32x4_t;
  using T = uint8x16_t;

  static F fzero() { return vdupq_n_f32(0.0f); }
  static F fset(float x) { return vdupq_n_f32(x); }
  static F fload(const float *p) { return vld1q_f32(p); }
  static void fstore(float *p, F v) { vst1q_f32(p, v); }
  static F fadd(F a, F b) { return vaddq_f32(a, b); }
  static F fsub(F a, F b) { return vsubq_f32(a, b); }
  static F fmul(F a, F b) { return vmulq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F fnma(F a, F b, F c) { return vfmsq_f32(c, a, b); }
  static F fmaxabs(F m, F v) { return vmaxnmq_f32(m, vabsq_f32(v)); }
  static float largest(F v) { return vmaxnmvq_f32(v); }
  static float total(F v) {  // half to half, see `total_of`
    const float32x2_t halves = vadd_f32(vget_low_f32(v), vget_high_f32(v));
    return vget_lane_f32(vpadd_f32(halves, halves), 0);
  }
  static constexpr int sums_together = 0;
  static bool any_nan(F v) { return vminvq_u32(vceqq_f32(v, v)) == 0; }

  static I iset(int x) { return vdupq_n_s32(x); }
  static F cvt(I v) { return vcvtq_f32_s32(v); }
  static F cast(I v) { return vreinterpretq_f32_s32(v); }
  static I castf(F v) { return vreinterpretq_s32_f32(v); }
  static I as_i(B v) { return vreinterpretq_s32_u8(v); }
  template <int N>
  static I sll(I v) {
    return vshlq_n_s32(v, N);
  }
  template <int N>
  static I srl(I v) {
    if constexpr (N == 0)
      return v;
    else
      return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(v), N));
  }
  template <int N>
  static I sra(I v) {
    return vshrq_n_s32(v, N);
  }
  static I sll_by(I v, int n) { return vshlq_s32(v, vdupq_n_s32(n)); }
  static I iand(I a, I b) { return vandq_s32(a, b); }
  static I ior(I a, I b) { return vorrq_s32(a, b); }
  static I ixor(I a, I b) { return veorq_s32(a, b); }
  static I equal(I v, int x) { return vreinterpretq_s32_u32(vceqq_s32(v, vdupq_n_s32(x))); }
  static I greater(I v, int x) { return vreinterpretq_s32_u32(vcgtq_s32(v, vdupq_n_s32(x))); }

  static I load_u16(const uint16_t *p) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(p))); }
  static I load_i16(const int16_t *p) { return vmovl_s16(vld1_s16(p)); }
  // Four bytes, and no byte past them.
  static uint32x2_t four(const void *p) {
    uint32_t u;
    __builtin_memcpy(&u, p, 4);
    return vdup_n_u32(u);
  }
  static I load_u8(const uint8_t *p) {
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four(p))))));
  }
  static I load_i8(const int8_t *p) {
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(four(p)))));
  }
  static F load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static void store_f16(uint16_t *p, F v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }

  static B bload(const uint8_t *p) { return vld1q_u8(p); }
  static void bstore(uint8_t *p, B v) { vst1q_u8(p, v); }
  static B bset(int x) { return vdupq_n_u8((uint8_t)x); }
  static B bor(B a, B b) { return vorrq_u8(a, b); }
  static B bxor(B a, B b) { return veorq_u8(a, b); }
  static B bsub(B a, B b) { return vsubq_u8(a, b); }
  template <int right, int mask>
  static B field(B v) {
    if constexpr (right > 0) v = vshrq_n_u8(v, right);
    if constexpr (right < 0) v = vshlq_n_u8(v, -right);
    return vandq_u8(v, vdupq_n_u8((uint8_t)mask));
  }
  static T tload(const int8_t *p) { return vreinterpretq_u8_s8(vld1q_s8(p)); }
  static B lookup(T table, B codes) { return vqtbl1q_u8(table, codes); }
  struct FT {
    float v[16];
  };
  static FT ftload(const float *p) {
    FT t;
    __builtin_memcpy(&t, p, 64);
    return t;
  }
  static F flookup(const FT &t, I codes) {
    const float lanes[4] = {t.v[vgetq_lane_s32(codes, 0) & 15], t.v[vgetq_lane_s32(codes, 1) & 15],
                            t.v[vgetq_lane_s32(codes, 2) & 15], t.v[vgetq_lane_s32(codes, 3) & 15]};
    return vld1q_f32(lanes);
  }

  static int8x16_t broadcast4(const int8_t *p) {
    return vreinterpretq_s8_u32(vcombine_u32(four(p), four(p)));
  }
  static I dot(I acc, B w, int8x16_t x) { return vdotq_s32(acc, vreinterpretq_s8_u8(w), x); }

  static void store_rounded(int8_t *q, F v) {
    const I r = vcvtnq_s32_f32(v);
    const int8x8_t bytes = vqmovn_s16(vcombine_s16(vqmovn_s32(r), vdup_n_s16(0)));
    const uint32_t u = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
    __builtin_memcpy(q, &u, 4);
  }
};

#include "kernels.inl"

}  // namespace

const Kernels kernels_neon = table_of<V>("neon");

}  // namespace halfbyte
