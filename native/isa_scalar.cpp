// Plain C++: sixteen lanes as arrays, fused products by definition (fma), for every machine and as
// a check on the others.
#include "kernels.h"

namespace halfbyte {
namespace {

struct V {
  static constexpr int W = 16, registers = 16;
  static constexpr bool unsigned_bytes = false, integer_tables = false, sums_in_16_bits = false,
                        fuses = false, blends = false;
  static constexpr int permuted_bits = 0;
  static constexpr bool one_panel_tiles = false;
  static constexpr Tiles i8 = kScalarInt8, f32 = kScalarFloat;
  struct F {
    float v[16];
  };
  struct I {
    int32_t v[16];
  };
  struct B {
    uint8_t v[64];
  };
  using P = I;
  struct Four {
    int8_t v[4];
  };

  template <class R, class Op>
  static R each(Op op) {
    R r;
    for (int i = 0; i < 16; ++i) r.v[i] = op(i);
    return r;
  }
  template <class Op>
  static B each_byte(Op op) {
    B r;
    for (int i = 0; i < 64; ++i) r.v[i] = (uint8_t)op(i);
    return r;
  }
  static float raw(int32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
  }
  static int32_t raw(float f) {
    int32_t u;
    __builtin_memcpy(&u, &f, 4);
    return u;
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
  static void fstore(float *p, const F &v) {
    for (int i = 0; i < 16; ++i) p[i] = v.v[i];
  }
  static F fadd(const F &a, const F &b) {
    return each<F>([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F fsub(const F &a, const F &b) {
    return each<F>([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F fmul(const F &a, const F &b) {
    return each<F>([&](int i) { return a.v[i] * b.v[i]; });
  }
  // In double the product of two floats is exact, and one addition rounds; the cast rounds again,
  // which differs from a fused operation only in ties of the 29 dropped bits: rounding the sum to
  // odd first removes those.
  static float fused(float a, float b, float c) {
    const double p = (double)a * b, s = p + c, t = s - p;
    const double e = (p - (s - t)) + (c - t);
    double r = s;
    if (e != 0 && s - s == 0) {
      int64_t u;
      __builtin_memcpy(&u, &r, 8);
      if (!(u & 1)) u += (e > 0) == (s > 0) ? 1 : -1;
      __builtin_memcpy(&r, &u, 8);
    }
    return (float)r;
  }
  static F fma(const F &a, const F &b, const F &c) {
    return each<F>([&](int i) { return fused(a.v[i], b.v[i], c.v[i]); });
  }
  static F fnma(const F &a, const F &b, const F &c) {
    return each<F>([&](int i) { return fused(-a.v[i], b.v[i], c.v[i]); });
  }
  static F fmaxabs(const F &m, const F &v) {
    return each<F>([&](int i) {
      const float a = raw((int32_t)(raw(v.v[i]) & 0x7fffffff));
      return a > m.v[i] ? a : m.v[i];
    });
  }
  static float largest(const F &v) {
    float m = v.v[0];
    for (int i = 1; i < 16; ++i) m = v.v[i] > m ? v.v[i] : m;
    return m;
  }
  static float total(F v) {  // half to half, see `total_of`
    for (int half = 8; half; half /= 2)
      for (int i = 0; i < half; ++i) v.v[i] += v.v[i + half];
    return v.v[0];
  }
  static constexpr int sums_together = 0;
  static bool any_nan(const F &v) {
    bool nan = false;
    for (int i = 0; i < 16; ++i) nan |= v.v[i] != v.v[i];
    return nan;
  }

  static I iset(int x) {
    return each<I>([&](int) { return x; });
  }
  static F cvt(const I &v) {
    return each<F>([&](int i) { return (float)v.v[i]; });
  }
  static F cast(const I &v) {
    return each<F>([&](int i) { return raw(v.v[i]); });
  }
  static I castf(const F &v) {
    return each<I>([&](int i) { return raw(v.v[i]); });
  }
  static I as_i(const B &v) {
    I r;
    __builtin_memcpy(&r, &v, 64);
    return r;
  }
  template <int N>
  static I sll(const I &v) {
    return sll_by(v, N);
  }
  template <int N>
  static I srl(const I &v) {
    return each<I>([&](int i) { return (int32_t)((uint32_t)v.v[i] >> N); });
  }
  template <int N>
  static I sra(const I &v) {
    return each<I>([&](int i) { return v.v[i] >> N; });
  }
  static I sll_by(const I &v, int n) {
    return each<I>([&](int i) { return (int32_t)((uint32_t)v.v[i] << n); });
  }
  static I iand(const I &a, const I &b) {
    return each<I>([&](int i) { return a.v[i] & b.v[i]; });
  }
  static I ior(const I &a, const I &b) {
    return each<I>([&](int i) { return a.v[i] | b.v[i]; });
  }
  static I ixor(const I &a, const I &b) {
    return each<I>([&](int i) { return a.v[i] ^ b.v[i]; });
  }
  static I equal(const I &v, int x) {
    return each<I>([&](int i) { return v.v[i] == x ? -1 : 0; });
  }
  static I greater(const I &v, int x) {
    return each<I>([&](int i) { return v.v[i] > x ? -1 : 0; });
  }

  static I load_u8(const uint8_t *p) {
    return each<I>([&](int i) { return (int32_t)p[i]; });
  }
  static I load_i8(const int8_t *p) {
    return each<I>([&](int i) { return (int32_t)p[i]; });
  }
  static I load_u16(const uint16_t *p) {
    return each<I>([&](int i) { return (int32_t)p[i]; });
  }
  static I load_i16(const int16_t *p) {
    return each<I>([&](int i) { return (int32_t)p[i]; });
  }
  static F load_f16(const uint16_t *p);
  static void store_f16(uint16_t *p, const F &v);

  static B bload(const uint8_t *p) {
    B r;
    __builtin_memcpy(&r, p, 64);
    return r;
  }
  static void bstore(uint8_t *p, const B &v) { __builtin_memcpy(p, &v, 64); }
  static B bset(int x) {
    return each_byte([&](int) { return x; });
  }
  static B bor(const B &a, const B &b) {
    return each_byte([&](int i) { return a.v[i] | b.v[i]; });
  }
  static B bxor(const B &a, const B &b) {
    return each_byte([&](int i) { return a.v[i] ^ b.v[i]; });
  }
  static B bsub(const B &a, const B &b) {
    return each_byte([&](int i) { return a.v[i] - b.v[i]; });
  }
  template <int right, int mask>
  static B field(const B &v) {
    if constexpr (right >= 0)
      return each_byte([&](int i) { return v.v[i] >> right & mask; });
    else
      return each_byte([&](int i) { return v.v[i] << -right & mask; });
  }
  struct T {
    int8_t v[16];
  };
  static T tload(const int8_t *p) {
    T t;
    __builtin_memcpy(&t, p, 16);
    return t;
  }
  static B lookup(const T &t, const B &codes) {
    return each_byte([&](int i) { return t.v[codes.v[i] & 15]; });
  }
  using FT = F;
  static FT ftload(const float *p) { return fload(p); }
  static F flookup(const FT &t, const I &codes) {
    return each<F>([&](int i) { return t.v[codes.v[i] & 15]; });
  }

  static Four broadcast4(const int8_t *p) {
    Four f;
    __builtin_memcpy(&f, p, 4);
    return f;
  }
  static I dot(const I &acc, const B &w, const Four &x) {
    return each<I>([&](int i) {
      const uint8_t *b = w.v + 4 * i;
      return acc.v[i] + (int8_t)b[0] * x.v[0] + (int8_t)b[1] * x.v[1] + (int8_t)b[2] * x.v[2] +
             (int8_t)b[3] * x.v[3];
    });
  }

  static void store_rounded(int8_t *q, const F &v) {
    for (int i = 0; i < 16; ++i)
      q[i] = (int8_t)(int)(v.v[i] == v.v[i] ? __builtin_rintf(v.v[i]) : 0.0f);
  }
};

#include "kernels.inl"

V::F V::load_f16(const uint16_t *p) {
  return each<F>([&](int i) { return half_to_float(p[i]); });
}

void V::store_f16(uint16_t *p, const F &v) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(v.v[i]);
}

}  // namespace

const Kernels kernels_scalar = table_of<V>("scalar");

}  // namespace halfbyte
