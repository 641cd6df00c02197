// Part of selfcheck.cpp and fuzz.cpp, which have `random_bits`, `uniform` and `normal`: weights of
// every structure in panel order, with every array in memory that ends at an unreadable page.

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
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t r = random_bits();
      p[i] = (uint16_t)((r & 0x8000) | (kind == Scale::f16 ? 0x2400 : 0x3d00) | (r >> 16 & 0x7ff));
    }
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
