// The Python module: arrays are checked against the weight here, once; nothing is copied; the
// interpreter's lock is released while computing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "../dispatch.h"
#include "../linear.h"
#include "../merges.h"
#include "../pool.h"
#include "../step.h"
#include "../strings.h"
#include "../transpose.h"
#include "packed_weight.h"
#include "without_gil.h"

namespace halfbyte {

std::atomic<bool> WithoutGil::closed_{false};
std::atomic<int> WithoutGil::running_{0};

void WithoutGil::close() {
  closed_ = true;
  PyThreadState *state = PyEval_SaveThread();
  while (running_) std::this_thread::yield();
  PyEval_RestoreThread(state);
}

namespace {

std::string text(int64_t x) { return std::to_string(x); }

// A matrix [rows][columns]: two axes of any strides, or any number of contiguous axes whose last is
// `columns`.
Matrix matrix_of(const char *operation, const char *name, const Array &a, int64_t columns) {
  Matrix m;
  m.data = a.data, m.dtype = dtype_of(operation, name, a);
  if (a.ndim < 1 || a.shape[a.ndim - 1] != columns)
    throw ShapeProblem(std::string("[") + operation + "] " + name + " is " + a.describe() +
                       "; allowed: (m, " + text(columns) + ")");
  m.rows = 1;
  for (int i = 0; i < a.ndim - 1; ++i) m.rows *= a.shape[i];
  m.row_stride = columns;
  if (a.ndim == 2)
    m.row_stride = a.strides[0], m.column_stride = a.strides[1];
  else
    check_plain(operation, name, a);
  if (a.size() && (uintptr_t)a.data % (uintptr_t)a.item())
    throw ShapeProblem(
        std::string("[") + operation + "] " + name +
        " is misaligned; elements at multiples of their size are allowed: give a copy");
  return m;
}

void linear_of(const PackedWeight &w, const Array &x, const std::optional<Array> &bias,
               Activations activations, const Array &out) {
  const Matrix in = matrix_of("linear", "x", x, w.k), to = matrix_of("linear", "out", out, w.n);
  check_plain("linear", "out", out);
  if (to.rows != in.rows)
    throw ShapeProblem("[linear] out has " + text(to.rows) + " rows; x has " + text(in.rows));
  const float *b = bias ? elements<float>("linear", "bias", *bias, w.n) : nullptr;
  WithoutGil computing;
  linear(w, in, b, activations, to.dtype, to.data ? const_cast<void *>(to.data) : nullptr);
}

void embedding_of(const PackedWeight &w, const Array &ids, const Array &out) {
  const int64_t *p = elements<int64_t>("embedding", "ids", ids, -1), count = ids.size();
  const Matrix to = matrix_of("embedding", "out", out, w.k);
  check_plain("embedding", "out", out);
  if (to.rows != count)
    throw ShapeProblem("[embedding] out has " + text(to.rows) + " rows for " + text(count) +
                       " ids");
  for (int64_t i = 0; i < count; ++i)
    if (p[i] < 0 || p[i] >= w.n)
      throw ShapeProblem("[embedding] ids have " + text(p[i]) + "; the table has rows 0 to " +
                         text(w.n - 1));
  WithoutGil computing;
  embedding(w, p, count, to.dtype, const_cast<void *>(to.data));
}

void dequantize_of(const PackedWeight &w, const Array &out) {
  const Matrix to = matrix_of("dequantize", "out", out, w.k);
  check_plain("dequantize", "out", out);
  if (to.rows != w.n)
    throw ShapeProblem("[dequantize] out is " + out.describe() + "; allowed: (" + text(w.n) + ", " +
                       text(w.k) + ")");
  WithoutGil computing;
  dequantize(w, 0, w.n, to.dtype, const_cast<void *>(to.data));
}

void transpose_of(const Array &in, const Array &out) {
  check_plain("transpose", "in", in), check_plain("transpose", "out", out);
  if (in.ndim != 2 || out.ndim != 2 || in.shape[0] != out.shape[1] || in.shape[1] != out.shape[0] ||
      in.item() != out.item() || in.dtype.bits % 8 ||
      (in.item() != 1 && in.item() != 2 && in.item() != 4 && in.item() != 8))
    throw ShapeProblem("[transpose] " + in.describe() + " to " + out.describe() +
                       "; allowed: (r, c) to (c, r) of 1, 2, 4 or 8 bytes");
  WithoutGil computing;
  transpose(in.data, in.shape[0], in.shape[1], (int)in.item(), out.data);
}

void transpose_nibbles_of(const Array &in, int64_t columns, const Array &in_order,
                          const Array &out_order, const Array &out) {
  const uint8_t *from = elements<uint8_t>("transpose", "in", in, -1);
  uint8_t *to = elements<uint8_t>("transpose", "out", out, -1);
  if (columns < 0 || in.ndim != 2 || out.ndim != 2 || in.shape[1] != (columns + 1) / 2 ||
      out.shape[0] != columns || out.shape[1] != (in.shape[0] + 1) / 2)
    throw ShapeProblem("[transpose] " + in.describe() + " of " + text(columns) + " columns to " +
                       out.describe() + "; allowed: (r, ceil(c / 2)) to (c, ceil(r / 2))");
  const auto order = [](const Array &a, int64_t side) -> const uint8_t * {
    const uint8_t *p = elements<uint8_t>("transpose", "order", a, 8);
    unsigned seen = 0;
    bool plain = true;
    for (int i = 0; i < 8; ++i) seen |= p[i] < 8 ? 1u << p[i] : 0, plain &= p[i] == i;
    if (seen != 255) throw ShapeProblem("[transpose] an order is a permutation of 0 to 7");
    if (!plain && side % 8)
      throw ShapeProblem("[transpose] " + text(side) +
                         " rows in another order; a multiple of 8 is allowed");
    return plain ? nullptr : p;
  };
  const uint8_t *first = order(in_order, in.shape[0]), *second = order(out_order, columns);
  WithoutGil computing;
  transpose_nibbles(from, in.shape[0], columns, first, second, to);
}

int64_t merges_of(const Array &characters, const Array &ends, const Array &left,
                  const Array &right) {
  const uint32_t *c = elements<uint32_t>("merges", "characters", characters, -1);
  const int64_t *e = elements<int64_t>("merges", "ends", ends, -1), words = ends.size();
  for (int64_t i = 0; i < words; ++i)
    if (e[i] < (i ? e[i - 1] : 0) || e[i] > characters.size())
      throw ShapeProblem("[merges] ends do not ascend within the characters");
  int32_t *l = elements<int32_t>("merges", "left", left, -1),
          *r = elements<int32_t>("merges", "right", right, -1);
  if (left.size() < characters.size() || right.size() < characters.size())
    throw ShapeProblem("[merges] left and right need one element a character");
  WithoutGil computing;
  return merges(c, e, words, l, r);
}

int64_t string_end_of(const Array &data, int64_t start, int64_t count, bool swapped) {
  const uint8_t *d = elements<uint8_t>("strings", "data", data, -1);
  if (start < 0 || start > data.size() || count < 0)
    throw ShapeProblem("[strings] " + text(count) + " strings at " + text(start) + " of " +
                       data.describe());
  return string_ends(d, data.size(), start, count, swapped);
}

// Strings with the object whose memory they are in.
class BoundStrings {
 public:
  BoundStrings(nb::handle object, int64_t start, int64_t count, bool swapped) {
    Array data;
    if (!Array::from(object, data)) throw ShapeProblem("[strings] data is no array in memory");
    if (string_end_of(data, start, count, swapped) < 0 || count > INT32_MAX)
      throw ShapeProblem("[strings] " + text(count) + " strings run past the end of " +
                         data.describe());
    std::vector<int64_t> ends((size_t)count);
    const uint8_t *d = (const uint8_t *)data.data;
    string_ends(d, data.size(), start, count, swapped, ends.data());
    kept_ = nb::borrow(object);
    strings_.emplace(d, start, std::move(ends));
  }
  nb::tuple bounds(int64_t i) const {
    if (i < 0 || i >= strings_->count())
      throw nb::index_error(("string " + text(i) + " of " + text(strings_->count())).c_str());
    return nb::make_tuple(strings_->begin(i), strings_->end(i));
  }
  int64_t find(const nb::bytes &word) const {
    return strings_->find((const uint8_t *)word.data(), (int64_t)word.size());
  }
  void pieces(const nb::bytes &written, nb::handle found) const {
    Array a;
    if (!Array::from(found, a)) throw ShapeProblem("[strings] found is no array in memory");
    check_writable("strings", "found", found);
    uint8_t *marks = elements<uint8_t>("strings", "found", a, strings_->count());
    WithoutGil computing;
    strings_->pieces((const uint8_t *)written.data(), (int64_t)written.size(), marks);
  }
  int64_t longest() const { return strings_->longest(); }
  bool distinct() const { return strings_->distinct(); }

