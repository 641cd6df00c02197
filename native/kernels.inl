// The loops, written once over a vector type V. Included by one translation unit an instruction set, inside an unnamed
// namespace, so that no function compiled for one set can be linked into another. Nothing of the standard library is
// instantiated here for that reason.
//
// V has W lanes of 32 bits (W divides 16), H = 16 / W vectors cover a panel. Types: F floats, I int32, B the same
// register as bytes.

// Loops over the sums of a tile must vanish, or the sums live in memory; compilers stop short of that by themselves.
// HALFBYTE_SMALL: instrumented builds, where that much code takes minutes to compile.
#if defined(HALFBYTE_SMALL)
#define HB_UNROLL
#define HB_INLINE inline
#define HB_INLINE_LAMBDA
#elif defined(_MSC_VER) && !defined(__clang__)
#define HB_UNROLL
#define HB_INLINE __forceinline
#define HB_INLINE_LAMBDA
#else
#define HB_UNROLL _Pragma("GCC unroll 16")
#define HB_INLINE inline __attribute__((always_inline))
#define HB_INLINE_LAMBDA __attribute__((always_inline))
#endif

template <int N>
struct Constant {
  static constexpr int value = N;
};

template <int I, int COUNT, class Body>
HB_INLINE void repeat(Body &&body) {
  if constexpr (I < COUNT) {
    body(Constant<I>());
    repeat<I + 1, COUNT>(body);
  }
}

// ---------------------------------------------------------------------------------------------------------------- codes to bytes

// Where a panel's planes are, at some input: addresses as numbers, since those of planes a width lacks are never
// followed.
struct Planes {
  uintptr_t p8, p4, p2, p1;

  static Planes at(const Weight &w, int64_t panel, int64_t k) {
    const int64_t first = panel * w.padded_k() + k;
    return {(uintptr_t)w.plane8 + first * 16, (uintptr_t)w.plane4 + first * 8, (uintptr_t)w.plane2 + first * 4,
            (uintptr_t)w.plane1 + first * 2};
  }
  void advance(int64_t inputs) { p8 += inputs * 16, p4 += inputs * 8, p2 += inputs * 4, p1 += inputs * 2; }
  // Asks for what is read `kAhead` bytes from here: the panels of a tile are as many streams, more than the hardware follows by itself.
  template <int BITS, int INPUTS>
  HB_INLINE void ask() const {
    constexpr int kAhead = 1024;
    if constexpr (BITS == 8) ask_units<INPUTS / 4>(p8 + kAhead);
    if constexpr (BITS != 8 && (BITS & 4) != 0) ask_units<INPUTS / 8>(p4 + kAhead);
    if constexpr (BITS != 8 && (BITS & 2) != 0) ask_units<INPUTS / 16>(p2 + kAhead);
    if constexpr (BITS != 8 && (BITS & 1) != 0) ask_units<INPUTS / 32>(p1 + kAhead);
  }
  template <int UNITS>
  static HB_INLINE void ask_units(uintptr_t at) {
    for (int i = 0; i < UNITS; ++i) __builtin_prefetch((const void *)(at + i * kUnitBytes));
  }
  static const uint8_t *unit(uintptr_t plane, int64_t index, int at) { return (const uint8_t *)plane + index * kUnitBytes + at; }
};

// The codes of inputs 4i to 4i + 3 from a place that is whole units of every plane of the width, W rows from byte `at`
// of a unit.
template <class V, int BITS, int i>
HB_INLINE typename V::B code_at(const Planes &p, int at) {
  using B = typename V::B;
  if constexpr (BITS == 8) {
    return V::bload(Planes::unit(p.p8, i, at));
  } else {
    B code;
    if constexpr ((BITS & 4) != 0) code = V::template field<4 * (i % 2), 0x0f>(V::bload(Planes::unit(p.p4, i / 2, at)));
    if constexpr ((BITS & 2) != 0) {
      constexpr int up = BITS & 4;
      const B two = V::template field<2 * (i % 4) - up, (0x03 << up)>(V::bload(Planes::unit(p.p2, i / 4, at)));
      if constexpr (up != 0) code = V::bor(code, two);
      else code = two;
    }
    if constexpr ((BITS & 1) != 0) {
      constexpr int up = BITS & 6;
      const B one = V::template field<i % 8 - up, (0x01 << up)>(V::bload(Planes::unit(p.p1, i / 8, at)));
      if constexpr (up != 0) code = V::bor(code, one);
      else code = one;
    }
    return code;
  }
}

// Inputs in which a width has whole units of all its planes.
constexpr int unit_inputs(int bits) { return bits == 8 ? 4 : bits & 1 ? 32 : bits & 2 ? 16 : 8; }

// Calls emit(step, half, codes) for each vector of four consecutive inputs; step counts fours from k0.
template <class V, int BITS, class Emit>
inline void each_codes(const Weight &w, int64_t panel, int64_t k0, int64_t count, Emit &&emit) {
  constexpr int H = kPanelRows / V::W;
  Planes planes = Planes::at(w, panel, k0);
  for (int64_t c = 0; c < count / kChunk; ++c, planes.advance(kChunk)) {
    planes.template ask<BITS, kChunk>();
    for (int h = 0; h < H; ++h)
      repeat<0, 8>([&](auto i) { emit(c * 8 + i.value, h, code_at<V, BITS, decltype(i)::value>(planes, h * V::W * 4)); });
  }
}

