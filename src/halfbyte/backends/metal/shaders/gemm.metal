// Tiled products that decode through threadgroup memory: the baseline, the double-buffered and the striped schedule.

namespace halfbyte {

// One tile of x and of w at a time, two barriers a step of 32 inputs. tiles: 2 x 64 x 36 floats, 18,432 bytes.
template <typename W, typename T, int op>
inline void gemm_single_stage(W w, const device T* x, ulong x_stride, const device float* bias, bool has_bias, float factor,
                              float divisor, device T* y, uint m, uint n, threadgroup float* tiles, uint2 group,
                              uint simdgroup, uint lane) {
  threadgroup float* x_tile = tiles;
  threadgroup float* w_tile = tiles + TILE_M * (32 + TILE_PAD);
  const uint m0 = group.y * TILE_M, n0 = group.x * TILE_N, thread_index = simdgroup * 32 + lane;
  accumulators sum;
  clear(sum);
  for (uint k = 0; k < 8 * w.units; k += 32) {
    load_x_tile<T, 32>(x, x_stride, m, w.units, m0, k, x_tile, thread_index);
    load_w_tile<W, 32>(w, n, n0, k, w_tile, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_tiles<32>(x_tile, w_tile, sum, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store_tile<T, op>(sum, tiles, y, m, n, m0, n0, bias, has_bias, factor, divisor, simdgroup, lane);
}

// Two buffers of 16 inputs each: the next tile is loaded and decoded while this one is multiplied, one barrier a step.
// tiles: 2 x 2 x 64 x 20 floats, 20,480 bytes.
template <typename W, typename T, int op>
inline void gemm_double_buffered(W w, const device T* x, ulong x_stride, const device float* bias, bool has_bias, float factor,
                                 float divisor, device T* y, uint m, uint n, threadgroup float* tiles, uint2 group,
                                 uint simdgroup, uint lane) {
  const uint half_tile = TILE_M * (16 + TILE_PAD), buffer = 2 * half_tile;
  const uint m0 = group.y * TILE_M, n0 = group.x * TILE_N, thread_index = simdgroup * 32 + lane;
  accumulators sum;
  clear(sum);
  load_x_tile<T, 16>(x, x_stride, m, w.units, m0, 0, tiles, thread_index);
  load_w_tile<W, 16>(w, n, n0, 0, tiles + half_tile, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint now = 0;
  for (uint k = 0; k < 8 * w.units; k += 16) {
    threadgroup float* next = tiles + (1 - now) * buffer;
    if (k + 16 < 8 * w.units) {
      load_x_tile<T, 16>(x, x_stride, m, w.units, m0, k + 16, next, thread_index);
      load_w_tile<W, 16>(w, n, n0, k + 16, next + half_tile, thread_index);
    }
    multiply_tiles<16>(tiles + now * buffer, tiles + now * buffer + half_tile, sum, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    now = 1 - now;
  }
  store_tile<T, op>(sum, tiles, y, m, n, m0, n0, bias, has_bias, factor, divisor, simdgroup, lane);
}

// Striped: tiles x steps of 32 inputs are one long list, tile after tile, and each threadgroup takes the same number of entries
// in a row. A stripe that ends inside a tile leaves a partial sum; `gemm_striped_reduce` adds those of a tile in order, so that
// results do not change from run to run.
//
//   steps of tile 0 | steps of tile 1 | ...          stripe s, tile t -> slot s + t of `pieces`, which no other pair has
//   [--stripe 0--][--stripe 1--][--stripe 2--]
//
template <typename W, typename T>
inline void gemm_striped(W w, const device T* x, ulong x_stride, device float* pieces, uint m, uint n, uint per_stripe,
                         threadgroup float* tiles, uint stripe, uint simdgroup, uint lane) {
  threadgroup float* x_tile = tiles;
  threadgroup float* w_tile = tiles + TILE_M * (32 + TILE_PAD);
  const uint thread_index = simdgroup * 32 + lane;
  const uint across = (n + TILE_N - 1) / TILE_N, down = (m + TILE_M - 1) / TILE_M, steps = (w.units + 3) / 4;
  const uint last = min((stripe + 1) * per_stripe, across * down * steps);
  for (uint at = stripe * per_stripe; at < last;) {
    const uint tile = at / steps, end = min((tile + 1) * steps, last);
    const uint m0 = tile / across * TILE_M, n0 = tile % across * TILE_N;
    accumulators sum;
    clear(sum);
    for (; at < end; ++at) {
      const uint k = 32 * (at % steps);
      load_x_tile<T, 32>(x, x_stride, m, w.units, m0, k, x_tile, thread_index);
      load_w_tile<W, 32>(w, n, n0, k, w_tile, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply_tiles<32>(x_tile, w_tile, sum, simdgroup);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    device float* slot = pieces + ulong(stripe + tile) * TILE_M * TILE_N;
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j)
        simdgroup_store(sum.at[i][j], slot + (simdgroup / 2 * 32 + 8 * i) * TILE_N + simdgroup % 2 * 32 + 8 * j, TILE_N);
  }
}

// A thread an output: the pieces of its tile in order of the stripes.
template <typename T, int op>
inline void gemm_striped_reduce(const device float* pieces, const device float* bias, bool has_bias, float factor,
                                float divisor, device T* y, uint m, uint n, uint units, uint per_stripe, uint2 at) {
  if (at.x >= n || at.y >= m) return;
  const uint across = (n + TILE_N - 1) / TILE_N, steps = (units + 3) / 4;
  const uint tile = at.y / TILE_M * across + at.x / TILE_N;
  const uint first = tile * steps / per_stripe, last = ((tile + 1) * steps - 1) / per_stripe;
  float sum = 0.0f;
  for (uint stripe = first; stripe <= last; ++stripe)
    sum += pieces[ulong(stripe + tile) * TILE_M * TILE_N + at.y % TILE_M * TILE_N + at.x % TILE_N];
  y[ulong(at.y) * n + at.x] = finish<T, op>(sum, factor, divisor, has_bias, has_bias ? bias[at.x] : 0.0f);
}

}  // namespace halfbyte
