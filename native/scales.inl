// Part of kernels.inl: the entries of a panel's groups as floats, into a buffer or in registers.

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
  if constexpr (kind == Scale::e4m3)
    return Minifloat<V>(8, 3, 7, 0x7e)(V::load_u8((const uint8_t *)base + at));
  if constexpr (kind == Scale::ue4m3) {
    // The sign bit is ignored, but only 0x7f without it reads as 0.
    const typename V::I b = V::load_u8((const uint8_t *)base + at);
    const typename V::I keep = V::ixor(V::equal(b, 0x7f), V::iset(-1));
    return V::cast(V::iand(V::castf(Minifloat<V>(8, 3, 7, 0)(V::iand(b, V::iset(0x7f)))), keep));
  }
  if constexpr (kind == Scale::f16) return V::load_f16((const uint16_t *)base + at);
  if constexpr (kind == Scale::bf16)
    return V::cast(V::template sll<16>(V::load_u16((const uint16_t *)base + at)));
  if constexpr (kind == Scale::f32) return V::fload((const float *)base + at);
  if constexpr (kind == Scale::u8) return V::cvt(V::load_u8((const uint8_t *)base + at));
  if constexpr (kind == Scale::i8) return V::cvt(V::load_i8((const int8_t *)base + at));
  return V::fset(1.0f);
}

