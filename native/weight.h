// A packed weight as the kernels see it: plain numbers and addresses, no ownership.
//
// Panel order: rows are taken sixteen at a time (a panel), inputs in kernel order k' (see below),
// and a panel's codes are stored in up to four bit planes of 64-byte units. A unit has sixteen
// 32-bit lanes, one a row; byte b of a lane holds field f for input 4f + b of the unit:
//
//     plane   bits of the code   fields a byte   inputs a unit
//     8       all                1               4
//     4       low 4              2               8
//     2       next 2             4               16
//     1       next 1             8               32
//
// so that shifting a whole vector by a constant gives four consecutive inputs of sixteen rows, one
// byte each: the operand of every instruction set's dot product. Codes of 3, 5, 6 and 7
// bits take planes 2+1, 4+1, 4+2 and 4+2+1 and keep their size. Parts with one entry for each
// group are [panel][group][16].
//
// Kernel order k': every group is padded to `group` inputs (a multiple of 8), so k' = groups *
// group; `gather[k']` is the input at position k', or -1 for padding. Act-order is such a
// gather.
#pragma once

#include <cstdint>

namespace halfbyte {

constexpr int kPanelRows = 16;
constexpr int kUnitBytes = 64;
constexpr int kChunk = 32;  // inputs in which all planes of all widths have whole units

enum class Element : int { integer = 0, table = 1, minifloat = 2 };
enum class Scale : int {
  none = 0,
  e8m0 = 1,
  e4m3 = 2,
  ue4m3 = 3,
  f16 = 4,
  bf16 = 5,
  f32 = 6,
  u8 = 7,
  i8 = 8,
  nested = 9
};
enum class Dtype : int { f32 = 0, f16 = 1, bf16 = 2 };
enum class Grouping : int { row = 0, flat = 1, strided = 2, block = 3 };
enum class Global : int { none = 0, multiply = 1, divide = 2 };

struct Weight {
  int64_t n = 0, k = 0;

  // Codes. Panel order uses the planes, canonical order `codes` with rows of `row_bytes`.
  bool panel_order = false;
  int bits = 0;
  const uint8_t *plane8 = nullptr, *plane4 = nullptr, *plane2 = nullptr, *plane1 = nullptr;
  const uint8_t *codes = nullptr;
  int64_t row_bytes = 0;
  int flip = 0;  // codes in the planes are stored code ^ flip (two's complement made offset binary)

  // Elements. `values` has 2^bits exact doubles by stored code and serves every decoder.
  Element element = Element::integer;
  const double *values = nullptr;
  int offset = 0;         // integer: element = (code - offset) * unit
  bool integral = false;  // every element is a whole number of `unit` that fits in 8 bits
  int table_low = 0;      // integral table: minus its smallest entry, in units
  double unit = 1.0;
  int mantissa_bits = 0, exponent_bias = 0,
      last_finite = 0;  // minifloat; last_finite 0: every code is a number

  // Groups.
  int64_t groups = 0, group = 0;  // of kernel order: padded size
  int64_t group_size = 0;         // of the format: unpadded
  int64_t seg = 0;                // inputs summed before a scale is applied; divides group
  int64_t span =
      0;  // int8 class: inputs one scale of the activations covers, whole segments; 0: one segment
  const int32_t *gather =
      nullptr;  // [groups * group], or null when kernel order is input order plus a zero tail
  const int32_t *group_index = nullptr;  // canonical order: [k]

  // Scales and terms.
  Scale scale = Scale::none;
  const void *scales = nullptr;
  const int16_t *zeros = nullptr;
  const void *float_zeros = nullptr;  // same dtype as scales
  const void *biases = nullptr;       // same dtype as scales
  const uint8_t *mins = nullptr;
  const uint16_t *super_scales = nullptr, *super_mins = nullptr;
  int64_t groups_per_super = 0, supers = 0;
  Global global_op = Global::none;
  double global = 1.0, divisor = 1.0;
  bool inverse = false;

  // Canonical order only.
  Grouping grouping = Grouping::row;
  int64_t group_rows = 1, first_row = 0, total_rows = 0;
  const float *nested_map = nullptr, *nested_absmax = nullptr;
  double nested_offset = 0.0;

  int64_t spanned() const { return span ? span : seg; }
  int64_t panels() const { return (n + kPanelRows - 1) / kPanelRows; }
  int64_t kernel_k() const { return groups * group; }
  int64_t padded_k() const { return (kernel_k() + kChunk - 1) / kChunk * kChunk; }
};

}  // namespace halfbyte
