#include "transpose.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace halfbyte {
namespace {

// Vectors of 16 bytes and the interleaving of two of them, low or high halves, in elements of
// `size` bytes: on every x86-64 and AArch64.
#if defined(__SSE2__) || defined(_M_X64)
using Vector = __m128i;
inline Vector load(const uint8_t *p) { return _mm_load_si128((const __m128i *)p); }
inline void store(uint8_t *p, Vector v) { _mm_store_si128((__m128i *)p, v); }
template <int size>
inline Vector low_halves(Vector a, Vector b) {
  return size == 1   ? _mm_unpacklo_epi8(a, b)
         : size == 2 ? _mm_unpacklo_epi16(a, b)
         : size == 4 ? _mm_unpacklo_epi32(a, b)
                     : _mm_unpacklo_epi64(a, b);
}
template <int size>
inline Vector high_halves(Vector a, Vector b) {
  return size == 1   ? _mm_unpackhi_epi8(a, b)
         : size == 2 ? _mm_unpackhi_epi16(a, b)
         : size == 4 ? _mm_unpackhi_epi32(a, b)
                     : _mm_unpackhi_epi64(a, b);
}
inline Vector low_nibbles(Vector a, Vector b) {  // of a, with those of b above them
  const Vector low = _mm_set1_epi8(0x0F);
  return _mm_or_si128(_mm_and_si128(a, low), _mm_andnot_si128(low, _mm_slli_epi16(b, 4)));
}
inline Vector high_nibbles(Vector a, Vector b) {
  const Vector low = _mm_set1_epi8(0x0F);
  return _mm_or_si128(_mm_and_si128(_mm_srli_epi16(a, 4), low), _mm_andnot_si128(low, b));
}
#elif defined(__ARM_NEON)
using Vector = uint8x16_t;
inline Vector load(const uint8_t *p) { return vld1q_u8(p); }
inline void store(uint8_t *p, Vector v) { vst1q_u8(p, v); }
template <int size>
inline Vector low_halves(Vector a, Vector b) {
  if (size == 1) return vzip1q_u8(a, b);
  if (size == 2)
    return vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
  if (size == 4)
    return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
  return vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}
template <int size>
inline Vector high_halves(Vector a, Vector b) {
  if (size == 1) return vzip2q_u8(a, b);
  if (size == 2)
    return vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
  if (size == 4)
    return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
  return vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}
inline Vector low_nibbles(Vector a, Vector b) { return vsliq_n_u8(a, b, 4); }
inline Vector high_nibbles(Vector a, Vector b) { return vsriq_n_u8(b, a, 4); }
#else
struct Vector {
  uint8_t bytes[16];
};
inline Vector load(const uint8_t *p) {
  Vector v;
  std::memcpy(v.bytes, p, 16);
  return v;
}
inline void store(uint8_t *p, Vector v) { std::memcpy(p, v.bytes, 16); }
template <int size>
inline Vector halves(const uint8_t *a, const uint8_t *b) {
  Vector v;
  for (int i = 0; i < 8 / size; ++i) {
    std::memcpy(v.bytes + 2 * i * size, a + i * size, size);
    std::memcpy(v.bytes + (2 * i + 1) * size, b + i * size, size);
  }
  return v;
}
template <int size>
inline Vector low_halves(Vector a, Vector b) {
  return halves<size>(a.bytes, b.bytes);
}
template <int size>
inline Vector high_halves(Vector a, Vector b) {
  return halves<size>(a.bytes + 8, b.bytes + 8);
}
inline Vector low_nibbles(Vector a, Vector b) {
  for (int i = 0; i < 16; ++i) a.bytes[i] = (uint8_t)((a.bytes[i] & 0x0F) | b.bytes[i] << 4);
  return a;
}
inline Vector high_nibbles(Vector a, Vector b) {
  for (int i = 0; i < 16; ++i) a.bytes[i] = (uint8_t)(a.bytes[i] >> 4 | (b.bytes[i] & 0xF0));
  return a;
}
#endif

// Both sides are processed in whole cache lines: each is read once and written once. Lines of a
// tile are a matrix row apart, too far for the hardware's prefetcher, so those of the next tile are
// prefetched; without that it takes three times as long.
constexpr int64_t kLine = 64;

inline void prefetch_read(const void *line) {
#if defined(_MSC_VER) && defined(_M_X64)
  _mm_prefetch((const char *)line, _MM_HINT_T0);
#elif !defined(_MSC_VER)
  __builtin_prefetch(line);
#endif
}
inline void prefetch_write(const void *line) {
#if defined(_MSC_VER) && defined(_M_X64)
  _mm_prefetch((const char *)line, _MM_HINT_T0);
#elif !defined(_MSC_VER)
  __builtin_prefetch(line, 1);
#endif
}

template <int rows>
struct Tile {
  alignas(64) uint8_t at[rows][kLine];
};

// Row i of the tile is row order[i % 8] of its eight; rows and columns outside the matrix are zero.
template <int rows>
void read(Tile<rows> &tile, const uint8_t *in, int64_t stride, int64_t high, int64_t wide,
          const uint8_t *order) {
  if (high < rows || wide < kLine) std::memset(&tile, 0, sizeof tile);
  for (int64_t i = 0; i < std::min<int64_t>(rows, high); ++i) {
    const uint8_t *line = in + (order ? (i & ~7) + order[i & 7] : i) * stride;
    if (i + rows < high) prefetch_read(line + rows * stride);
    if (wide >= kLine)
      std::memcpy(tile.at[i], line, kLine);
    else
      std::memcpy(tile.at[i], line, wide);
  }
}

template <int rows>
void write(const Tile<rows> &tile, uint8_t *out, int64_t stride, int64_t high, int64_t wide,
           const uint8_t *order) {
  for (int64_t i = 0; i < std::min<int64_t>(rows, high); ++i) {
    uint8_t *line = out + (order ? (i & ~7) + order[i & 7] : i) * stride;
    if (wide > kLine) prefetch_write(line + kLine);
    if (wide >= kLine)
      std::memcpy(line, tile.at[i], kLine);
    else
      std::memcpy(line, tile.at[i], wide);
  }
}

// Transposes a tile of vectors: interleaving the first half of the rows with the second moves the
// top bit of an element's row number to the bottom of its column number and the top bit of its
// column number to its row number; log2(side) rounds exchange the two numbers.
template <int size>
inline void transpose_vectors(Vector (&v)[16 / size]) {
  constexpr int side = 16 / size;
  for (int round = 1; round < side; round *= 2) {
    Vector next[side];
    for (int i = 0; i < side / 2; ++i) {
      next[2 * i] = low_halves<size>(v[i], v[i + side / 2]);
      next[2 * i + 1] = high_halves<size>(v[i], v[i + side / 2]);
    }
    for (int i = 0; i < side; ++i) v[i] = next[i];
  }
}

template <int size>
void transpose_elements(const uint8_t *in, int64_t rows, int64_t columns, uint8_t *out) {
  constexpr int side = kLine / size, part = 16 / size;
  Tile<side> from, to;
  for (int64_t c = 0; c < columns; c += side)
    for (int64_t r = 0; r < rows; r += side) {
      read(from, in + (r * columns + c) * size, columns * size, rows - r, (columns - c) * size,
           nullptr);
      for (int i = 0; i < side; i += part)
        for (int j = 0; j < side; j += part) {
          Vector v[part];
          for (int p = 0; p < part; ++p) v[p] = load(from.at[i + p] + j * size);
          transpose_vectors<size>(v);
          for (int p = 0; p < part; ++p) store(to.at[j + p] + i * size, v[p]);
        }
      write(to, out + (c * rows + r) * size, rows * size, columns - c, (rows - r) * size, nullptr);
    }
}

}  // namespace

