// Part of kernels.inl: codes of a panel as floats, into a buffer or in registers.

// ---------------------------------------------------------------------------------------------------------------
// codes to floats

// Byte b (0 to 3) of each lane, sign- or zero-extended.
template <class V, int b>
inline typename V::I signed_byte(typename V::I lanes) {
  if constexpr (b == 3)
    return V::template sra<24>(lanes);
  else
    return V::template sra<24>(V::template sll<24 - 8 * b>(lanes));
}

template <class V, int b>
inline typename V::I plain_byte(typename V::I lanes) {
  if constexpr (b == 3)
    return V::template srl<24>(lanes);
  else if constexpr (b == 0)
    return V::iand(lanes, V::iset(0xff));
  else
    return V::iand(V::template srl<8 * b>(lanes), V::iset(0xff));
}

// A minifloat code (sign, exponent, mantissa) is shifted onto float32's fields; one product
// corrects the bias, of subnormal codes too. Codes above `last` are infinity or NaN: their exponent
// is set to ones, and the mantissa decides between the two.
template <class V>
struct Minifloat {
  int shift, sign_shift, last;
  int magnitude;
  float factor;
  Minifloat(int bits, int mantissa, int bias, int last_finite)
      : shift(23 - mantissa),
        sign_shift(32 - bits),
        last(last_finite),
        magnitude((1 << (bits - 1)) - 1) {
    factor = 0x1p127f / (float)(1 << bias);
  }
  typename V::F operator()(typename V::I code) const {
    typename V::I mag = V::iand(code, V::iset(magnitude));
    typename V::I sign = V::iand(V::sll_by(code, sign_shift), V::iset((int)0x80000000u));
    typename V::F value = V::fmul(V::cast(V::ior(V::sll_by(mag, shift), sign)), V::fset(factor));
    if (last)
      value = V::cast(V::ior(V::castf(value), V::iand(V::greater(mag, last), V::iset(0x7f800000))));
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
      for (int c = 0; c < 16; ++c)
        entries[c] = w.element == Element::table ? (float)w.values[c] : (float)(c - w.offset);
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
  const auto table = byte_table<V>(w, 0);
  const bool looked_up = BITS == 4 && w.element == Element::table;
  // Integers are decoded as signed bytes; for unsigned 8-bit codes 128 is added afterwards.
  const bool wide = BITS == 8 && w.offset != 128;
  const B low = V::bset(BITS == 8 ? 128 : w.offset);
  const typename V::F back = V::fset((float)(128 - w.offset));
  each_codes<V, BITS>(w, panel, k0, count, [&](int64_t step, int h, B code) {
    const I lanes = V::as_i(looked_up ? V::lookup(table, code) : V::bsub(code, low));
    float *o = rows(step, h);
    typename V::F v0 = V::cvt(signed_byte<V, 0>(lanes)), v1 = V::cvt(signed_byte<V, 1>(lanes));
    typename V::F v2 = V::cvt(signed_byte<V, 2>(lanes)), v3 = V::cvt(signed_byte<V, 3>(lanes));
    if (BITS == 8 && wide)
      v0 = V::fadd(v0, back), v1 = V::fadd(v1, back), v2 = V::fadd(v2, back),
      v3 = V::fadd(v3, back);
    V::fstore(o, v0), V::fstore(o + 16, v1), V::fstore(o + 32, v2), V::fstore(o + 48, v3);
  });
}

template <class V>
void decode_f32(const Weight &w, int64_t panel, int64_t k0, int64_t count, float *out) {
  switch (w.bits) {
    case 1:
      return decode_f32_bits<V, 1>(w, panel, k0, count, out);
    case 2:
      return decode_f32_bits<V, 2>(w, panel, k0, count, out);
    case 3:
      return decode_f32_bits<V, 3>(w, panel, k0, count, out);
    case 4:
      return decode_f32_bits<V, 4>(w, panel, k0, count, out);
    case 5:
      return decode_f32_bits<V, 5>(w, panel, k0, count, out);
    case 6:
      return decode_f32_bits<V, 6>(w, panel, k0, count, out);
    case 7:
      return decode_f32_bits<V, 7>(w, panel, k0, count, out);
    default:
      return decode_f32_bits<V, 8>(w, panel, k0, count, out);
  }
}

// ----------------------------------------------------------------------------------------------------------
// codes to floats in registers, while the product is computed

// Elements of a width as floats, read from the planes: `four` loads the codes of four inputs,
// `element` decodes one of them. TABLE: elements of a table; for 8 bits on instruction sets that
// use signed bytes, an offset other than 128.
//
// One of three methods. (1) A permutation of the sixteen or thirty-two floats of the table, indexed
// by the low bits of a lane. (2) The code is written into the mantissa of a power of two M whose
// unit in the last place is the code's lowest bit, and M + offset is subtracted; both are exact.
// (3) Signed bytes (8-bit codes minus 128, added back later), shifted down and converted.
template <class V, int BITS, bool TABLE>
struct FloatDecoder {
  using F = typename V::F;
  using I = typename V::I;
  using B = typename V::B;
  static constexpr bool permuted = BITS <= V::permuted_bits, blended = !permuted && V::blends;
  typename V::FT low, high;
  typename V::T table;
  B less;
  F back;
  int offset;

