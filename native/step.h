// A decoding step of one token as a list of operations on float32 buffers: what a model computes
// between its products is done here too, so that a step costs no interpreter and no dispatch
// between them. Python appends the operations once a text
// (halfbyte/transformers/decode/native_step.py) and runs them once a token; every buffer stays
// valid meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "attention.h"
#include "functions.h"
#include "linear.h"

namespace halfbyte {

// Cosines and sines [position][d] of one kind of rotation.
struct Angles {
  const float *cosines = nullptr, *sines = nullptr;
  int64_t d = 0;
};

class Step {
 public:
  // y = x * transpose(w) + bias
  void product(const Weight &w, const float *x, const float *bias, Activations activations,
               float *y);
  // y = x / sqrt(mean(x^2) + eps) * scale, a row of d at a time; y may be x.
  void norm(const float *x, const float *scale, int64_t rows, int64_t d, float eps, float *y);
  // x = x cos + (-second half, first half) sin, in place, by the angles of `table`.
  void rotate(float *x, int64_t heads, int64_t d, int table);
  // Writes k and v [kv_heads][d] to the last token in view of the layer's cache, then y[h] =
  // softmax(scale q[h] . keys) values.
  void attend(int layer, const float *q, const float *k, const float *v, int64_t heads,
              int64_t kv_heads, int64_t d, float scale, float *y);
  // y = f(gate) * up
  void gate(Gate f, const float *gate, const float *up, int64_t count, float *y);
  // y = y + x
  void add(const float *x, int64_t count, float *y);

  // One entry a layer and one a table; `position` is the row of the tables.
  void run(const LayerCache *layers, const Angles *tables, int64_t position);

 private:
  struct Inputs {
    const LayerCache *layers;
    const Angles *tables;
    int64_t position;
  };
  std::vector<std::function<void(const Inputs &)>> operations_;
  std::vector<float> scratch_;  // of `attend`
};

}  // namespace halfbyte
