// Which instruction sets this machine has, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace halfbyte {

// Names this build knows for this architecture, best first, and those this machine and its operating system can run.
std::vector<std::string> known_sets();
std::vector<std::string> supported_sets();

// The table in use. The first call picks: HALFBYTE_CPU when set, else the best supported. Throws std::invalid_argument,
// listing what there is, for an unknown or unsupported name.
const Kernels &kernels();
void use_set(const std::string &name);

// What differs between cores that run the same instructions; measured (docs/design/cpu.md).
struct Core {
  int ahead;        // products of few tokens too ask for codes so many bytes before their use; 0: they do not
  bool narrow;      // up to four tokens take one panel at a time
  bool on_the_way;  // codes are decoded on the way to the products for any number of tokens
  bool other_tile;  // many tokens of the int8 class take tiles of `Kernels::other_i8`
};
Core core_for(const Kernels &set);

// Names of those known, and one to go by from now on whatever the machine is, so that tests meet all of them; "" is the machine's own again.
std::vector<std::string> known_cores();
void use_core(const std::string &name);

}  // namespace halfbyte