template <class V, int BITS>
void decode_u8_bits(const Weight &w, int64_t panel, int64_t k0, int64_t count, uint8_t *out) {
  if constexpr (BITS == 4) {
    if (w.element == Element::table) {
      alignas(64) int8_t entries[16];
      const int off = buffer_offset(w, V::unsigned_bytes);
      for (int c = 0; c < 16; ++c) entries[c] = (int8_t)(w.values[c] / w.unit + off);
      const auto table = V::tload(entries);
      each_codes<V, BITS>(w, panel, k0, count, [&](int64_t step, int h, typename V::B code) {
        V::bstore(out + step * kUnitBytes + h * V::W * 4, V::lookup(table, code));
      });
      return;
    }
  }
  const typename V::B sign = V::bset(BITS == 8 && !V::unsigned_bytes ? 0x80 : 0);
  each_codes<V, BITS>(w, panel, k0, count, [&](int64_t step, int h, typename V::B code) {
    if constexpr (BITS == 8) code = V::bxor(code, sign);
    V::bstore(out + step * kUnitBytes + h * V::W * 4, code);
  });
}

template <class V>
void decode_u8(const Weight &w, int64_t panel, int64_t k0, int64_t count, uint8_t *out) {
  switch (w.bits) {
    case 1: return decode_u8_bits<V, 1>(w, panel, k0, count, out);
    case 2: return decode_u8_bits<V, 2>(w, panel, k0, count, out);
    case 3: return decode_u8_bits<V, 3>(w, panel, k0, count, out);
    case 4: return decode_u8_bits<V, 4>(w, panel, k0, count, out);
    case 5: return decode_u8_bits<V, 5>(w, panel, k0, count, out);
    case 6: return decode_u8_bits<V, 6>(w, panel, k0, count, out);
    case 7: return decode_u8_bits<V, 7>(w, panel, k0, count, out);
    default: return decode_u8_bits<V, 8>(w, panel, k0, count, out);
  }
}

// --------------------------------------------------------------------------------------------------------------- codes to floats

// Byte b (0 to 3) of each lane, sign- or zero-extended.
template <class V, int b>
inline typename V::I signed_byte(typename V::I lanes) {
  if constexpr (b == 3) return V::template sra<24>(lanes);
  else return V::template sra<24>(V::template sll<24 - 8 * b>(lanes));
}

template <class V, int b>
inline typename V::I plain_byte(typename V::I lanes) {
  if constexpr (b == 3) return V::template srl<24>(lanes);
  else if constexpr (b == 0) return V::iand(lanes, V::iset(0xff));
  else return V::iand(V::template srl<8 * b>(lanes), V::iset(0xff));
}

// A minifloat code, exponent above mantissa, sign bit on top: shift it onto float32's fields and let one product set
// the bias right; this gets the subnormal codes right too. Codes past `last` are infinity or NaN: forcing the exponent
// to ones makes them so, by their own mantissa.
template <class V>
struct Minifloat {
  int shift, sign_shift, last;
  int magnitude;
  float factor;
  Minifloat(int bits, int mantissa, int bias, int last_finite)
      : shift(23 - mantissa), sign_shift(32 - bits), last(last_finite), magnitude((1 << (bits - 1)) - 1) {
    factor = 0x1p127f / (float)(1 << bias);
  }
  typename V::F operator()(typename V::I code) const {
    typename V::I mag = V::iand(code, V::iset(magnitude));
    typename V::I sign = V::iand(V::sll_by(code, sign_shift), V::iset((int)0x80000000u));
    typename V::F value = V::fmul(V::cast(V::ior(V::sll_by(mag, shift), sign)), V::fset(factor));
    if (last) value = V::cast(V::ior(V::castf(value), V::iand(V::greater(mag, last), V::iset(0x7f800000))));
    return value;
  }
};

