// The core's own test, without Python: for cross-compiled builds under an emulator, for sanitizers,
// and with every array against a guard page, so that a byte read past a weight or written past a
// result is a crash.
//
// For each instruction set, each structure of weight and several shapes: one-hot products return
// the decoded row bit for bit in both classes, products are within float32's error of float64, a
// row does not depend on its batch, panel order returns the codes it was made from, and all
// instruction sets have the same bits; in the int8 class for every number of tokens up to 40 and
// segments of every length up to 136. Scales and zero points reach from one end of their type to
// the other. Matrices are transposed.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "../dispatch.h"
#include "../linear.h"
#include "../pool.h"
#include "../step.h"
#include "../transpose.h"

using namespace halfbyte;

namespace {

constexpr uint64_t kSeed = 88172645463325252ull;
uint64_t state = kSeed;
uint32_t random_bits() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint32_t)(state >> 16);
}
double uniform() { return random_bits() / 4294967296.0; }
float normal() { return (float)(uniform() + uniform() + uniform() + uniform() - 2.0); }

#include "made_weight.inl"

// FNV-1a of the products' bits; the same for every instruction set.
constexpr uint64_t kEmptyHash = 14695981039346656037ull;
uint64_t products_hash = kEmptyHash;
void add_to_hash(const std::vector<float> &y) {
  for (const float v : y) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    for (int i = 0; i < 4; ++i)
      products_hash = (products_hash ^ (bits >> (8 * i) & 255)) * 1099511628211ull;
  }
}

int failures = 0;
bool stops = false;  // --first: at the first failure
void check(bool good, const std::string &what) {
  if (good) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
  if (stops) std::exit(1);
}

const Activations kClasses[] = {Activations::exact, Activations::int8, Activations::int8_token};
const char *name_of(Activations mode) {
  return mode == Activations::exact  ? " exact"
         : mode == Activations::int8 ? " int8"
                                     : " int8_token";
}

std::vector<float> product(const Weight &w, const float *x, int64_t m, Activations mode) {
  Guarded xs((size_t)(m * w.k) * 4), out((size_t)(m * w.n) * 4);
  std::memcpy(xs.as<float>(), x, (size_t)(m * w.k) * 4);
  Matrix matrix;
  matrix.data = xs.as<float>(), matrix.rows = m, matrix.row_stride = w.k;
  linear(w, matrix, nullptr, mode, Dtype::f32, out.as<float>());
  return std::vector<float>(out.as<float>(), out.as<float>() + m * w.n);
}

// Half a unit of the activations' rounding at each of the m * k inputs: max |x| / 254 over the
// inputs under one scale, zero where the int8 class multiplies exactly.
std::vector<double> rounding(const Weight &w, const std::vector<float> &x, int64_t m,
                             Activations mode) {
  std::vector<double> half(x.size(), 0.0);
  if (mode == Activations::exact || !w.integral) return half;
  const bool whole = mode == Activations::int8_token && w.groups == 1;
  const int64_t span = whole ? w.group : w.spanned();
  const auto input = [&](int64_t p) -> int64_t { return w.gather ? w.gather[p] : p; };
  for (int64_t t = 0; t < m; ++t)
    for (int64_t p0 = 0; p0 < w.kernel_k(); p0 += span) {
      const int64_t p1 = std::min(p0 + span, w.kernel_k());
      double largest = 0;
      for (int64_t p = p0; p < p1; ++p)
        if (input(p) >= 0)
          largest = std::fmax(largest, std::fabs((double)x[(size_t)(t * w.k + input(p))]));
      for (int64_t p = p0; p < p1; ++p)
        if (input(p) >= 0) half[(size_t)(t * w.k + input(p))] = largest * (1.0 / 254 + 1e-6);
    }
  return half;
}

