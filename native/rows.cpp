#include "rows.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace halfbyte {
namespace {

// -------------------------------------------------------------------------------------------------------
// codes of one canonical row

void codes_of_row(const uint8_t *row, int64_t row_bytes, int bits, int64_t k, uint8_t *out) {
  const uint64_t mask = (1u << bits) - 1;
  int64_t j = 0;
  // Eight codes are `bits` whole bytes; a whole 64-bit word is read only where it is inside the
  // row.
  for (; j + 8 <= k && j / 8 * bits + 8 <= row_bytes; j += 8) {
    uint64_t word;
    std::memcpy(&word, row + j / 8 * bits, 8);
    for (int i = 0; i < 8; ++i) out[j + i] = (uint8_t)(word >> (i * bits) & mask);
  }
  for (; j < k; ++j) {
    const int64_t bit = j * bits;
    uint32_t word = row[bit / 8];
    if (bit / 8 + 1 < row_bytes) word |= (uint32_t)row[bit / 8 + 1] << 8;
    out[j] = (uint8_t)(word >> (bit % 8) & mask);
  }
}

void row_of_codes(const uint8_t *codes, int bits, int64_t k, uint8_t *row, int64_t row_bytes) {
  std::memset(row, 0, (size_t)row_bytes);
  for (int64_t j = 0; j < k; ++j) {
    const int64_t bit = j * bits;
    const uint32_t word = (uint32_t)codes[j] << (bit % 8);
    row[bit / 8] |= (uint8_t)word;
    if (word >> 8) row[bit / 8 + 1] |= (uint8_t)(word >> 8);
  }
}

// ----------------------------------------------------------------------------------------------------------------
// planes, one row

// Four codes of a row, one a byte, into their fields; `four` counts fours along k'.
struct RowPlanes {
  uint8_t *p8, *p4, *p2, *p1;
  int bits;