template <class V, int BITS>
void decode_f32_bits(const Weight &w, int64_t panel, int64_t k0, int64_t count, float *out) {
  using I = typename V::I;
  using B = typename V::B;
  // Four vectors, one an input: lane offset h * W within each 16-float row.
  auto rows = [&](int64_t step, int h) { return out + step * 4 * kPanelRows + h * V::W; };
  if constexpr (BITS == 4) {
    if (w.element == Element::table ? !(w.integral && V::integer_tables) : !V::integer_tables) {
      alignas(64) float entries[16];
      for (int c = 0; c < 16; ++c) entries[c] = w.element == Element::table ? (float)w.values[c] : (float)(c - w.offset);
      const auto table = V::ftload(entries);
      each_codes<V, BITS>(w, panel, k0, count, [&](int64_t step, int h, B code) {
        const I lanes = V::as_i(code);
        float *o = rows(step, h);
        V::fstore(o, V::flookup(table, lanes));
        V::fstore(o + 16, V::flookup(table, V::template srl<8>(lanes)));
        V::fstore(o + 32, V::flookup(table, V::template srl<16>(lanes)));
        V::fstore(o + 48, V::flookup(table, V::template srl<24>(lanes)));
      });
      return;
    }
  }
  if (w.element == Element::minifloat) {
    const Minifloat<V> decode(BITS, w.mantissa_bits, w.exponent_bias, w.last_finite);
    each_codes<V, BITS>(w, panel, k0, count, [&](int64_t step, int h, B code) {
      const I lanes = V::as_i(code);
      float *o = rows(step, h);
      V::fstore(o, decode(plain_byte<V, 0>(lanes)));
      V::fstore(o + 16, decode(plain_byte<V, 1>(lanes)));
      V::fstore(o + 32, decode(plain_byte<V, 2>(lanes)));
      V::fstore(o + 48, decode(plain_byte<V, 3>(lanes)));
    });
    return;
  }
  alignas(64) int8_t entries[16] = {};
  if (w.element == Element::table)
    for (int c = 0; c < 16; ++c) entries[c] = (int8_t)(w.values[c] / w.unit);
  const auto table = V::tload(entries);
  const bool looked_up = BITS == 4 && w.element == Element::table;
  // Whole numbers pass through signed bytes; unsigned 8-bit codes get the 128 they lack afterwards.
  const bool wide = BITS == 8 && w.offset != 128;
  const B low = V::bset(BITS == 8 ? 128 : w.offset);
  const typename V::F back = V::fset((float)(128 - w.offset));
  each_codes<V, BITS>(w, panel, k0, count, [&](int64_t step, int h, B code) {
    const I lanes = V::as_i(looked_up ? V::lookup(table, code) : V::bsub(code, low));
    float *o = rows(step, h);
    typename V::F v0 = V::cvt(signed_byte<V, 0>(lanes)), v1 = V::cvt(signed_byte<V, 1>(lanes));
    typename V::F v2 = V::cvt(signed_byte<V, 2>(lanes)), v3 = V::cvt(signed_byte<V, 3>(lanes));
    if (BITS == 8 && wide) v0 = V::fadd(v0, back), v1 = V::fadd(v1, back), v2 = V::fadd(v2, back), v3 = V::fadd(v3, back);
    V::fstore(o, v0), V::fstore(o + 16, v1), V::fstore(o + 32, v2), V::fstore(o + 48, v3);
  });
}

template <class V>
void decode_f32(const Weight &w, int64_t panel, int64_t k0, int64_t count, float *out) {
  switch (w.bits) {
    case 1: return decode_f32_bits<V, 1>(w, panel, k0, count, out);
    case 2: return decode_f32_bits<V, 2>(w, panel, k0, count, out);
    case 3: return decode_f32_bits<V, 3>(w, panel, k0, count, out);
    case 4: return decode_f32_bits<V, 4>(w, panel, k0, count, out);
    case 5: return decode_f32_bits<V, 5>(w, panel, k0, count, out);
    case 6: return decode_f32_bits<V, 6>(w, panel, k0, count, out);
    case 7: return decode_f32_bits<V, 7>(w, panel, k0, count, out);
    default: return decode_f32_bits<V, 8>(w, panel, k0, count, out);
  }
}

// ------------------------------------------------------------------------------------------------------------------------ scales

template <class V>
inline typename V::F e8m0(typename V::I b) {
  // Byte 0 is 2^-127, a subnormal, and 255 is NaN: one bit of mantissa makes both.
  typename V::I edge = V::ior(V::equal(b, 0), V::equal(b, 255));
  return V::cast(V::ior(V::template sll<23>(b), V::iand(edge, V::iset(0x00400000))));
}

// W entries of a part with one entry a group, as floats.
template <class V, Scale kind>
inline typename V::F scale_lanes(const void *base, int64_t at) {
  if constexpr (kind == Scale::e8m0) return e8m0<V>(V::load_u8((const uint8_t *)base + at));
  if constexpr (kind == Scale::e4m3) return Minifloat<V>(8, 3, 7, 0x7e)(V::load_u8((const uint8_t *)base + at));
  if constexpr (kind == Scale::ue4m3) {
    // The sign bit is ignored, but only 0x7f without it reads as 0.
    const typename V::I b = V::load_u8((const uint8_t *)base + at);
    const typename V::I keep = V::ixor(V::equal(b, 0x7f), V::iset(-1));
    return V::cast(V::iand(V::castf(Minifloat<V>(8, 3, 7, 0)(V::iand(b, V::iset(0x7f)))), keep));
  }
  if constexpr (kind == Scale::f16) return V::load_f16((const uint16_t *)base + at);
  if constexpr (kind == Scale::bf16) return V::cast(V::template sll<16>(V::load_u16((const uint16_t *)base + at)));
  if constexpr (kind == Scale::f32) return V::fload((const float *)base + at);
  if constexpr (kind == Scale::u8) return V::cvt(V::load_u8((const uint8_t *)base + at));
  if constexpr (kind == Scale::i8) return V::cvt(V::load_i8((const int8_t *)base + at));
  return V::fset(1.0f);
}