  HB_INLINE explicit FloatDecoder(const Weight &w) : offset(w.offset) {
    alignas(64) float entries[32] = {};
    if constexpr (permuted)
      for (int c = 0; c < 1 << BITS; ++c)
        entries[c] = TABLE ? (float)w.values[c] : (float)(c - w.offset);
    low = V::ftload(entries), high = V::ftload(entries + 16);
    table = byte_table<V>(w, 0);
    less = V::bset(BITS == 8 ? 128 : w.offset);
    back = V::fset((float)(128 - w.offset));
  }

  template <int i>
  HB_INLINE I four(const Planes &p, int at) const {
    if constexpr (permuted && BITS == 4)
      return V::as_i(V::bload(Planes::unit(p.p4, i / 2, at)));
    else if constexpr (permuted && BITS == 5)
      return V::as_i(V::template blend<0x10>(one_bit<i>(p, at), nibble<i>(p, at)));
    else if constexpr (blended && BITS == 6)
      return V::as_i(V::template blend<0x30>(two_bits<i>(p, at), nibble<i>(p, at)));
    else if constexpr (permuted || blended)
      return V::as_i(code_at<V, BITS, i>(p, at));
    else if constexpr (TABLE && BITS == 4)
      return V::as_i(V::lookup(table, code_at<V, BITS, i>(p, at)));
    else
      return V::as_i(V::bsub(code_at<V, BITS, i>(p, at), less));
  }

  template <int i, int q>
  HB_INLINE F element(I lanes) const {
    if constexpr (permuted) {
      constexpr int place = 8 * q + (BITS == 4 ? 4 * (i % 2) : 0);
      if constexpr (BITS <= 4)
        return V::flookup(low, V::template srl<place>(lanes));
      else
        return V::flookup(low, high, V::template srl<place>(lanes));
    } else if constexpr (blended) {
      constexpr int up = 8 * q + BITS <= 23 ? 0 : 16, place = 8 * q - up;
      constexpr int exponent = 23 - place;
      const I biased = V::with_exponent(V::template srl<up>(lanes), ((1 << BITS) - 1) << place,
                                        (127 + exponent) << 23);
      return V::fsub(V::cast(biased), V::fset((float)((1 << exponent) + offset)));
    } else {
      const F whole = V::cvt(signed_byte<V, q>(lanes));
      if constexpr (BITS == 8 && TABLE)
        return V::fadd(whole, back);
      else
        return whole;
    }
  }

 private:
  // Fields; the bits above them are ignored by the permutation.
  template <int i>
  static HB_INLINE B nibble(const Planes &p, int at) {
    return V::template shifted<4 * (i % 2)>(V::bload(Planes::unit(p.p4, i / 2, at)));
  }
  template <int i>
  static HB_INLINE B two_bits(const Planes &p, int at) {
    return V::template shifted<2 * (i % 4) - 4>(V::bload(Planes::unit(p.p2, i / 4, at)));
  }
  template <int i>
  static HB_INLINE B one_bit(const Planes &p, int at) {
    return V::template shifted<i % 8 - 4>(V::bload(Planes::unit(p.p1, i / 8, at)));
  }
};
