// Rows of a weight as exact numbers, and the bijection between canonical rows and bit planes.
#pragma once

#include "weight.h"

namespace halfbyte {

// Canonical codes [n][row_bytes] -> the planes of `w` (addresses in `planes`, 8, 4, 2 and 1
// bits), for panels first
// .. last.
void pack_panels(const Weight &w, const uint8_t *codes, int64_t row_bytes, uint8_t *const planes[4],
                 int64_t first, int64_t last);

// The inverse: canonical codes of rows first .. last into out [last - first][row_bytes], padding
// bits zero.
void unpack_rows(const Weight &w, int64_t first, int64_t last, uint8_t *out, int64_t row_bytes);

// Row `row` in input order, exact values rounded once, to nearest even. `scratch` holds k bytes for
// the codes and grows as needed.
class RowDecoder {
 public:
  explicit RowDecoder(const Weight &w);
  ~RowDecoder();
  RowDecoder(const RowDecoder &) = delete;
  void decode(int64_t row, Dtype dtype, void *out);

 private:
  template <class Out>
  void decode_as(int64_t row, Out *out);
  const Weight &w_;
  uint8_t *codes_;
};

double scale_value(Scale kind, const void *base, int64_t at);
uint16_t half_from_double(double x);
uint16_t bfloat_from_double(double x);
// x * numerator / denominator, rounded once to float32; the product must be exact in float64.
float scaled_once(float x, double numerator, double denominator);

}  // namespace halfbyte
