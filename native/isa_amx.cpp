// AMX: the int8 class on tile registers (AMX-INT8), for tiles of sixteen tokens; everything else is
// AVX-512's, which every processor with AMX has.
//
// A tile of sums has a row for each token and a column for each row of the weight. One product
// takes up to 64 inputs of a segment: operand A is [token][input] of the activations, operand B the
// decoded codes, whose order [input / 4][row][4] is that of the instruction. The segment's integer
// sums are exact; `matrix.inl` applies both scales to them.
//
// HALFBYTE_EMULATE_AMX computes tiles and lanes by definition, beside the scalar kernels, so that
// the addresses can be tested where no processor has tiles.
#if !defined(HALFBYTE_EMULATE_AMX)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace halfbyte {
namespace {

#include "matrix.inl"

constexpr int kTogether = 4;  // segments whose sums are in tile registers at a time
constexpr int kRowBytes = 64;

// The shapes of the tile registers: 0 .. 3 sums, 4 and 6 activations, 5 and 7 codes.
struct alignas(64) Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];

  // For products of `inputs`.
  explicit Shapes(int inputs) : palette(1), start_row(0), reserved{}, row_bytes{}, rows{} {
    for (int i = 0; i < kTogether; ++i) rows[i] = kTokens, row_bytes[i] = kRowBytes;
    for (int i = kTogether; i < kTogether + 4; i += 2) {
      rows[i] = kTokens, row_bytes[i] = (uint16_t)inputs;
      rows[i + 1] = (uint8_t)(inputs / 4), row_bytes[i + 1] = kRowBytes;
    }
  }
};

#if defined(HALFBYTE_EMULATE_AMX)

