// One token's way through a model, as a list of operations on float32 buffers: what a model computes between its products is
// done here too, so that a decoding step costs no interpreter and no dispatch between them. Python writes the list once a text
// (halfbyte/transformers/decode/native_step.py) and runs it once a token; every address it gives stays valid meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "linear.h"

namespace halfbyte {

enum class Gate : int { silu = 0, gelu_tanh = 1 };

// Where a layer's keys and values lie: `count` visible tokens from these addresses on, the new one last, [head][token][d] with
// `stride` floats from head to head.
struct Place {
  float *keys, *values;
  int64_t stride, count;
};

class Step {
 public:
  // y = x * transpose(w) + bias
  void product(const Weight &w, const float *x, const float *bias, Activations activations, float *y);
  // y = x / sqrt(mean(x^2) + eps) * scale, a row of d at a time; y may be x.
  void norm(const float *x, const float *scale, int64_t rows, int64_t d, float eps, float *y);
  // x = x cos + (-second half, first half) sin, in place; table `which` of those given to `run`, [cos d, sin d].
  void rotate(float *x, int64_t heads, int64_t d, int which);
  // Puts k and v [kv_heads][d] in the last place of the layer's, then y[h] = softmax(scale q[h] . keys) values.
  void attend(int layer, const float *q, const float *k, const float *v, int64_t heads, int64_t kv_heads, int64_t d, float scale, float *y);
  // y = f(gate) * up
  void gate(Gate f, const float *gate, const float *up, int64_t count, float *y);
  // y = y + x
  void add(const float *x, int64_t count, float *y);

  // places: one a layer; cosines and sines: one address a table.
  void run(const Place *places, const float *const *cosines, const float *const *sines);

 private:
  struct Moment {
    const Place *places;
    const float *const *cosines, *const *sines;
  };
  std::vector<std::function<void(const Moment &)>> operations_;
  std::vector<float> scores_, parts_;  // of `attend`
};

}  // namespace halfbyte
