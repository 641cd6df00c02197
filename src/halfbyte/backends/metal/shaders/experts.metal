// A mixture of experts: products grouped by expert over routed tokens, the gated activation in the epilogue.
//
// `order` lists the (token, slot) pairs sorted by expert, `offsets` [experts + 1] where each expert's begin. Nothing is dropped and
// no count travels to the host: the grid has room for one short tile an expert, and groups beyond the last tile return.

namespace halfbyte {

constant constexpr int NONE = 0, SWIGLU = 1, SWIGLU_CLAMPED = 2, GEGLU = 3;

// gate and up of one hidden unit, float32. The clamped form is gpt-oss's.
template <int activation> inline float gated(float gate, float up, float limit, float alpha) {
  if (activation == SWIGLU) return gate / (1.0f + exp(-gate)) * up;
  if (activation == SWIGLU_CLAMPED) {
    const float g = min(gate, limit), u = clamp(up, -limit, limit);
    return g / (1.0f + exp(-alpha * g)) * (u + 1.0f);
  }
  const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return 0.5f * gate * (1.0f + precise::tanh(inner)) * up;  // the fast one is NaN for large arguments
}

// A tile's expert and its sorted rows [begin, end); begin == end beyond the last tile.
struct expert_tile {
  uint expert, begin, end;
};

inline expert_tile find_tile(const device int* offsets, uint experts, uint tile) {
  for (uint e = 0; e < experts; ++e) {
    const uint begin = uint(offsets[e]), end = uint(offsets[e + 1]), tiles = (end - begin + TILE_M - 1) / TILE_M;
    if (tile < tiles) return {e, begin + tile * TILE_M, min(begin + (tile + 1) * TILE_M, end)};
    tile -= tiles;
  }
  return {0, 0, 0};
}

// y[target] = activation(w_e x[source] + bias_e), 64 sorted rows by 64 outputs of w a threadgroup.
//   gate·up   source = order / top_k, target = the sorted row          down   source = the sorted row, target = order
// tiles: as in gemm_single_stage.
template <typename W, typename T, int op, int activation, bool down>
inline void experts_gemm(W stack, const device T* x, ulong x_stride, const device int* order, const device int* offsets,
                         const device float* bias, bool has_bias, const device float* factors, float divisor,
                         device float* y, uint n, uint experts, uint top_k, uint half_rows, float limit, float alpha,
                         threadgroup float* tiles, uint2 group, uint simdgroup, uint lane) {
  const expert_tile tile = find_tile(offsets, experts, group.y);
  if (tile.begin == tile.end) return;
  const W w = stack.expert(tile.expert, n);
  threadgroup float* x_tile = tiles;
  threadgroup float* w_tile = tiles + TILE_M * (32 + TILE_PAD);
  const uint n0 = group.x * TILE_N, thread_index = simdgroup * 32 + lane;
  accumulators sum;
  clear(sum);
  for (uint k = 0; k < 8 * w.units; k += 32) {
    for (uint i = thread_index; i < TILE_M * 4; i += TILE_THREADS) {
      const uint row = tile.begin + i / 4, unit = k / 8 + i % 4;
      float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
      if (row < tile.end && unit < w.units) {
        const uint source = down ? row : uint(order[row]) / top_k;
        load_eight_x(x + source * x_stride + 8 * unit, v);
      }
      store_eight(x_tile + i / 4 * (32 + TILE_PAD) + 8 * (i % 4), v);
    }
    load_w_tile<W, 32>(w, n, n0, k, w_tile, thread_index, half_rows);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_tiles<32>(x_tile, w_tile, sum, simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const float factor = factors[op == NO_FACTOR ? 0 : tile.expert];
  const device float* own_bias = bias + (has_bias ? ulong(tile.expert) * n : 0);
  threadgroup float* stage = tiles + 64 * simdgroup;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) {
      const uint row0 = tile.begin + simdgroup / 2 * 32 + 8 * i, column0 = n0 + simdgroup % 2 * 32 + 8 * j;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_store(sum.at[i][j], stage, 8);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint at = lane; at < (activation == NONE ? 64u : 32u); at += 32) {
        const uint row = row0 + (activation == NONE ? at / 8 : at / 4);
        const uint column = column0 + (activation == NONE ? at % 8 : at % 4 * 2);
        if (row >= tile.end || column >= n) continue;
        const threadgroup float* found = stage + (row - row0) * 8 + (column - column0);
        const uint first = paired_row(column, half_rows);
        const float a = finish<float, op>(found[0], factor, divisor, has_bias, has_bias ? own_bias[first] : 0.0f);
        const ulong target = down ? uint(order[row]) : row;
        if (activation == NONE) {
          y[target * n + column] = a;
        } else {
          const uint second = paired_row(column + 1, half_rows);
          const float b = finish<float, op>(found[1], factor, divisor, has_bias, has_bias ? own_bias[second] : 0.0f);
          y[target * (n / 2) + column / 2] = gated<activation>(a, b, limit, alpha);
        }
      }
    }
}

// The same for few tokens: a threadgroup makes MATVEC_ROWS outputs of one (token, slot), no sorting.
template <typename W, typename T, int op, int activation, bool down>
inline void experts_matvec(W stack, const device T* x, ulong x_stride, const device int* indices, const device float* bias,
                           bool has_bias, const device float* factors, float divisor, device float* y, uint n, uint top_k,
                           uint half_rows, float limit, float alpha, threadgroup float* partial, uint row_block, uint routed,
                           uint simdgroup, uint lane) {
  const uint expert = uint(indices[routed]);
  const W w = stack.expert(expert, n);
  const device T* row = x + ulong(down ? routed : routed / top_k) * x_stride;
  for (int r = 0; r < MATVEC_ROWS; ++r) {
    const uint output = row_block * MATVEC_ROWS + r;
    float sums[1] = {0.0f};
    if (output < n)
      row_sums<W, T, 1>(w, row, 0, paired_row(output, half_rows), 1, simdgroup * 32 + lane, 32 * MATVEC_SIMDGROUPS, sums);
    const float sum = simd_sum(sums[0]);
    if (lane == 0) partial[simdgroup * MATVEC_ROWS + r] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint each = activation == NONE ? 1 : 2, r = (simdgroup * 32 + lane) * each, output = row_block * MATVEC_ROWS + r;
  if (r >= uint(MATVEC_ROWS) || output >= n) return;
  const float factor = factors[op == NO_FACTOR ? 0 : expert];
  const device float* own_bias = bias + (has_bias ? ulong(expert) * n : 0);
  float done[2] = {0.0f, 0.0f};
  for (uint e = 0; e < each; ++e) {
    float sum = 0.0f;
    for (int s = 0; s < MATVEC_SIMDGROUPS; ++s) sum += partial[s * MATVEC_ROWS + r + e];
    done[e] = finish<float, op>(sum, factor, divisor, has_bias, has_bias ? own_bias[paired_row(output + e, half_rows)] : 0.0f);
  }
  if (activation == NONE) y[ulong(routed) * n + output] = done[0];
  else y[ulong(routed) * (n / 2) + output / 2] = gated<activation>(done[0], done[1], limit, alpha);
}

// y[i] = sum over slots t, in order, of share[i, t] routed[i, t].
template <typename T>
inline void experts_combine(const device float* routed, const device float* shares, device T* y, uint m, uint h, uint top_k,
                            uint2 at) {
  if (at.x >= h || at.y >= m) return;
  float sum = 0.0f;
  for (uint t = 0; t < top_k; ++t) sum += shares[at.y * top_k + t] * routed[(ulong(at.y) * top_k + t) * h + at.x];
  y[ulong(at.y) * h + at.x] = rounded<T>({sum, 0.0f});
}

}  // namespace halfbyte
