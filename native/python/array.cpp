#include "array.h"

namespace halfbyte {
namespace {

namespace dlpack = nb::dlpack;

// DLPack's table (dlpack.h, "DLPackExchangeAPI"), as far as it is used here.
struct ExchangeTable {
  struct {
    uint32_t major, minor;
  } version;
  ExchangeTable *previous;
  void *(*unused[3])();
  int (*tensor_from_object)(void *object, dlpack::dltensor *out);
};

// The table of a type, or null. Types are few and live as long as the process: each is looked up
// once.
const ExchangeTable *exchange_table(PyTypeObject *type) {
  struct Known {
    PyTypeObject *type;
    const ExchangeTable *table;
  };
  static Known known[8];
  static int count = 0;
  for (int i = 0; i < count; ++i)
    if (known[i].type == type) return known[i].table;
  const ExchangeTable *table = nullptr;
  PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
  if (capsule) {
    table = (const ExchangeTable *)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  while (table && table->version.major > 1) table = table->previous;
  if (count < 8) {
    Py_INCREF(type);
    known[count++] = {type, table};
  }
  return table;
}

bool fill(Array &out, int ndim, const int64_t *shape, const int64_t *strides) {
  if (ndim > kMaxDims) return false;
  out.ndim = ndim;
  int64_t step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    out.shape[i] = shape[i];
    out.strides[i] = strides ? strides[i] : step;
    step *= shape[i];
  }
  return true;
}

std::string dtype_name(dlpack::dtype d) {
  static const char *const kinds[] = {"int",    "uint",    "float", "handle",
                                      "bfloat", "complex", "bool"};
  return (d.code < 7 ? kinds[d.code] : "dtype") + std::to_string(d.bits);
}

[[noreturn]] void refuse(const char *operation, const char *name, const Array &a,
                         const std::string &allowed) {
  throw ShapeProblem(std::string("[") + operation + "] " + name + " is " + a.describe() +
                     "; allowed: " + allowed);
}

bool is(dlpack::dtype d, dlpack::dtype_code code, int bits) {
  return d.code == (uint8_t)code && d.bits == bits && d.lanes == 1;
}

template <class T>
struct Kind;
template <>
struct Kind<float> {
  static constexpr auto code = dlpack::dtype_code::Float;
  static constexpr auto name = "float32";
};
template <>
struct Kind<double> {
  static constexpr auto code = dlpack::dtype_code::Float;
  static constexpr auto name = "float64";
};
template <>
struct Kind<int16_t> {
  static constexpr auto code = dlpack::dtype_code::Int;
  static constexpr auto name = "int16";
};
template <>
struct Kind<int32_t> {
  static constexpr auto code = dlpack::dtype_code::Int;
  static constexpr auto name = "int32";
};
template <>
struct Kind<int64_t> {
  static constexpr auto code = dlpack::dtype_code::Int;
  static constexpr auto name = "int64";
};
template <>
struct Kind<uint8_t> {
  static constexpr auto code = dlpack::dtype_code::UInt;
  static constexpr auto name = "uint8";
};
template <>
struct Kind<uint16_t> {
  static constexpr auto code = dlpack::dtype_code::UInt;
  static constexpr auto name = "16-bit words";
};
template <>
struct Kind<uint32_t> {
  static constexpr auto code = dlpack::dtype_code::UInt;
  static constexpr auto name = "uint32";
};

}  // namespace

bool Array::contiguous() const {
  if (size() == 0) return true;
  int64_t step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != step) return false;
    step *= shape[i];
  }
  return true;
}

std::string Array::describe() const {
  std::string text = dtype_name(dtype) + " (";
  for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (ndim == 1 ? ",)" : ")");
}

bool Array::from(nb::handle object, Array &out) {
  if (const ExchangeTable *table = exchange_table(Py_TYPE(object.ptr()))) {
    dlpack::dltensor t;
    if (table->tensor_from_object(object.ptr(), &t) != 0) {
      PyErr_Clear();
      return false;
    }
    if (t.device.device_type != nb::device::cpu::value || !fill(out, t.ndim, t.shape, t.strides))
      return false;
    out.data = (char *)t.data + t.byte_offset, out.dtype = t.dtype;
    return t.data || out.size() == 0;  // a fake or meta tensor has no data
  }
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(object, array, false)) {
    // A parameter of an older torch refuses `__dlpack__` because it records gradients.
    if (!nb::hasattr(object, "detach") || !nb::try_cast(object.attr("detach")(), array, false))
      return false;
  }
  if (array.device_type() != nb::device::cpu::value ||
      !fill(out, (int)array.ndim(), array.shape_ptr(), array.stride_ptr()))
    return false;
  out.data = const_cast<void *>(array.data()), out.dtype = array.dtype(),
  out.imported = std::move(array);
  return true;
}

Dtype dtype_of(const char *operation, const char *name, const Array &a) {
  using Code = dlpack::dtype_code;
  if (is(a.dtype, Code::Float, 32)) return Dtype::f32;
  if (is(a.dtype, Code::Float, 16)) return Dtype::f16;
  if (is(a.dtype, Code::Bfloat, 16) || is(a.dtype, Code::UInt, 16)) return Dtype::bf16;
  refuse(operation, name, a, "float32, float16 or bfloat16");
}

void check_plain(const char *operation, const char *name, const Array &a) {
  if (!a.contiguous()) refuse(operation, name, a, "a contiguous array; this one has other strides");
  if (a.item() && (uintptr_t)a.data % (uintptr_t)a.item() && a.size())
    refuse(operation, name, a,
           "elements at multiples of their size; this array is misaligned, give a copy");
}

template <class T>
T *elements(const char *operation, const char *name, const Array &a, int64_t count) {
  const bool kind = sizeof(T) == 2 && Kind<T>::code == dlpack::dtype_code::UInt
                        ? a.dtype.bits == 16
                        : is(a.dtype, Kind<T>::code, 8 * sizeof(T));
  if (!kind || a.dtype.lanes != 1 || (count >= 0 && a.size() != count))
    refuse(
        operation, name, a,
        (count >= 0 ? std::to_string(count) + " elements of " : std::string("")) + Kind<T>::name);
  check_plain(operation, name, a);
  return (T *)a.data;
}
template float *elements<float>(const char *, const char *, const Array &, int64_t);
template double *elements<double>(const char *, const char *, const Array &, int64_t);
template int16_t *elements<int16_t>(const char *, const char *, const Array &, int64_t);
template int32_t *elements<int32_t>(const char *, const char *, const Array &, int64_t);
template int64_t *elements<int64_t>(const char *, const char *, const Array &, int64_t);
template uint8_t *elements<uint8_t>(const char *, const char *, const Array &, int64_t);
template uint16_t *elements<uint16_t>(const char *, const char *, const Array &, int64_t);
template uint32_t *elements<uint32_t>(const char *, const char *, const Array &, int64_t);

void check_writable(const char *operation, const char *name, nb::handle object) {
  if (exchange_table(Py_TYPE(object.ptr()))) return;
  nb::ndarray<> array;
  if (!nb::try_cast(object, array, false))
    throw ShapeProblem(std::string("[") + operation + "] " + name +
                       " is read-only; a writable array is allowed");
}

}  // namespace halfbyte
