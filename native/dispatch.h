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

// Whether even a product of one token gains from asking for codes ahead of their use: it takes a quarter less time on Intel's
// cores, and up to a half more on AMD's (Zen 4) where a weight has two planes.
bool asks_always();

}  // namespace halfbyte
