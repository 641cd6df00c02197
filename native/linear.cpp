#include "linear.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "pool.h"
#include "rows.h"
#include "schedule.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace halfbyte {
namespace {

constexpr int64_t kTokens = 256;  // tokens whose activations are prepared at a time
// The sums of a span of several segments are in units of the activations' scale, up to 127 times as
// large as their value; the weight's scales are divided by this number until the span ends, so that
// no sum overflows float32.
constexpr float kLift = 128.0f;

// Subnormal scales and values must be exact (E8M0's smallest is one); another library may have set
// this thread to flush them to zero.
class KeepSubnormals {
 public:
#if defined(__x86_64__) || defined(_M_X64)
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  KeepSubnormals() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved_));
    __asm__ __volatile__("msr fpcr, %0" : : "r"((uint64_t)0));
  }
  ~KeepSubnormals() { __asm__ __volatile__("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// A buffer that a thread reuses in later calls, aligned to a cache line; never null, also for a
// product of no inputs.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  template <class T>
  T *take(int64_t count) {
    const size_t bytes = ((size_t)(count > 0 ? count : 1) * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      size_ = data_ ? bytes : 0;
      if (!data_) throw std::bad_alloc();
    }
    return static_cast<T *>(data_);
  }

 private:
  void *data_ = nullptr;
  size_t size_ = 0;
};

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

size_t size_of(Dtype d) { return d == Dtype::f32 ? 4 : 2; }

// One row of activations as float32 in input order.
void load_row(const Kernels &ks, const Matrix &x, int64_t row, int64_t k, float *out) {
  if (k == 0) return;
  const char *base = (const char *)x.data + row * x.row_stride * (int64_t)size_of(x.dtype);
  if (x.column_stride == 1) {
    if (x.dtype == Dtype::f32)
      std::memcpy(out, base, (size_t)k * 4);
    else if (x.dtype == Dtype::f16)
      ks.from_f16((const uint16_t *)base, k, out);
    else
      ks.from_bf16((const uint16_t *)base, k, out);
    return;
  }
  for (int64_t j = 0; j < k; ++j) {
    if (x.dtype == Dtype::f32)
      out[j] = ((const float *)base)[j * x.column_stride];
    else if (x.dtype == Dtype::f16)
      ks.from_f16((const uint16_t *)base + j * x.column_stride, 1, out + j);
    else
      ks.from_bf16((const uint16_t *)base + j * x.column_stride, 1, out + j);
  }
}

// What the tasks of one call share. Activations are stored one block of inputs after another, token
// after token within a block.
struct Plan {
  const Kernels *ks;
  const Weight *w;
  bool int8;
  Schedule schedule;
  int64_t tokens, inputs, seg, segs, span, blocks;
  float *xf = nullptr;
  int8_t *xq = nullptr;
  float *x_scale = nullptr, *x_sum = nullptr;
  int32_t *x_start = nullptr;
};

// Floats of a row in kernel order, with the zeros behind it.
int64_t ordered_floats(const Plan &p) {
  return round_up(p.inputs > p.w->k ? p.inputs : p.w->k, 16);
}

void prepare_token(const Plan &p, const Matrix &x, int64_t row, int64_t t, float *scratch) {
  const Weight &w = *p.w;
  float *plain = scratch, *ordered = scratch + round_up(w.k, 16);
  int8_t *bytes = (int8_t *)(ordered + ordered_floats(p));  // of a span
  load_row(*p.ks, x, row, w.k, w.gather ? plain : ordered);
  if (w.gather)
    for (int64_t j = 0; j < p.inputs; ++j)
      ordered[j] = w.gather[j] >= 0 ? plain[w.gather[j]] : 0.0f;
  else
    std::memset(ordered + w.k, 0, (size_t)(p.inputs - w.k) * 4);
  const bool sums = w.zeros || w.biases || w.mins;
  const bool matrix = t < p.schedule.matrix_tokens;
  int64_t t0 = matrix ? t / kMatrixTokens * kMatrixTokens : p.schedule.matrix_tokens;
  int tile = matrix ? kMatrixTokens : tile_tokens(p.tokens - t0, p.schedule.tile_tokens);
  while (t >= t0 + tile) t0 += tile, tile = tile_tokens(p.tokens - t0, p.schedule.tile_tokens);
  const int64_t first = t0 * p.segs + (t - t0);  // of x_scale, x_sum and x_start
  const int64_t together = p.ks->matrix.together;
  const int off = p.int8 ? buffer_offset(w, p.ks->unsigned_bytes) : 0;
  for (int64_t b = 0; b < p.blocks; ++b) {
    const int64_t k0 = b * p.schedule.block,
                  count = p.inputs - k0 < p.schedule.block ? p.inputs - k0 : p.schedule.block;
    const int64_t at = k0 * p.tokens + t0 * count;  // of the tile
    if (!p.int8) {
      float *values = p.xf + at + (t - t0);
      for (int64_t j = 0; j < count; ++j) values[j * tile] = ordered[k0 + j];
      if (sums)
        for (int64_t s = 0; s < count / p.seg; ++s)
          p.x_sum[first + (k0 / p.seg + s) * tile] = p.ks->sum(ordered + k0 + s * p.seg, p.seg);
      continue;
    }
    for (int64_t from = 0; from < count; from += p.span) {
      const int64_t inputs = count - from < p.span ? count - from : p.span;
      const float scale = p.ks->quantize(ordered + k0 + from, inputs, bytes);
      if (matrix && !together) {
        std::memcpy(p.xq + at + (t - t0) * count + from, bytes, (size_t)inputs);
      } else if (matrix) {
        int8_t *codes = p.xq + at + from * tile + (t - t0) * together;
        for (int64_t j = 0; j < inputs; j += together)
          std::memcpy(codes + j * tile, bytes + j, (size_t)together);
      } else {
        int8_t *codes = p.xq + at + from * tile + (t - t0) * 4;
        for (int64_t j = 0; j < inputs; j += 4) std::memcpy(codes + j * tile, bytes + j, 4);
      }
      for (int64_t s = 0; s < inputs; s += p.seg) {
        const int64_t entry = first + (k0 + from + s) / p.seg * tile;
        const int32_t total = p.ks->sum_i8(bytes + s, p.seg);
        p.x_start[entry] = -off * total;
        p.x_scale[entry] = p.span == p.seg ? scale : scale * kLift;
        p.x_sum[entry] = p.span == p.seg ? scale * (float)total : (float)total;
      }
    }
  }
}

// Columns row0 .. row0 + rows of the result, for all tokens of the plan.
void store_results(const Plan &p, const float *total, int64_t stride, int64_t row0, int64_t rows,
                   const float *bias, Dtype dtype, char *out, float *line) {
  const Weight &w = *p.w;
  const double numerator = w.global_op == Global::multiply ? w.global : 1.0;
  const double denominator = w.divisor * (w.global_op == Global::divide ? w.global : 1.0);
  const bool factor = w.panel_order && (numerator != 1.0 || denominator != 1.0);
  for (int64_t t = 0; t < p.tokens; ++t) {
    const float *from = total + t * stride;
    if (factor || bias) {
      if (!factor)
        std::memcpy(line, from, (size_t)rows * 4);
      else if (denominator == 1.0)
        for (int64_t i = 0; i < rows; ++i) line[i] = (float)((double)from[i] * numerator);
      else
        for (int64_t i = 0; i < rows; ++i) line[i] = scaled_once(from[i], numerator, denominator);
      if (bias)
        for (int64_t i = 0; i < rows; ++i) line[i] += bias[row0 + i];
      from = line;
    }
    char *to = out + (t * w.n + row0) * (int64_t)size_of(dtype);
    if (dtype == Dtype::f32)
      std::memcpy(to, from, (size_t)rows * 4);
    else if (dtype == Dtype::f16)
      p.ks->to_f16(from, rows, (uint16_t *)to);
    else
      p.ks->to_bf16(from, rows, (uint16_t *)to);
  }
}

thread_local Scratch total_scratch, panel_scratch, scale_scratch, line_scratch;

// Multiplies panels first .. first + count by every token.
void run_panels(const Plan &p, int64_t first, int count, const float *bias, Dtype dtype,
                char *out) {
  const Weight &w = *p.w;
  const Kernels &ks = *p.ks;
  // Fused tiles are compiled for kFusedPanels panels only. When fewer remain at the end, the tile
  // overlaps the panels before them if a block is the whole row; otherwise they are decoded into
  // the buffer. The sums are the same.
  const int done = p.schedule.whole_rows ? kFusedPanels - count : 0;
  first -= done, count += done;
  const int64_t width = (int64_t)count * kPanelRows;
  float *total = total_scratch.take<float>(p.tokens * width);
  std::memset(total, 0, (size_t)(p.tokens * width) * 4);
  const int64_t item = p.int8 ? 1 : 4,
                buffer = round_up(p.schedule.block, kChunk) * kPanelRows * item;
  const bool fused = p.schedule.fused && count == kFusedPanels;
  char *decoded = fused ? nullptr : panel_scratch.take<char>(buffer * count);
  const int64_t per = p.schedule.block / p.seg * kPanelRows;  // floats of one part of one panel
  float *parts = scale_scratch.take<float>(3 * per * count);
  float *scales = parts, *zeros = parts + per * count, *added = zeros + per * count;
  float unit = p.int8 || w.element == Element::integer || (w.integral && ks.integer_tables)
                   ? (float)w.unit
                   : 1.0f;
  if (p.int8 && p.span != p.seg) unit /= kLift;
  // Bytes that are operands of the dot product as stored need no buffer.
  const bool direct = p.int8 && w.bits == 8 && ks.unsigned_bytes;
  const bool decode = !fused && !direct;
  const int64_t inputs_of_first_block = p.inputs < p.schedule.block ? p.inputs : p.schedule.block;
  for (int64_t b = 0; b < p.blocks; ++b) {
    const int64_t k0 = b * p.schedule.block,
                  inputs = p.inputs - k0 < p.schedule.block ? p.inputs - k0 : p.schedule.block,
                  s0 = k0 / p.seg;
    for (int i = 0; i < count; ++i) {
      if (decode && p.int8)
        ks.decode_u8(w, first + i, k0, round_up(inputs, kChunk), (uint8_t *)decoded + i * buffer);
      if (decode && !p.int8)
        ks.decode_f32(w, first + i, k0, round_up(inputs, kChunk), (float *)(decoded + i * buffer));
      if (!p.schedule.whole_rows || p.tokens > kFewTokens)
        ks.decode_scales(w, first + i, s0, inputs / p.seg, unit, scales + i * per, zeros + i * per,
                         added + i * per);
    }
    Block block{};
    block.weight = &w, block.panel = first, block.k0 = k0;
    block.w = fused    ? nullptr
              : direct ? w.plane8 + (first * w.padded_k() + k0) * kPanelRows
                       : (const void *)decoded;
    block.w_stride = direct ? w.padded_k() * kPanelRows : buffer;
    block.scales = scales;
    block.zeros = w.zeros ? zeros : nullptr;
    block.biases = w.biases || w.mins ? added : nullptr;
    block.s_stride = per, block.unit = unit;
    block.segments = (int)(inputs / p.seg), block.seg = (int)p.seg, block.panels = count,
    block.tokens = (int)p.tokens;
    block.span = (int)(p.span / p.seg), block.prefetch_bytes = p.schedule.prefetch_bytes,
    block.one_panel = p.schedule.one_panel;
    if (!fused && b + 1 < p.blocks) {
      const int64_t after = p.inputs - k0 - inputs;
      block.next_panel = first, block.next_k0 = k0 + inputs,
      block.next_inputs = after < p.schedule.block ? after : p.schedule.block;
    } else if (!fused && first + 2 * count <= w.panels()) {
      block.next_panel = first + count, block.next_k0 = 0,
      block.next_inputs = inputs_of_first_block;
    }
    block.x = p.int8 ? (const void *)(p.xq + k0 * p.tokens) : (const void *)(p.xf + k0 * p.tokens);
    block.x_stride = inputs, block.largest = p.schedule.tile_tokens;
    block.x_scale = p.x_scale, block.x_sum = p.x_sum, block.x_start = p.x_start;
    block.first_segment = s0, block.all_segments = p.segs;
    block.total = total, block.total_stride = width;
    block.widest = p.int8 ? widest_byte(w, ks.unsigned_bytes) : 0;
    if (p.schedule.matrix_tokens) {
      ks.matrix.multiply(block, p.schedule.matrix_tokens, buffer_offset(w, ks.unsigned_bytes) != 0);
      block = block.after(p.schedule.matrix_tokens);
    }
    if (block.tokens) (p.int8 ? ks.block_i8 : ks.block_f32)(block);
  }
  const int64_t row0 = (first + done) * kPanelRows, room = width - done * kPanelRows,
                rows = w.n - row0 < room ? w.n - row0 : room;
  store_results(p, total + done * kPanelRows, width, row0, rows, bias, dtype, out,
                line_scratch.take<float>(width));
}

// Weights in canonical order (groups that run over the flattened matrix, float zero points, nested
// scales): decodes sixteen rows exactly, then multiplies.
void run_rows(const Plan &p, int64_t panel, const float *bias, Dtype dtype, char *out) {
  const Weight &w = *p.w;
  const int64_t row0 = panel * kPanelRows, rows = w.n - row0 < kPanelRows ? w.n - row0 : kPanelRows;
  float *total = total_scratch.take<float>(p.tokens * kPanelRows);
  std::memset(total, 0, (size_t)(p.tokens * kPanelRows) * 4);
  float *decoded = panel_scratch.take<float>(p.inputs * kPanelRows + w.k);
  float *row = decoded + p.inputs * kPanelRows;
  std::memset(decoded, 0, (size_t)(p.inputs * kPanelRows) * 4);
  RowDecoder decoder(w);
  for (int64_t r = 0; r < rows; ++r) {
    decoder.decode(row0 + r, Dtype::f32, row);
    for (int64_t j = 0; j < w.k; ++j) decoded[j * kPanelRows + r] = row[j];
  }
  float *scales = scale_scratch.take<float>(p.schedule.block / p.seg * kPanelRows);
  for (int64_t i = 0; i < p.schedule.block / p.seg * kPanelRows; ++i) scales[i] = 1.0f;
  for (int64_t b = 0; b < p.blocks; ++b) {
    const int64_t k0 = b * p.schedule.block,
                  inputs = p.inputs - k0 < p.schedule.block ? p.inputs - k0 : p.schedule.block;
    Block block{};
    block.weight = &w;
    block.w = decoded + k0 * kPanelRows;
    block.scales = scales;
    block.span = 1, block.segments = (int)(inputs / p.seg), block.seg = (int)p.seg,
    block.panels = 1, block.tokens = (int)p.tokens;
    block.x = p.xf + k0 * p.tokens, block.x_stride = inputs, block.largest = p.schedule.tile_tokens;
    block.total = total, block.total_stride = kPanelRows;
    p.ks->block_f32(block);
  }
  store_results(p, total, kPanelRows, row0, rows, bias, dtype, out,
                line_scratch.take<float>(kPanelRows));
}

}  // namespace