 private:
  nb::object kept_;
  std::optional<Strings> strings_;
};

double probe_of(Probe kind, const Array &data, int64_t rounds) {
  const uint8_t *p = elements<uint8_t>("probe", "data", data, -1);
  const int64_t count = kind == Probe::read ? data.size() : rounds;
  if (kind != Probe::read && data.size() < 512)
    throw ShapeProblem("[probe] data is " + data.describe() +
                       "; 512 bytes of operands are allowed");
  const Kernels &table = kernels();
  WithoutGil computing;
  return table.probe(kind, p, count);
}

// A list of operations with the objects whose memory they use.
class BoundStep : public Step {
 public:
  void keep(std::initializer_list<nb::handle> objects) {
    for (nb::handle h : objects) kept_.push_back(nb::borrow(h));
  }
  static float *floats(const char *name, nb::handle object, int64_t count,
                       int64_t *size = nullptr) {
    Array a;
    if (!Array::from(object, a))
      throw ShapeProblem(std::string("[step] ") + name + " is no array in memory");
    if (size) *size = a.size();
    return elements<float>("step", name, a, count);
  }
  static float *written(const char *name, nb::handle object, int64_t count,
                        int64_t *size = nullptr) {
    check_writable("step", name, object);
    return floats(name, object, count, size);
  }

