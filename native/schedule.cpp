#include "schedule.h"

namespace halfbyte {
namespace {

constexpr int64_t kBlockBytes =
    16384;  // decoded at a time: with its activations it stays in the first-level cache
// From this row length on tiles of 8-bit codes take four panels in the exact class: each stream is
// then long enough for the prefetcher, 10 % faster.
constexpr int64_t kLongRow = 2048;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A multiple of the span and of 32, near `target`.
int64_t block_inputs(int64_t span, int64_t target) {
  int64_t step = span;
  while (step % kChunk) step += span;
  return round_up(target, step);
}

}  // namespace

Schedule schedule_for(const Kernels &ks, const Core &core, const Weight &w, bool int8,
                      int64_t tokens, int64_t inputs, int64_t span) {
  const Tiles &tiles = int8 ? ks.i8 : ks.f32;
  const bool few = tokens <= kFewTokens, eight_bits = w.bits == 8;
  const bool matrix =
      int8 && ks.matrix.multiply && tokens >= kMatrixTokens && w.seg >= ks.matrix.shortest_segment;
  Schedule s{};
  s.matrix_tokens = matrix ? (int)(tokens / kMatrixTokens * kMatrixTokens) : 0;
  // A vector of 6-bit codes takes two planes and four operations, whose registers are not free
  // beside the sums of six tokens.
  const bool core_fuses = core.fused_tokens && !(int8 && w.bits == 6);
  const int fused_tokens = core_fuses ? core.fused_tokens : tiles.fused_tokens;
  s.fused =
      w.panel_order && !matrix && tokens <= fused_tokens && (int8 ? ks.fuses_i8 : ks.fuses_f32)(w);
  s.whole_rows = s.fused && w.panels() >= kFusedPanels;
  s.panels = !w.panel_order ? 1 : s.fused ? kFusedPanels : tiles.panels;

  const int64_t item = int8 ? 1 : 4;
  s.block = s.whole_rows ? round_up(inputs, kChunk)
                         : block_inputs(span, kBlockBytes / kPanelRows / (tiles.panels * item));

  const bool side_by_side = !int8 && (tokens > 1 || (eight_bits && inputs > kLongRow));
  s.one_panel = core.one_panel_tokens >= tokens && !side_by_side;

  const bool prefetches = int8
                              ? !few || (tokens == kFewTokens && !eight_bits) || core.prefetch_bytes
                              : few || core.fused_tokens;
  const bool core_distance = core.prefetch_bytes && (s.one_panel || (int8 && eight_bits));
  s.prefetch_bytes = !prefetches ? 0 : core_distance ? core.prefetch_bytes : kPrefetchBytes;

  // Where only few tokens are fused, tiles have four tokens; panels of such a call that are decoded
  // into the buffer use the same order of activations.
  if (s.fused && fused_tokens < tiles.tokens)
    s.tile_tokens = 4;
  else if (int8 && tokens >= core.alternative_tile_from)
    s.tile_tokens = tiles.alternative;
  else
    s.tile_tokens = tiles.tokens;
  return s;
}

}  // namespace halfbyte