template <class V, Scale kind>
void decode_scales_of(const Weight &w, int64_t panel, int64_t s0, int64_t count, float unit, float *s, float *z, float *b) {
  const int64_t per_group = w.group / w.seg;
  const typename V::F one = V::fset(unit);
  int64_t g = s0 / per_group, left = per_group - s0 % per_group;  // segments left of group g
  int64_t super = w.supers ? g / w.groups_per_super : 0, super_left = w.supers ? w.groups_per_super - g % w.groups_per_super : 0;
  for (int64_t i = 0; i < count;) {
    const int64_t again = left < count - i ? left : count - i;
    for (int lane = 0; lane < kPanelRows; lane += V::W) {
      const int64_t at = (panel * w.groups + g) * kPanelRows + lane, super_at = (panel * w.supers + super) * kPanelRows + lane;
      typename V::F scale = scale_lanes<V, kind>(w.scales, at);
      if (w.super_scales) scale = V::fmul(scale, V::load_f16(w.super_scales + super_at));
      scale = V::fmul(scale, one);
      typename V::F zero = V::fzero(), added = V::fzero();
      if (w.zeros) zero = V::cvt(V::load_i16(w.zeros + at));
      if (w.biases) added = scale_lanes<V, kind>(w.biases, at);
      if (w.mins) added = V::fsub(added, V::fmul(V::cvt(V::load_u8(w.mins + at)), V::load_f16(w.super_mins + super_at)));
      for (int64_t r = i; r < i + again; ++r) {
        V::fstore(s + r * kPanelRows + lane, scale);
        if (w.zeros) V::fstore(z + r * kPanelRows + lane, zero);
        if (w.biases || w.mins) V::fstore(b + r * kPanelRows + lane, added);
      }
    }
    i += again, ++g, left = per_group;
    if (w.supers && --super_left == 0) ++super, super_left = w.groups_per_super;
  }
}

template <class V>
void decode_scales(const Weight &w, int64_t panel, int64_t s0, int64_t count, float unit, float *s, float *z, float *b) {
  switch (w.scale) {
    case Scale::e8m0: return decode_scales_of<V, Scale::e8m0>(w, panel, s0, count, unit, s, z, b);
    case Scale::e4m3: return decode_scales_of<V, Scale::e4m3>(w, panel, s0, count, unit, s, z, b);
    case Scale::ue4m3: return decode_scales_of<V, Scale::ue4m3>(w, panel, s0, count, unit, s, z, b);
    case Scale::f16: return decode_scales_of<V, Scale::f16>(w, panel, s0, count, unit, s, z, b);
    case Scale::bf16: return decode_scales_of<V, Scale::bf16>(w, panel, s0, count, unit, s, z, b);
    case Scale::f32: return decode_scales_of<V, Scale::f32>(w, panel, s0, count, unit, s, z, b);
    case Scale::u8: return decode_scales_of<V, Scale::u8>(w, panel, s0, count, unit, s, z, b);
    case Scale::i8: return decode_scales_of<V, Scale::i8>(w, panel, s0, count, unit, s, z, b);
    default: return decode_scales_of<V, Scale::none>(w, panel, s0, count, unit, s, z, b);
  }
}

// ---------------------------------------------------------------------------------------------------------------------- products

// The sums of a tile outside the loop over inputs: MT tokens by NV vectors of rows. Addresses are copied out of the
// Block, which the compiler must otherwise read again after every store.
template <class V, int MT, int NV>
struct Tile {
  using F = typename V::F;
  // Few sums stay in registers from segment to segment, many in memory.
  static constexpr bool held = MT * NV <= V::registers / 4;
  const float *scales, *zeros, *biases, *x_sum[MT];
  float *total[MT];
  int64_t s_at[NV];
  F sums[held ? MT : 1][held ? NV : 1];

  HB_INLINE Tile(const Block &b, int t0, int v0) : scales(b.scales), zeros(b.zeros), biases(b.biases) {
    constexpr int H = kPanelRows / V::W;
    HB_UNROLL
    for (int j = 0; j < NV; ++j) s_at[j] = (v0 + j) / H * b.s_stride + (v0 + j) % H * V::W;
    HB_UNROLL
    for (int t = 0; t < MT; ++t) {
      total[t] = b.total + (t0 + t) * b.total_stride + v0 * V::W;
      x_sum[t] = b.x_sum ? b.x_sum + (t0 + t) * b.x_seg_stride : nullptr;
    }
    if constexpr (held)
      HB_UNROLL
      for (int t = 0; t < MT; ++t)
        HB_UNROLL
        for (int j = 0; j < NV; ++j) sums[t][j] = V::fload(total[t] + j * V::W);
  }

  // total += (sum - zero * x_sum) * scale + bias * x_sum, where `sum` is segment s's sum of products. A single non-zero
  // activation of 1 so gives the weight's exact value rounded once: the difference is exact, and the last step is one
  // product or one fused product and sum.
  HB_INLINE void settle(F (&sum)[MT][NV], int s) {
    HB_UNROLL
    for (int j = 0; j < NV; ++j) {
      const int64_t at = s_at[j] + s * kPanelRows;
      const F scale = V::fload(scales + at);
      HB_UNROLL
      for (int t = 0; t < MT; ++t) {
        if (zeros) sum[t][j] = V::fnma(V::fload(zeros + at), V::fset(x_sum[t][s]), sum[t][j]);
        F now;
        if constexpr (held) now = sums[t][j];
        else now = V::fload(total[t] + j * V::W);
        if (biases) now = V::fadd(now, V::fma(sum[t][j], scale, V::fmul(V::fload(biases + at), V::fset(x_sum[t][s]))));
        else now = V::fma(sum[t][j], scale, now);
        if constexpr (held) sums[t][j] = now;
        else V::fstore(total[t] + j * V::W, now);
      }
    }
  }