  struct Attention {
    int layer;
    int64_t kv_heads, d;
  };
  std::vector<Attention> attentions;
  std::vector<std::pair<int, int64_t>> rotations;  // table and d
  std::vector<LayerCache> layers;
  std::vector<int64_t> kv_heads, d, tokens;
  std::vector<Angles> tables;
  int64_t positions = 0;
  std::vector<nb::object> caches;

 private:
  std::vector<nb::object> kept_;
};

[[noreturn]] void refuse_step(const std::string &what) { throw ShapeProblem("[step] " + what); }

// The caches of a sequence and the angles of its next positions, which `run` indexes.
void bind_caches(BoundStep &s, const std::vector<nb::object> &keys,
                 const std::vector<nb::object> &values, const std::vector<nb::object> &cosines,
                 const std::vector<nb::object> &sines) {
  if (keys.size() != values.size() || cosines.size() != sines.size())
    refuse_step("keys and values, cosines and sines come in pairs");
  s.layers.clear(), s.kv_heads.clear(), s.d.clear(), s.tokens.clear(), s.tables.clear(),
      s.caches.clear();
  for (size_t i = 0; i < keys.size(); ++i) {
    Array k, v;
    if (!Array::from(keys[i], k) || !Array::from(values[i], v))
      refuse_step("keys or values are no arrays in memory");
    for (const Array *a : {&k, &v})
      if (a->ndim != 3 || a->dtype.code != (uint8_t)nb::dlpack::dtype_code::Float ||
          a->dtype.bits != 32 || a->strides[2] != 1 || a->strides[1] != a->shape[2] ||
          (uintptr_t)a->data % 4)
        refuse_step("keys or values are " + a->describe() +
                    "; float32 (kv_heads, tokens, d) with contiguous heads is allowed");
    if (!std::equal(k.shape, k.shape + 3, v.shape) || k.strides[0] != v.strides[0])
      refuse_step("keys " + k.describe() + " and values " + v.describe() + " differ");
    check_writable("step", "keys", keys[i]), check_writable("step", "values", values[i]);
    LayerCache layer;
    layer.keys = (float *)k.data, layer.values = (float *)v.data, layer.stride = k.strides[0];
    s.layers.push_back(layer), s.kv_heads.push_back(k.shape[0]), s.tokens.push_back(k.shape[1]),
        s.d.push_back(k.shape[2]);
    s.caches.push_back(keys[i]), s.caches.push_back(values[i]);
  }
  for (size_t i = 0; i < cosines.size(); ++i) {
    Array c, n;
    if (!Array::from(cosines[i], c) || !Array::from(sines[i], n) || c.ndim != 2 || n.ndim != 2 ||
        !std::equal(c.shape, c.shape + 2, n.shape))
      refuse_step("cosines and sines are (positions, d) of one shape");
    if (i && c.shape[0] != s.positions)
      refuse_step("tables of " + text(c.shape[0]) + " and " + text(s.positions) + " positions");
    s.positions = c.shape[0];
    s.tables.push_back({elements<float>("step", "cosines", c, -1),
                        elements<float>("step", "sines", n, -1), c.shape[1]});
    s.caches.push_back(cosines[i]), s.caches.push_back(sines[i]);
  }
  for (const auto &a : s.attentions)
    if (a.layer >= (int)s.layers.size() || s.kv_heads[a.layer] != a.kv_heads || s.d[a.layer] != a.d)
      refuse_step("the cache of layer " + std::to_string(a.layer) + " does not have its heads");
  for (const auto &[table, d] : s.rotations)
    if (table >= (int)s.tables.size() || s.tables[table].d != d)
      refuse_step("there is no table " + std::to_string(table) + " of " + text(d) + " angles");
}

// Tokens of a sequence, at most: no sum of positions overflows.
constexpr int64_t kLongest = (int64_t)1 << 48;

void run_step(BoundStep &s, const Array &first, const Array &count, int64_t position,
              int64_t token) {
  const int64_t layers = (int64_t)s.layers.size();
  const int64_t *f = elements<int64_t>("step", "first", first, layers),
                *c = elements<int64_t>("step", "count", count, layers);
  for (int64_t i = 0; i < layers; ++i) {
    if (f[i] < 0 || c[i] < 1 || f[i] > s.tokens[i] - c[i])
      refuse_step("tokens " + text(f[i]) + " to " + text(f[i] + c[i]) + " of layer " + text(i) +
                  "; its cache has " + text(s.tokens[i]));
    if (token < c[i] - 1 || token >= kLongest)
      refuse_step(text(c[i]) + " tokens up to token " + text(token) + " of the sequence");
    s.layers[i].first = f[i], s.layers[i].count = c[i], s.layers[i].begin = token + 1 - c[i];
  }
  if (!s.rotations.empty() && (position < 0 || position >= s.positions))
    refuse_step("position " + text(position) + " of " + text(s.positions));
  if (s.layers.empty() && !s.attentions.empty())
    refuse_step("bind the caches before the first run");
  if (s.tables.empty() && !s.rotations.empty()) refuse_step("bind the tables before the first run");
  WithoutGil computing;
  s.run(s.layers.data(), s.tables.data(), position);
}

// softmax(scale q . keys) values for the last tokens of a cache, of which `count` tokens are filled
// and the first is token `begin` of the sequence.
void attend(const Array &q, const Array &keys, const Array &values, int64_t count, int64_t begin,
            int64_t window, float scale, nb::handle out) {
  Array y;
  if (!Array::from(out, y)) throw ShapeProblem("[attend] y is no array in memory");
  check_writable("attend", "y", out);
  if (q.ndim != 3 || keys.ndim != 3 || !q.shape[0] || !q.shape[1] || !q.shape[2] ||
      keys.shape[2] != q.shape[2] || !keys.shape[0] || q.shape[0] % keys.shape[0])
    throw ShapeProblem("[attend] q " + q.describe() + " and keys " + keys.describe() +
                       "; (heads, tokens, d) and (kv_heads, tokens, d) are allowed");
  if (!std::equal(keys.shape, keys.shape + 3, values.shape) || values.ndim != 3)
    throw ShapeProblem("[attend] keys " + keys.describe() + " and values " + values.describe() +
                       " differ");
  const int64_t tokens = q.shape[1];
  if (count < tokens || count > keys.shape[1] || begin < 0 || begin > kLongest - count ||
      window < 1)
    throw ShapeProblem("[attend] " + text(tokens) + " tokens, " + text(count) + " cached of " +
                       text(keys.shape[1]) + ", begin " + text(begin) + ", window " + text(window));
  const Heads heads{q.shape[0], keys.shape[0], q.shape[2]};
  LayerCache cache;
  cache.keys = elements<float>("attend", "keys", keys, -1);
  cache.values = elements<float>("attend", "values", values, -1);
  cache.stride = keys.shape[1] * heads.d, cache.count = count, cache.begin = begin;
  const float *from = elements<float>("attend", "q", q, -1);
  float *to = elements<float>("attend", "y", y, q.size());
  WithoutGil computing;
  attend_prompt(from, tokens, heads, scale, cache, window, to);
}

void bind_step(nb::module_ &m) {  // for halfbyte/transformers/decode/native_step.py
  m.def("attend", &attend, nb::arg("q"), nb::arg("keys"), nb::arg("values"), nb::arg("count"),
        nb::arg("begin"), nb::arg("window"), nb::arg("scale"), nb::arg("y"));
  nb::enum_<Gate>(m, "Gate").value("silu", Gate::silu).value("gelu_tanh", Gate::gelu_tanh);
  nb::class_<BoundStep>(m, "Step")
      .def(nb::init<>())
      .def(
          "product",
          [](BoundStep &s, nb::object weight, nb::object x, nb::object bias,
             Activations activations, nb::object y) {
            const PackedWeight &w = nb::cast<const PackedWeight &>(weight);
            float *b = bias.is_none() ? nullptr : BoundStep::floats("bias", bias, w.n);
            s.product(w, BoundStep::floats("x", x, w.k), b, activations,
                      BoundStep::written("y", y, w.n));
            s.keep({weight, x, bias, y});
          },
          nb::arg("weight"), nb::arg("x"), nb::arg("bias").none(), nb::arg("activations"),
          nb::arg("y"))
      .def("norm",
           [](BoundStep &s, nb::object x, nb::object scale, float eps, nb::object y) {
             int64_t d, size;
             const float *by = BoundStep::floats("scale", scale, -1, &d),
                         *from = BoundStep::floats("x", x, -1, &size);
             if (d < 1 || size % d)
               refuse_step("a norm over " + text(d) + " of " + text(size) + " numbers");
             s.norm(from, by, size / d, d, eps, BoundStep::written("y", y, size));
             s.keep({x, scale, y});
           })
      .def("rotate",
           [](BoundStep &s, nb::object x, int64_t d, int table) {
             int64_t size;
             float *at = BoundStep::written("x", x, -1, &size);
             if (d < 2 || d % 2 || size % d || table < 0)
               refuse_step("a rotation of " + text(d) + " of " + text(size) + " numbers by table " +
                           std::to_string(table));
             s.rotate(at, size / d, d, table);
             s.rotations.push_back({table, d});
             s.keep({x});
           })
      .def("attend",
           [](BoundStep &s, int layer, nb::object q, nb::object k, nb::object v, int64_t d,
              float scale, nb::object y) {
             int64_t queries, keys;
             const float *from = BoundStep::floats("q", q, -1, &queries),
                         *key = BoundStep::floats("k", k, -1, &keys);
             if (layer < 0 || d < 1 || queries % d || keys % d || keys == 0 || queries % keys)
               refuse_step("attention of " + text(queries) + " numbers to " + text(keys) +
                           ", heads of " + text(d));
             s.attend(layer, from, key, BoundStep::floats("v", v, keys), queries / d, keys / d, d,
                      scale, BoundStep::written("y", y, queries));
             s.attentions.push_back({layer, keys / d, d});
             s.keep({q, k, v, y});
           })
      .def("gate",
           [](BoundStep &s, Gate f, nb::object gate, nb::object up, nb::object y) {
             int64_t size;
             const float *g = BoundStep::floats("gate", gate, -1, &size);
             s.gate(f, g, BoundStep::floats("up", up, size), size,
                    BoundStep::written("y", y, size));
             s.keep({gate, up, y});
           })
      .def("add",
           [](BoundStep &s, nb::object x, nb::object y) {
             int64_t size;
             const float *from = BoundStep::floats("x", x, -1, &size);
             s.add(from, size, BoundStep::written("y", y, size));
             s.keep({x, y});
           })
      .def("bind", &bind_caches)
      .def("run", &run_step);
}

}  // namespace
}  // namespace halfbyte

