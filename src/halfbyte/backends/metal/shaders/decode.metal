// Codes to numbers in registers, every one exact.
//
// No float32 subnormal occurs here: Apple GPUs take those for zero. The specification allows that for half subnormals too; the one
// function with half subnormals says so in its name, and is a variant.

// ---- element codes -> float -------------------------------------------------------------------------------------------------

namespace halfbyte {

inline float with_sign(float magnitude, uint sign_bit31) { return as_type<float>(as_type<uint>(magnitude) | sign_bit31); }

// Exponent and mantissa moved into a float's places give v, right for magnitudes from 1 on; below, where E2M1 has no hidden one,
// 0.5 and 0.75 stand for 0 and 0.5, which is 2 v - 1. That is the smaller of the two exactly there.
inline float e2m1_to_float(uint c) {
  const float v = as_type<float>(((c & 7) << 22) + 0x3f000000u);
  return with_sign(min(v, fma(v, 2.0f, -1.0f)), (c & 8) << 28);
}

// A small float of `mantissa` bits and bias `bias` whose top exponent is an ordinary one; subnormals are whole multiples of
// 2^(1 - bias - mantissa).
template <int bits, int mantissa, int bias> inline float minifloat_to_float(uint c) {
  const uint magnitude = c & ((1u << (bits - 1)) - 1);
  const uint moved = (magnitude << (23 - mantissa)) + (uint(127 - bias) << 23);
  const float unit = as_type<float>(uint(127 + 1 - bias - mantissa) << 23);
  const float value = magnitude >> mantissa ? as_type<float>(moved) : float(magnitude) * unit;
  return with_sign(value, ((c >> (bits - 1)) & 1) << 31);
}

constant constexpr uint QUIET_NAN = 0x7fc00000u;

inline float e4m3_to_float(uint c) {
  const float value = minifloat_to_float<8, 3, 7>(c);
  return (c & 0x7f) == 0x7f ? as_type<float>(QUIET_NAN) : value;
}

// GGUF's reading: the sign is ignored, 0x7F is 0, 0xFF is 480.
inline float ue4m3_to_float(uint c) { return c == 0x7f ? 0.0f : minifloat_to_float<8, 3, 7>(c & 0x7f); }

inline float e5m2_to_float(uint c) {
  const uint top = (c & 0x80) << 24;
  const float value = minifloat_to_float<8, 2, 15>(c);
  if ((c & 0x7f) < 0x7c) return value;
  return as_type<float>((c & 3) ? QUIET_NAN : (top | 0x7f800000u));
}

// QLoRA's 16 quantiles of a normal distribution, bitsandbytes' own fp4, ggml's non-linear integers.
constant constexpr float NF4_TABLE[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
// ModelOpt keeps the same table to four digits, in bfloat16.
constant constexpr float NF4_MODELOPT_TABLE[16] = {-1.0f, -0.6953125f, -0.5234375f, -0.39453125f, -0.28515625f, -0.1845703125f,
                                                   -0.09130859375f, 0.0f, 0.07958984375f, 0.1611328125f, 0.24609375f,
                                                   0.337890625f, 0.44140625f, 0.5625f, 0.72265625f, 1.0f};
constant constexpr float BNB_FP4_TABLE[16] = {
    0.0f, 0.005208333487808704f, 0.6666666865348816f, 1.0f, 0.3333333432674408f, 0.5f, 0.1666666716337204f, 0.25f,
    0.0f, -0.005208333487808704f, -0.6666666865348816f, -1.0f, -0.3333333432674408f, -0.5f, -0.1666666716337204f, -0.25f};
constant constexpr float IQ4_NL_TABLE[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                                             1.0f, 13.0f, 25.0f, 38.0f, 53.0f, 69.0f, 89.0f, 113.0f};
constant constexpr float E2M1_TABLE[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                           -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// ---- two nibbles of a word at once -> half2 -----------------------------------------------------------------------------------

// Nibbles 3 and 7 of q, the rule of e2m1_to_float for both halves of the word.
inline half2 e2m1_to_half2(uint q) {
  const half2 v = as_type<half2>(((q & 0x70007000u) >> 3) + 0x38003800u);
  const half2 magnitude = half2(min(v.x, fma(v.x, 2.0h, -1.0h)), min(v.y, fma(v.y, 2.0h, -1.0h)));
  return as_type<half2>(as_type<uint>(magnitude) | (q & 0x80008000u));
}
// The same with the fields left in place, times 2^-14: 0.5 is a half subnormal on the way.
inline half2 e2m1_to_half2_by_subnormal(uint q) {
  return as_type<half2>((q & 0x80008000u) | ((q & 0x70007000u) >> 3)) * half2(16384.0h, 16384.0h);
}

// Nibbles 0 and 4 of q as codes 0 to 15: 1024 + q is a half whose last place is 1.
inline half2 u4_low_half2(uint q) { return as_type<half2>((q & 0x000f000fu) | 0x64006400u) - half2(1024.0h, 1024.0h); }
// Nibbles 1 and 5: 1024 + 16 q, a sixteenth of it less 64.
inline half2 u4_high_half2(uint q) {
  const half2 v = as_type<half2>((q & 0x00f000f0u) | 0x64006400u);
  return half2(fma(v.x, 0.0625h, -64.0h), fma(v.y, 0.0625h, -64.0h));
}
// The same less 8.
inline half2 u4b8_low_half2(uint q) { return as_type<half2>((q & 0x000f000fu) | 0x64006400u) - half2(1032.0h, 1032.0h); }
inline half2 u4b8_high_half2(uint q) {
  const half2 v = as_type<half2>((q & 0x00f000f0u) | 0x64006400u);
  return half2(fma(v.x, 0.0625h, -72.0h), fma(v.y, 0.0625h, -72.0h));
}

// ---- scales -------------------------------------------------------------------------------------------------------------------

// 2^e for -126 <= e <= 127.
inline float power_of_two(int e) { return as_type<float>(uint(e + 127) << 23); }

// v 2^(b - 127) in two steps, each factor and each product in range: 2^-127 itself would count as zero. 255 is NaN.
inline float times_e8m0(float v, uint b) {
  const int e = int(b) - 127;
  const int first = e >> 1;
  const float scaled = v * power_of_two(first) * power_of_two(e - first);
  return b == 255 ? as_type<float>(QUIET_NAN) : scaled;
}

}  // namespace halfbyte