  HB_INLINE void finish() {
    if constexpr (held)
      HB_UNROLL
      for (int t = 0; t < MT; ++t)
        HB_UNROLL
        for (int j = 0; j < NV; ++j) V::fstore(total[t] + j * V::W, sums[t][j]);
  }
};

// How the rows of a tile come: decoded in a buffer, or from the planes of a width, through a table or not. TURN inputs
// are unrolled; segments are whole turns.
template <int TURN, int BITS, bool TABLE = false>
struct FromPlanes {
  static constexpr int turn = TURN, bits = BITS;
  static constexpr bool table = TABLE, fused = true;
};
template <int TURN>
struct FromBuffer {
  static constexpr int turn = TURN, bits = 0;
  static constexpr bool table = false, fused = false;
};

template <class V>
inline typename V::T byte_table(const Weight &w, int offset) {
  alignas(64) int8_t entries[16] = {};
  if (w.element == Element::table && w.integral)
    for (int c = 0; c < 16; ++c) entries[c] = (int8_t)(w.values[c] / w.unit + offset);
  return V::tload(entries);
}

// MT tokens by NV vectors of rows. F: products a partial sum takes before it is folded (instruction sets whose products
// are 16-bit); 0: signed bytes, or sets that sum in 32 bits at once.
template <class V, int MT, int NV, int F, class Source>
void tile_i8(const Block &b, int t0, int v0) {
  using B = typename V::B;
  constexpr int H = kPanelRows / V::W, bits = Source::bits;
  constexpr int inputs = Source::turn;
  static_assert(inputs % (4 * (F ? F : 1)) == 0 && (!Source::fused || inputs % unit_inputs(bits) == 0), "a turn is whole units");
  const uint8_t *w[NV];
  Planes planes[NV];
  HB_UNROLL
  for (int j = 0; j < NV; ++j) {
    const int panel = (v0 + j) / H;
    if constexpr (Source::fused) planes[j] = Planes::at(*b.weight, b.panel + panel, b.k0);
    else w[j] = (const uint8_t *)b.w + panel * b.w_stride + (v0 + j) % H * V::W * 4;
  }
  const auto table = byte_table<V>(*b.weight, Source::table ? buffer_offset(*b.weight, V::unsigned_bytes) : 0);
  const B sign = V::bset(bits == 8 && !V::unsigned_bytes ? 0x80 : 0);
  const int8_t *x = (const int8_t *)b.x + t0 * b.x_stride;
  const int32_t *x_start[MT];
  const float *x_scale[MT];
  HB_UNROLL
  for (int t = 0; t < MT; ++t) x_start[t] = b.x_start + (t0 + t) * b.x_seg_stride, x_scale[t] = b.x_scale + (t0 + t) * b.x_seg_stride;
  Tile<V, MT, NV> tile(b, t0, v0);
  const int segments = b.segments, turns = b.seg / inputs;
  for (int s = 0; s < segments; ++s) {
    typename V::I acc[MT][NV];
    typename V::P part[MT][NV];
    HB_UNROLL
    for (int t = 0; t < MT; ++t)
      HB_UNROLL
      for (int j = 0; j < NV; ++j) acc[t][j] = V::iset(x_start[t][s]);
    for (int turn = 0; turn < turns; ++turn) {
      repeat<0, inputs / 4>([&](auto index) HB_INLINE_LAMBDA {
        constexpr int i = decltype(index)::value;
        B rows[NV];
        HB_UNROLL
        for (int j = 0; j < NV; ++j) {
          if constexpr (Source::fused) {
            rows[j] = code_at<V, bits, i>(planes[j], (v0 + j) % H * V::W * 4);
            if constexpr (Source::table) rows[j] = V::lookup(table, rows[j]);
            if constexpr (bits == 8 && !V::unsigned_bytes) rows[j] = V::bxor(rows[j], sign);
          } else {
            rows[j] = V::bload(w[j] + i * kUnitBytes);
          }
        }
        HB_UNROLL
        for (int t = 0; t < MT; ++t) {
          const auto four = V::broadcast4(x + (i * MT + t) * 4);
          HB_UNROLL
          for (int j = 0; j < NV; ++j) {
            if constexpr (F == 0) acc[t][j] = V::dot(acc[t][j], rows[j], four);
            else if constexpr (i % (F ? F : 1) == 0) part[t][j] = V::products(rows[j], four);
            else part[t][j] = V::more(part[t][j], rows[j], four);
          }
        }
        if constexpr (F != 0 && (i + 1) % (F ? F : 1) == 0)
          HB_UNROLL
          for (int t = 0; t < MT; ++t)
            HB_UNROLL
            for (int j = 0; j < NV; ++j) acc[t][j] = V::fold(acc[t][j], part[t][j]);
      });
      HB_UNROLL
      for (int j = 0; j < NV; ++j) {
        if constexpr (Source::fused) planes[j].advance(inputs);
        else w[j] += inputs / 4 * kUnitBytes;
      }
      x += MT * inputs;
    }
    typename V::F sum[MT][NV];
    HB_UNROLL
    for (int t = 0; t < MT; ++t) {
      const typename V::F by = V::fset(x_scale[t][s]);
      HB_UNROLL
      for (int j = 0; j < NV; ++j) sum[t][j] = V::fmul(V::cvt(acc[t][j]), by);
    }
    tile.settle(sum, s);
  }
  tile.finish();
}