  static void merge(uint8_t *at, uint32_t value) {
    uint32_t word;
    std::memcpy(&word, at, 4);
    word |= value;
    std::memcpy(at, &word, 4);
  }
  void put(int64_t four, uint32_t codes) const {
    int done = 0;
    if (bits == 8) return merge(p8 + four * kUnitBytes, codes);
    if (bits & 4)
      merge(p4 + four / 2 * kUnitBytes, (codes & 0x0f0f0f0fu) << (four % 2 * 4)), done = 4;
    if (bits & 2)
      merge(p2 + four / 4 * kUnitBytes, (codes >> done & 0x03030303u) << (four % 4 * 2)), done += 2;
    if (bits & 1) merge(p1 + four / 8 * kUnitBytes, (codes >> done & 0x01010101u) << (four % 8));
  }
  uint32_t get(int64_t four) const {
    auto word = [](const uint8_t *at) {
      uint32_t u;
      std::memcpy(&u, at, 4);
      return u;
    };
    if (bits == 8) return word(p8 + four * kUnitBytes);
    uint32_t codes = 0;
    int done = 0;
    if (bits & 4)
      codes = word(p4 + four / 2 * kUnitBytes) >> (four % 2 * 4) & 0x0f0f0f0fu, done = 4;
    if (bits & 2)
      codes |= (word(p2 + four / 4 * kUnitBytes) >> (four % 4 * 2) & 0x03030303u) << done,
          done += 2;
    if (bits & 1) codes |= (word(p1 + four / 8 * kUnitBytes) >> (four % 8) & 0x01010101u) << done;
    return codes;
  }
};

RowPlanes planes_of_row(const Weight &w, int64_t row, uint8_t *const planes[4]) {
  const int64_t inputs = row / kPanelRows * w.padded_k(), lane = row % kPanelRows * 4;
  auto at = [&](uint8_t *plane, int bits) {
    return plane ? plane + inputs * kPanelRows * bits / 8 + lane : nullptr;
  };
  return {at(planes[0], 8), at(planes[1], 4), at(planes[2], 2), at(planes[3], 1), w.bits};
}

void codes_from_planes(const Weight &w, int64_t row, uint8_t *out) {
  uint8_t *const planes[4] = {const_cast<uint8_t *>(w.plane8), const_cast<uint8_t *>(w.plane4),
                              const_cast<uint8_t *>(w.plane2), const_cast<uint8_t *>(w.plane1)};
  const RowPlanes lanes = planes_of_row(w, row, planes);
  const uint32_t flip = 0x01010101u * (uint32_t)w.flip;
  if (!w.gather) {
    for (int64_t four = 0; four * 4 < w.k; ++four) {
      const uint32_t codes = lanes.get(four) ^ flip;
      std::memcpy(out + four * 4, &codes, (size_t)(w.k - four * 4 < 4 ? w.k - four * 4 : 4));
    }
    return;
  }
  for (int64_t four = 0; four * 4 < w.kernel_k(); ++four) {
    const uint32_t codes = lanes.get(four) ^ flip;
    for (int i = 0; i < 4; ++i)
      if (const int32_t j = w.gather[four * 4 + i]; j >= 0) out[j] = (uint8_t)(codes >> (8 * i));
  }
}

// -------------------------------------------------------------------------------------------------------------------
// exact rounding

int64_t bits_of(double x) {
  int64_t u;
  std::memcpy(&u, &x, 8);
  return u;
}

void two_sum(double a, double b, double &s, double &t) {
  s = a + b;
  const double bb = s - a;
  t = (a - (s - bb)) + (b - bb);
}

// Dekker's product with Veltkamp's split: exact without a fused instruction, for magnitudes within
// 2^+-500.
void two_product(double a, double b, double &p, double &e) {
  p = a * b;
  const double ca = a * 134217729.0, cb = b * 134217729.0;
  const double ah = ca - (ca - a), bh = cb - (cb - b), al = a - ah, bl = b - bh;
  e = ((ah * bh - p) + ah * bl + al * bh) + al * bl;
}

// hi + lo rounded to odd: rounding it again to a narrower type is as exact as rounding the real
// number (Boldo and Melquiond 2008).
double to_odd(double hi, double lo) {
  if (lo == 0 || !std::isfinite(hi) || (bits_of(hi) & 1)) return hi;
  return std::nextafter(hi, lo > 0 ? std::numeric_limits<double>::infinity()
                                   : -std::numeric_limits<double>::infinity());
}

float odd_float(double x) {
  const float f = (float)x;
  if (!(std::isfinite(x)) || (double)f == x) return f;
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if (u & 1) return f;
  return std::nextafterf(f, x > (double)f ? std::numeric_limits<float>::infinity()
                                          : -std::numeric_limits<float>::infinity());
}

inline void store(float *out, double x) { *out = (float)x; }
struct Half {
  uint16_t u;
};
struct Bfloat {
  uint16_t u;
};
inline void store(Half *out, double x) { out->u = half_from_double(x); }
inline void store(Bfloat *out, double x) { out->u = bfloat_from_double(x); }

double half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  double v;
  if (exponent == 31)
    v = mantissa ? std::numeric_limits<double>::quiet_NaN()
                 : std::numeric_limits<double>::infinity();
  else
    v = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return h & 0x8000 ? -v : v;
}

struct EightBitScales {
  double e8m0[256], e4m3[256], ue4m3[256];
  EightBitScales() {
    for (int b = 0; b < 256; ++b) {
      e8m0[b] = b == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, b - 127);
      const int magnitude = b & 0x7f, exponent = magnitude >> 3, mantissa = magnitude & 7;
      const double v =
          std::ldexp(mantissa / 8.0 + (exponent > 0), (exponent > 1 ? exponent : 1) - 7);
      e4m3[b] = magnitude == 0x7f ? std::numeric_limits<double>::quiet_NaN() : b & 0x80 ? -v : v;
      ue4m3[b] = b == 0x7f ? 0.0 : v;
    }
  }
};
const EightBitScales kEightBit;

}  // namespace

uint16_t half_from_double(double x) {
  const float f = odd_float(x);
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (a < 0x38800000)
    return (uint16_t)(sign | (uint32_t)std::nearbyint(std::ldexp(std::fabs(f), 24)));
  return (uint16_t)(sign | (((a + 0xfff + (a >> 13 & 1)) >> 13) - (112u << 10)));
}

