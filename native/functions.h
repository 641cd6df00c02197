// Functions of one float32, in operations that compilers vectorize (with -fno-trapping-math, see
// CMakeLists.txt). Static: each instruction set compiles its own.
#pragma once

#include <cstdint>

namespace halfbyte {

enum class Gate : int { silu = 0, gelu_tanh = 1 };

// exp(x) within 2 units in the last place from -87 to 88: x = n log 2 + r, 2^n set as an exponent,
// exp(r) by the polynomial of Cephes' expf. Beyond, the value at the end; NaN stays.
static inline float exponential(float x) {
  constexpr float shift =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which its low bits then are
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float whole = x * 1.44269504088896341f + shift, n = whole - shift;
  const float r = x - n * 0.693359375f - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &whole, 4);
  bits = (bits - 0x4b400000u + 127u) << 23;
  float power;
  __builtin_memcpy(&power, &bits, 4);
  return p * power;
}

}  // namespace halfbyte