template <class V, int MT, int NV, class Source>
void tile_f32(const Block &b, int t0, int v0) {
  using F = typename V::F;
  constexpr int H = kPanelRows / V::W, bits = Source::bits;
  constexpr int inputs = Source::turn;
  const float *w[NV];
  Planes planes[NV];
  HB_UNROLL
  for (int j = 0; j < NV; ++j) {
    const int panel = (v0 + j) / H;
    if constexpr (Source::fused) planes[j] = Planes::at(*b.weight, b.panel + panel, b.k0);
    else w[j] = (const float *)((const char *)b.w + panel * b.w_stride) + (v0 + j) % H * V::W;
  }
  // Sixteen elements as floats, or whole numbers through signed bytes (codes of 8 bits less 128, the rest added back).
  alignas(64) float entries[16] = {};
  if constexpr (bits == 4)
    for (int c = 0; c < 16; ++c)
      entries[c] = Source::table ? (float)b.weight->values[c] : (float)(c - b.weight->offset);
  const auto floats = V::ftload(entries);
  const auto table = byte_table<V>(*b.weight, 0);
  const typename V::B low = V::bset(bits == 8 ? 128 : b.weight->offset);
  const F back = V::fset(bits == 8 ? (float)(128 - b.weight->offset) : 0.0f);
  const float *x = (const float *)b.x + t0 * b.x_stride;
  Tile<V, MT, NV> tile(b, t0, v0);
  const int segments = b.segments, turns = b.seg / inputs;
  for (int s = 0; s < segments; ++s) {
    F acc[MT][NV];
    HB_UNROLL
    for (int t = 0; t < MT; ++t)
      HB_UNROLL
      for (int j = 0; j < NV; ++j) acc[t][j] = V::fzero();
    for (int turn = 0; turn < turns; ++turn) {
      if constexpr (Source::fused)
        for (int j = 0; j < NV; j += H) planes[j].template ask<bits, inputs>();
      repeat<0, inputs / 4>([&](auto index) HB_INLINE_LAMBDA {
        constexpr int i = decltype(index)::value;
        typename V::I lanes[NV];
        if constexpr (Source::fused)
          HB_UNROLL
          for (int j = 0; j < NV; ++j) {
            if constexpr (bits == 4 && !V::integer_tables) {
              // The look-up reads four bits of a lane: no need to cut the nibbles out.
              lanes[j] = V::as_i(V::bload(Planes::unit(planes[j].p4, i / 2, (v0 + j) % H * V::W * 4)));
            } else {
              typename V::B code = code_at<V, bits, i>(planes[j], (v0 + j) % H * V::W * 4);
              if constexpr (Source::table && bits == 4) code = V::lookup(table, code);
              else code = V::bsub(code, low);
              lanes[j] = V::as_i(code);
            }
          }
        repeat<0, 4>([&](auto byte) HB_INLINE_LAMBDA {
          constexpr int q = decltype(byte)::value;
          F rows[NV];
          HB_UNROLL
          for (int j = 0; j < NV; ++j) {
            if constexpr (!Source::fused) {
              rows[j] = V::fload(w[j] + (i * 4 + q) * kPanelRows);
            } else if constexpr (bits == 4 && !V::integer_tables) {
              rows[j] = V::flookup(floats, V::template srl<8 * q + 4 * (i % 2)>(lanes[j]));
            } else {
              rows[j] = V::cvt(signed_byte<V, q>(lanes[j]));
              if constexpr (bits == 8 && Source::table) rows[j] = V::fadd(rows[j], back);
            }
          }
          HB_UNROLL
          for (int t = 0; t < MT; ++t) {
            const F one = V::fset(x[(i * 4 + q) * MT + t]);
            HB_UNROLL
            for (int j = 0; j < NV; ++j) acc[t][j] = V::fma(rows[j], one, acc[t][j]);
          }
        });
      });
      HB_UNROLL
      for (int j = 0; j < NV; ++j) {
        if constexpr (Source::fused) planes[j].advance(inputs);
        else w[j] += inputs * kPanelRows;
      }
      x += MT * inputs;
    }
    tile.settle(acc, s);
  }
  tile.finish();
}

template <class V, int MT, int NV, int F, class Source>
inline void tiles_i8(const Block &b, int t0) {
  constexpr int H = kPanelRows / V::W;
  int v = 0;
  for (; v + NV <= b.panels * H; v += NV) tile_i8<V, MT, NV, F, Source>(b, t0, v);
  if constexpr (NV > 1 && !Source::fused)  // a call that decodes on the way has all of its panels
    for (; v < b.panels * H; ++v) tile_i8<V, MT, 1, F, Source>(b, t0, v);
}