// Every sum within what rounding can do: sum_j half_j |c_j| of the activations, where c is the
// element times its scale, or the weight where that is larger, and one float32 rounding a step of
// the sum of |x_j| (|c_j| + |w_j|). And the root of the mean square: 2e-6 of the sums' own in the
// exact class, twice what independent roundings give in the int8 class.
void check_sums(const std::string &in, const Weight &w, const std::vector<float> &x,
                const std::vector<float> &y, const std::vector<float> &dense, int64_t m,
                Activations mode) {
  Weight scaled = w;  // elements times scales alone
  scaled.zeros = nullptr, scaled.biases = nullptr, scaled.mins = nullptr;
  scaled.super_mins = nullptr;
  std::vector<float> part(dense.size());
  dequantize(scaled, 0, w.n, Dtype::f32, part.data());
  const std::vector<double> half = rounding(w, x, m, mode);
  const double unit = (double)(w.seg + w.kernel_k() / w.seg + 8) * std::ldexp(1.0, -24);
  double error = 0, size = 0, expected = 0, worst = 0;
  for (int64_t t = 0; t < m; ++t)
    for (int64_t r = 0; r < w.n; ++r) {
      double sum = 0, bound = 0;
      for (int64_t j = 0; j < w.k; ++j) {
        const double value = dense[(size_t)(r * w.k + j)], element = part[(size_t)(r * w.k + j)];
        const double one = x[(size_t)(t * w.k + j)], h = half[(size_t)(t * w.k + j)];
        const double c = std::fmax(std::fabs(value), std::fabs(element));
        sum += one * value;
        bound += h * c + unit * (std::fabs(one) + h) * (c + std::fabs(value - element));
        expected += h * h / 3 * c * c;
      }
      const double off = std::fabs(y[(size_t)(t * w.n + r)] - sum);
      worst = std::fmax(worst, off / bound);
      error += off * off, size += sum * sum;
    }
  check(worst <= 1, in + ": " + std::to_string(worst) + " of the largest possible error");
  check(std::sqrt(error) <= 2e-6 * std::sqrt(size) + 2 * std::sqrt(expected),
        in + ": root of the mean square " + std::to_string(std::sqrt(error / size)));
}

// Products of m rows with a single 1 each are rows of the decoded weight.
void check_one_hot(const std::string &in, const Weight &w, const std::vector<float> &dense,
                   int64_t m, Activations mode) {
  const int64_t n = w.n, k = w.k;
  std::vector<float> hot((size_t)(m * k), 0.0f);
  std::vector<int64_t> at((size_t)m);
  for (int64_t t = 0; t < m; ++t)
    at[(size_t)t] = (int64_t)(random_bits() % (uint32_t)k),
    hot[(size_t)(t * k + at[(size_t)t])] = 1.0f;
  const auto y = product(w, hot.data(), m, mode);
  bool same = true;
  for (int64_t t = 0; t < m; ++t)
    for (int64_t r = 0; r < n; ++r)
      same &= y[(size_t)(t * n + r)] == dense[(size_t)(r * k + at[(size_t)t])];
  check(same, in + " m=" + std::to_string(m) + ": one-hot");
}

void check_weight(const std::string &set, const Structure &s, int64_t n, int64_t k) {
  const auto made = make(s, n, k);
  const Weight &w = made->w;
  const std::string where =
      set + " " + s.name + " n=" + std::to_string(n) + " k=" + std::to_string(k);
  std::vector<uint8_t> back(made->codes.size());
  unpack(w, back.data(), w.row_bytes);
  check(back == made->codes, where + ": codes return");
  std::vector<float> dense((size_t)(n * k));
  dequantize(w, 0, n, Dtype::f32, dense.data());

  for (const Activations mode : kClasses) {
    const std::string in = where + name_of(mode);
    for (const int64_t m : {(int64_t)1, (int64_t)2, (int64_t)4, (int64_t)21})
      check_one_hot(in, w, dense, m, mode);
    const int64_t m = 27;
    std::vector<float> x((size_t)(m * k));
    for (float &v : x) v = normal();
    const auto y = product(w, x.data(), m, mode);
    add_to_hash(y);
    const auto alone = product(w, x.data() + 5 * k, 1, mode),
               some = product(w, x.data() + 4 * k, 3, mode);
    check(!std::memcmp(alone.data(), y.data() + 5 * n, (size_t)n * 4) &&
              !std::memcmp(some.data(), y.data() + 4 * n, (size_t)n * 12),
          in + ": batch");
    check_sums(in, made->w, x, y, dense, m, mode);
  }
}

