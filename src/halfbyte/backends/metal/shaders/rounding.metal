// Results rounded once: a float32 value with what its own rounding left out, rounded from there to half and bfloat.

namespace halfbyte {

struct inexact {
  float value;  // nearest float32
  float error;  // exact minus value, to the precision that decides its sign
};

inline inexact exact_product(float a, float b) {
  const float p = a * b;
  return {p, fma(a, b, -p)};
}

// a b + c, one rounding in `value`.
inline inexact exact_fma(float a, float b, float c) {
  const float s = fma(a, b, c);
  const inexact p = exact_product(a, b);
  const float high = p.value + c;  // two_sum: what p.value + c leaves out
  const float back = high - p.value;
  const float low = (p.value - (high - back)) + (c - back);
  return {s, (high - s) + (low + p.error)};
}

inline bool is_finite(float v) { return (as_type<uint>(v) & 0x7f800000u) != 0x7f800000u; }

// v / d, correct whatever the division instruction leaves in the last place.
inline inexact exact_quotient(inexact v, float d) {
  const float q = v.value / d;
  if (!is_finite(q) || q == 0.0f) return {q, 0.0f};
  const float rest = fma(-q, d, v.value) + v.error;
  const float better = q + rest / d;
  if (!is_finite(better)) return {q, 0.0f};
  return {better, (fma(-better, d, v.value) + v.error) / d};
}

// Round to odd: the last bit set when anything was left out, so that one more rounding is the only one.
inline float to_odd(inexact v) {
  const uint bits = as_type<uint>(v.value);
  if (v.error == 0.0f || !is_finite(v.value) || !is_finite(v.error)) return v.value;
  const bool beyond = (v.error > 0.0f) == ((bits >> 31) == 0);  // the exact magnitude is larger
  return as_type<float>((beyond ? bits : bits - 1) | 1);
}

template <typename T> inline T rounded(inexact v);
template <> inline float rounded<float>(inexact v) { return v.value; }
template <> inline half rounded<half>(inexact v) { return half(to_odd(v)); }
// By integers, to nearest even: float32 subnormals pass.
template <> inline bfloat rounded<bfloat>(inexact v) {
  const uint bits = as_type<uint>(to_odd(v));
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint nearest = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  return as_type<bfloat>(ushort(nan ? ((bits >> 16) | 0x40) : nearest));
}

// v 2^(b - 127) by its fields, subnormal results included: exact, since no MX element has a bit below 2^-16. 255 is NaN.
inline float times_e8m0_fields(float v, uint b) {
  const uint bits = as_type<uint>(v), sign = bits & 0x80000000u, field = (bits >> 23) & 255;
  if (b == 255) return as_type<float>(QUIET_NAN);
  if (field == 0 || field == 255) return v;  // zero, infinity, NaN
  const int moved = int(field) + int(b) - 127;
  if (moved >= 255) return as_type<float>(sign | 0x7f800000u);
  if (moved > 0) return as_type<float>(sign | (uint(moved) << 23) | (bits & 0x7fffffu));
  return as_type<float>(sign | (((bits & 0x7fffffu) | 0x800000u) >> (1 - moved)));
}

}  // namespace halfbyte