template <class V, int F, class Source>
void blocks_i8(const Block &b) {
  int t = 0;
  if constexpr (!Source::fused)
    for (; V::tokens_i8 <= b.largest && t + V::tokens_i8 <= b.tokens; t += V::tokens_i8) tiles_i8<V, V::tokens_i8, V::vectors_i8, F, Source>(b, t);
  if constexpr (Source::fused || V::tokens_i8 > 4)
    for (; t + 4 <= b.tokens; t += 4) tiles_i8<V, 4, V::vectors_i8_four, F, Source>(b, t);
  for (; t + 2 <= b.tokens; t += 2) tiles_i8<V, 2, V::vectors_i8_two, F, Source>(b, t);
  for (; t < b.tokens; ++t) tiles_i8<V, 1, V::vectors_i8_one, F, Source>(b, t);
}

// The widths that are decoded on the way; the rest go through the buffer.
template <class V>
bool fuses_i8(const Weight &w) {
  if (!V::fuses) return false;
  if (w.element == Element::table) return w.bits == 4 && w.integral && w.seg % 16 == 0;
  const bool has = w.bits != 1 && w.bits != 7, halves = w.bits == 2 || w.bits == 6;
  return w.element == Element::integer && has && w.seg % (halves ? 16 : 32) == 0;
}

template <class V, int F>
void buffered_i8(const Block &b) {
  if (b.seg % 16 == 0) return blocks_i8<V, F, FromBuffer<16>>(b);
  if constexpr (F <= 2) blocks_i8<V, F, FromBuffer<8>>(b);
}

// Products in 16 bits: pairs of bytes, |w| * 127 * 2 a step, must stay below 2^15 over F steps. Signed bytes have their
// own way (0).
template <class V>
constexpr int steps(int most) {
  return V::sums_in_16_bits ? most : 0;
}

template <class V>
void planes_i8(const Block &b) {
  constexpr int F2 = steps<V>(2), F4 = steps<V>(4);
  if (b.weight->element == Element::table) {
    if (b.widest > 32) return blocks_i8<V, 0, FromPlanes<16, 4, true>>(b);
    if (b.seg % 32 == 0) return blocks_i8<V, F4, FromPlanes<32, 4, true>>(b);
    return blocks_i8<V, F4, FromPlanes<16, 4, true>>(b);
  }
  switch (b.weight->bits) {
    case 2: return blocks_i8<V, F4, FromPlanes<16, 2>>(b);
    case 3: return blocks_i8<V, F4, FromPlanes<32, 3>>(b);
    case 4: return blocks_i8<V, F4, FromPlanes<32, 4>>(b);
    case 5: return blocks_i8<V, F4, FromPlanes<32, 5>>(b);
    case 6: return blocks_i8<V, F2, FromPlanes<16, 6>>(b);
    default: return blocks_i8<V, 0, FromPlanes<32, 8>>(b);
  }
}

template <class V>
void block_i8(const Block &b) {
  if constexpr (V::fuses)
    if (!b.w) return planes_i8<V>(b);
  if (b.widest <= 32 && b.seg % 16 == 0) return buffered_i8<V, steps<V>(4)>(b);
  if (b.widest <= 64) return buffered_i8<V, steps<V>(2)>(b);
  if (b.widest <= 127) return buffered_i8<V, steps<V>(1)>(b);
  buffered_i8<V, 0>(b);
}

template <class V, int MT, int NV, class Source>
inline void tiles_f32(const Block &b, int t0) {
  constexpr int H = kPanelRows / V::W;
  int v = 0;
  for (; v + NV <= b.panels * H; v += NV) tile_f32<V, MT, NV, Source>(b, t0, v);
  if constexpr (NV > 1 && !Source::fused)
    for (; v < b.panels * H; ++v) tile_f32<V, MT, 1, Source>(b, t0, v);
}

template <class V, class Source>
void blocks_f32(const Block &b) {
  int t = 0;
  if constexpr (!Source::fused)
    for (; V::tokens_f32 <= b.largest && t + V::tokens_f32 <= b.tokens; t += V::tokens_f32) tiles_f32<V, V::tokens_f32, V::vectors_f32, Source>(b, t);
  if constexpr (Source::fused || V::tokens_f32 > 4)
    for (; t + 4 <= b.tokens; t += 4) tiles_f32<V, 4, V::vectors_f32_four, Source>(b, t);
  for (; t + 2 <= b.tokens; t += 2) tiles_f32<V, 2, V::vectors_f32_two, Source>(b, t);
  for (; t < b.tokens; ++t) tiles_f32<V, 1, V::vectors_f32_one, Source>(b, t);
}

template <class V>
bool fuses_f32(const Weight &w) {
  if (!V::fuses) return false;
  if (w.element == Element::table) return w.bits == 4 && (w.integral || !V::integer_tables) && w.seg % 16 == 0;
  const bool has = w.bits != 1 && w.bits != 7, odd = w.bits & 1;
  return w.element == Element::integer && has && w.seg % (odd ? 32 : 16) == 0;
}

template <class V>
void planes_f32(const Block &b) {
  if (b.weight->element == Element::table) return blocks_f32<V, FromPlanes<16, 4, true>>(b);
  switch (b.weight->bits) {
    case 2: return blocks_f32<V, FromPlanes<16, 2>>(b);
    case 3: return blocks_f32<V, FromPlanes<32, 3>>(b);
    case 4: return blocks_f32<V, FromPlanes<16, 4>>(b);
    case 5: return blocks_f32<V, FromPlanes<32, 5>>(b);
    case 6: return blocks_f32<V, FromPlanes<16, 6>>(b);
    default:
      if (b.weight->offset == 128) return blocks_f32<V, FromPlanes<16, 8>>(b);
      return blocks_f32<V, FromPlanes<16, 8, true>>(b);  // for 8 bits "through a table" means: not centred on 128, so add the rest back
  }
}

