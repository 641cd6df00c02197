// Arrays as they come from Python: address, dtype, shape and strides, checked before anything is
// computed.
//
// NumPy arrays are imported by nanobind. torch's tensors offer DLPack's C exchange table on their
// type (`__dlpack_c_exchange_api__`, specified with DLPack 1.3), which costs 50 ns where Python's
// `__dlpack__` costs 3 us; older versions go through the latter.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "../weight.h"

namespace halfbyte {

namespace nb = nanobind;

// Shapes or dtypes that do not fit: `halfbyte.errors.ShapeError` in Python.
struct ShapeProblem : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kMaxDims = 8;

struct Array {
  void *data = nullptr;
  nb::dlpack::dtype dtype{};
  int ndim = 0;
  int64_t shape[kMaxDims] = {}, strides[kMaxDims] = {};  // in elements
  nb::ndarray<nb::ro> imported;                          // keeps what nanobind imported alive

  int64_t size() const {
    int64_t count = 1;
    for (int i = 0; i < ndim; ++i) count *= shape[i];
    return count;
  }
  int64_t item() const { return dtype.bits / 8; }
  bool contiguous() const;
  std::string describe() const;  // "float32 (2, 64)"

  // Reads the array; false, with no Python error set, for an object that is none.
  static bool from(nb::handle object, Array &out);
};

// float32, float16, and bfloat16 or the 16-bit words that represent it in NumPy. ShapeProblem for
// others.
Dtype dtype_of(const char *operation, const char *name, const Array &a);

// Contiguous, aligned elements of T: `count` of them, or any number where it is -1. T = uint16_t
// takes every 16-bit dtype.
template <class T>
T *elements(const char *operation, const char *name, const Array &a, int64_t count);

// A whole array in memory, any dtype: contiguous and aligned, or ShapeProblem.
void check_plain(const char *operation, const char *name, const Array &a);

// `object` may be written to. torch's tensors always may.
void check_writable(const char *operation, const char *name, nb::handle object);

}  // namespace halfbyte

namespace nanobind::detail {
template <>
struct type_caster<halfbyte::Array> {
  NB_TYPE_CASTER(halfbyte::Array, const_name("numpy.ndarray | torch.Tensor"))
  bool from_python(handle object, uint8_t, cleanup_list *) noexcept {
    try {
      return halfbyte::Array::from(object, value);
    } catch (...) {
      PyErr_Clear();
      return false;
    }
  }
};
}  // namespace nanobind::detail