void linear(const Weight &w, const Matrix &x, const float *bias, Activations activations,
            Dtype out_dtype, void *out) {
  if (x.rows == 0 || w.n == 0) return;
  const Kernels &ks = kernels();
  if (w.k == 0) {  // a sum of no inputs
    float *line = line_scratch.take<float>(w.n);
    for (int64_t i = 0; i < w.n; ++i) line[i] = bias ? bias[i] : 0.0f;
    for (int64_t t = 0; t < x.rows; ++t) {
      char *to = (char *)out + t * w.n * (int64_t)size_of(out_dtype);
      if (out_dtype == Dtype::f32)
        std::memcpy(to, line, (size_t)w.n * 4);
      else if (out_dtype == Dtype::f16)
        ks.to_f16(line, w.n, (uint16_t *)to);
      else
        ks.to_bf16(line, w.n, (uint16_t *)to);
    }
    return;
  }
  if (activations == Activations::int8_token) {  // the row is one segment
    Weight row = w;
    if (w.groups == 1 && w.group <= kLongestTokenRow) row.seg = w.group, row.span = 0;
    return linear(row, x, bias, Activations::int8, out_dtype, out);
  }
  Plan p;
  p.ks = &ks, p.w = &w;
  p.int8 = activations == Activations::int8 && w.panel_order && w.integral;
  p.inputs = w.panel_order ? w.kernel_k() : round_up(w.k, kChunk);
  p.seg = w.panel_order ? w.seg : kChunk;
  p.segs = p.inputs / p.seg;
  p.span = p.int8 ? w.spanned() : p.seg;
  const Core &core = core_for(ks);
  for (int64_t t0 = 0; t0 < x.rows; t0 += kTokens) {
    p.tokens = x.rows - t0 < kTokens ? x.rows - t0 : kTokens;
    p.schedule = schedule_for(ks, core, w, p.int8, p.tokens, p.inputs, p.span);
    p.blocks = (p.inputs + p.schedule.block - 1) / p.schedule.block;
    thread_local Scratch x_scratch, segment_scratch;
    if (p.int8)
      p.xq = x_scratch.take<int8_t>(p.tokens * p.inputs);
    else
      p.xf = x_scratch.take<float>(p.tokens * p.inputs);
    float *entries = segment_scratch.take<float>(3 * p.tokens * p.segs);
    p.x_scale = entries, p.x_sum = entries + p.tokens * p.segs,
    p.x_start = (int32_t *)(p.x_sum + p.tokens * p.segs);
    char *to = (char *)out + t0 * w.n * (int64_t)size_of(out_dtype);
    auto token = [&](int64_t t) {
      KeepSubnormals keep;
      thread_local Scratch row_scratch;
      prepare_token(p, x, t0 + t, t,
                    row_scratch.take<float>(round_up(w.k, 16) + ordered_floats(p) + p.span));
    };
    if (p.tokens >= 8)
      parallel_for(p.tokens, token);
    else
      for (int64_t t = 0; t < p.tokens; ++t) token(t);
    const int panels_together = p.schedule.panels;
    const int64_t panels = w.panels();
    parallel_for((panels + panels_together - 1) / panels_together, [&](int64_t i) {
      KeepSubnormals keep;
      if (!w.panel_order) return run_rows(p, i, bias, out_dtype, to);
      const int64_t first = i * panels_together, left = panels - first;
      run_panels(p, first, (int)(left < panels_together ? left : panels_together), bias, out_dtype,
                 to);
    });
  }
}

