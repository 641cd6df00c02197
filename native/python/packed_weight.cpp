#include "packed_weight.h"

#include <algorithm>
#include <utility>

#include "../linear.h"
#include "without_gil.h"

namespace halfbyte {
namespace {

constexpr const char *kWeight = "weight";
constexpr int64_t kMostElements = (int64_t)1 << 46;  // no sum of sizes below overflows

[[noreturn]] void refuse(const std::string &what) { throw ShapeProblem("[weight] " + what); }
void require(bool holds, const std::string &what) {
  if (!holds) refuse(what);
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The counts of `w` are not negative, and no product of them that is computed here or in a decoder
// overflows.
void check_counts(const Weight &w) {
  const int64_t rows = w.panels() * kPanelRows;
  const std::pair<int64_t, int64_t> products[] = {
      {w.row_bytes, w.n},  {w.groups, rows},       {w.supers, rows},
      {w.total_rows, w.k}, {w.groups, w.group},    {w.supers, w.groups_per_super},
      {w.first_row, w.k},  {w.group_size, 1},      {w.group_rows, 1},
      {w.seg, w.span},     {w.first_row, w.groups}};
  for (const auto &[a, b] : products)
    require(a >= 0 && b >= 0 && a <= kMostElements && (b == 0 || a <= kMostElements / b),
            "counts " + std::to_string(a) + " and " + std::to_string(b) +
                " are outside what is allowed");
  require(w.flip >= 0 && w.flip < 256 && w.mantissa_bits >= 0 && w.mantissa_bits < 8 &&
              w.last_finite >= 0 && w.last_finite < 256 && w.exponent_bias >= 0 &&
              w.exponent_bias < 31,
          "flip " + std::to_string(w.flip) + ", mantissa_bits " + std::to_string(w.mantissa_bits) +
              ", last_finite " + std::to_string(w.last_finite) + " or exponent_bias " +
              std::to_string(w.exponent_bias) + " is outside what is allowed");
  for (const int number : {w.offset, w.table_low})
    require(number >= -1024 && number <= 1024,
            std::to_string(number) + " is no offset or lowest entry");
}

// The arrays of one set of fields, by name.
class Arrays {
 public:
  explicit Arrays(const std::map<std::string, nb::object> &objects) : objects_(objects) {}
  bool has(const char *name) const { return objects_.count(name) != 0; }
  Array get(const char *name) const {
    Array a;
    const auto object = objects_.find(name);
    require(object != objects_.end(), std::string(name) + " is missing");
    require(Array::from(object->second, a), std::string(name) + " is no array in memory");
    return a;
  }
  template <class T>
  const T *elements(const char *name, int64_t count) const {
    return halfbyte::elements<T>(kWeight, name, get(name), count);
  }
  template <class T>
  const T *optional(const char *name, int64_t count) const {
    return has(name) ? elements<T>(name, count) : nullptr;
  }

 private:
  const std::map<std::string, nb::object> &objects_;
};

int scale_bytes(Scale s) {
  return s == Scale::f32 ? 4 : s == Scale::f16 || s == Scale::bf16 ? 2 : 1;
}

// `count` entries of the scale's dtype.
const void *scale_entries(const Arrays &arrays, const char *name, Scale kind, int64_t count) {
  const Array a = arrays.get(name);
  require(a.item() == scale_bytes(kind) && a.size() == count,
          std::string(name) + " is " + a.describe() + "; " + std::to_string(count) +
              " elements of " + std::to_string(scale_bytes(kind)) + " bytes are allowed");
  check_plain(kWeight, name, a);
  return a.data;
}

void check_range(const int32_t *p, int64_t count, int64_t low, int64_t end, const char *name) {
  for (int64_t i = 0; i < count; ++i)
    require(p[i] >= low && p[i] < end, std::string(name) + " has " + std::to_string(p[i]) + "; " +
                                           std::to_string(low) + " to " + std::to_string(end - 1) +
                                           " are allowed");
}

void check_panel_order(Weight &w, const Arrays &arrays) {
  require(w.grouping == Grouping::row, "panel order holds groups along a row");
  require(w.group_index || w.groups >= (w.k + w.group_size - 1) / w.group_size,
          "groups " + std::to_string(w.groups) + " of " + std::to_string(w.group_size) +
              " do not hold k = " + std::to_string(w.k));
  require(w.group > 0 && w.group % 8 == 0 && w.groups >= 0 && w.kernel_k() >= w.k,
          "groups " + std::to_string(w.groups) + " of " + std::to_string(w.group) +
              " do not hold k = " + std::to_string(w.k));
  require(w.groups <= kMostElements / w.group, "too many groups");
  require(
      w.seg > 0 && w.seg <= 128 && w.seg % 8 == 0 && w.group % w.seg == 0,
      "seg " + std::to_string(w.seg) + " does not divide the group of " + std::to_string(w.group));
  require(w.span == 0 || (w.span % w.seg == 0 && w.span <= 128),
          "span " + std::to_string(w.span) + " is not whole segments, at most 128 inputs");
  const int64_t inputs = w.panels() * kPanelRows * w.padded_k();
  const auto plane = [&](const char *name, int bits) {
    const bool needed = w.bits == 8 ? bits == 8 : (w.bits & bits) != 0 && bits != 8;
    return needed ? arrays.elements<uint8_t>(name, inputs * bits / 8) : nullptr;
  };
  w.plane8 = plane("plane8", 8), w.plane4 = plane("plane4", 4), w.plane2 = plane("plane2", 2),
  w.plane1 = plane("plane1", 1);
  if ((w.gather = arrays.optional<int32_t>("gather", w.kernel_k())))
    check_range(w.gather, w.kernel_k(), -1, w.k, "gather");
  const int64_t lanes = w.panels() * kPanelRows, entries = lanes * w.groups;
  w.scales = w.scale == Scale::none ? nullptr : scale_entries(arrays, "scales", w.scale, entries);
  w.zeros = arrays.optional<int16_t>("zeros", entries);
  w.biases = arrays.has("biases") ? scale_entries(arrays, "biases", w.scale, entries) : nullptr;
  w.mins = arrays.optional<uint8_t>("mins", entries);
  if (arrays.has("super_scales")) {
    require(w.groups_per_super > 0 && w.supers * w.groups_per_super >= w.groups,
            "super-groups do not hold the groups");
    w.super_scales = arrays.elements<uint16_t>("super_scales", lanes * w.supers);
    w.super_mins = arrays.optional<uint16_t>("super_mins", lanes * w.supers);
  }
  require(!w.mins || w.super_mins, "mins without super_mins");
  require(w.scale != Scale::nested && !w.inverse && !arrays.has("float_zeros"),
          "panel order holds no nested, inverse or float zero points");
}

void check_canonical_order(Weight &w, const Arrays &arrays) {
  require(w.row_bytes >= (w.k * w.bits + 7) / 8,
          "row_bytes " + std::to_string(w.row_bytes) + " does not hold k = " + std::to_string(w.k));
  w.codes = arrays.elements<uint8_t>("codes", w.n * w.row_bytes);
  require(w.first_row >= 0 && w.total_rows >= w.first_row + w.n && w.group_rows > 0,
          "rows are outside the tensor they are a part of");
  require(w.groups >= 0 && w.group_size > 0 && w.groups >= (w.k + w.group_size - 1) / w.group_size,
          "groups do not hold k = " + std::to_string(w.k));
  int64_t entries = w.n * w.groups;  // the number that the row decoder's indices stay below
  if (w.grouping == Grouping::flat)
    entries = ((w.first_row + w.n) * w.k + w.group_size - 1) / w.group_size;
  if (w.grouping == Grouping::strided) entries = w.total_rows * w.k / w.group_size;
  if (w.grouping == Grouping::block)
    entries = ((w.first_row + w.n + w.group_rows - 1) / w.group_rows) * w.groups;
  require(w.grouping != Grouping::strided || entries > 0 || w.n * w.k == 0,
          "groups of " + std::to_string(w.group_size) + " are longer than the tensor");
  const auto reaches = [&](const char *name, int64_t item) -> const void * {
    const Array a = arrays.get(name);
    require(a.item() == item && a.size() >= entries,
            std::string(name) + " is " + a.describe() + "; at least " + std::to_string(entries) +
                " elements of " + std::to_string(item) + " bytes are allowed");
    check_plain(kWeight, name, a);
    return a.data;
  };
  w.scales = w.scale == Scale::none ? nullptr : reaches("scales", scale_bytes(w.scale));
  w.zeros = arrays.has("zeros") ? (const int16_t *)reaches("zeros", 2) : nullptr;
  w.float_zeros =
      arrays.has("float_zeros") ? reaches("float_zeros", scale_bytes(w.scale)) : nullptr;
  w.biases = arrays.has("biases") ? reaches("biases", scale_bytes(w.scale)) : nullptr;
  w.mins = arrays.has("mins") ? (const uint8_t *)reaches("mins", 1) : nullptr;
  if (arrays.has("super_scales")) {
    require(w.groups_per_super > 0 && w.supers * w.groups_per_super >= w.groups,
            "super-groups do not hold the groups");
    w.super_scales = arrays.elements<uint16_t>("super_scales", w.n * w.supers);
    w.super_mins = arrays.optional<uint16_t>("super_mins", w.n * w.supers);
  }
  require(!w.mins || w.super_mins, "mins without super_mins");
  if (w.scale == Scale::nested) {
    w.nested_map = arrays.elements<float>("nested_map", 256);
    w.nested_absmax = arrays.elements<float>("nested_absmax", -1);
    require(arrays.get("nested_absmax").size() * 256 >= entries, "nested_absmax is too short");
  }
}

}  // namespace

void WeightFields::set(const char *name, nb::object array) { arrays[name] = std::move(array); }

PackedWeight::PackedWeight(const WeightFields &fields) : Weight(fields), arrays_(fields.arrays) {
  Weight &w = *this;
  const Arrays arrays(arrays_);
  require(w.n >= 0 && w.k >= 0 && (w.k == 0 || w.n <= kMostElements / std::max<int64_t>(w.k, 1)),
          "shape (" + std::to_string(w.n) + ", " + std::to_string(w.k) +
              ") is outside what is allowed");
  check_counts(w);
  require(w.bits >= 1 && w.bits <= 8, std::to_string(w.bits) + " bits; 1 to 8 are allowed");
  w.group_size = std::max<int64_t>(w.group_size, 1);
  w.values = arrays.elements<double>("values", (int64_t)1 << w.bits);
  if ((w.group_index = arrays.optional<int32_t>("group_index", w.k)))
    check_range(w.group_index, w.k, 0, std::max<int64_t>(w.groups, 1), "group_index");
  if (w.panel_order)
    check_panel_order(w, arrays);
  else
    check_canonical_order(w, arrays);
}

namespace {

// The codes [n, row_bytes] that `pack` reads and `unpack` writes.
Array canonical_codes(const char *operation, const Weight &w, nb::handle object) {
  Array a;
  require(Array::from(object, a), "codes are no array in memory");
  elements<uint8_t>(operation, "codes", a, -1);
  if (a.ndim != 2 || a.shape[0] != w.n || a.shape[1] < (w.k * w.bits + 7) / 8)
    throw ShapeProblem(std::string("[") + operation + "] codes are " + a.describe() +
                       "; allowed: (" + std::to_string(w.n) + ", " +
                       std::to_string((w.k * w.bits + 7) / 8) + ") of uint8");
  return a;
}

}  // namespace

void bind_weight(nb::module_ &m) {
  nb::enum_<Element>(m, "Element")
      .value("integer", Element::integer)
      .value("table", Element::table)
      .value("minifloat", Element::minifloat);
  nb::enum_<Scale>(m, "Scale")
      .value("none", Scale::none)
      .value("e8m0", Scale::e8m0)
      .value("e4m3", Scale::e4m3)
      .value("ue4m3", Scale::ue4m3)
      .value("f16", Scale::f16)
      .value("bf16", Scale::bf16)
      .value("f32", Scale::f32)
      .value("u8", Scale::u8)
      .value("i8", Scale::i8)
      .value("nested", Scale::nested);
  nb::enum_<Grouping>(m, "Grouping")
      .value("row", Grouping::row)
      .value("flat", Grouping::flat)
      .value("strided", Grouping::strided)
      .value("block", Grouping::block);
  nb::enum_<Global>(m, "Global")
      .value("none", Global::none)
      .value("multiply", Global::multiply)
      .value("divide", Global::divide);

  nb::class_<WeightFields> fields(m, "WeightFields");
  fields.def(nb::init<>())
      .def_rw("n", &WeightFields::n)
      .def_rw("k", &WeightFields::k)
      .def_rw("panel_order", &WeightFields::panel_order)
      .def_rw("bits", &WeightFields::bits)
      .def_rw("row_bytes", &WeightFields::row_bytes)
      .def_rw("flip", &WeightFields::flip)
      .def_rw("element", &WeightFields::element)
      .def_rw("offset", &WeightFields::offset)
      .def_rw("integral", &WeightFields::integral)
      .def_rw("table_low", &WeightFields::table_low)
      .def_rw("unit", &WeightFields::unit)
      .def_rw("mantissa_bits", &WeightFields::mantissa_bits)
      .def_rw("exponent_bias", &WeightFields::exponent_bias)
      .def_rw("last_finite", &WeightFields::last_finite)
      .def_rw("groups", &WeightFields::groups)
      .def_rw("group", &WeightFields::group)
      .def_rw("group_size", &WeightFields::group_size)
      .def_rw("seg", &WeightFields::seg)
      .def_rw("span", &WeightFields::span)
      .def_rw("scale", &WeightFields::scale)
      .def_rw("groups_per_super", &WeightFields::groups_per_super)
      .def_rw("supers", &WeightFields::supers)
      .def_rw("global_op", &WeightFields::global_op)
      .def_rw("global_scale", &WeightFields::global)
      .def_rw("divisor", &WeightFields::divisor)
      .def_rw("inverse", &WeightFields::inverse)
      .def_rw("grouping", &WeightFields::grouping)
      .def_rw("group_rows", &WeightFields::group_rows)
      .def_rw("first_row", &WeightFields::first_row)
      .def_rw("total_rows", &WeightFields::total_rows)
      .def_rw("nested_offset", &WeightFields::nested_offset);
  static const char *const kArrays[] = {
      "plane8", "plane4",       "plane2",     "plane1",     "codes",        "values",
      "gather", "group_index",  "scales",     "zeros",      "float_zeros",  "biases",
      "mins",   "super_scales", "super_mins", "nested_map", "nested_absmax"};
  for (const char *name : kArrays)
    fields.def_prop_rw(
        name,
        [name](const WeightFields &f) {
          return f.arrays.count(name) ? f.arrays.at(name) : nb::none();
        },
        [name](WeightFields &f, nb::object array) { f.set(name, std::move(array)); });

  nb::class_<PackedWeight>(m, "Weight")
      .def(nb::init<const WeightFields &>())
      .def_prop_ro("shape", [](const PackedWeight &w) { return nb::make_tuple(w.n, w.k); });

  // Writes canonical codes into the planes of `fields`, which are writable until a Weight is made
  // of them.
  m.def("pack", [](const WeightFields &f, nb::object codes) {
    const PackedWeight w(f);
    const Array a = canonical_codes("pack", w, codes);
    for (const char *name : {"plane8", "plane4", "plane2", "plane1"})
      if (f.arrays.count(name)) check_writable("pack", name, f.arrays.at(name));
    uint8_t *const planes[4] = {const_cast<uint8_t *>(w.plane8), const_cast<uint8_t *>(w.plane4),
                                const_cast<uint8_t *>(w.plane2), const_cast<uint8_t *>(w.plane1)};
    if (!w.panel_order || a.size() == 0) return;
    WithoutGil computing;
    pack(w, (const uint8_t *)a.data, a.shape[1], planes);
  });
  m.def("unpack", [](const PackedWeight &w, nb::object out) {
    const Array a = canonical_codes("unpack", w, out);
    check_writable("unpack", "codes", out);
    require(w.panel_order, "unpack takes panel order; canonical codes are there already");
    if (a.size() == 0) return;
    WithoutGil computing;
    unpack(w, (uint8_t *)a.data, a.shape[1]);
  });
}

}  // namespace halfbyte
