// Attention of one token (a decoding step) and of many (a prompt) over cached keys and values,
// float32 throughout. A token's result has the same bits in both, on every instruction set, for any
// number of threads, and however a text was cut into calls.
#pragma once

#include <cstdint>
#include <vector>

namespace halfbyte {

// The keys and values of a layer, [head][token][d] with `stride` floats from head to head, and
// `count` tokens of them from `first` on, of which the first one is token `begin` of the sequence.
struct LayerCache {
  float *keys = nullptr, *values = nullptr;
  int64_t stride = 0, first = 0, count = 0, begin = 0;
};

struct Heads {
  int64_t queries, keys, d;
};

// y[h] = softmax(scale q[h] . keys) values, over all tokens of the cache. q, y [heads][d];
// `scratch` keeps its memory from call to call.
void attend_token(const float *q, Heads heads, float scale, const LayerCache &cache,
                  std::vector<float> &scratch, float *y);

// The same for the last `tokens` tokens of the cache, each of which sees the `window` tokens up to
// itself. q [heads][tokens][d], y [tokens][heads][d].
void attend_prompt(const float *q, int64_t tokens, Heads heads, float scale,
                   const LayerCache &cache, int64_t window, float *y);

}  // namespace halfbyte
