#include "step.h"

#include <cmath>
#include <cstring>

#include "dispatch.h"
#include "functions.h"

namespace halfbyte {
namespace {

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
  operations_.push_back([=](const Inputs &) {
    for (int64_t r = 0; r < rows; ++r) {
      const float *from = x + r * d;
      const float factor = 1.0f / std::sqrt(square_sum(from, d) / (float)d + eps);
      for (int64_t i = 0; i < d; ++i) y[r * d + i] = from[i] * factor * scale[i];
    }
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
  // gelu_tanh(x) = x (1 + tanh u) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
  if (f == Gate::silu)
    operations_.push_back([=](const Inputs &) {
      for (int64_t i = 0; i < count; ++i) y[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
    });
  else
    operations_.push_back([=](const Inputs &) {
      for (int64_t i = 0; i < count; ++i) {
        const float x = gate[i], u = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
        y[i] = x / (1.0f + exponential(-2.0f * u)) * up[i];
      }
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