void transpose(const void *in, int64_t rows, int64_t columns, int size, void *out) {
  const uint8_t *from = (const uint8_t *)in;
  uint8_t *to = (uint8_t *)out;
  switch (size) {
    case 1:
      return transpose_elements<1>(from, rows, columns, to);
    case 2:
      return transpose_elements<2>(from, rows, columns, to);
    case 4:
      return transpose_elements<4>(from, rows, columns, to);
    default:
      return transpose_elements<8>(from, rows, columns, to);
  }
}

void transpose_nibbles(const uint8_t *in, int64_t rows, int64_t columns, const uint8_t *in_order,
                       const uint8_t *out_order, uint8_t *out) {
  constexpr int side = 2 * kLine;
  const int64_t in_bytes = (columns + 1) / 2, out_bytes = (rows + 1) / 2;
  Tile<side> from, to;
  for (int64_t c = 0; c < columns; c += side)
    for (int64_t r = 0; r < rows; r += side) {
      read(from, in + r * in_bytes + c / 2, in_bytes, rows - r, in_bytes - c / 2, in_order);
      // Two rows give one row of their low nibbles and one of their high nibbles, whose bytes are
      // then transposed.
      for (int i = 0; i < side; i += 32)
        for (int j = 0; j < kLine; j += 16) {
          Vector even[16], odd[16];
          for (int p = 0; p < 16; ++p) {
            const Vector a = load(from.at[i + 2 * p] + j), b = load(from.at[i + 2 * p + 1] + j);
            even[p] = low_nibbles(a, b), odd[p] = high_nibbles(a, b);
          }
          transpose_vectors<1>(even);
          transpose_vectors<1>(odd);
          for (int p = 0; p < 16; ++p) {
            store(to.at[2 * (j + p)] + i / 2, even[p]);
            store(to.at[2 * (j + p) + 1] + i / 2, odd[p]);
          }
        }
      write(to, out + c * out_bytes + r / 2, out_bytes, columns - c, out_bytes - r / 2, out_order);
    }
}

}  // namespace halfbyte