template <class V, Scale kind>
void decode_scales_of(const Weight &w, int64_t panel, int64_t s0, int64_t count, float unit,
                      float *s, float *z, float *b) {
  const int64_t per_group = w.group / w.seg;
  const typename V::F one = V::fset(unit);
  if (per_group == 1 && !w.super_scales && !w.zeros && !w.biases && !w.mins) {
    const int64_t first = (panel * w.groups + s0) * kPanelRows;
    const void *const from = w.scales;
    for (int64_t i = 0; i < count * kPanelRows; i += V::W)
      V::fstore(s + i, V::fmul(scale_lanes<V, kind>(from, first + i), one));
    return;
  }
  int64_t g = s0 / per_group, left = per_group - s0 % per_group;  // segments left of group g
  int64_t super = w.supers ? g / w.groups_per_super : 0,
          super_left = w.supers ? w.groups_per_super - g % w.groups_per_super : 0;
  for (int64_t i = 0; i < count;) {
    const int64_t again = left < count - i ? left : count - i;
    for (int lane = 0; lane < kPanelRows; lane += V::W) {
      const int64_t at = (panel * w.groups + g) * kPanelRows + lane,
                    super_at = (panel * w.supers + super) * kPanelRows + lane;
      typename V::F scale = scale_lanes<V, kind>(w.scales, at);
      if (w.super_scales) scale = V::fmul(scale, V::load_f16(w.super_scales + super_at));
      scale = V::fmul(scale, one);
      typename V::F zero = V::fzero(), added = V::fzero();
      if (w.zeros) zero = V::cvt(V::load_i16(w.zeros + at));
      if (w.biases) added = scale_lanes<V, kind>(w.biases, at);
      if (w.mins)
        added = V::fsub(
            added, V::fmul(V::cvt(V::load_u8(w.mins + at)), V::load_f16(w.super_mins + super_at)));
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

// The entries of a tile's groups, read from the weight one group after another, for NV vectors of
// rows. Fused tiles use them, so that scales are loaded along with the codes.
template <class V, int NV>
struct PanelScales {
  using F = typename V::F;
  static constexpr int H = kPanelRows / V::W;
  const Weight &w;
  const bool zeros, biases, one_panel;
  F unit, scales[NV];
  int64_t at, super_at, per_group, left, super_left;
  // The lane of the first vector: 0 where the tile takes whole panels, so that each vector's
  // address is one of its panel's plus a constant.
  static constexpr bool whole = NV % H == 0;
  int first;

  PanelScales(const Weight &weight, int64_t panel, int v0, float of, bool alone)
      : w(weight),
        zeros(w.zeros),
        biases(w.biases || w.mins),
        one_panel(alone),
        unit(V::fset(of)),
        per_group(w.group / w.seg),
        left(per_group),
        super_left(w.groups_per_super) {
    panel += v0 / H;
    at = panel * w.groups * kPanelRows, super_at = panel * w.supers * kPanelRows;
    first = v0 % H;
  }
  HB_INLINE int64_t index(int j) const { return at + place(j, w.groups); }
  HB_INLINE int64_t super_index(int j) const { return super_at + place(j, w.supers); }
  HB_INLINE int64_t place(int j, int64_t count) const {
    const int vector = whole ? j : first + j;
    return vector / H * count * kPanelRows + vector % H * V::W;
  }
  template <Scale kind>
  HB_INLINE void load_scales() {
    HB_UNROLL_FOR (int j = 0; j < NV; ++j) {
      scales[j] = scale_lanes<V, kind>(w.scales, index(j));
      if (w.super_scales)
        scales[j] = V::fmul(scales[j], V::load_f16(w.super_scales + super_index(j)));
      scales[j] = V::fmul(scales[j], unit);
    }
  }
  // One switch for each segment; its branch is predicted.
  HB_INLINE void load() {
    if constexpr (NV == 1)
      if (one_panel) prefetch();
    switch (w.scale) {
      case Scale::e8m0:
        return load_scales<Scale::e8m0>();
      case Scale::e4m3:
        return load_scales<Scale::e4m3>();
      case Scale::ue4m3:
        return load_scales<Scale::ue4m3>();
      case Scale::f16:
        return load_scales<Scale::f16>();
      case Scale::bf16:
        return load_scales<Scale::bf16>();
      case Scale::f32:
        return load_scales<Scale::f32>();
      case Scale::u8:
        return load_scales<Scale::u8>();
      case Scale::i8:
        return load_scales<Scale::i8>();
      default:
        return load_scales<Scale::none>();
    }
  }
  // The entries of one panel are read too slowly for the hardware prefetcher to follow them beside
  // the codes.
  HB_INLINE void prefetch() const {
    constexpr int kScalePrefetchBytes = 1024;
    const int bytes = w.scale == Scale::f16 || w.scale == Scale::bf16 ? 2
                      : w.scale == Scale::f32                         ? 4
                                                                      : 1;
    __builtin_prefetch((const char *)w.scales + index(0) * bytes + kScalePrefetchBytes);
    if (w.mins) __builtin_prefetch(w.mins + index(0) + kScalePrefetchBytes);
    if (w.zeros) __builtin_prefetch((const char *)(w.zeros + index(0)) + kScalePrefetchBytes);
    if (w.biases)
      __builtin_prefetch((const char *)w.biases + index(0) * bytes + kScalePrefetchBytes);
  }
  HB_INLINE F scale(int j) const { return scales[j]; }
  HB_INLINE F zero(int j) const { return V::cvt(V::load_i16(w.zeros + index(j))); }
  HB_INLINE F bias(int j) const {
    if (w.mins)
      return V::fsub(V::fzero(), V::fmul(V::cvt(V::load_u8(w.mins + index(j))),
                                         V::load_f16(w.super_mins + super_index(j))));
    if (w.scale == Scale::f16) return scale_lanes<V, Scale::f16>(w.biases, index(j));
    if (w.scale == Scale::bf16) return scale_lanes<V, Scale::bf16>(w.biases, index(j));
    return scale_lanes<V, Scale::f32>(w.biases, index(j));
  }
  // To the next segment.
  HB_INLINE void advance() {
    if (--left) return;
    left = per_group, at += kPanelRows;
    if (w.supers && --super_left == 0) super_left = w.groups_per_super, super_at += kPanelRows;
  }
};

template <class V>
void decode_scales(const Weight &w, int64_t panel, int64_t s0, int64_t count, float unit, float *s,
                   float *z, float *b) {
  switch (w.scale) {
    case Scale::e8m0:
      return decode_scales_of<V, Scale::e8m0>(w, panel, s0, count, unit, s, z, b);
    case Scale::e4m3:
      return decode_scales_of<V, Scale::e4m3>(w, panel, s0, count, unit, s, z, b);
    case Scale::ue4m3:
      return decode_scales_of<V, Scale::ue4m3>(w, panel, s0, count, unit, s, z, b);
    case Scale::f16:
      return decode_scales_of<V, Scale::f16>(w, panel, s0, count, unit, s, z, b);
    case Scale::bf16:
      return decode_scales_of<V, Scale::bf16>(w, panel, s0, count, unit, s, z, b);
    case Scale::f32:
      return decode_scales_of<V, Scale::f32>(w, panel, s0, count, unit, s, z, b);
    case Scale::u8:
      return decode_scales_of<V, Scale::u8>(w, panel, s0, count, unit, s, z, b);
    case Scale::i8:
      return decode_scales_of<V, Scale::i8>(w, panel, s0, count, unit, s, z, b);
    default:
      return decode_scales_of<V, Scale::none>(w, panel, s0, count, unit, s, z, b);
  }
}
