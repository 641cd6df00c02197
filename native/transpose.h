// Transposes of matrices of packed codes: from a checkpoint's order along n to one along k, and
// back.
#pragma once

#include <cstdint>

namespace halfbyte {

// out[c][r] = in[r][c] for elements of 1, 2, 4 or 8 bytes, both in C order.
void transpose(const void *in, int64_t rows, int64_t columns, int size, void *out);

// The same for elements of half a byte. A row begins on a byte, low nibble first, and takes
// ceil(elements / 2) bytes; the padding nibble of an odd row is zero in the result.
//
//   in_order, out_order  null, or a permutation of 0 to 7, for sides that are multiples of eight:
//   row 8 i + j of the matrix is
//                        stored as row 8 i + order[j] of `in` (of `out`)
void transpose_nibbles(const uint8_t *in, int64_t rows, int64_t columns, const uint8_t *in_order,
                       const uint8_t *out_order, uint8_t *out);

}  // namespace halfbyte