template <class V>
void block_f32(const Block &b) {
  if constexpr (V::fuses)
    if (!b.w) return planes_f32<V>(b);
  blocks_f32<V, FromBuffer<4>>(b);
}

// ------------------------------------------------------------------------------------------------------------------- activations

// q = round(x / d), d = max |x| / 127. A maximum so small that 127 / max is not a float is scaled up first; NaN or
// infinity make the scale NaN, and so every result of that row.
template <class V>
void quantize(const float *x, int64_t count, int8_t *q, float *scale, int32_t *sum) {
  typename V::F most = V::fzero();
  int64_t i = 0;
  for (; i + V::W <= count; i += V::W) most = V::fmaxabs(most, V::fload(x + i));
  float peak = V::largest(most);
  for (; i < count; ++i) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    peak = a > peak || a != a ? a : peak;
  }
  int32_t total = 0;
  if (peak == 0.0f || !(peak <= 3.4028234663852886e38f)) {
    for (i = 0; i < count; ++i) q[i] = 0;
    // fmaxabs drops NaN on some sets: look again only in this rare case and in the finite one below through the sum.
    *scale = peak == 0.0f ? 0.0f : __builtin_nanf("");
    *sum = 0;
    if (peak == 0.0f)
      for (i = 0; i < count; ++i)
        if (x[i] != x[i]) *scale = __builtin_nanf("");
    return;
  }
  float lift = 1.0f;
  if (peak < 1e-36f) lift = 1.2676506002282294e30f;  // 2^100
  const float inverse = 127.0f / (peak * lift);
  bool nan = false;
  const typename V::F by = V::fset(inverse), up = V::fset(lift);
  i = 0;
  for (; i + V::W <= count; i += V::W) {
    const typename V::F v = V::fload(x + i);
    total += V::store_rounded(q + i, V::fmul(V::fmul(v, up), by));
    nan |= V::any_nan(v);
  }
  for (; i < count; ++i) {
    const float y = x[i] * lift * inverse;
    nan |= y != y;
    const int32_t r = nan ? 0 : (int32_t)__builtin_rintf(y);
    q[i] = (int8_t)r;
    total += r;
  }
  *scale = nan ? __builtin_nanf("") : peak / 127.0f;
  *sum = total;
}

template <class V>
float sum_of(const float *x, int64_t count) {
  typename V::F acc = V::fzero();
  int64_t i = 0;
  for (; i + V::W <= count; i += V::W) acc = V::fadd(acc, V::fload(x + i));
  alignas(64) float lanes[V::W];
  V::fstore(lanes, acc);
  float total = 0.0f;
  for (int j = 0; j < V::W; ++j) total += lanes[j];
  for (; i < count; ++i) total += x[i];
  return total;
}

// ------------------------------------------------------------------------------------------------------- half precision, one value

inline uint32_t bits_of(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  return float_of(bits_of(float_of(magnitude << 13) * 0x1p112f) | sign);
}

// Round to nearest even; NaN keeps its top mantissa bits and is quiet.
inline uint16_t float_to_half(float f) {
  const uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x1ff));
  if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (a < 0x38800000) {  // subnormal: adding 1/2 at the right place rounds in the addition
    const float r = float_of(a) + 0.5f;
    return (uint16_t)(sign | (bits_of(r) - 0x3f000000u));
  }
  return (uint16_t)(sign | (((a + 0xfff + (a >> 13 & 1)) >> 13) - (112u << 10)));
}

inline uint16_t float_to_bfloat(float f) {
  const uint32_t u = bits_of(f);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

template <class V>
void from_f16(const uint16_t *x, int64_t count, float *out) {
  int64_t i = 0;
  for (; i + V::W <= count; i += V::W) V::fstore(out + i, V::load_f16(x + i));
  for (; i < count; ++i) out[i] = half_to_float(x[i]);
}

template <class V>
void from_bf16(const uint16_t *x, int64_t count, float *out) {
  for (int64_t i = 0; i < count; ++i) out[i] = float_of((uint32_t)x[i] << 16);
}

template <class V>
void to_f16(const float *x, int64_t count, uint16_t *out) {
  int64_t i = 0;
  for (; i + V::W <= count; i += V::W) V::store_f16(out + i, V::fload(x + i));
  for (; i < count; ++i) out[i] = float_to_half(x[i]);
}

template <class V>
void to_bf16(const float *x, int64_t count, uint16_t *out) {
  for (int64_t i = 0; i < count; ++i) out[i] = float_to_bfloat(x[i]);
}

template <class V>
constexpr Kernels table_of(const char *name) {
  return {name,
          V::unsigned_bytes,
          V::integer_tables,
          V::tokens_i8,
          V::tokens_f32,
          decode_u8<V>,
          decode_f32<V>,
          decode_scales<V>,
          block_i8<V>,
          block_f32<V>,
          fuses_i8<V>,
          fuses_f32<V>,
          quantize<V>,
          sum_of<V>,
          from_f16<V>,
          from_bf16<V>,
          to_f16<V>,
          to_bf16<V>};
}
