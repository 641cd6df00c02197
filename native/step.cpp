#include "step.h"

#include <cmath>
#include <cstring>

#include "dispatch.h"
#include "pool.h"

namespace halfbyte {
namespace {

// Tokens of a layer's attention that are one task. Fixed, so that sums do not depend on the number
// of threads.
constexpr int64_t kSplitTokens = 64;

int64_t splits_of(int64_t count) { return (count + kSplitTokens - 1) / kSplitTokens; }

// exp(x) within 2 units in the last place from -87 to 88, in operations that compilers vectorize
// (with -fno-trapping-math, see CMakeLists.txt): x = n log 2 + r, 2^n set as an exponent, exp(r) by
// the polynomial of Cephes' expf. Beyond, the value at the end; NaN stays.
inline float exponential(float x) {
  constexpr float shift =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which its low bits then are
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float whole = x * 1.44269504088896341f + shift, n = whole - shift;
  const float r = x - n * 0.693359375f - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &whole, 4);
  bits = (bits - 0x4b400000u + 127u) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

float square_sum(const float *x, int64_t count) {
  float sum;
  kernels().dots(x, 1, x, 1, count, &sum, 1);
  return sum;
}

// NaN where either is.
float larger_of(float a, float b) { return b > a || b != b ? b : a; }

float largest_of(const float *x, int64_t count) {
  float most[4] = {x[0], x[0], x[0], x[0]};
  for (int64_t i = 1; i < count; ++i) most[i % 4] = larger_of(most[i % 4], x[i]);
  return larger_of(larger_of(most[0], most[1]), larger_of(most[2], most[3]));
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
    const LayerCache cache = now.layers[layer];
    float *const all_keys = cache.keys + cache.first * d, *const all_values =
                                                              cache.values + cache.first * d;
    const int64_t last = cache.count - 1, group = heads / kv_heads, splits = splits_of(cache.count);
    for (int64_t h = 0; h < kv_heads; ++h) {
      std::memcpy(all_keys + h * cache.stride + last * d, k + h * d, (size_t)d * 4);
      std::memcpy(all_values + h * cache.stride + last * d, v + h * d, (size_t)d * 4);
    }
    // A split leaves, for each of its heads, the largest score, the sum of exp(score - largest),
    // and the values so weighted.
    const int64_t part = group * (d + 2), lines = group * kSplitTokens;
    partial_.resize((size_t)(kv_heads * splits * part));
    scores_.resize((size_t)(kv_heads * splits * lines));
    parallel_for(kv_heads * splits, [&](int64_t i) {
      const int64_t h = i / splits, t0 = i % splits * kSplitTokens,
                    count = cache.count - t0 < kSplitTokens ? cache.count - t0 : kSplitTokens;
      float *scores = scores_.data() + i * lines, *peaks = partial_.data() + i * part,
            *sums = peaks + group, *mixed = sums + group;
      const float *keys = all_keys + h * cache.stride + t0 * d,
                  *values = all_values + h * cache.stride + t0 * d;
      kernels().dots(q + h * group * d, group, keys, count, d, scores, kSplitTokens);
      for (int64_t g = 0; g < group; ++g) {
        float *line = scores + g * kSplitTokens;
        const float peak = peaks[g] = largest_of(line, count);
        for (int64_t t = 0; t < count; ++t) line[t] = exponential((line[t] - peak) * scale);
        sums[g] = kernels().sum(line, count);
      }
      kernels().mix(scores, kSplitTokens, group, values, count, d, mixed);
    });
    for (int64_t i = 0; i < heads; ++i) {
      const float *first = partial_.data() + i / group * splits * part + i % group;
      float peak = first[0], sum = 0.0f, *to = y + i * d;
      for (int64_t s = 1; s < splits; ++s) peak = larger_of(peak, first[s * part]);
      for (int64_t j = 0; j < d; ++j) to[j] = 0.0f;
      for (int64_t s = 0; s < splits; ++s) {
        const float *one = first + s * part, weight = exponential((one[0] - peak) * scale);
        const float *mixed = first + s * part - i % group + 2 * group + i % group * d;
        sum += weight * one[group];
        for (int64_t j = 0; j < d; ++j) to[j] += weight * mixed[j];
      }
      const float inverse = 1.0f / sum;
      for (int64_t j = 0; j < d; ++j) to[j] *= inverse;
    }
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
