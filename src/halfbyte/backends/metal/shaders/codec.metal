// A codec is an element, a scale and what is added; a packed weight is where those lie.
//
//   value = (element(code) - zero) scale          ZEROS       value = element(code) scale + bias          BIASES
//
// Codes of a row are one little-endian stream along k: eight of `bits` bits are exactly `bits` bytes. Rows are padded to whole
// eights, groups are whole eights, so eight codes share one scale.

namespace halfbyte {

// ---- eight codes ------------------------------------------------------------------------------------------------------------
struct eight_codes {
  uint low, high;
};

// Code j of eight; j is a constant where the loop is unrolled, and the branches with it.
template <int bits> inline uint code_at(eight_codes e, int j) {
  const int at = j * bits;
  const uint mask = (1u << bits) - 1;
  if (at + bits <= 32) return (e.low >> at) & mask;
  if (at >= 32) return (e.high >> (at - 32)) & mask;
  return ((e.low >> at) | (e.high << (32 - at))) & mask;
}

// ---- elements: `bits`, and `eight`, the values of eight codes in order ------------------------------------------------------
template <typename Element> inline void eight_by_value(eight_codes e, thread float* v) {
  for (int j = 0; j < 8; ++j) v[j] = Element::value(code_at<Element::bits>(e, j));
}
// Codes i and i + 4 of eight.
inline void put(half2 pair, thread float* v, int i) {
  v[i] = float(pair.x);
  v[i + 4] = float(pair.y);
}

template <int B> struct uint_code {
  static constant constexpr int bits = B;
  static float value(uint c) { return float(c); }
  static void eight(eight_codes e, thread float* v) { eight_by_value<uint_code<B> >(e, v); }
};
template <> struct uint_code<4> {
  static constant constexpr int bits = 4;
  static void eight(eight_codes e, thread float* v) {
    put(u4_low_half2(e.low), v, 0);
    put(u4_high_half2(e.low), v, 1);
    put(u4_low_half2(e.low >> 8), v, 2);
    put(u4_high_half2(e.low >> 8), v, 3);
  }
};
template <int B> struct int_code {  // the middle code is zero
  static constant constexpr int bits = B;
  static float value(uint c) { return float(int(c) - (1 << (B - 1))); }
  static void eight(eight_codes e, thread float* v) { eight_by_value<int_code<B> >(e, v); }
};
template <> struct int_code<4> {
  static constant constexpr int bits = 4;
  static void eight(eight_codes e, thread float* v) {
    put(u4b8_low_half2(e.low), v, 0);
    put(u4b8_high_half2(e.low), v, 1);
    put(u4b8_low_half2(e.low >> 8), v, 2);
    put(u4b8_high_half2(e.low >> 8), v, 3);
  }
};
struct e2m1_code {
  static constant constexpr int bits = 4;
  static void eight(eight_codes e, thread float* v) {
    for (int i = 0; i < 4; ++i) put(e2m1_to_half2(e.low << (12 - 4 * i)), v, i);
  }
};
template <int B> struct mxint_code {  // two's complement over 2^(B - 2)
  static constant constexpr int bits = B;
  static float value(uint c) { return float(int(c ^ (1u << (B - 1))) - (1 << (B - 1))) * (1.0f / float(1 << (B - 2))); }
  static void eight(eight_codes e, thread float* v) { eight_by_value<mxint_code<B> >(e, v); }
};
#define HALFBYTE_ELEMENT(name, width, expression)                                      \
  struct name {                                                                        \
    static constant constexpr int bits = width;                                        \
    static float value(uint c) { return expression; }                                  \
    static void eight(eight_codes e, thread float* v) { eight_by_value<name>(e, v); }  \
  };
HALFBYTE_ELEMENT(e2m3_code, 6, (minifloat_to_float<6, 3, 1>(c)))
HALFBYTE_ELEMENT(e3m2_code, 6, (minifloat_to_float<6, 2, 3>(c)))
HALFBYTE_ELEMENT(e4m3_code, 8, e4m3_to_float(c))
HALFBYTE_ELEMENT(e5m2_code, 8, e5m2_to_float(c))
HALFBYTE_ELEMENT(nf4_code, 4, NF4_TABLE[c])
HALFBYTE_ELEMENT(nf4_modelopt_code, 4, NF4_MODELOPT_TABLE[c])
HALFBYTE_ELEMENT(bnb_fp4_code, 4, BNB_FP4_TABLE[c])
HALFBYTE_ELEMENT(iq4_nl_code, 4, IQ4_NL_TABLE[c])

// Other ways to decode E2M1, for kernels that compare them: one at a time, in pairs through half subnormals, and looked up in
// constant and in threadgroup memory.
HALFBYTE_ELEMENT(e2m1_single_code, 4, e2m1_to_float(c))
HALFBYTE_ELEMENT(e2m1_constant_code, 4, E2M1_TABLE[c])
struct e2m1_subnormal_code {
  static constant constexpr int bits = 4;
  static void eight(eight_codes e, thread float* v) {
    for (int i = 0; i < 4; ++i) put(e2m1_to_half2_by_subnormal(e.low << (12 - 4 * i)), v, i);
  }
};
struct e2m1_threadgroup_code {
  static constant constexpr int bits = 4;
  const threadgroup float* table;
  void eight(eight_codes e, thread float* v) const {
    for (int j = 0; j < 8; ++j) v[j] = table[code_at<4>(e, j)];
  }
};
inline void fill_e2m1_table(threadgroup float* table, uint thread_index) {
  if (thread_index < 16) table[thread_index] = E2M1_TABLE[thread_index];
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// ---- scales: `stored`, `value`, and v times the scale without leaving float32's normal range on the way ---------------------
template <typename T> struct float_scale {
  typedef T stored;
  static inline float value(T raw) { return float(raw); }
  static inline float times(float v, T raw) { return v * float(raw); }
  static inline inexact exact(float v, T raw) { return exact_product(v, float(raw)); }
};
struct e8m0_scale {
  typedef uchar stored;
  static inline float value(uchar raw) { return times_e8m0(1.0f, raw); }
  static inline float times(float v, uchar raw) { return times_e8m0(v, raw); }
  static inline inexact exact(float v, uchar raw) { return {times_e8m0_fields(v, raw), 0.0f}; }
};
struct e4m3_scale {
  typedef uchar stored;
  static inline float value(uchar raw) { return e4m3_to_float(raw); }
  static inline float times(float v, uchar raw) { return v * e4m3_to_float(raw); }
  static inline inexact exact(float v, uchar raw) { return exact_product(v, e4m3_to_float(raw)); }
};
struct ue4m3_scale {
  typedef uchar stored;
  static inline float value(uchar raw) { return ue4m3_to_float(raw); }
  static inline float times(float v, uchar raw) { return v * ue4m3_to_float(raw); }
  static inline inexact exact(float v, uchar raw) { return exact_product(v, ue4m3_to_float(raw)); }
};

// Unit u of a row, in the widest loads its alignment allows.
template <int bits> inline eight_codes load_eight(const device uchar* row, uint u) {
  const device uchar* p = row + ulong(u) * bits;
  if (bits == 8) {
    const uint2 v = *(const device uint2*)p;
    return {v.x, v.y};
  }
  if (bits == 4) return {*(const device uint*)p, 0};
  if (bits == 2) return {*(const device ushort*)p, 0};
  if (bits == 6) {
    const device ushort* h = (const device ushort*)p;
    return {uint(h[0]) | (uint(h[1]) << 16), h[2]};
  }
  uint low = p[0], high = 0;
  if (bits > 1) low |= uint(p[1]) << 8;
  if (bits > 2) low |= uint(p[2]) << 16;
  if (bits > 3) low |= uint(p[3]) << 24;
  if (bits > 4) high = p[4];
  if (bits > 5) high |= uint(p[5]) << 8;
  if (bits > 6) high |= uint(p[6]) << 16;
  return {low, high};
}

// ---- weights ----------------------------------------------------------------------------------------------------------------
constant constexpr int NO_ADDEND = 0, ZEROS = 1, BIASES = 2;
constant constexpr int NO_FACTOR = 0, MULTIPLY = 1, DIVIDE = 2;

template <int addend, typename S> struct addend_type { typedef S type; };
template <typename S> struct addend_type<ZEROS, S> { typedef short type; };

// A weight in rows: codes [n, units bits] bytes, scales and addends [n, groups], one factor. G inputs a group, 0 for the row.
template <typename Element, typename Scale, int Addend, int G> struct packed_rows {
  typedef Scale scale;
  typedef typename Scale::stored stored;
  typedef typename addend_type<Addend, stored>::type added;
  static constant constexpr int addend = Addend;

  const device uchar* codes;
  const device stored* scales;
  const device added* addends;
  uint units, groups;
  Element decode;

  uint group_of(uint unit) const { return G == 0 ? 0 : unit / (G / 8 > 0 ? G / 8 : 1); }
  eight_codes load(uint n, uint unit) const {
    return load_eight<Element::bits>(codes + ulong(n) * units * Element::bits, unit);
  }
  ulong entry(uint n, uint unit) const { return ulong(n) * groups + group_of(unit); }

  // Matrix e of a stack of (n, k) matrices.
  packed_rows expert(uint e, uint n) const {
    const ulong entries = ulong(e) * n * groups;
    return {codes + ulong(e) * n * units * Element::bits, scales + entries, addends + (Addend == NO_ADDEND ? 0 : entries),
            units, groups, decode};
  }
};

// What a product sums: the element's number with scale and addend, but for the factor of the whole tensor, which comes last.
template <typename W> inline float scaled(float v, typename W::stored s, typename W::added a) {
  if (W::addend == ZEROS) return W::scale::times(v - float(a), s);
  if (W::addend == BIASES) return fma(v, W::scale::value(s), float(a));
  return W::scale::times(v, s);
}
template <typename W> inline inexact scaled_exactly(float v, typename W::stored s, typename W::added a) {
  if (W::addend == ZEROS) return W::scale::exact(v - float(a), s);
  if (W::addend == BIASES) return exact_fma(v, W::scale::value(s), float(a));
  return W::scale::exact(v, s);
}

// The eight weights of a unit.
template <typename W> inline void decode_unit(W w, uint n, uint unit, thread float* v) {
  const ulong at = w.entry(n, unit);
  const typename W::stored scale = w.scales[at];
  const typename W::added addend = W::addend == NO_ADDEND ? typename W::added(0.0f) : w.addends[at];
  w.decode.eight(w.load(n, unit), v);
  for (int j = 0; j < 8; ++j) v[j] = scaled<W>(v[j], scale, addend);
}

// The factor of the whole tensor. `divisor` is 1 but for formats that store a multiple of it.
template <int op> inline inexact with_factor(inexact v, float factor, float divisor) {
  if (op == MULTIPLY) {
    const inexact p = exact_product(v.value, factor);
    if (divisor == 1.0f) return p;
    return exact_quotient(p, divisor);
  }
  if (op == DIVIDE) return exact_quotient(v, factor);
  if (divisor == 1.0f) return v;
  return exact_quotient(v, divisor);
}

// What becomes of a finished sum: the tensor's factor, the bias of the layer, one rounding to T.
template <typename T, int op>
inline T finish(float sum, float factor, float divisor, bool has_bias, float bias) {
  const inexact y = with_factor<op>({sum, 0.0f}, factor, divisor);
  return has_bias ? rounded<T>({y.value + bias, 0.0f}) : rounded<T>(y);
}

}  // namespace halfbyte
