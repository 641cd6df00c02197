// The table of functions an instruction set provides: one constant of this type a translation unit;
// `dispatch.cpp` picks one.
#pragma once

#include "functions.h"
#include "tiles.h"
#include "weight.h"

namespace halfbyte {

// One block of inputs of a product: `panels` panels from `panel` on against `tokens` rows of
// activations, added to `total`.
//
// Activations are stored in tiles of tokens (`tile_tokens`), a tile as [k/4][token][4] bytes or
// [k][token] floats, so that the inner loops walk one address.
struct Block {
  const Weight *weight;
  int64_t panel, k0;  // inputs k0 .. k0 + segments * seg of kernel order
  const void *w;  // decoded codes: u8 [k/4][16][4] or f32 [k][16] a panel; null: the tile decodes
                  // from the planes
  int64_t w_stride;                      // bytes from panel to panel
  const float *scales, *zeros, *biases;  // [segment][16] a panel; zeros and biases may be null
  int64_t s_stride;                      // floats from panel to panel
  float unit;                            // factor of scales that are read from the weight itself
  int segments, seg, panels, tokens;
  int span;              // int8 class: segments under one scale of the activations
  const void *x;         // int8 or f32, tile after tile
  int largest;           // tokens of the largest tile x was laid out for
  int64_t x_stride;      // elements a token takes
  const float *x_scale;  // int8 class: one a segment and token, tile after tile, a tile as [segment
                         // of all inputs][token]
  const float *x_sum;    // in the same order: sum of a segment's activations; where a span has
                         // several segments, of the rounded ones in units of their scale
  const int32_t
      *x_start;  // int8 class: minus buffer offset times the sum of the integer activations
  int64_t first_segment, all_segments;  // index of the block's first segment; segments of a token
  float *total;                         // [token][panels * 16]
  int64_t total_stride;
  int widest;          // int8 class: largest stored byte; decides how many products fit in 16 bits
  int prefetch_bytes;  // distance at which fused tiles prefetch codes; 0: they do not
  bool one_panel;      // few tokens take one panel at a time: one stream from memory
  // The next block's codes, which tiles from a buffer prefetch a little at a time; no inputs:
  // nothing.
  int64_t next_panel, next_k0, next_inputs;

  // Index in x_scale, x_sum and x_start of the block's first segment, for the tile of `tile` tokens
  // from t0 on.
  int64_t entry(int64_t t0, int tile) const { return t0 * all_segments + first_segment * tile; }