// In the int8 class the first m rows of a product are those of a product of m tokens, m = 1 .. 40:
// every way to cut tokens into tiles.
void check_tokens(const std::string &set, const Structure &s) {
  constexpr int64_t most = 40, n = 19;
  for (const int64_t groups : {1, 3}) {
    const auto made = make(s, n, s.super ? s.super : groups * s.group);
    const Weight &w = made->w;
    if (!w.integral) return;
    const Activations mode = groups == 1 ? Activations::int8_token : Activations::int8;
    std::vector<float> x((size_t)(most * w.k));
    for (float &v : x) v = normal();
    const auto y = product(w, x.data(), most, mode);
    add_to_hash(y);
    for (int64_t m = 1; m < most; ++m) {
      const auto first = product(w, x.data(), m, mode);
      check(!std::memcmp(first.data(), y.data(), first.size() * 4),
            set + " " + s.name + name_of(mode) + ": the first " + std::to_string(m) + " tokens");
    }
  }
}

// Five groups of `group` inputs, each a segment: one-hot products are the weight's values, and a
// row does not depend on its batch, of which sixteen tokens are a tile of a product of matrices.
void check_segments(const std::string &set, Structure s, int group) {
  constexpr int64_t n = 19, m = 18;
  s.group = group;
  const auto made = make(s, n, 5 * group);
  const Weight &w = made->w;
  std::vector<float> dense((size_t)(n * w.k)), x((size_t)(m * w.k));
  dequantize(w, 0, n, Dtype::f32, dense.data());
  for (float &v : x) v = normal();
  const std::string in = set + " " + s.name + " segments of " + std::to_string(group);
  check_one_hot(in, w, dense, m, Activations::int8);
  const auto y = product(w, x.data(), m, Activations::int8);
  add_to_hash(y);
  for (int64_t t = 0; t < m; t += 5) {
    const auto alone = product(w, x.data() + t * w.k, 1, Activations::int8);
    check(!std::memcmp(alone.data(), y.data() + t * n, (size_t)n * 4), in + ": batch");
  }
}

// A small float by its definition: sign, exponent and mantissa of so many bits, subnormals below
// the least exponent. What has no finite value there is its caller's matter.
double small_float(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1),
            bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t leading = exponent ? 1u << mantissa_bits : 0;
  const double magnitude = std::ldexp((double)(leading | (bits & ((1u << mantissa_bits) - 1))),
                                      std::max(exponent, 1) - bias - mantissa_bits);
  return bits >> (exponent_bits + mantissa_bits) ? -magnitude : magnitude;
}

double scale_of(Scale kind, uint32_t bits) {
  if (kind == Scale::e8m0) return bits == 255 ? NAN : std::ldexp(1.0, (int)bits - 127);
  if (kind == Scale::e4m3) return (bits & 0x7f) == 0x7f ? NAN : small_float(bits, 4, 3);
  // As ggml reads it: the sign is ignored, but for 0x7f, which is 0 without it alone.
  if (kind == Scale::ue4m3) return bits == 0x7f ? 0.0 : small_float(bits & 0x7f, 4, 3);
  const int exponent_bits = kind == Scale::f16 ? 5 : 8, mantissa_bits = 15 - exponent_bits;
  if ((bits & 0x7fff) >> mantissa_bits != (1u << exponent_bits) - 1)
    return small_float(bits, exponent_bits, mantissa_bits);
  if (bits & ((1u << mantissa_bits) - 1)) return NAN;
  return bits >> 15 ? -INFINITY : INFINITY;
}