NB_MODULE(_native, m) {
  using namespace halfbyte;
  nb::set_leak_warnings(false);  // daemon threads keep weights until the process ends
  nb::register_exception_translator([](const std::exception_ptr &problem, void *) {
    try {
      std::rethrow_exception(problem);
    } catch (const ShapeProblem &e) {
      PyErr_SetString(nb::module_::import_("halfbyte.errors").attr("ShapeError").ptr(), e.what());
    }
  });
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&WithoutGil::close));

  nb::enum_<Activations>(m, "Activations")
      .value("exact", Activations::exact)
      .value("int8", Activations::int8)
      .value("int8_token", Activations::int8_token);
  nb::enum_<Probe>(m, "Probe")
      .value("read", Probe::read)
      .value("fma", Probe::fma)
      .value("dot", Probe::dot);
  bind_weight(m);

  m.def("known", &known_sets);
  m.def("supported", &supported_sets);
  m.def("current", [] { return std::string(kernels().name); });
  m.def("use", &use_set, nb::arg("name"));
  m.def("known_cores", &known_cores);
  m.def("use_core", &use_core, nb::arg("name"));
  m.def("threads", &threads);
  m.def("usable_threads", &usable_threads);
  m.def("quota_threads", &quota_threads, nb::arg("groups_of_process"), nb::arg("mount"));
  m.def("set_threads", &set_threads, nb::arg("threads"));

  m.def("linear", &linear_of, nb::arg("weight"), nb::arg("x"), nb::arg("bias").none(),
        nb::arg("activations"), nb::arg("out"));
  m.def("embedding", &embedding_of, nb::arg("weight"), nb::arg("ids"), nb::arg("out"));
  m.def("dequantize", &dequantize_of, nb::arg("weight"), nb::arg("out"));
  m.def("probe", &probe_of, nb::arg("kind"), nb::arg("data"),
        nb::arg("rounds"));  // for halfbyte/bench/cpu/limits.py
  m.def("transpose", &transpose_of, nb::arg("x"),
        nb::arg("out"));  // for halfbyte/numerics/transpose.py
  m.def("transpose_nibbles", &transpose_nibbles_of, nb::arg("x"), nb::arg("columns"),
        nb::arg("order"), nb::arg("out_order"), nb::arg("out"));
  m.def("merges", &merges_of, nb::arg("characters"), nb::arg("ends"), nb::arg("left"),
        nb::arg("right"));  // for gguf_models/bpe_merges.py
  m.def("string_end", &string_end_of, nb::arg("data"), nb::arg("start"), nb::arg("count"),
        nb::arg("swapped"));  // for checkpoints/gguf/metadata.py
  nb::class_<BoundStrings>(m, "Strings")
      .def(nb::init<nb::handle, int64_t, int64_t, bool>(), nb::arg("data"), nb::arg("start"),
           nb::arg("count"), nb::arg("swapped"))
      .def("bounds", &BoundStrings::bounds, nb::arg("index"))
      .def("find", &BoundStrings::find, nb::arg("word"))
      .def("pieces", &BoundStrings::pieces, nb::arg("text"), nb::arg("found"))
      .def_prop_ro("longest", &BoundStrings::longest)
      .def_prop_ro("distinct", &BoundStrings::distinct);
  bind_step(m);
}
