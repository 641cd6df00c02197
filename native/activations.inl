// Part of kernels.inl: activations to 8 bits, sums, half precision, gates.

// -------------------------------------------------------------------------------------------------------------------
// activations

// q = round(x / d), d = max |x| / 127. A maximum so small that 127 / max is not a float is scaled
// up first; NaN or infinity make the scale NaN, and so every result of that row.
template <class V>
float quantize(const float *x, int64_t count, int8_t *q) {
  typename V::F peaks = V::fzero();
  int64_t i = 0;
  for (; i + V::W <= count; i += V::W) peaks = V::fmaxabs(peaks, V::fload(x + i));
  float peak = V::largest(peaks);
  for (; i < count; ++i) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    peak = a > peak || a != a ? a : peak;
  }
  if (peak == 0.0f || !(peak <= 3.4028234663852886e38f)) {
    for (i = 0; i < count; ++i) q[i] = 0;
    // fmaxabs ignores NaN on some instruction sets: they are looked for in this rare case, and
    // otherwise found by the sum below.
    if (peak != 0.0f) return __builtin_nanf("");
    for (i = 0; i < count; ++i)
      if (x[i] != x[i]) return __builtin_nanf("");
    return 0.0f;
  }
  float lift = 1.0f;
  if (peak < 1e-36f) lift = 1.2676506002282294e30f;  // 2^100
  const float inverse = 127.0f / (peak * lift);
  bool nan = false;
  const typename V::F by = V::fset(inverse), up = V::fset(lift);
  i = 0;
  for (; i + V::W <= count; i += V::W) {
    const typename V::F v = V::fload(x + i);
    V::store_rounded(q + i, V::fmul(V::fmul(v, up), by));
    nan |= V::any_nan(v);
  }
  for (; i < count; ++i) {
    const float y = x[i] * lift * inverse;
    nan |= y != y;
    q[i] = (int8_t)(nan ? 0 : (int32_t)__builtin_rintf(y));
  }
  return nan ? __builtin_nanf("") : peak / 127.0f;
}

// Input i is added to partial sum i mod 16, then the sixteen sums in order, then the inputs past
// the last multiple of sixteen. Every vector width can compute this order, so all instruction sets
// return the same bits.
template <class V>
float sum_of(const float *x, int64_t count) {
  constexpr int vectors = kPanelRows / V::W;
  typename V::F acc[vectors];
  for (int v = 0; v < vectors; ++v) acc[v] = V::fzero();
  int64_t i = 0;
  for (; i + kPanelRows <= count; i += kPanelRows)
    for (int v = 0; v < vectors; ++v) acc[v] = V::fadd(acc[v], V::fload(x + i + v * V::W));
  alignas(64) float lanes[kPanelRows];
  for (int v = 0; v < vectors; ++v) V::fstore(lanes + v * V::W, acc[v]);
  float total = 0.0f;
  for (int j = 0; j < kPanelRows; ++j) total += lanes[j];
  for (; i < count; ++i) total += x[i];
  return total;
}

template <class V>
int32_t sum_of_i8(const int8_t *q, int64_t count) {
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += q[i];
  return total;
}

// -------------------------------------------------------------------------------------------------------
// half precision, one value

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
  if (a < 0x38800000) {  // subnormal: adding 1/2 makes the addition round at the right bit
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

// -------------------------------------------------------------------------------------------------------------------
// gates

// y = f(gate) * up, in operations that compilers vectorize. gelu_tanh(x) = x (1 + tanh u) / 2 =
// x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class V>
void apply_gate(Gate f, const float *gate, const float *up, int64_t count, float *y) {
  if (f == Gate::silu)
    for (int64_t i = 0; i < count; ++i) y[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
  else
    for (int64_t i = 0; i < count; ++i) {
      const float x = gate[i], u = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
      y[i] = x / (1.0f + exponential(-2.0f * u)) * up[i];
    }
}