// A weight of one group in each of 256 rows, under scales from one end of their type to the other,
// zero, subnormals, infinities and NaN among them: every byte of a scale of 8 bits, and of one of
// 16 bits every upper byte with the lower bytes where exponents and mantissas begin and end. Zero
// points reach from one end of int16 to the other. Rows and one-hot products are elements, less
// their zero point, times scales, rounded once; a row whose scale is NaN is NaN.
const int16_t kZeros[] = {0, -1, 1, 127, 128, -128, -129, 255, 256, 32767, -32767, -32768};
void check_scales(const std::string &set, const Structure &s) {
  const bool wide = s.scale == Scale::f16 || s.scale == Scale::bf16;
  if (s.super || s.scale == Scale::f32) return;
  const int64_t n = 256, k = s.group;
  const auto made = make(s, n, k);
  Weight &w = made->w;
  w.biases = nullptr, w.global_op = Global::none;
  for (const uint32_t low : {0x00u, 0x01u, 0x7fu, 0x80u, 0xffu}) {
    if (low && !wide) break;
    std::vector<float> wanted((size_t)(n * k)), dense((size_t)(n * k));
    for (int64_t r = 0; r < n; ++r) {
      const uint32_t entry = wide ? (uint32_t)r << 8 | low : (uint32_t)r;
      if (wide)
        ((uint16_t *)w.scales)[r] = (uint16_t)entry;
      else
        ((uint8_t *)w.scales)[r] = (uint8_t)entry;
      const double scale = scale_of(s.scale, entry);
      const int16_t zero = s.zeros ? kZeros[r % (int64_t)std::size(kZeros)] : (int16_t)0;
      if (s.zeros) ((int16_t *)w.zeros)[r] = zero;
      for (int64_t j = 0; j < k; ++j) {
        uint32_t c = 0;
        for (int b = 0; b < s.bits; ++b)
          c |= (made->codes[(size_t)(r * w.row_bytes + (j * s.bits + b) / 8)] >>
                    ((j * s.bits + b) % 8) &
                1u)
               << b;
        wanted[(size_t)(r * k + j)] = (float)((w.values[c] - zero) * scale);
      }
    }
    const auto equal = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
    const std::string where = set + " " + s.name + " scales " + std::to_string(low);
    dequantize(w, 0, n, Dtype::f32, dense.data());
    check(std::equal(dense.begin(), dense.end(), wanted.begin(), equal), where + ": rows");
    for (const Activations mode : kClasses)
      for (const int64_t m : {(int64_t)1, (int64_t)21}) {
        std::vector<float> hot((size_t)(m * k), 0.0f);
        for (int64_t t = 0; t < m; ++t) hot[(size_t)(t * k + (7 * t + 3) % k)] = 1.0f;
        const auto y = product(w, hot.data(), m, mode);
        int64_t wrong = 0;
        for (int64_t t = 0; t < m; ++t)
          for (int64_t r = 0; r < n; ++r)
            wrong += !equal(y[(size_t)(t * n + r)], wanted[(size_t)(r * k + (7 * t + 3) % k)]);
        check(!wrong, where + name_of(mode) + " m=" + std::to_string(m) + ": " +
                          std::to_string(wrong) + " products");
      }
  }
}

#include "step_check.inl"
#include "transpose_check.inl"

}  // namespace

int main(int argc, char **argv) {
  if (argc > 1 && !std::strcmp(argv[1], "--sets")) {
    for (const auto &name : supported_sets()) std::printf("%s\n", name.c_str());
    return 0;
  }
  stops = argc > 1 && !std::strcmp(argv[1], "--first");
  uint64_t expected = 0;
  for (const auto &set : supported_sets()) {
    use_set(set);
    for (const std::string &core :
         set == "avx512" || set == "amx" ? known_cores() : std::vector<std::string>{""}) {
      use_core(core);
      state = kSeed, products_hash = kEmptyHash;
      for (const Structure &s : kStructures)
        for (const int64_t n : {(int64_t)1, (int64_t)19, (int64_t)70})
          for (const int64_t groups : {1, 5})
            check_weight(
                set, s, n,
                s.super ? s.super * (groups > 1 ? 2 : 1)
                        : groups * s.group - (groups > 1 && !s.act_order && s.group == 64 ? 9 : 0));
      // Rows of one long group, in 11, 13 and 14 products of tiles.
      for (Structure s : {kStructures[0], kStructures[1], kStructures[7]})
        for (const int group : {704, 832, 896}) s.group = group, check_weight(set, s, 19, group);
      // Segments of every remainder of the inputs that one product of matrices takes, in each
      // combination of offsets, zero points, biases and spans.
      for (const int i : {0, 1, 2, 7, 8, 10, 17, 20})
        for (int group = 8; group <= 136; group += 8) check_segments(set, kStructures[i], group);
      for (const Structure &s : kStructures) check_tokens(set, s);
      check_step(set);
      for (const Structure &s : kStructures) check_scales(set, s);
      if (!expected) expected = products_hash;
      check(products_hash == expected, set + " " + core + ": not the bits of the other sets");
    }
    use_core("");
    std::printf("%s: checked, products %016llx\n", set.c_str(), (unsigned long long)products_hash);
  }
  check_transpose();
  if (failures) std::printf("%d checks failed\n", failures);
  return failures ? 1 : 0;
}
