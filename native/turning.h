// Matrices of packed codes, rows to columns: what a checkpoint's order along n needs to become one along k, and back.
#pragma once

#include <cstdint>

namespace halfbyte {

// out[c][r] = in[r][c] for elements of 1, 2, 4 or 8 bytes, both in C order.
void turn(const void *in, int64_t rows, int64_t columns, int size, void *out);

// The same for elements of half a byte. A row begins on a byte, low nibble first, and takes ceil(elements / 2) bytes; the
// nibble after an odd row comes out zero.
//
//   in_order, out_order  0, or eight numbers, 0 to 7 each once, for sides of whole eights: row 8 i + j of `in` (of `out`) is
//                        the one that lies at 8 i + order[j]
void turn_nibbles(const uint8_t *in, int64_t rows, int64_t columns, const uint8_t *in_order, const uint8_t *out_order, uint8_t *out);

}  // namespace halfbyte
