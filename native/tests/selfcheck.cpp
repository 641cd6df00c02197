// The core's own test, without Python: for cross-compiled builds under an emulator, for sanitizers,
// and with every array against a guard page, so that a byte read past a weight or written past a
// result is a crash.
//
// For each instruction set, each structure of weight and several shapes: one-hot products return
// the decoded row bit for bit in both classes, products are within float32's error of float64, a
// row does not depend on its batch, and panel order returns the codes it was made from. Matrices
// are turned.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

uint64_t state = 88172645463325252ull;
uint32_t random_bits() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint32_t)(state >> 16);
}
double uniform() { return random_bits() / 4294967296.0; }
float normal() { return (float)(uniform() + uniform() + uniform() + uniform() - 2.0); }

// Memory that ends where an unreadable page begins.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    whole_ = (bytes + page - 1) / page * page + page;
    base_ =
        (char *)mmap(nullptr, whole_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED || mprotect(base_ + whole_ - page, page, PROT_NONE) != 0) std::abort();
    data_ = base_ + whole_ - page - bytes;
  }
  ~Guarded() { munmap(base_, whole_); }
  Guarded(const Guarded &) = delete;
  template <class T = uint8_t>
  T *as() {
    return (T *)data_;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_, whole_;
  char *base_, *data_;
};

struct Structure {
  const char *name;
  Element element;
  int bits;
  Scale scale;
  int group;
  bool zeros = false, biases = false, mins = false;
  int super = 0;
  bool global = false;
  int offset = 0;
  const char *table = "";
  bool act_order = false;
};

const Structure kStructures[] = {
    {"int4:g32", Element::integer, 4, Scale::f16, 32, false, false, false, 0, false, 8},
    {"uint4:g32 zeros", Element::integer, 4, Scale::bf16, 32, true},
    {"uint4:g16 act-order", Element::integer, 4, Scale::f32, 16, true, false, false, 0, false, 0,
     "", true},
    {"int2:g32", Element::integer, 2, Scale::f16, 32, false, false, false, 0, false, 2},
    {"int3:g128", Element::integer, 3, Scale::f16, 128, false, false, false, 0, false, 4},
    {"uint1:g64", Element::integer, 1, Scale::f16, 64},
    {"int7:g32", Element::integer, 7, Scale::f16, 32, false, false, false, 0, false, 64},
    {"uint8:g32", Element::integer, 8, Scale::f16, 32, true},
    {"q8_0", Element::integer, 8, Scale::f16, 32, false, false, false, 0, false, 128},
    {"q5_0", Element::integer, 5, Scale::f16, 32, false, false, false, 0, false, 16},
    {"affine4:g64", Element::integer, 4, Scale::bf16, 64, false, true},
    {"affine6:g40", Element::integer, 6, Scale::f16, 40, false, true},
    {"q2_K", Element::integer, 2, Scale::u8, 16, false, false, true, 256},
    {"q3_K", Element::integer, 3, Scale::i8, 16, false, false, false, 256, false, 4},
    {"q4_K", Element::integer, 4, Scale::u8, 32, false, false, true, 256},
    {"q5_K", Element::integer, 5, Scale::u8, 32, false, false, true, 256},
    {"q6_K", Element::integer, 6, Scale::i8, 16, false, false, false, 256, false, 32},
    {"mxfp4", Element::table, 4, Scale::e8m0, 32, false, false, false, 0, false, 0, "e2m1"},
    {"nvfp4", Element::table, 4, Scale::e4m3, 16, false, false, false, 0, true, 0, "e2m1"},
    {"nvfp4 ue4m3", Element::table, 4, Scale::ue4m3, 16, false, false, false, 0, true, 0, "e2m1"},
    {"iq4_nl", Element::table, 4, Scale::f16, 32, false, false, false, 0, false, 0, "iq4_nl"},
    {"iq4_xs", Element::table, 4, Scale::i8, 32, false, false, false, 256, false, 0, "iq4_nl"},
    {"table of floats", Element::table, 4, Scale::f32, 64, false, false, false, 0, false, 0,
     "floats"},
    {"mxfp6_e2m3", Element::minifloat, 6, Scale::e8m0, 32, false, false, false, 0, false, 0,
     "2 3 1 0"},
    {"mxfp6_e3m2", Element::minifloat, 6, Scale::e8m0, 32, false, false, false, 0, false, 0,
     "3 2 3 0"},
    {"mxfp8_e4m3", Element::minifloat, 8, Scale::e8m0, 32, false, false, false, 0, false, 0,
     "4 3 7 126"},
    {"mxfp8_e5m2", Element::minifloat, 8, Scale::e8m0, 32, false, false, false, 0, false, 0,
     "5 2 15 123"},
};

