// y = x * transpose(w) + bias, and the rows of w, for any weight, on the instruction set in use.
#pragma once

#include "weight.h"

namespace halfbyte {

// int8: one scale of the activations for each span of the weight. int8_token: one for all inputs of
// a token where the weight has one group a row of at most kLongestTokenRow inputs; else as int8.
enum class Activations : int { exact = 0, int8 = 1, int8_token = 2 };

// Sums of products of a byte and a 7-bit number over so many inputs fit in 32 bits.
constexpr int64_t kLongestTokenRow = 65536;

struct Matrix {
  const void *data = nullptr;
  Dtype dtype = Dtype::f32;
  int64_t rows = 0, row_stride = 0, column_stride = 1;  // in elements
};

// Results do not depend on the number of threads or on which rows share a call: a row's sums run
// over each segment in order, then over the segments in order, whatever the tile. out is
// [x.rows][w.n], contiguous, of out_dtype; bias is float32 or null.
void linear(const Weight &w, const Matrix &x, const float *bias, Activations activations,
            Dtype out_dtype, void *out);

// Rows ids[0 .. count - 1] of w, decoded exactly: out [count][k].
void embedding(const Weight &w, const int64_t *ids, int64_t count, Dtype dtype, void *out);

// Rows first .. last: out [last - first][k].
void dequantize(const Weight &w, int64_t first, int64_t last, Dtype dtype, void *out);

void pack(const Weight &w, const uint8_t *codes, int64_t row_bytes, uint8_t *const planes[4]);
void unpack(const Weight &w, uint8_t *out, int64_t row_bytes);

}  // namespace halfbyte
