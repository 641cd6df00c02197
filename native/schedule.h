// How one call of `linear` is cut into tiles: the choice among schedules by weight, tokens,
// instruction set and core.
#pragma once

#include "dispatch.h"

namespace halfbyte {

constexpr int kFusedPanels = 4;  // panels a fused task takes

struct Schedule {
  bool fused;          // codes are decoded in registers by the tiles, not into a buffer first
  bool whole_rows;     // a block is all inputs: there is no buffer whose size would limit it
  bool one_panel;      // tiles take one panel at a time, one stream from memory
  int matrix_tokens;   // in tiles of kMatrixTokens, which come first; 0 without such products
  int tile_tokens;     // of the largest other tile
  int prefetch_bytes;  // distance at which fused tiles prefetch codes; 0: they do not
  int panels;          // a task takes
  int64_t block;       // inputs of a block
};

// `inputs` of kernel order in segments of `seg` and spans of `span`; `tokens` at most kTokens
// (linear.cpp).
Schedule schedule_for(const Kernels &ks, const Core &core, const Weight &w, bool int8,
                      int64_t tokens, int64_t inputs, int64_t span);

}  // namespace halfbyte
