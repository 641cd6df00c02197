// Part of kernels.inl: codes of a panel as bytes or floats, and the entries of its groups as floats.

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

// The entries of a tile's groups where they lie, one group after another, for NV vectors of rows: what a product that decodes
// on the way reads, so that the scales come along with the codes instead of being waited for first.
template <class V, int NV>
struct Entries {
  using F = typename V::F;
  static constexpr int H = kPanelRows / V::W;
  const Weight &w;
  const bool zeros, biases;
  F unit, scales[NV];
  int64_t at, super_at, per_group, left, super_left;
  int lane;

  Entries(const Weight &weight, int64_t panel, int v0)
      : w(weight), zeros(w.zeros), biases(w.biases || w.mins), unit(V::fset((float)w.unit)), per_group(w.group / w.seg), left(per_group),
        super_left(w.groups_per_super) {
    panel += v0 / H;
    at = panel * w.groups * kPanelRows, super_at = panel * w.supers * kPanelRows;
    lane = v0 % H * V::W;
  }
  HB_INLINE int64_t place(int j) const { return at + ((lane / V::W + j) / H * w.groups) * kPanelRows + (lane / V::W + j) % H * V::W; }
  HB_INLINE int64_t super_place(int j) const {
    return super_at + ((lane / V::W + j) / H * w.supers) * kPanelRows + (lane / V::W + j) % H * V::W;
  }
  template <Scale kind>
  HB_INLINE void take() {
    HB_UNROLL
    for (int j = 0; j < NV; ++j) {
      scales[j] = scale_lanes<V, kind>(w.scales, place(j));
      if (w.super_scales) scales[j] = V::fmul(scales[j], V::load_f16(w.super_scales + super_place(j)));
      scales[j] = V::fmul(scales[j], unit);
    }
  }
  // One switch a segment, which a processor soon foresees.
  HB_INLINE void load() {
    switch (w.scale) {
      case Scale::e8m0: return take<Scale::e8m0>();
      case Scale::e4m3: return take<Scale::e4m3>();
      case Scale::ue4m3: return take<Scale::ue4m3>();
      case Scale::f16: return take<Scale::f16>();
      case Scale::bf16: return take<Scale::bf16>();
      case Scale::f32: return take<Scale::f32>();
      case Scale::u8: return take<Scale::u8>();
      case Scale::i8: return take<Scale::i8>();
      default: return take<Scale::none>();
    }
  }
  HB_INLINE F scale(int j) const { return scales[j]; }
  HB_INLINE F zero(int j) const { return V::cvt(V::load_i16(w.zeros + place(j))); }
  HB_INLINE F bias(int j) const {
    if (w.mins) return V::fsub(V::fzero(), V::fmul(V::cvt(V::load_u8(w.mins + place(j))), V::load_f16(w.super_mins + super_place(j))));
    if (w.scale == Scale::f16) return scale_lanes<V, Scale::f16>(w.biases, place(j));
    if (w.scale == Scale::bf16) return scale_lanes<V, Scale::bf16>(w.biases, place(j));
    return scale_lanes<V, Scale::f32>(w.biases, place(j));
  }
  // To the next segment.
  HB_INLINE void advance() {
    if (--left) return;
    left = per_group, at += kPanelRows;
    if (w.supers && --super_left == 0) super_left = w.groups_per_super, super_at += kPanelRows;
  }
};

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

