// AVX-512 (F, BW, VL, DQ) with VNNI: sixteen lanes, so a vector is a panel. One token in the exact
// mode is `interleaved_f32` in products.inl on cores that prefer one panel at a time (Zen 5).
#include <immintrin.h>

#include "kernels.h"

namespace halfbyte {
namespace {

struct V {
  static constexpr int W = 16, registers = 32;
  static constexpr bool unsigned_bytes = true, integer_tables = false, sums_in_16_bits = false,
                        fuses = true, blends = true;
  static constexpr int permuted_bits = 5;  // codes whose floats one permutation finds
  static constexpr bool one_panel_tiles = true;
  static constexpr bool narrow_supers = false;
  static constexpr Tiles i8 = kAvx512Int8, f32 = kAvx512Float;
  using F = __m512;
  using I = __m512i;
  using B = __m512i;
  using P = __m512i;
  using T = __m512i;

  static F fzero() { return _mm512_setzero_ps(); }
  static F fset(float x) { return _mm512_set1_ps(x); }
  static F fload(const float *p) { return _mm512_loadu_ps(p); }
  static void fstore(float *p, F v) { _mm512_storeu_ps(p, v); }
  static F fadd(F a, F b) { return _mm512_add_ps(a, b); }
  static F fsub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F fmul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static F fmaxabs(F m, F v) { return _mm512_max_ps(m, _mm512_abs_ps(v)); }
  static float largest(F v) { return _mm512_reduce_max_ps(v); }
  static float total(F v) {  // half to half, see `total_of`
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  // The totals of sixteen vectors, four a row of `out`: level by level two vectors become one that
  // has what `total` would add next of both.
  static constexpr int sums_together = 16;
  static void totals(const F (&v)[16], float *out, int64_t stride) {
    F pairs[8], fours[4], eights[2];
    for (int i = 0; i < 8; ++i) {  // v[i] and v[i + 8], two rows apart
      const F a = v[i], b = v[i + 8];
      pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    }
    for (int i = 0; i < 4; ++i) {  // and those a row apart: quarters 0, 2, 1, 3 are of rows 0 to 3
      const F a = pairs[i], b = pairs[i + 4];
      fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    }
    for (int i = 0; i < 2; ++i) {
      const F a = fours[i], b = fours[i + 2];
      eights[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
    }
    const F all = _mm512_add_ps(_mm512_shuffle_ps(eights[0], eights[1], 0x88),
                                _mm512_shuffle_ps(eights[0], eights[1], 0xDD));
    // Of a quarter's four totals the middle ones are exchanged.
    const F ordered = _mm512_shuffle_ps(all, all, 0xD8);
    _mm_storeu_ps(out, _mm512_extractf32x4_ps(ordered, 0));
    _mm_storeu_ps(out + 2 * stride, _mm512_extractf32x4_ps(ordered, 1));
    _mm_storeu_ps(out + stride, _mm512_extractf32x4_ps(ordered, 2));
    _mm_storeu_ps(out + 3 * stride, _mm512_extractf32x4_ps(ordered, 3));
  }
  static bool any_nan(F v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }

  static I iset(int x) { return _mm512_set1_epi32(x); }
  static F cvt(I v) { return _mm512_cvtepi32_ps(v); }
  static F cast(I v) { return _mm512_castsi512_ps(v); }
  static I castf(F v) { return _mm512_castps_si512(v); }
  static I as_i(B v) { return v; }
  template <int N>
  static I sll(I v) {
    return _mm512_slli_epi32(v, N);
  }
  template <int N>
  static I srl(I v) {
    return N ? _mm512_srli_epi32(v, N) : v;
  }
  template <int N>
  static I sra(I v) {
    return _mm512_srai_epi32(v, N);
  }
  static I sll_by(I v, int n) { return _mm512_sll_epi32(v, _mm_cvtsi32_si128(n)); }
  static I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static I ior(I a, I b) { return _mm512_or_si512(a, b); }
  static I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I equal(I v, int x) { return _mm512_movm_epi32(_mm512_cmpeq_epi32_mask(v, iset(x))); }
  static I greater(I v, int x) { return _mm512_movm_epi32(_mm512_cmpgt_epi32_mask(v, iset(x))); }

  static I load_u8(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  }
  static I load_i8(const int8_t *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
  }
  static I load_u16(const uint16_t *p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  }
  static I load_i16(const int16_t *p) {
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p));
  }
  static F load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
  }
  static void store_f16(uint16_t *p, F v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  static B bload(const uint8_t *p) { return _mm512_loadu_si512(p); }
  static void bstore(uint8_t *p, B v) { _mm512_storeu_si512(p, v); }
  static B bset(int x) { return _mm512_set1_epi8((char)x); }
  static B bor(B a, B b) { return _mm512_or_si512(a, b); }
  static B bxor(B a, B b) { return _mm512_xor_si512(a, b); }
  static B bsub(B a, B b) { return _mm512_sub_epi8(a, b); }
  template <int right, int mask>
  static B field(B v) {
    if constexpr (right > 0) v = _mm512_srli_epi32(v, right);
    if constexpr (right < 0) v = _mm512_slli_epi32(v, -right);
    return _mm512_and_si512(v, _mm512_set1_epi8((char)mask));
  }
  template <int right>
  static B shifted(B v) {
    return right < 0 ? _mm512_slli_epi32(v, -right) : right ? _mm512_srli_epi32(v, right) : v;
  }
  // Bits of `mask` from `a`, the rest from `b`; and of lanes: bits of `mask` from `v`, the rest
  // from `around`, which has none there.
  template <int mask>
  static B blend(B a, B b) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), a, b, 0xca);
  }
  static I with_exponent(I v, int mask, int around) {
    return _mm512_ternarylogic_epi32(v, iset(mask), iset(around), 0xea);
  }
  static B tload(const int8_t *p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
  }
  static B lookup(B table, B codes) { return _mm512_shuffle_epi8(table, codes); }
  using FT = __m512;
  static FT ftload(const float *p) { return _mm512_loadu_ps(p); }
  static F flookup(FT t, I codes) {
    return _mm512_permutexvar_ps(codes, t);
  }  // reads the low four bits of a lane
  static F flookup(FT low, FT high, I codes) {
    return _mm512_permutex2var_ps(low, codes, high);
  }  // ... five

  static B broadcast4(const int8_t *p) {
    int four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
  static I dot(I acc, B w, B x) { return _mm512_dpbusd_epi32(acc, w, x); }

  static void store_rounded(int8_t *q, F v) {
    _mm_storeu_si128((__m128i *)q, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
  }
};

#include "kernels.inl"

}  // namespace

const Kernels kernels_avx512 = table_of<V>("avx512");

}  // namespace halfbyte