// A weight of a structure with everything it points at.
struct Made {
  Weight w;
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<uint8_t> codes;
  std::vector<int32_t> index;

  template <class T>
  T *room(int64_t count) {
    memory.push_back(std::make_unique<Guarded>((size_t)count * sizeof(T)));
    return memory.back()->as<T>();
  }
};

void fill_values(Made &m, const Structure &s) {
  Weight &w = m.w;
  const int count = 1 << s.bits;
  double *v = m.room<double>(count);
  w.values = v;
  if (s.element == Element::integer) {
    for (int c = 0; c < count; ++c) v[c] = c - s.offset;
    w.integral = true;
  } else if (!std::strcmp(s.table, "e2m1")) {
    const double half[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    for (int c = 0; c < 16; ++c) v[c] = c < 8 ? half[c] : -half[c - 8];
    w.integral = true, w.unit = 0.5, w.table_low = 12;
  } else if (!std::strcmp(s.table, "iq4_nl")) {
    const int table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                           1,    13,   25,  38,  53,  69,  89,  113};
    for (int c = 0; c < 16; ++c) v[c] = table[c];
    w.integral = true, w.table_low = 127;
  } else if (!std::strcmp(s.table, "floats")) {
    for (int c = 0; c < 16; ++c) v[c] = normal();
  } else {
    int exponent_bits = 0;
    std::sscanf(s.table, "%d %d %d %d", &exponent_bits, &w.mantissa_bits, &w.exponent_bias,
                &w.last_finite);
    for (int c = 0; c < count; ++c) {
      const int magnitude = c & (count / 2 - 1), exponent = magnitude >> w.mantissa_bits,
                mantissa = magnitude & ((1 << w.mantissa_bits) - 1);
      const double x =
          std::ldexp(mantissa + (exponent ? 1 << w.mantissa_bits : 0),
                     (exponent > 1 ? exponent : 1) - w.exponent_bias - w.mantissa_bits);
      v[c] = c >= count / 2 ? -x : x;
    }
  }
}

void *scale_entries(Made &m, Scale kind, int64_t count) {
  if (kind == Scale::f32) {
    float *p = m.room<float>(count);
    for (int64_t i = 0; i < count; ++i) p[i] = normal();
    return p;
  }
  if (kind == Scale::f16 || kind == Scale::bf16) {
    uint16_t *p = m.room<uint16_t>(count);
    for (int64_t i = 0; i < count; ++i)
      p[i] = (uint16_t)((random_bits() & 0x8000) | (kind == Scale::f16 ? 0x2400 : 0x3d00) |
                        (random_bits() & 0x7ff));
    return p;
  }
  uint8_t *p = m.room<uint8_t>(count);
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t r = (uint8_t)random_bits();
    p[i] = kind == Scale::e8m0                           ? (uint8_t)(115 + r % 20)
           : kind == Scale::e4m3 || kind == Scale::ue4m3 ? (uint8_t)(r % 0x7e | (r & 0x80))
                                                         : r;
  }
  return p;
}