struct V {
  struct F {
    float v[16];
  };
  struct I {
    int32_t v[16];
  };
  template <class R, class Op>
  static R each(Op op) {
    R r;
    for (int i = 0; i < 16; ++i) r.v[i] = op(i);
    return r;
  }
  static F fzero() {
    return each<F>([](int) { return 0.0f; });
  }
  static F fset(float x) {
    return each<F>([&](int) { return x; });
  }
  static F fload(const float *p) {
    return each<F>([&](int i) { return p[i]; });
  }
  static void fstore(float *p, const F &v) { __builtin_memcpy(p, v.v, sizeof v.v); }
  static F fmul(const F &a, const F &b) {
    return each<F>([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F fma(const F &a, const F &b, const F &c) {
    return each<F>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
  }
  static F fnma(const F &a, const F &b, const F &c) {
    return each<F>([&](int i) { return __builtin_fmaf(-a.v[i], b.v[i], c.v[i]); });
  }
  static F cvt(const I &v) {
    return each<F>([&](int i) { return (float)v.v[i]; });
  }
  static I iload(const int32_t *p) {
    return each<I>([&](int i) { return p[i]; });
  }
  static I add(const I &a, const I &b) {
    return each<I>([&](int i) { return a.v[i] + b.v[i]; });
  }
  static I plus(const I &a, int b) {
    return each<I>([&](int i) { return a.v[i] + b; });
  }
};

struct Tile {
  uint8_t rows[kTokens][kRowBytes];
};
thread_local Tile tiles[8];
thread_local const Shapes *shapes = nullptr;

void tile_zero(int t) { tiles[t] = {}; }
void tile_load(int t, const void *from, int64_t stride) {
  tiles[t] = {};
  for (int r = 0; r < shapes->rows[t]; ++r)
    __builtin_memcpy(tiles[t].rows[r], (const char *)from + r * stride, shapes->row_bytes[t]);
}
void tile_store(int t, void *to, int64_t stride) {
  for (int r = 0; r < shapes->rows[t]; ++r)
    __builtin_memcpy((char *)to + r * stride, tiles[t].rows[r], shapes->row_bytes[t]);
}
// Signed bytes on both sides: what the scalar `decode_u8` writes.
void tile_dot(int to, int x, int w) {
  for (int r = 0; r < shapes->rows[to]; ++r)
    for (int c = 0; c < shapes->row_bytes[to] / 4; ++c) {
      int32_t sum;
      __builtin_memcpy(&sum, tiles[to].rows[r] + 4 * c, 4);
      for (int j = 0; j < shapes->row_bytes[x]; ++j)
        sum += (int8_t)tiles[x].rows[r][j] * (int8_t)tiles[w].rows[j / 4][4 * c + j % 4];
      __builtin_memcpy(tiles[to].rows[r] + 4 * c, &sum, 4);
    }
}
void tile_shapes(const Shapes &s) { shapes = &s; }
void tile_release() { shapes = nullptr; }

#define HB_TILE_ZERO tile_zero
#define HB_TILE_LOAD tile_load
#define HB_TILE_STORE tile_store
#define HB_TILE_DOT tile_dot

#else

struct V {
  using F = __m512;
  using I = __m512i;
  static F fzero() { return _mm512_setzero_ps(); }
  static F fset(float x) { return _mm512_set1_ps(x); }
  static F fload(const float *p) { return _mm512_loadu_ps(p); }
  static void fstore(float *p, F v) { _mm512_storeu_ps(p, v); }
  static F fmul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  static F cvt(I v) { return _mm512_cvtepi32_ps(v); }
  static I iload(const int32_t *p) { return _mm512_load_si512(p); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I plus(I a, int b) { return _mm512_add_epi32(a, _mm512_set1_epi32(b)); }
};

void tile_shapes(const Shapes &s) {
  __asm__ volatile("" : : "r"(&s) : "memory");  // all of it is written before it is loaded
  _tile_loadconfig(&s);
}
void tile_release() { _tile_release(); }

// Numbers of tile registers are part of the instruction, hence macros. Activations are signed, the
// codes that AVX-512's `decode_u8` writes are not.
#define HB_TILE_ZERO(t) _tile_zero(t)
#define HB_TILE_LOAD(t, from, stride) _tile_loadd(t, from, stride)
#define HB_TILE_STORE(t, to, stride) _tile_stored(t, to, stride)
#define HB_TILE_DOT(to, x, w) _tile_dpbsud(to, x, w)

#endif

// The products a segment is cut into: the fewest whose inputs are a multiple of four, at most 64.
int products_of(int seg) {
  int count = (seg + 63) / 64;
  while (seg % count || seg / count % 4) ++count;
  return count;
}

// Adds product `index` of the block to tile register SUM.
#define HB_PRODUCT(SUM, X, W, index)                                        \
  do {                                                                      \
    HB_TILE_LOAD(X, x + (int64_t)(index) * inputs, x_stride);               \
    HB_TILE_LOAD(W, w + (int64_t)(index) * inputs * kPanelRows, kRowBytes); \
    HB_TILE_DOT(SUM, X, W);                                                 \
  } while (0)

// Sums of one segment into tile register SUM, and from there into memory.
#define HB_SEGMENT(SUM, X, W, index)                                                           \
  do {                                                                                         \
    HB_TILE_ZERO(SUM);                                                                         \
    for (int i = 0; i < products; ++i) HB_PRODUCT(SUM, X, W, (int64_t)(index) * products + i); \
    HB_TILE_STORE(SUM, sums[SUM], kRowBytes);                                                  \
  } while (0)

// Sixteen tokens from t0 on by one panel.
template <bool STARTS, bool SPANS>
void multiply(const Block &b, int t0, int panel, int products) {
  const int seg = b.seg, inputs = seg / products, segments = b.segments;
  const int64_t x_stride = b.x_stride;
  const int8_t *x = (const int8_t *)b.x + t0 * x_stride;
  const uint8_t *w = (const uint8_t *)b.w + panel * b.w_stride;
  alignas(64) int32_t sums[kTogether][kTokens * kPanelRows];
  MatrixTotal<V, STARTS, SPANS> total(b, t0, panel, 0);
  for (int s0 = 0; s0 < segments; s0 += kTogether) {
    const int count = segments - s0 < kTogether ? segments - s0 : kTogether;
    // One product waits for the one before it in the same register: the products of a segment that
    // is alone go to all registers in turn.
    const bool divided = count == 1 && products >= kTogether;
    if (divided) {
      const int64_t at = (int64_t)s0 * products;
      int i = 0;
      HB_TILE_ZERO(0);
      HB_TILE_ZERO(1);
      HB_TILE_ZERO(2);
      HB_TILE_ZERO(3);
      for (; i + kTogether <= products; i += kTogether) {
        HB_PRODUCT(0, 4, 5, at + i);
        HB_PRODUCT(1, 6, 7, at + i + 1);
        HB_PRODUCT(2, 4, 5, at + i + 2);
        HB_PRODUCT(3, 6, 7, at + i + 3);
      }
      if (i < products) HB_PRODUCT(0, 4, 5, at + i);
      if (i + 1 < products) HB_PRODUCT(1, 6, 7, at + i + 1);
      if (i + 2 < products) HB_PRODUCT(2, 4, 5, at + i + 2);
      HB_TILE_STORE(0, sums[0], kRowBytes);
      HB_TILE_STORE(1, sums[1], kRowBytes);
      HB_TILE_STORE(2, sums[2], kRowBytes);
      HB_TILE_STORE(3, sums[3], kRowBytes);
    } else {
      HB_SEGMENT(0, 4, 5, s0);
      if (count > 1) HB_SEGMENT(1, 6, 7, s0 + 1);
      if (count > 2) HB_SEGMENT(2, 4, 5, s0 + 2);
      if (count > 3) HB_SEGMENT(3, 6, 7, s0 + 3);
    }
    total.begin();
    for (int i = 0; i < count; ++i)
      total.add(s0 + i, [&](int t) HB_INLINE_LAMBDA {
        V::I whole = V::iload(sums[i] + t * kPanelRows);
        if (divided)
          for (int part = 1; part < kTogether; ++part)
            whole = V::add(whole, V::iload(sums[part] + t * kPanelRows));
        return whole;
      });
    total.end();
  }
}

void multiply_tiles(const Block &b, int tokens, bool starts) {
  const int products = products_of(b.seg);
  const Shapes wanted(b.seg / products);
  tile_shapes(wanted);
  each_tile(b, tokens, starts, [&](auto with_starts, auto with_spans, int t0, int panel) {
    multiply<with_starts.value, with_spans.value>(b, t0, panel, products);
  });
  tile_release();
}

}  // namespace

// Sums of shorter segments leave the tile registers too often: 1.0 to 1.7 of the time of AVX-512's
// tiles with 16 and 32 inputs, 0.57 to 0.80 with 128 (Intel Xeon, 4096 x 4096).
constexpr int kShortestSegment = 64;

const MatrixKernels kernels_amx = {multiply_tiles, 0, kShortestSegment};

}  // namespace halfbyte
