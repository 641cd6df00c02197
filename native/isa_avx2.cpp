// AVX2, FMA and F16C: the vector type V of eight lanes, for which kernels.inl is compiled. The
// products are in products.inl: `blocks_i8` and `blocks_f32`, which choose the tiles of tiles.h;
// one token takes `vectors_one` vectors of rows.
#include <immintrin.h>

#include "kernels.h"

namespace halfbyte {
namespace {

struct V {
  static constexpr int W = 8, registers = 16;
  static constexpr bool unsigned_bytes = false, integer_tables = true, sums_in_16_bits = true,
                        fuses = true, blends = false;
  static constexpr int permuted_bits = 0;
  static constexpr bool one_panel_tiles = false;
  static constexpr bool narrow_supers = true;
  static constexpr Tiles i8 = kAvx2Int8, f32 = kAvx2Float;
  using F = __m256;
  using I = __m256i;
  using B = __m256i;
  using P = __m256i;
  using T = __m256i;

  static F fzero() { return _mm256_setzero_ps(); }
  static F fset(float x) { return _mm256_set1_ps(x); }
  static F fload(const float *p) { return _mm256_loadu_ps(p); }
  static void fstore(float *p, F v) { _mm256_storeu_ps(p, v); }
  static F fadd(F a, F b) { return _mm256_add_ps(a, b); }
  static F fsub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F fmul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  static F fmaxabs(F m, F v) {
    return _mm256_max_ps(m, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v));
  }
  static float largest(F v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  static float total(F v) {
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  // The totals of four vectors, one a row of `out`.
  static constexpr int sums_together = 4;
  static void totals(const F (&v)[4], float *out, int64_t stride) {
    const F a = _mm256_add_ps(_mm256_permute2f128_ps(v[0], v[1], 0x20),
                              _mm256_permute2f128_ps(v[0], v[1], 0x31));
    const F b = _mm256_add_ps(_mm256_permute2f128_ps(v[2], v[3], 0x20),
                              _mm256_permute2f128_ps(v[2], v[3], 0x31));
    const F both = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xEE));
    const F all =
        _mm256_add_ps(_mm256_shuffle_ps(both, both, 0x88), _mm256_shuffle_ps(both, both, 0xDD));
    const __m128 even = _mm256_castps256_ps128(all), odd = _mm256_extractf128_ps(all, 1);
    _mm_store_ss(out, even), _mm_store_ss(out + stride, odd);
    _mm_store_ss(out + 2 * stride, _mm_shuffle_ps(even, even, 1));
    _mm_store_ss(out + 3 * stride, _mm_shuffle_ps(odd, odd, 1));
  }
  static bool any_nan(F v) { return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0; }

  static I iset(int x) { return _mm256_set1_epi32(x); }
  static F cvt(I v) { return _mm256_cvtepi32_ps(v); }
  static F cast(I v) { return _mm256_castsi256_ps(v); }
  static I castf(F v) { return _mm256_castps_si256(v); }
  static I as_i(B v) { return v; }
  template <int N>
  static I sll(I v) {
    return _mm256_slli_epi32(v, N);
  }
  template <int N>
  static I srl(I v) {
    return _mm256_srli_epi32(v, N);
  }
  template <int N>
  static I sra(I v) {
    return _mm256_srai_epi32(v, N);
  }
  static I sll_by(I v, int n) { return _mm256_sll_epi32(v, _mm_cvtsi32_si128(n)); }
  static I iand(I a, I b) { return _mm256_and_si256(a, b); }
  static I ior(I a, I b) { return _mm256_or_si256(a, b); }
  static I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
  static I equal(I v, int x) { return _mm256_cmpeq_epi32(v, iset(x)); }
  static I greater(I v, int x) { return _mm256_cmpgt_epi32(v, iset(x)); }

  static I load_u8(const uint8_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  }
  static I load_i8(const int8_t *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
  }
  static I load_u16(const uint16_t *p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  }
  static I load_i16(const int16_t *p) {
    return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)p));
  }
  static F load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
  }
  static void store_f16(uint16_t *p, F v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  static B bload(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
  static void bstore(uint8_t *p, B v) { _mm256_storeu_si256((__m256i *)p, v); }
  static B bset(int x) { return _mm256_set1_epi8((char)x); }
  static B bor(B a, B b) { return _mm256_or_si256(a, b); }
  static B bxor(B a, B b) { return _mm256_xor_si256(a, b); }
  static B bsub(B a, B b) { return _mm256_sub_epi8(a, b); }
  template <int right, int mask>
  static B field(B v) {
    if constexpr (right > 0) v = _mm256_srli_epi32(v, right);
    if constexpr (right < 0) v = _mm256_slli_epi32(v, -right);
    return _mm256_and_si256(v, _mm256_set1_epi8((char)mask));
  }
  static B tload(const int8_t *p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
  }
  static B lookup(B table, B codes) { return _mm256_shuffle_epi8(table, codes); }
  struct FT {
    __m256 low, high;
  };
  static FT ftload(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static F flookup(const FT &t, I codes) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, codes),
                            _mm256_permutevar8x32_ps(t.high, codes),
                            _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }

  static B broadcast4(const int8_t *p) {
    int four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }
  // Signed bytes on both sides: the instruction wants an unsigned left operand, so move w's sign
  // over to x.
  static I dot(I acc, B w, B x) {
    const B pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static P products(B w, B x) { return _mm256_maddubs_epi16(w, x); }
  static P more(P p, B w, B x) { return _mm256_add_epi16(p, _mm256_maddubs_epi16(w, x)); }
  static I widen(P p) { return _mm256_madd_epi16(p, _mm256_set1_epi16(1)); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }

  static void store_rounded(int8_t *q, F v) {
    const I r = _mm256_cvtps_epi32(v);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_storel_epi64((__m128i *)q, _mm_packs_epi16(words, words));
  }
};

#include "kernels.inl"

}  // namespace

const Kernels kernels_avx2 = table_of<V>("avx2");

}  // namespace halfbyte
