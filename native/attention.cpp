#include "attention.h"

#include <algorithm>

#include "dispatch.h"
#include "functions.h"
#include "pool.h"

namespace halfbyte {
namespace {

// Tokens whose scores are weighed together. Splits begin at its multiples in the sequence, so that
// sums depend neither on threads nor on where a call begins.
constexpr int64_t kSplit = 64;

// Tokens of a prompt that are one task.
constexpr int64_t kTogether = 16;

// What each split leaves of some rows: the largest score, the sum of exp(score - largest), and the
// values so weighted.
struct Parts {
  float *data;
  int64_t rows, d;

  static int64_t size(int64_t rows, int64_t d, int64_t splits) { return splits * rows * (d + 2); }
  float *peaks(int64_t split) const { return data + size(rows, d, split); }
  float *sums(int64_t split) const { return peaks(split) + rows; }
  float *mixed(int64_t split) const { return peaks(split) + 2 * rows; }
};

// NaN where either is.
float larger_of(float a, float b) { return b > a || b != b ? b : a; }

// A row's values over all its splits.
void combine(const Parts &parts, int64_t row, int64_t splits, float scale, float *y) {
  const int64_t d = parts.d;
  float peak = parts.peaks(0)[row], sum = 0.0f;
  for (int64_t s = 1; s < splits; ++s) peak = larger_of(peak, parts.peaks(s)[row]);
  for (int64_t j = 0; j < d; ++j) y[j] = 0.0f;
  for (int64_t s = 0; s < splits; ++s) {
    const float weight = exponential((parts.peaks(s)[row] - peak) * scale);
    const float *mixed = parts.mixed(s) + row * d;
    sum += weight * parts.sums(s)[row];
    for (int64_t j = 0; j < d; ++j) y[j] += weight * mixed[j];
  }
  const float inverse = 1.0f / sum;
  for (int64_t j = 0; j < d; ++j) y[j] *= inverse;
}

}  // namespace

void attend_token(const float *q, Heads heads, float scale, const LayerCache &cache,
                  std::vector<float> &scratch, float *y) {
  const int64_t d = heads.d, group = heads.queries / heads.keys, end = cache.begin + cache.count;
  const int64_t first = cache.begin / kSplit, splits = (end - 1) / kSplit + 1 - first;
  const int64_t each = Parts::size(group, d, splits), lines = group * kSplit;
  scratch.resize((size_t)(heads.keys * (each + splits * lines)));
  float *const parts = scratch.data(), *const scores = parts + heads.keys * each;
  parallel_for(heads.keys * splits, [&](int64_t i) {
    const int64_t h = i / splits, s = i % splits,
                  from = std::max(cache.begin, (first + s) * kSplit),
                  count = std::min(end, (first + s + 1) * kSplit) - from;
    const int64_t at = h * cache.stride + (cache.first + from - cache.begin) * d;
    const Parts part{parts + h * each, group, d};
    float *const line = scores + i * lines;
    kernels().dots(q + h * group * d, group, cache.keys + at, count, d, line, kSplit);
    for (int64_t g = 0; g < group; ++g)
      kernels().weigh(line + g * kSplit, count, scale, part.peaks(s) + g, part.sums(s) + g);
    kernels().mix(line, kSplit, group, cache.values + at, count, d, part.mixed(s));
  });
  for (int64_t h = 0; h < heads.queries; ++h)
    combine({parts + h / group * each, group, d}, h % group, splits, scale, y + h * d);
}

void attend_prompt(const float *q, int64_t tokens, Heads heads, float scale,
                   const LayerCache &cache, int64_t window, float *y) {
  const int64_t d = heads.d, group = heads.queries / heads.keys;
  const int64_t first = cache.begin + cache.count - tokens;  // position of the first query
  const auto sees_from = [&](int64_t position) {
    return std::max(cache.begin, position - window + 1);
  };
  parallel_for((tokens + kTogether - 1) / kTogether * heads.queries, [&](int64_t i) {
    thread_local std::vector<float> scratch;
    const int64_t h = i % heads.queries, t0 = i / heads.queries * kTogether,
                  rows = std::min(kTogether, tokens - t0);
    const int64_t begin = sees_from(first + t0), end = first + t0 + rows;
    const int64_t split = begin / kSplit, splits = (end - 1) / kSplit + 1 - split;
    scratch.resize((size_t)(Parts::size(rows, d, splits) + rows * kSplit));
    const Parts parts{scratch.data(), rows, d};
    float *const scores = scratch.data() + Parts::size(rows, d, splits);
    for (int64_t s = 0; s < splits; ++s) {
      const int64_t from = std::max(begin, (split + s) * kSplit),
                    to = std::min(end, (split + s + 1) * kSplit);
      const int64_t at = h / group * cache.stride + (cache.first + from - cache.begin) * d;
      kernels().dots(q + (h * tokens + t0) * d, rows, cache.keys + at, to - from, d, scores,
                     kSplit);
      // Rows that see the whole split are mixed together.
      int64_t whole = 0;
      const auto mix_whole = [&](int64_t before) {
        if (whole)
          kernels().mix(scores + (before - whole) * kSplit, kSplit, whole, cache.values + at,
                        to - from, d, parts.mixed(s) + (before - whole) * d);
        whole = 0;
      };
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t position = first + t0 + r, a = std::max(from, sees_from(position)) - from,
                      b = std::min(to, position + 1) - from;
        if (a < b)
          kernels().weigh(scores + r * kSplit + a, b - a, scale, parts.peaks(s) + r,
                          parts.sums(s) + r);
        if (a == 0 && b == to - from) {
          ++whole;
          continue;
        }
        mix_whole(r);
        if (a < b)
          kernels().mix(scores + r * kSplit + a, kSplit, 1, cache.values + at + a * d, b - a, d,
                        parts.mixed(s) + r * d);
      }
      mix_whole(rows);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = first + t0 + r, skipped = sees_from(position) / kSplit - split;
      const Parts own{parts.peaks(skipped), rows, d};
      combine(own, r, position / kSplit + 1 - split - skipped, scale,
              y + ((t0 + r) * heads.queries + h) * d);
    }
  });
}

}  // namespace halfbyte