std::unique_ptr<Made> make(const Structure &s, int64_t n, int64_t k) {
  auto made = std::make_unique<Made>();
  Made &m = *made;
  Weight &w = m.w;
  w.n = n, w.k = k, w.bits = s.bits, w.element = s.element, w.offset = s.offset, w.scale = s.scale,
  w.panel_order = true;
  fill_values(m, s);
  w.group_size = s.group, w.groups = (k + s.group - 1) / s.group;
  w.group = (s.group + 7) / 8 * 8, w.seg = w.group;
  // As backends/cpu/pack.py has it: sums in units of the activations' scale must stay exact in
  // float32.
  if (s.bits <= 4 && w.integral && w.table_low <= 12 && s.scale != Scale::f32 && !s.biases &&
      !s.mins && !s.super && w.seg < 128)
    w.span = 128 / w.seg * w.seg;
  std::vector<int32_t> gather;
  if (s.act_order) {
    // Inputs dealt to groups in turn: every group keeps its size.
    m.index.resize((size_t)k);
    gather.assign((size_t)w.kernel_k(), -1);
    for (int64_t j = 0; j < k; ++j) {
      const int64_t g = j % w.groups;
      m.index[(size_t)j] = (int32_t)g;
      gather[(size_t)(g * w.group + j / w.groups)] = (int32_t)j;
    }
    w.group_index = m.index.data();
  } else if (k != w.kernel_k()) {
    gather.assign((size_t)w.kernel_k(), -1);
    for (int64_t j = 0; j < k; ++j)
      gather[(size_t)(j / s.group * w.group + j % s.group)] = (int32_t)j;
  }
  if (!gather.empty()) {
    int32_t *p = m.room<int32_t>((int64_t)gather.size());
    std::memcpy(p, gather.data(), gather.size() * 4);
    w.gather = p;
  }
  const int64_t entries = w.panels() * w.groups * kPanelRows;
  w.scales = scale_entries(m, s.scale, entries);
  if (s.zeros) {
    int16_t *z = m.room<int16_t>(entries);
    for (int64_t i = 0; i < entries; ++i) z[i] = (int16_t)(random_bits() & ((1u << s.bits) - 1));
    w.zeros = z;
  }
  if (s.biases) w.biases = scale_entries(m, s.scale, entries);
  if (s.mins) w.mins = (const uint8_t *)scale_entries(m, Scale::u8, entries);
  if (s.super) {
    w.groups_per_super = s.super / s.group, w.supers = k / s.super;
    w.super_scales =
        (const uint16_t *)scale_entries(m, Scale::f16, w.panels() * w.supers * kPanelRows);
    if (s.mins)
      w.super_mins =
          (const uint16_t *)scale_entries(m, Scale::f16, w.panels() * w.supers * kPanelRows);
  }
  if (s.global) w.global_op = Global::multiply, w.global = 0.37f;
  w.row_bytes = (k * s.bits + 7) / 8;
  m.codes.assign((size_t)(n * w.row_bytes), 0);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t j = 0; j < k; ++j) {
      uint32_t c = random_bits() & ((1u << s.bits) - 1);
      if (w.last_finite && (int)(c & 0x7f) > w.last_finite) c = 1;
      for (int b = 0; b < s.bits; ++b)
        if (c >> b & 1)
          m.codes[(size_t)(r * w.row_bytes + (j * s.bits + b) / 8)] |=
              (uint8_t)(1 << ((j * s.bits + b) % 8));
    }
  uint8_t *planes[4] = {};
  const int widths[4] = {8, 4, 2, 1};
  for (int i = 0; i < 4; ++i)
    if (s.bits == 8 ? widths[i] == 8 : (s.bits & widths[i]) != 0)
      planes[i] = m.room<uint8_t>(w.panels() * kPanelRows * w.padded_k() * widths[i] / 8);
  w.plane8 = planes[0], w.plane4 = planes[1], w.plane2 = planes[2], w.plane1 = planes[3];
  pack(w, m.codes.data(), w.row_bytes, planes);
  return made;
}

int failures = 0;
void check(bool good, const std::string &what) {
  if (good) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
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
  const int64_t span = w.span ? w.span : w.seg;
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

  for (const Activations mode : {Activations::exact, Activations::int8}) {
    const std::string in = where + (mode == Activations::exact ? " exact" : " int8");
    for (const int64_t m : {(int64_t)1, (int64_t)2, (int64_t)4, (int64_t)21}) {
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
    const int64_t m = 11;
    std::vector<float> x((size_t)(m * k));
    for (float &v : x) v = normal();
    const auto y = product(w, x.data(), m, mode);
    const auto alone = product(w, x.data() + 5 * k, 1, mode),
               some = product(w, x.data() + 4 * k, 3, mode);
    check(!std::memcmp(alone.data(), y.data() + 5 * n, (size_t)n * 4) &&
              !std::memcmp(some.data(), y.data() + 4 * n, (size_t)n * 12),
          in + ": batch");
    check_sums(in, made->w, x, y, dense, m, mode);
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
  for (const auto &set : supported_sets()) {
    use_set(set);
    for (const std::string &core : set == "avx512" ? known_cores() : std::vector<std::string>{""}) {
      use_core(core);
      for (const Structure &s : kStructures)
        for (const int64_t n : {(int64_t)1, (int64_t)19, (int64_t)70})
          for (const int64_t groups : {1, 5})
            check_weight(
                set, s, n,
                s.super ? s.super * (groups > 1 ? 2 : 1)
                        : groups * s.group - (groups > 1 && !s.act_order && s.group == 64 ? 9 : 0));
    }
    use_core("");
    check_step(set);
    std::printf("%s: checked\n", set.c_str());
  }
  check_transpose();
  if (failures) std::printf("%d checks failed\n", failures);
  return failures ? 1 : 0;
}