  // The block without its first `count` tokens, which are whole tiles of 8-bit activations.
  Block after(int count) const {
    Block rest = *this;
    rest.tokens -= count, rest.next_inputs = 0;
    rest.x = (const int8_t *)x + count * x_stride;
    rest.x_scale += count * all_segments, rest.x_sum += count * all_segments;
    rest.x_start += count * all_segments;
    rest.total += count * total_stride;
    return rest;
  }
};

// Fused tiles of up to this many tokens read scales from the weight itself; larger ones find them
// in a buffer.
constexpr int kFewTokens = 4;

// Distance at which codes are prefetched, in bytes, unless a core has its own.
constexpr int kPrefetchBytes = 2048;

// Tokens of a tile of an instruction set with products of matrices (AMX, i8mm).
constexpr int kMatrixTokens = 16;

// Tokens of the next tile when `left` remain: the largest tile, then 8, 4, 2, 1.
static inline int tile_tokens(int64_t left, int largest) {
  if (left >= largest) return largest;
  return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

// Prefetches a share of the next block's codes while tokens t0 .. t1 of this block are multiplied,
// so that memory is read during the products and decoding finds the codes in the cache.
static inline void prefetch_next(const Block &b, int t0, int t1) {
  if (!b.next_inputs) return;
  const Weight &w = *b.weight;
  const auto prefetch = [&](const uint8_t *plane, int bits) {
    if (!plane) return;
    const int64_t bytes = b.next_inputs * bits * 2;  // of a panel
    for (int i = 0; i < b.panels; ++i) {
      const uint8_t *from = plane + ((b.next_panel + i) * w.padded_k() + b.next_k0) * bits * 2;
      for (int64_t at = bytes * t0 / b.tokens / kUnitBytes * kUnitBytes; at < bytes * t1 / b.tokens;
           at += kUnitBytes)
        __builtin_prefetch(from + at);
    }
  };
  prefetch(w.plane8, 8), prefetch(w.plane4, 4), prefetch(w.plane2, 2), prefetch(w.plane1, 1);
}

enum class Probe : int { read, fma, dot };  // the rates `halfbyte bench` compares products with

// What an instruction set with products of matrices of bytes adds to another set's table
// (`dispatch.cpp`), for tiles of kMatrixTokens in the int8 class.
struct MatrixKernels {
  // Multiplies the first `tokens` of a decoded block, whole tiles. `starts`: x_start is not all
  // zero.
  void (*multiply)(const Block &, int tokens, bool starts);
  // A tile's activations are stored as [input / together][token][together]; 0: [token][input of the
  // block].
  int together;
  int shortest_segment;  // shorter segments are multiplied by the other set's tiles
};

struct Kernels {
  const char *name;
  bool unsigned_bytes;   // int8 class: the weight operand of the dot product is unsigned
  bool integer_tables;   // exact class: tables of small integers are decoded as integers, in units
                         // of `unit`
  bool one_panel_tiles;  // tiles of one panel are compiled
  Tiles i8, f32;
  // Codes of one panel, inputs k0 .. k0 + count of kernel order (multiples of 32), as bytes
  // [count/4][16][4]: element / unit + buffer offset.
  void (*decode_u8)(const Weight &, int64_t panel, int64_t k0, int64_t count, uint8_t *out);
  // The same as float elements [count][16].
  void (*decode_f32)(const Weight &, int64_t panel, int64_t k0, int64_t count, float *out);
  // Scales, zero points and added terms of `count` segments from s0, as float [count][16], scales
  // times `unit`.
  void (*decode_scales)(const Weight &, int64_t panel, int64_t s0, int64_t count, float unit,
                        float *s, float *z, float *b);
  void (*block_i8)(const Block &);
  void (*block_f32)(const Block &);
  // True where the tiles can decode the weight's planes themselves (`Block::w` is then null).
  bool (*fuses_i8)(const Weight &);
  bool (*fuses_f32)(const Weight &);
  // x [count] to int8; returns the scale.
  float (*quantize)(const float *x, int64_t count, int8_t *q);
  // Sums in an order that does not depend on the instruction set.
  float (*sum)(const float *x, int64_t count);
  int32_t (*sum_i8)(const int8_t *q, int64_t count);
  void (*from_f16)(const uint16_t *x, int64_t count, float *out);
  void (*from_bf16)(const uint16_t *x, int64_t count, float *out);
  void (*to_f16)(const float *x, int64_t count, uint16_t *out);
  void (*to_bf16)(const float *x, int64_t count, uint16_t *out);
  // y = f(gate) * up; y may be either.
  void (*gate)(Gate f, const float *gate, const float *up, int64_t count, float *y);
  // q [heads][d], k [rows][d]: out[h * stride + t] = q[h] . k[t]. Scores to exp((score - peak) *
  // scale), peak the largest, and their sum. And out [heads][d] = sum over t of p[h * stride + t]
  // v[t].
  void (*dots)(const float *q, int64_t heads, const float *k, int64_t rows, int64_t d, float *out,
               int64_t stride);
  void (*weigh)(float *line, int64_t count, float scale, float *peak, float *sum);
  void (*mix)(const float *p, int64_t stride, int64_t heads, const float *v, int64_t rows,
              int64_t d, float *out);
  double (*probe)(Probe kind, const uint8_t *data, int64_t count);  // probes.inl
  MatrixKernels matrix;  // without products of matrices `multiply` is null
};

// Added to element / unit in the bytes `decode_u8` writes, so that they suit the dot product's
// operand: non-negative where it is unsigned, or where they then stay small enough to be either.
static inline int buffer_offset(const Weight &w, bool unsigned_bytes) {
  if (w.element == Element::integer)
    return w.bits == 8 && !unsigned_bytes ? w.offset - 128 : w.offset;
  return unsigned_bytes || w.table_low <= 32 ? w.table_low : 0;
}

// Largest byte `decode_u8` writes; 255 where bytes are signed.
static inline int widest_byte(const Weight &w, bool unsigned_bytes) {
  if (w.element == Element::integer) return w.bits == 8 ? 255 : (1 << w.bits) - 1;
  return unsigned_bytes || w.table_low > 32 ? 255 : 2 * w.table_low;
}

extern const Kernels kernels_scalar;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#if defined(HALFBYTE_AMX)
extern const MatrixKernels kernels_amx;
#endif
#endif
#if defined(__aarch64__)
extern const Kernels kernels_neon;
#if defined(HALFBYTE_I8MM)
extern const MatrixKernels kernels_i8mm;
#endif
#endif

}  // namespace halfbyte