uint16_t bfloat_from_double(double x) {
  const float f = odd_float(x);
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float scaled_once(float x, double numerator, double denominator) {
  const double product = (double)x * numerator;
  if (denominator == 1.0) return (float)product;
  const double q = product / denominator;
  if (!std::isfinite(q) || !std::isfinite(denominator)) return (float)q;
  double p, e;
  two_product(q, denominator, p, e);
  const double rest = (product - p) - e;
  return (float)to_odd(q, denominator > 0 ? rest : -rest);
}

double scale_value(Scale kind, const void *base, int64_t at) {
  switch (kind) {
    case Scale::e8m0:
      return kEightBit.e8m0[((const uint8_t *)base)[at]];
    case Scale::e4m3:
      return kEightBit.e4m3[((const uint8_t *)base)[at]];
    case Scale::ue4m3:
      return kEightBit.ue4m3[((const uint8_t *)base)[at]];
    case Scale::f16:
      return half_value(((const uint16_t *)base)[at]);
    case Scale::bf16: {
      const uint32_t u = (uint32_t)((const uint16_t *)base)[at] << 16;
      float f;
      std::memcpy(&f, &u, 4);
      return f;
    }
    case Scale::f32:
      return ((const float *)base)[at];
    case Scale::u8:
      return ((const uint8_t *)base)[at];
    case Scale::i8:
      return ((const int8_t *)base)[at];
    default:
      return 1.0;
  }
}

void pack_panels(const Weight &w, const uint8_t *codes, int64_t row_bytes, uint8_t *const planes[4],
                 int64_t first, int64_t last) {
  const int64_t kk = w.kernel_k(), padded = w.padded_k();
  uint8_t *plain = (uint8_t *)std::malloc((size_t)(w.k + padded + 8));
  if (!plain) throw std::bad_alloc();
  uint8_t *ordered = plain + w.k;
  const uint32_t flip = 0x01010101u * (uint32_t)w.flip;
  for (int64_t row = first * kPanelRows; row < last * kPanelRows && row < w.n; ++row) {
    codes_of_row(codes + row * row_bytes, row_bytes, w.bits, w.k, plain);
    std::memset(ordered, 0, (size_t)padded);
    if (w.gather)
      for (int64_t j = 0; j < kk; ++j) ordered[j] = w.gather[j] >= 0 ? plain[w.gather[j]] : 0;
    else
      std::memcpy(ordered, plain, (size_t)w.k);
    const RowPlanes lanes = planes_of_row(w, row, planes);
    for (int64_t four = 0; four * 4 < padded; ++four) {
      uint32_t word;
      std::memcpy(&word, ordered + four * 4, 4);
      lanes.put(four, word ^ flip);
    }
  }
  std::free(plain);
}

void unpack_rows(const Weight &w, int64_t first, int64_t last, uint8_t *out, int64_t row_bytes) {
  uint8_t *plain = (uint8_t *)std::malloc((size_t)w.k + 8);
  if (!plain) throw std::bad_alloc();
  for (int64_t row = first; row < last; ++row) {
    codes_from_planes(w, row, plain);
    row_of_codes(plain, w.bits, w.k, out + (row - first) * row_bytes, row_bytes);
  }
  std::free(plain);
}

RowDecoder::RowDecoder(const Weight &w) : w_(w), codes_((uint8_t *)std::malloc((size_t)w.k + 8)) {
  if (!codes_) throw std::bad_alloc();
}

RowDecoder::~RowDecoder() { std::free(codes_); }

void RowDecoder::decode(int64_t row, Dtype dtype, void *out) {
  if (w_.panel_order)
    codes_from_planes(w_, row, codes_);
  else
    codes_of_row(w_.codes + row * w_.row_bytes, w_.row_bytes, w_.bits, w_.k, codes_);
  switch (dtype) {
    case Dtype::f32:
      return decode_as(row, (float *)out);
    case Dtype::f16:
      return decode_as(row, (Half *)out);
    case Dtype::bf16:
      return decode_as(row, (Bfloat *)out);
  }
}

template <class Out>
void RowDecoder::decode_as(int64_t row, Out *out) {
  const Weight &w = w_;
  // Index of a group's entry: [row][group], or [panel][group][16].
  auto entry = [&](int64_t g, int64_t per_row) {
    return w.panel_order ? (row / kPanelRows * per_row + g) * kPanelRows + row % kPanelRows
                         : row * per_row + g;
  };
  auto place = [&](int64_t j, int64_t g) -> int64_t {
    const int64_t flat = (w.first_row + row) * w.k + j;
    switch (w.grouping) {
      case Grouping::flat:
        return flat / w.group_size;
      case Grouping::strided:
        return flat % (w.total_rows * w.k / w.group_size);
      case Grouping::block:
        return (w.first_row + row) / w.group_rows * w.groups + g;
      default:
        return entry(g, w.groups);
    }
  };
  const bool by_element =
      w.grouping == Grouping::flat || w.grouping == Grouping::strided || w.group_index || w.gather;
  double numerator = 1.0, fixed_divisor = w.divisor;
  if (w.global_op == Global::multiply) numerator = w.global;
  if (w.global_op == Global::divide) fixed_divisor *= w.global;

  int64_t last_place = -1;
  double scale = 1.0, scale_low = 0.0, zero = 0.0, added = 0.0, divisor = fixed_divisor;
  bool float_zero = w.float_zeros != nullptr, has_added = w.biases || w.mins,
       divides = fixed_divisor != 1.0 || w.inverse;
  auto load = [&](int64_t at, int64_t g) {
    scale_low = 0.0;
    if (w.scale == Scale::nested) {
      double p, e, t;
      two_product(w.nested_map[((const uint8_t *)w.scales)[at]], w.nested_absmax[at / 256], p, e);
      two_sum(p, w.nested_offset, scale, t);
      scale_low = t + e;
    } else {
      scale = w.scale == Scale::none ? 1.0 : scale_value(w.scale, w.scales, at);
    }
    if (w.super_scales)
      scale *= scale_value(Scale::f16, w.super_scales, entry(g / w.groups_per_super, w.supers));
    if (w.zeros) zero = w.zeros[at];
    if (float_zero) zero = scale_value(w.scale, w.float_zeros, at);
    if (w.biases) added = scale_value(w.scale, w.biases, at);
    if (w.mins)
      added = -(w.mins[at] *
                scale_value(Scale::f16, w.super_mins, entry(g / w.groups_per_super, w.supers)));
    if (w.inverse) divisor = fixed_divisor * scale, scale = 1.0;
    if (!float_zero && w.scale != Scale::nested && numerator != 1.0) scale *= numerator;
  };
  // Act-order in panel order: the group of an input is found through the inverse of the gather.
  auto group_of = [&](int64_t j) -> int64_t {
    return w.group_index ? w.group_index[j] : j / w.group_size;
  };
  const bool simple = !float_zero && !has_added && !divides && w.scale != Scale::nested;
  for (int64_t j = 0; j < w.k; ++j) {
    if (by_element || last_place < 0 || j % w.group_size == 0) {
      const int64_t g = group_of(j), at = place(j, g);
      if (at != last_place) load(at, g), last_place = at;
    }
    const double element = w.values[codes_[j]];
    if (simple) {
      store(out + j, (element - zero) * scale);
      continue;
    }
    if (float_zero || w.scale == Scale::nested) {
      // Up to three terms: (high + low of element - zero) * scale, or element * (high + low of
      // scale).
      double hi = element, lo = 0, p, e;
      if (float_zero) two_sum(element, -zero, hi, lo);
      two_product(hi, scale, p, e);
      const double small = float_zero ? lo * scale : element * scale_low;
      double s, t, u, v;
      if (!std::isfinite(p)) {
        store(out + j, p);
        continue;
      }
      two_sum(e, small, t, v);
      two_sum(p, t, s, u);
      store(out + j, to_odd(s, u != 0 ? u : v));
      continue;
    }
    const double product = (element - zero) * scale;
    if (divides) {
      const double q = product / divisor;
      if (!std::isfinite(q) || !std::isfinite(divisor)) {
        store(out + j, q);
        continue;
      }
      double p, e;
      two_product(q, divisor, p, e);
      const double rest = (product - p) - e;
      store(out + j, to_odd(q, divisor > 0 ? rest : -rest));
      continue;
    }
    double s, t;
    two_sum(product, added, s, t);
    store(out + j, std::isfinite(s) ? to_odd(s, t) : s);
  }
}

}  // namespace halfbyte
