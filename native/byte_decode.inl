// Part of kernels.inl: codes of a panel as bytes.

// ----------------------------------------------------------------------------------------------------------------
// codes to bytes

// Addresses of a panel's planes at some input, as integers: those of planes that a width lacks are
// not valid pointers.
struct Planes {
  uintptr_t p8, p4, p2, p1;

  static Planes at(const Weight &w, int64_t panel, int64_t k) {
    const int64_t first = panel * w.padded_k() + k;
    return {(uintptr_t)w.plane8 + first * 16, (uintptr_t)w.plane4 + first * 8,
            (uintptr_t)w.plane2 + first * 4, (uintptr_t)w.plane1 + first * 2};
  }
  void advance(int64_t inputs) {
    p8 += inputs * 16, p4 += inputs * 8, p2 += inputs * 4, p1 += inputs * 2;
  }
  // Prefetches what is read `prefetch_bytes` bytes further on: the panels of a tile are more
  // streams than the hardware prefetcher follows.
  template <int BITS, int INPUTS>
  HB_INLINE void prefetch(int prefetch_bytes) const {
    if constexpr (BITS == 8) prefetch_units<INPUTS / 4>(p8 + prefetch_bytes);
    if constexpr (BITS != 8 && (BITS & 4) != 0) prefetch_units<INPUTS / 8>(p4 + prefetch_bytes);
    if constexpr (BITS != 8 && (BITS & 2) != 0) prefetch_units<INPUTS / 16>(p2 + prefetch_bytes);
    if constexpr (BITS != 8 && (BITS & 1) != 0) prefetch_units<INPUTS / 32>(p1 + prefetch_bytes);
  }
  template <int UNITS>
  static HB_INLINE void prefetch_units(uintptr_t at) {
    for (int i = 0; i < UNITS; ++i) __builtin_prefetch((const void *)(at + i * kUnitBytes));
  }
  static const uint8_t *unit(uintptr_t plane, int64_t index, int at) {
    return (const uint8_t *)plane + index * kUnitBytes + at;
  }
};

// The codes of inputs 4i to 4i + 3, counted from an input at which every plane of the width begins
// a unit; W rows from byte `at` of a unit.
template <class V, int BITS, int i>
HB_INLINE typename V::B code_at(const Planes &p, int at) {
  using B = typename V::B;
  if constexpr (BITS == 8) {
    return V::bload(Planes::unit(p.p8, i, at));
  } else {
    B code;
    if constexpr ((BITS & 4) != 0)
      code = V::template field<4 * (i % 2), 0x0f>(V::bload(Planes::unit(p.p4, i / 2, at)));
    if constexpr ((BITS & 2) != 0) {
      constexpr int up = BITS & 4;
      const B two = V::template field<2 * (i % 4) - up, (0x03 << up)>(
          V::bload(Planes::unit(p.p2, i / 4, at)));
      if constexpr (up != 0)
        code = V::bor(code, two);
      else
        code = two;
    }
    if constexpr ((BITS & 1) != 0) {
      constexpr int up = BITS & 6;
      const B one =
          V::template field<i % 8 - up, (0x01 << up)>(V::bload(Planes::unit(p.p1, i / 8, at)));
      if constexpr (up != 0)
        code = V::bor(code, one);
      else
        code = one;
    }
    return code;
  }
}

// Number of inputs that are whole units of every plane of a width.
constexpr int unit_inputs(int bits) { return bits == 8 ? 4 : bits & 1 ? 32 : bits & 2 ? 16 : 8; }

// Calls emit(step, half, codes) for each vector of four consecutive inputs; step counts fours from
// k0.
template <class V, int BITS, class Emit>
inline void each_codes(const Weight &w, int64_t panel, int64_t k0, int64_t count, Emit &&emit) {
  constexpr int H = kPanelRows / V::W;
  Planes planes = Planes::at(w, panel, k0);
  for (int64_t c = 0; c < count / kChunk; ++c, planes.advance(kChunk)) {
    planes.template prefetch<BITS, kChunk>(kPrefetchBytes);
    for (int h = 0; h < H; ++h)
      repeat<0, 8>([&](auto i) {
        emit(c * 8 + i.value, h, code_at<V, BITS, decltype(i)::value>(planes, h * V::W * 4));
      });
  }
}

// The entries of an integral table plus an offset; those from 128 on are unsigned bytes.
template <class V>
inline typename V::T byte_table(const Weight &w, int offset) {
  alignas(64) int8_t entries[16] = {};
  if (w.element == Element::table && w.integral)
    for (int c = 0; c < 16; ++c) entries[c] = (int8_t)(int)(w.values[c] / w.unit + offset);
  return V::tload(entries);
}

template <class V, int BITS>
void decode_u8_bits(const Weight &w, int64_t panel, int64_t k0, int64_t count, uint8_t *out) {
  if constexpr (BITS == 4) {
    if (w.element == Element::table) {
      const auto table = byte_table<V>(w, buffer_offset(w, V::unsigned_bytes));
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
    case 1:
      return decode_u8_bits<V, 1>(w, panel, k0, count, out);
    case 2:
      return decode_u8_bits<V, 2>(w, panel, k0, count, out);
    case 3:
      return decode_u8_bits<V, 3>(w, panel, k0, count, out);
    case 4:
      return decode_u8_bits<V, 4>(w, panel, k0, count, out);
    case 5:
      return decode_u8_bits<V, 5>(w, panel, k0, count, out);
    case 6:
      return decode_u8_bits<V, 6>(w, panel, k0, count, out);
    case 7:
      return decode_u8_bits<V, 7>(w, panel, k0, count, out);
    default:
      return decode_u8_bits<V, 8>(w, panel, k0, count, out);
  }
}
