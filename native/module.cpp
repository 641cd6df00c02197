// The Python face: numbers and addresses in, nothing copied, the interpreter's lock released while computing. Every
// array is validated in Python (backends/cpu/__init__.py), which also keeps the arrays of a Weight alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"
#include "linear.h"
#include "merges.h"
#include "pool.h"
#include "step.h"
#include "turning.h"

namespace nb = nanobind;
using namespace nb::literals;
using halfbyte::Weight;

namespace {

template <class T>
const T *address(uintptr_t a) {
  return reinterpret_cast<const T *>(a);
}

float *floats(uintptr_t a) { return reinterpret_cast<float *>(a); }

// Fields of a Weight by name, from a dict of numbers: a misspelt name is an error.
template <class T>
bool set_number(const char *key, const char *name, T &field, nb::handle value) {
  if (std::strcmp(key, name) != 0) return false;
  if constexpr (std::is_pointer_v<T>) field = address<std::remove_const_t<std::remove_pointer_t<T>>>(nb::cast<uintptr_t>(value));
  else if constexpr (std::is_enum_v<T>) field = static_cast<T>(nb::cast<int>(value));
  else field = nb::cast<T>(value);
  return true;
}

void set_field(Weight &w, const char *key, nb::handle v) {
#define HB_FIELD(name) set_number(key, #name, w.name, v)
  const bool known = HB_FIELD(n) || HB_FIELD(k) || HB_FIELD(panel_order) || HB_FIELD(bits) || HB_FIELD(plane8) || HB_FIELD(plane4) ||
                     HB_FIELD(plane2) || HB_FIELD(plane1) || HB_FIELD(codes) || HB_FIELD(row_bytes) || HB_FIELD(flip) || HB_FIELD(element) ||
                     HB_FIELD(values) || HB_FIELD(offset) || HB_FIELD(integral) || HB_FIELD(table_low) || HB_FIELD(unit) ||
                     HB_FIELD(mantissa_bits) || HB_FIELD(exponent_bias) || HB_FIELD(last_finite) || HB_FIELD(groups) || HB_FIELD(group) ||
                     HB_FIELD(group_size) || HB_FIELD(seg) || HB_FIELD(span) || HB_FIELD(gather) || HB_FIELD(group_index) || HB_FIELD(scale) ||
                     HB_FIELD(scales) || HB_FIELD(zeros) || HB_FIELD(float_zeros) || HB_FIELD(biases) || HB_FIELD(mins) ||
                     HB_FIELD(super_scales) || HB_FIELD(super_mins) || HB_FIELD(groups_per_super) || HB_FIELD(supers) ||
                     HB_FIELD(global_op) || HB_FIELD(global) || HB_FIELD(divisor) || HB_FIELD(inverse) || HB_FIELD(grouping) ||
                     HB_FIELD(group_rows) || HB_FIELD(first_row) || HB_FIELD(total_rows) || HB_FIELD(nested_map) ||
                     HB_FIELD(nested_absmax) || HB_FIELD(nested_offset);
#undef HB_FIELD
  if (!known) throw nb::key_error(key);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::class_<Weight>(m, "Weight").def("__init__", [](Weight *self, nb::dict fields) {
    new (self) Weight();
    for (auto [key, value] : fields) set_field(*self, nb::cast<std::string>(key).c_str(), value);
  });

  m.def("known", &halfbyte::known_sets);
  m.def("supported", &halfbyte::supported_sets);
  m.def("current", [] { return std::string(halfbyte::kernels().name); });
  m.def("use", &halfbyte::use_set, "name"_a);
  m.def("known_cores", &halfbyte::known_cores);
  m.def("use_core", &halfbyte::use_core, "name"_a);
  m.def("threads", &halfbyte::threads);
  m.def("usable_threads", &halfbyte::usable_threads);
  m.def("set_threads", &halfbyte::set_threads, "threads"_a);

  m.def(
      "linear",
      [](const Weight &w, uintptr_t x, int dtype, int64_t rows, int64_t row_stride, int64_t column_stride, uintptr_t bias, int activations,
         int out_dtype, uintptr_t out) {
        halfbyte::Matrix matrix;
        matrix.data = address<void>(x), matrix.dtype = static_cast<halfbyte::Dtype>(dtype), matrix.rows = rows;
        matrix.row_stride = row_stride, matrix.column_stride = column_stride;
        nb::gil_scoped_release released;
        halfbyte::linear(w, matrix, address<float>(bias), static_cast<halfbyte::Activations>(activations),
                         static_cast<halfbyte::Dtype>(out_dtype), reinterpret_cast<void *>(out));
      });
  m.def("embedding", [](const Weight &w, uintptr_t ids, int64_t count, int dtype, uintptr_t out) {
    nb::gil_scoped_release released;
    halfbyte::embedding(w, address<int64_t>(ids), count, static_cast<halfbyte::Dtype>(dtype), reinterpret_cast<void *>(out));
  });
  m.def("dequantize", [](const Weight &w, int64_t first, int64_t last, int dtype, uintptr_t out) {
    nb::gil_scoped_release released;
    halfbyte::dequantize(w, first, last, static_cast<halfbyte::Dtype>(dtype), reinterpret_cast<void *>(out));
  });
  m.def("pack", [](const Weight &w, uintptr_t codes, int64_t row_bytes, uintptr_t p8, uintptr_t p4, uintptr_t p2, uintptr_t p1) {
    uint8_t *const planes[4] = {reinterpret_cast<uint8_t *>(p8), reinterpret_cast<uint8_t *>(p4), reinterpret_cast<uint8_t *>(p2),
                                reinterpret_cast<uint8_t *>(p1)};
    nb::gil_scoped_release released;
    halfbyte::pack(w, address<uint8_t>(codes), row_bytes, planes);
  });
  m.def("probe", [](int kind, uintptr_t data, int64_t count) {  // for halfbyte/bench/cpu/limits.py
    const halfbyte::Kernels &table = halfbyte::kernels();
    nb::gil_scoped_release released;
    return table.probe(static_cast<halfbyte::Probe>(kind), address<uint8_t>(data), count);
  });
  m.def("unpack", [](const Weight &w, uintptr_t out, int64_t row_bytes) {
    nb::gil_scoped_release released;
    halfbyte::unpack(w, reinterpret_cast<uint8_t *>(out), row_bytes);
  });

  m.def("turn", [](uintptr_t in, int64_t rows, int64_t columns, int size, uintptr_t out) {  // for halfbyte/numerics/transpose.py
    nb::gil_scoped_release released;
    halfbyte::turn(address<void>(in), rows, columns, size, reinterpret_cast<void *>(out));
  });
  m.def("turn_nibbles", [](uintptr_t in, int64_t rows, int64_t columns, uintptr_t in_order, uintptr_t out_order, uintptr_t out) {
    nb::gil_scoped_release released;
    halfbyte::turn_nibbles(address<uint8_t>(in), rows, columns, address<uint8_t>(in_order), address<uint8_t>(out_order),
                           reinterpret_cast<uint8_t *>(out));
  });

  m.def("merges", [](uintptr_t characters, uintptr_t ends, int64_t words, uintptr_t left, uintptr_t right) {  // for halfbyte/transformers/gguf/bpe_merges.py
    nb::gil_scoped_release released;
    return halfbyte::merges(address<uint32_t>(characters), address<int64_t>(ends), words, reinterpret_cast<int32_t *>(left),
                            reinterpret_cast<int32_t *>(right));
  });

  using halfbyte::Step;  // for halfbyte/transformers/decode/native_step.py
  nb::class_<Step>(m, "Step")
      .def(nb::init<>())
      .def("product",
           [](Step &s, const Weight &w, uintptr_t x, uintptr_t bias, int activations, uintptr_t y) {
             s.product(w, floats(x), floats(bias), static_cast<halfbyte::Activations>(activations), floats(y));
           })
      .def("norm", [](Step &s, uintptr_t x, uintptr_t scale, int64_t rows, int64_t d, float eps,
                      uintptr_t y) { s.norm(floats(x), floats(scale), rows, d, eps, floats(y)); })
      .def("rotate", [](Step &s, uintptr_t x, int64_t heads, int64_t d, int which) { s.rotate(floats(x), heads, d, which); })
      .def("attend",
           [](Step &s, int layer, uintptr_t q, uintptr_t k, uintptr_t v, int64_t heads, int64_t kv_heads, int64_t d, float scale, uintptr_t y) {
             s.attend(layer, floats(q), floats(k), floats(v), heads, kv_heads, d, scale, floats(y));
           })
      .def("gate", [](Step &s, int f, uintptr_t gate, uintptr_t up, int64_t count,
                      uintptr_t y) { s.gate(static_cast<halfbyte::Gate>(f), floats(gate), floats(up), count, floats(y)); })
      .def("add", [](Step &s, uintptr_t x, int64_t count, uintptr_t y) { s.add(floats(x), count, floats(y)); })
      .def("run", [](Step &s, uintptr_t places, uintptr_t cosines, uintptr_t sines) {
        nb::gil_scoped_release released;
        s.run(address<halfbyte::Place>(places), address<const float *>(cosines), address<const float *>(sines));
      });
}
