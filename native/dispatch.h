// The instruction sets of this machine, the one in use, and the processor core, on which the choice
// of schedules depends.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace halfbyte {

// Instruction sets this build has for this architecture, best first, and those this machine and its
// operating system can run.
std::vector<std::string> known_sets();
std::vector<std::string> supported_sets();

// The table in use. The first call picks HALFBYTE_CPU when set, else the best supported one. Throws
// std::invalid_argument, listing the supported sets, for an unknown or unsupported name.
const Kernels &kernels();
void use_set(const std::string &name);

// How cores that run the same instructions differ; measured values, benchmarks/cpu.md.
struct Core {
  const char *name;
  int prefetch_bytes;    // this core's distance at which fused tiles prefetch codes; 0: it is
                         // kPrefetchBytes, and few tokens with int8 activations do not prefetch
                         // (`schedule_for`)
  int one_panel_tokens;  // up to this many tokens take one panel at a time
  int fused_tokens;  // up to this many tokens are decoded in registers; 0: the instruction set's
                     // own number
  int alternative_tile_from;  // int8 class: from this many tokens on tiles have
                              // `Tiles::alternative` tokens
};
const Core &core_for(const Kernels &set);

// Names of the cores in the table. `use_core` replaces this machine's by another so that tests meet
// all of them; "" undoes it.
std::vector<std::string> known_cores();
void use_core(const std::string &name);

}  // namespace halfbyte