void embedding(const Weight &w, const int64_t *ids, int64_t count, Dtype dtype, void *out) {
  const int64_t bytes = w.k * (int64_t)size_of(dtype), ids_per_task = 64;
  parallel_for((count + ids_per_task - 1) / ids_per_task, [&](int64_t i) {
    KeepSubnormals keep;
    RowDecoder decoder(w);
    for (int64_t j = i * ids_per_task; j < count && j < (i + 1) * ids_per_task; ++j)
      decoder.decode(ids[j], dtype, (char *)out + j * bytes);
  });
}

void dequantize(const Weight &w, int64_t first, int64_t last, Dtype dtype, void *out) {
  const int64_t bytes = w.k * (int64_t)size_of(dtype), rows_per_task = 16;
  parallel_for((last - first + rows_per_task - 1) / rows_per_task, [&](int64_t i) {
    KeepSubnormals keep;
    RowDecoder decoder(w);
    for (int64_t r = first + i * rows_per_task; r < last && r < first + (i + 1) * rows_per_task;
         ++r)
      decoder.decode(r, dtype, (char *)out + (r - first) * bytes);
  });
}

void pack(const Weight &w, const uint8_t *codes, int64_t row_bytes, uint8_t *const planes[4]) {
  parallel_for((w.panels() + 7) / 8, [&](int64_t i) {
    const int64_t last = i * 8 + 8 < w.panels() ? i * 8 + 8 : w.panels();
    pack_panels(w, codes, row_bytes, planes, i * 8, last);
  });
}

void unpack(const Weight &w, uint8_t *out, int64_t row_bytes) {
  parallel_for((w.n + 127) / 128, [&](int64_t i) {
    const int64_t first = i * 128, last = first + 128 < w.n ? first + 128 : w.n;
    unpack_rows(w, first, last, out + first * row_bytes, row_bytes);
  });
}

}  // namespace halfbyte
