// A weight as Python builds it: the fields of `Weight` set one by one, then checked as a whole and
// never changed again.
#pragma once

#include <map>

#include "array.h"

namespace halfbyte {

// What Python fills in: numbers directly, arrays by `set`. Nothing is checked before
// `PackedWeight`.
struct WeightFields : Weight {
  std::map<std::string, nb::object> arrays;
  void set(const char *name, nb::object array);
};

// A weight whose arrays have the dtypes and sizes that its numbers say, kept alive with it.
// Products with it read nothing outside those arrays. ShapeProblem names the first field that does
// not fit.
class PackedWeight : public Weight {
 public:
  explicit PackedWeight(const WeightFields &fields);

 private:
  std::map<std::string, nb::object> arrays_;
};

void bind_weight(nb::module_ &m);

}  // namespace halfbyte
