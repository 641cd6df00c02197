// The loops, written once over a vector type V. Included by one translation unit an instruction set, inside an unnamed namespace, so that
// no function compiled for one set can be linked into another. Nothing of the standard library is instantiated here for that reason.
//
// V has W lanes of 32 bits (W divides 16), H = 16 / W vectors cover a panel. Types: F floats, I int32, B the same register as bytes.

template <int N>
struct Constant {
  static constexpr int value = N;
};

template <class Body>
inline void eight_times(Body &&body) {
  body(Constant<0>()), body(Constant<1>()), body(Constant<2>()), body(Constant<3>());
  body(Constant<4>()), body(Constant<5>()), body(Constant<6>()), body(Constant<7>());
}

// ---------------------------------------------------------------------------------------------------------------- codes to bytes

// Calls emit(step, half, codes) for each vector of four consecutive inputs; step counts fours from k0.
template <class V, int BITS, class Emit>
inline void each_codes(const Weight &w, int64_t panel, int64_t k0, int64_t count, Emit &&emit) {
  using B = typename V::B;
  constexpr int H = kPanelRows / V::W;
  const int64_t padded = w.padded_k();
  const uint8_t *p8 = w.plane8 + (panel * padded + k0) * kPanelRows;
  const uint8_t *p4 = w.plane4 + (panel * padded + k0) * kPanelRows / 2;
  const uint8_t *p2 = w.plane2 + (panel * padded + k0) * kPanelRows / 4;
  const uint8_t *p1 = w.plane1 + (panel * padded + k0) * kPanelRows / 8;
  for (int64_t c = 0; c < count / kChunk; ++c) {
    for (int h = 0; h < H; ++h) {
      const int at = h * V::W * 4;
      eight_times([&](auto index) {
        constexpr int i = decltype(index)::value;
        const int64_t step = c * 8 + i;
        if constexpr (BITS == 8) {
          emit(step, h, V::bload(p8 + step * kUnitBytes + at));
        } else {
          B code;
          if constexpr ((BITS & 4) != 0) code = V::template field<4 * (i % 2), 0x0f>(V::bload(p4 + (c * 4 + i / 2) * kUnitBytes + at));
          if constexpr ((BITS & 2) != 0) {
            constexpr int up = BITS & 4;
            B two = V::template field<2 * (i % 4) - up, (0x03 << up)>(V::bload(p2 + (c * 2 + i / 4) * kUnitBytes + at));
            if constexpr (up != 0) code = V::bor(code, two);
            else code = two;
          }
          if constexpr ((BITS & 1) != 0) {
            constexpr int up = BITS & 6;
            B one = V::template field<i - up, (0x01 << up)>(V::bload(p1 + c * kUnitBytes + at));
            if constexpr (up != 0) code = V::bor(code, one);
            else code = one;
          }
          emit(step, h, code);
        }
      });
    }
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

// A minifloat code, exponent above mantissa, sign bit on top: shift it onto float32's fields and let one product set the bias right; this gets the
// subnormal codes right too. Codes past `last` are infinity or NaN: forcing the exponent to ones makes them so, by their own mantissa.
template <class V>
struct Minifloat {
  int shift, sign_shift, last;
  int magnitude;
  float factor;
  Minifloat(int bits, int mantissa, int bias, int last_finite)
      : shift(23 - mantissa), sign_shift(32 - bits), last(last_finite), magnitude((1 << (bits - 1)) - 1) {
    factor = 1.0f;
    for (int i = 0; i < 127 - bias; ++i) factor *= 2.0f;
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
    if (w.element == Element::table && !(w.integral && V::integer_tables)) {
      alignas(64) float entries[16];
      for (int c = 0; c < 16; ++c) entries[c] = (float)w.values[c];
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
  const bool wide = BITS == 8 && w.offset == 0;
  const B low = V::bset(BITS == 8 ? 128 : w.offset);
  const typename V::F back = V::fset(wide ? 128.0f : (float)(BITS == 8 ? 128 - w.offset : 0));
  each_codes<V, BITS>(w, panel, k0, count, [&](int64_t step, int h, B code) {
    const I lanes = V::as_i(looked_up ? V::lookup(table, code) : V::bsub(code, low));
    float *o = rows(step, h);
    typename V::F v0 = V::cvt(signed_byte<V, 0>(lanes)), v1 = V::cvt(signed_byte<V, 1>(lanes));
    typename V::F v2 = V::cvt(signed_byte<V, 2>(lanes)), v3 = V::cvt(signed_byte<V, 3>(lanes));
    if (BITS == 8) v0 = V::fadd(v0, back), v1 = V::fadd(v1, back), v2 = V::fadd(v2, back), v3 = V::fadd(v3, back);
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
template <class V>
inline typename V::F scale_lanes(Scale kind, const void *base, int64_t at) {
  switch (kind) {
    case Scale::e8m0: return e8m0<V>(V::load_u8((const uint8_t *)base + at));
    case Scale::e4m3: return Minifloat<V>(8, 3, 7, 0x7e)(V::load_u8((const uint8_t *)base + at));
    case Scale::ue4m3: {
      // The sign bit is ignored, but only 0x7f without it reads as 0.
      typename V::I b = V::load_u8((const uint8_t *)base + at);
      typename V::I keep = V::ixor(V::equal(b, 0x7f), V::iset(-1));
      return V::cast(V::iand(V::castf(Minifloat<V>(8, 3, 7, 0)(V::iand(b, V::iset(0x7f)))), keep));
    }
    case Scale::f16: return V::load_f16((const uint16_t *)base + at);
    case Scale::bf16: return V::cast(V::template sll<16>(V::load_u16((const uint16_t *)base + at)));
    case Scale::f32: return V::fload((const float *)base + at);
    case Scale::u8: return V::cvt(V::load_u8((const uint8_t *)base + at));
    case Scale::i8: return V::cvt(V::load_i8((const int8_t *)base + at));
    default: return V::fset(1.0f);
  }
}

template <class V>
void decode_scales(const Weight &w, int64_t panel, int64_t s0, int64_t count, float unit, float *s, float *z, float *b) {
  const int64_t per_group = w.group / w.seg;
  const typename V::F one = V::fset(unit);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t g = (s0 + i) / per_group;
    const bool again = i > 0 && (s0 + i) % per_group != 0;  // a further segment of the same group
    for (int lane = 0; lane < kPanelRows; lane += V::W) {
      const int64_t to = i * kPanelRows + lane, at = (panel * w.groups + g) * kPanelRows + lane;
      if (again) {
        V::fstore(s + to, V::fload(s + to - kPanelRows));
        if (w.zeros) V::fstore(z + to, V::fload(z + to - kPanelRows));
        if (w.biases || w.mins) V::fstore(b + to, V::fload(b + to - kPanelRows));
        continue;
      }
      typename V::F scale = scale_lanes<V>(w.scale, w.scales, at);
      const int64_t super = w.supers ? (panel * w.supers + g / w.groups_per_super) * kPanelRows + lane : 0;
      if (w.super_scales) scale = V::fmul(scale, V::load_f16(w.super_scales + super));
      V::fstore(s + to, V::fmul(scale, one));
      if (w.zeros) V::fstore(z + to, V::cvt(V::load_i16(w.zeros + at)));
      if (w.biases) V::fstore(b + to, scale_lanes<V>(w.scale, w.biases, at));
      if (w.mins) {
        typename V::F low = V::fmul(V::cvt(V::load_u8(w.mins + at)), V::load_f16(w.super_mins + super));
        V::fstore(b + to, V::fsub(V::fzero(), low));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------- products

// total += (sum - zero * x_sum) * scale + bias * x_sum, where `sum` is a segment's sum of products. A single non-zero activation of 1 so gives the
// weight's exact value rounded once: the difference is exact, and the last step is one product or one fused product and sum.
template <class V>
inline void settle(const Block &b, typename V::F sum, float x_sum, int64_t s_at, float *total) {
  const typename V::F scale = V::fload(b.scales + s_at);
  if (b.zeros) sum = V::fnma(V::fload(b.zeros + s_at), V::fset(x_sum), sum);
  if (b.biases) {
    const typename V::F added = V::fmul(V::fload(b.biases + s_at), V::fset(x_sum));
    V::fstore(total, V::fadd(V::fload(total), V::fma(sum, scale, added)));
  } else {
    V::fstore(total, V::fma(sum, scale, V::fload(total)));
  }
}

// MT tokens by NV vectors of rows. F: products a partial sum takes before it is folded (instruction sets whose products are 16-bit); 0: signed bytes,
// or sets that sum in 32 bits at once.
template <class V, int MT, int NV, int F>
void tile_i8(const Block &b, int t0, int v0) {
  constexpr int H = kPanelRows / V::W;
  const uint8_t *w[NV];
  int64_t s_at[NV];
  for (int j = 0; j < NV; ++j) {
    w[j] = (const uint8_t *)b.w + (v0 + j) / H * b.w_stride + (v0 + j) % H * V::W * 4;
    s_at[j] = (v0 + j) / H * b.s_stride + (v0 + j) % H * V::W;
  }
  const int8_t *x[MT];
  for (int t = 0; t < MT; ++t) x[t] = (const int8_t *)b.x + (t0 + t) * b.x_stride;
  const int steps = b.seg / 4;
  for (int s = 0; s < b.segments; ++s) {
    typename V::I acc[MT][NV];
    for (int t = 0; t < MT; ++t)
      for (int j = 0; j < NV; ++j) acc[t][j] = V::iset(b.x_start[(t0 + t) * b.x_seg_stride + s]);
    if constexpr (F == 0) {
      for (int i = 0; i < steps; ++i) {
        typename V::B rows[NV];
        for (int j = 0; j < NV; ++j) rows[j] = V::bload(w[j] + i * kUnitBytes);
        for (int t = 0; t < MT; ++t) {
          const auto four = V::broadcast4(x[t] + i * 4);
          for (int j = 0; j < NV; ++j) acc[t][j] = V::dot(acc[t][j], rows[j], four);
        }
      }
    } else {
      for (int i = 0; i < steps; i += F) {
        typename V::P part[MT][NV];
        for (int f = 0; f < F; ++f) {
          typename V::B rows[NV];
          for (int j = 0; j < NV; ++j) rows[j] = V::bload(w[j] + (i + f) * kUnitBytes);
          for (int t = 0; t < MT; ++t) {
            const auto four = V::broadcast4(x[t] + (i + f) * 4);
            for (int j = 0; j < NV; ++j) part[t][j] = f == 0 ? V::products(rows[j], four) : V::more(part[t][j], rows[j], four);
          }
        }
        for (int t = 0; t < MT; ++t)
          for (int j = 0; j < NV; ++j) acc[t][j] = V::fold(acc[t][j], part[t][j]);
      }
    }
    for (int t = 0; t < MT; ++t) {
      const int64_t at = (t0 + t) * b.x_seg_stride + s;
      const typename V::F x_scale = V::fset(b.x_scale[at]);
      for (int j = 0; j < NV; ++j)
        settle<V>(b, V::fmul(V::cvt(acc[t][j]), x_scale), b.x_sum[at], s_at[j] + s * kPanelRows,
                  b.total + (t0 + t) * b.total_stride + (v0 + j) * V::W);
    }
    for (int j = 0; j < NV; ++j) w[j] += steps * kUnitBytes;
    for (int t = 0; t < MT; ++t) x[t] += b.seg;
  }
}

template <class V, int MT, int NV>
void tile_f32(const Block &b, int t0, int v0) {
  constexpr int H = kPanelRows / V::W;
  const float *w[NV];
  int64_t s_at[NV];
  for (int j = 0; j < NV; ++j) {
    w[j] = (const float *)((const char *)b.w + (v0 + j) / H * b.w_stride) + (v0 + j) % H * V::W;
    s_at[j] = (v0 + j) / H * b.s_stride + (v0 + j) % H * V::W;
  }
  const float *x[MT];
  for (int t = 0; t < MT; ++t) x[t] = (const float *)b.x + (t0 + t) * b.x_stride;
  for (int s = 0; s < b.segments; ++s) {
    typename V::F acc[MT][NV];
    for (int t = 0; t < MT; ++t)
      for (int j = 0; j < NV; ++j) acc[t][j] = V::fzero();
    for (int i = 0; i < b.seg; ++i) {
      typename V::F rows[NV];
      for (int j = 0; j < NV; ++j) rows[j] = V::fload(w[j] + i * kPanelRows);
      for (int t = 0; t < MT; ++t) {
        const typename V::F one = V::fset(x[t][i]);
        for (int j = 0; j < NV; ++j) acc[t][j] = V::fma(rows[j], one, acc[t][j]);
      }
    }
    for (int t = 0; t < MT; ++t) {
      const float x_sum = b.x_sum ? b.x_sum[(t0 + t) * b.x_seg_stride + s] : 0.0f;
      for (int j = 0; j < NV; ++j)
        settle<V>(b, acc[t][j], x_sum, s_at[j] + s * kPanelRows, b.total + (t0 + t) * b.total_stride + (v0 + j) * V::W);
    }
    for (int j = 0; j < NV; ++j) w[j] += b.seg * kPanelRows;
    for (int t = 0; t < MT; ++t) x[t] += b.seg;
  }
}

template <class V, int MT, int NV, int F>
inline void row_of_tiles_i8(const Block &b, int t0) {
  constexpr int H = kPanelRows / V::W;
  int v = 0;
  for (; v + NV <= b.panels * H; v += NV) tile_i8<V, MT, NV, F>(b, t0, v);
  for (; v < b.panels * H; ++v) tile_i8<V, MT, 1, F>(b, t0, v);
}

template <class V, int F>
void blocks_i8(const Block &b) {
  int t = 0;
  for (; t + V::tokens_i8 <= b.tokens; t += V::tokens_i8) row_of_tiles_i8<V, V::tokens_i8, V::vectors_i8, F>(b, t);
  if constexpr (V::tokens_i8 > 4)
    for (; t + 4 <= b.tokens; t += 4) row_of_tiles_i8<V, 4, V::vectors_i8, F>(b, t);
  for (; t + 2 <= b.tokens; t += 2) row_of_tiles_i8<V, 2, V::vectors_i8_two, F>(b, t);
  for (; t < b.tokens; ++t) row_of_tiles_i8<V, 1, V::vectors_i8_one, F>(b, t);
}

template <class V>
void block_i8(const Block &b) {
  if constexpr (V::sums_in_16_bits) {
    // Pairs of products of bytes: |w| * 127 * 2 a step must stay below 2^15 over F steps.
    if (b.widest <= 32 && b.seg % 16 == 0) return blocks_i8<V, 4>(b);
    if (b.widest <= 64) return blocks_i8<V, 2>(b);
    if (b.widest <= 127) return blocks_i8<V, 1>(b);
  }
  blocks_i8<V, 0>(b);
}

template <class V, int MT, int NV>
inline void row_of_tiles_f32(const Block &b, int t0) {
  constexpr int H = kPanelRows / V::W;
  int v = 0;
  for (; v + NV <= b.panels * H; v += NV) tile_f32<V, MT, NV>(b, t0, v);
  for (; v < b.panels * H; ++v) tile_f32<V, MT, 1>(b, t0, v);
}

template <class V>
void block_f32(const Block &b) {
  int t = 0;
  for (; t + V::tokens_f32 <= b.tokens; t += V::tokens_f32) row_of_tiles_f32<V, V::tokens_f32, V::vectors_f32>(b, t);
  if constexpr (V::tokens_f32 > 4)
    for (; t + 4 <= b.tokens; t += 4) row_of_tiles_f32<V, 4, V::vectors_f32>(b, t);
  for (; t + 2 <= b.tokens; t += 2) row_of_tiles_f32<V, 2, V::vectors_f32_two>(b, t);
  for (; t < b.tokens; ++t) row_of_tiles_f32<V, 1, V::vectors_f32_one>(b, t);
}

// ------------------------------------------------------------------------------------------------------------------- activations

// q = round(x / d), d = max |x| / 127. A maximum so small that 127 / max is not a float is scaled up first; NaN or infinity make the scale NaN, and so
// every result of that row.
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
          decode_u8<V>,
          decode_f32<V>,
          decode_scales<V>,
          block_i8<V>,
          block_f32<V>,
          quantize<V>,
          sum_of<V>,
          from_f16<V>,
          from_bf16<V>,
          to_f16<V>,
          to_bf16<V>};
}
