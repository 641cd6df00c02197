#include "step.h"

#include <cmath>
#include <cstring>

#include "dispatch.h"
#include "pool.h"

namespace halfbyte {
namespace {

// Elements of a gate or of norms that are one task: those of one token are.
constexpr int64_t kElements = 1 << 14;

float square_sum(const float *x, int64_t count) {
  float sum;
  kernels().dots(x, 1, x, 1, count, &sum, 1);
  return sum;
}

}  // namespace

void Step::product(const Weight &w, const float *x, const float *bias, Activations activations,
                   float *y) {
  operations_.push_back([&w, x, bias, activations, y](const Inputs &) {
    Matrix row;
    row.data = x, row.rows = 1, row.row_stride = w.k;
    linear(w, row, bias, activations, Dtype::f32, y);
  });
}

void Step::norm(const float *x, const float *scale, int64_t rows, int64_t d, float eps, float *y) {
  const int64_t together = d < kElements ? kElements / d : 1;
  operations_.push_back([=](const Inputs &) {
    parallel_for((rows + together - 1) / together, [&](int64_t i) {
      for (int64_t r = i * together; r < rows && r < (i + 1) * together; ++r) {
        const float *from = x + r * d;
        const float factor = 1.0f / std::sqrt(square_sum(from, d) / (float)d + eps);
        for (int64_t j = 0; j < d; ++j) y[r * d + j] = from[j] * factor * scale[j];
      }
    });
  });
}

void Step::rotate(float *x, int64_t heads, int64_t d, int table) {
  operations_.push_back([=](const Inputs &now) {
    const float *cosine = now.tables[table].cosines + now.position * d,
                *sine = now.tables[table].sines + now.position * d;
    const int64_t half = d / 2;
    for (int64_t h = 0; h < heads; ++h) {
      float *first = x + h * d, *second = first + half;
      for (int64_t i = 0; i < half; ++i) {
        const float a = first[i], b = second[i];
        first[i] = a * cosine[i] - b * sine[i];
        second[i] = b * cosine[half + i] + a * sine[half + i];
      }
    }
  });
}

void Step::attend(int layer, const float *q, const float *k, const float *v, int64_t heads,
                  int64_t kv_heads, int64_t d, float scale, float *y) {
  operations_.push_back([=](const Inputs &now) {
    const LayerCache &cache = now.layers[layer];
    const int64_t last = (cache.first + cache.count - 1) * d;
    for (int64_t h = 0; h < kv_heads; ++h) {
      std::memcpy(cache.keys + h * cache.stride + last, k + h * d, (size_t)d * 4);
      std::memcpy(cache.values + h * cache.stride + last, v + h * d, (size_t)d * 4);
    }
    attend_token(q, {heads, kv_heads, d}, scale, cache, scratch_, y);
  });
}

void Step::gate(Gate f, const float *gate, const float *up, int64_t count, float *y) {
  operations_.push_back([=](const Inputs &) {
    parallel_for((count + kElements - 1) / kElements, [&](int64_t i) {
      const int64_t at = i * kElements, left = count - at < kElements ? count - at : kElements;
      kernels().gate(f, gate + at, up + at, left, y + at);
    });
  });
}

void Step::add(const float *x, int64_t count, float *y) {
  operations_.push_back([=](const Inputs &) {
    for (int64_t i = 0; i < count; ++i) y[i] += x[i];
  });
}

void Step::run(const LayerCache *layers, const Angles *tables, int64_t position) {
  const Inputs now{layers, tables, position};
  for (const auto &operation : operations_) operation(now);
}

}  // namespace halfbyte
