#include "dispatch.h"

#include <atomic>
#include <climits>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__) || defined(_M_X64)
#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif
#if defined(HALFBYTE_AMX) && !defined(HALFBYTE_EMULATE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace halfbyte {
namespace {

struct Entry {
  const Kernels *table;
  bool (*runs_here)();
};

bool always() { return true; }

#if defined(HALFBYTE_AMX) || defined(HALFBYTE_I8MM)
// A set's table with products of matrices. It is put together here, in code that every machine can
// run.
Kernels with_matrix(const char *name, Kernels table, const MatrixKernels &added) {
  table.name = name;
  table.matrix = added;
  return table;
}
#endif

#if defined(__x86_64__) || defined(_M_X64)
void cpuid(int leaf, int sub, unsigned r[4]) {
#if defined(_MSC_VER)
  __cpuidex((int *)r, leaf, sub);
#else
  __cpuid_count(leaf, sub, r[0], r[1], r[2], r[3]);
#endif
}

// The processor having an instruction is not enough: the operating system must save the registers
// (XCR0), and a hypervisor may mask either.
uint64_t saved_registers() {
  unsigned r[4];
  cpuid(1, 0, r);
  if (!(r[2] >> 27 & 1)) return 0;  // OSXSAVE
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
#endif
}

bool has_avx2() {
  unsigned one[4], seven[4], zero[4];
  cpuid(0, 0, zero);
  if (zero[0] < 7) return false;
  cpuid(1, 0, one);
  cpuid(7, 0, seven);
  const bool fma = one[2] >> 12 & 1, f16c = one[2] >> 29 & 1, avx = one[2] >> 28 & 1,
             avx2 = seven[1] >> 5 & 1;
  return fma && f16c && avx && avx2 && (saved_registers() & 0x6) == 0x6;
}

bool has_avx512() {
  if (!has_avx2()) return false;
  unsigned seven[4];
  cpuid(7, 0, seven);
  const bool f = seven[1] >> 16 & 1, dq = seven[1] >> 17 & 1, bw = seven[1] >> 30 & 1,
             vl = seven[1] >> 31 & 1, vnni = seven[2] >> 11 & 1;
  return f && dq && bw && vl && vnni && (saved_registers() & 0xe6) == 0xe6;
}

#if defined(HALFBYTE_AMX)
// The tile registers, and a process must ask Linux for them (5.16 and later): it saves 8 KiB more a
// thread.
bool has_amx() {
#if defined(HALFBYTE_EMULATE_AMX)
  return true;
#else
  static const bool has = [] {
    if (!has_avx512()) return false;
    unsigned r[4];
    cpuid(7, 0, r);
    const bool tile = r[3] >> 24 & 1, int8 = r[3] >> 25 & 1;
    if (!tile || !int8 || (saved_registers() & 0x60000) != 0x60000) return false;
    cpuid(0x1d, 1, r);  // the registers of palette 1: eight of sixteen rows of 64 bytes
    if (r[1] >> 16 < 8 || (r[1] & 0xffff) < 64 || (r[2] & 0xffff) < 16) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
#endif
}

#if defined(HALFBYTE_EMULATE_AMX)
const Kernels kernels_with_tiles = with_matrix("amx", kernels_scalar, kernels_amx);
#else
const Kernels kernels_with_tiles = with_matrix("amx", kernels_avx512, kernels_amx);
#endif
#endif

const Entry kEntries[] = {
#if defined(HALFBYTE_AMX)
    {&kernels_with_tiles, has_amx},
#endif
    {&kernels_avx512, has_avx512},
    {&kernels_avx2, has_avx2},
    {&kernels_scalar, always}};
#elif defined(__aarch64__)
#if defined(__APPLE__)
bool has_feature(const char *name) {
  int present = 0;
  size_t size = sizeof present;
  return sysctlbyname(name, &present, &size, nullptr, 0) == 0 && present;
}
#endif

bool has_dotprod() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
  return has_feature("hw.optional.arm.FEAT_DotProd");
#else
  return false;
#endif
}

#if defined(HALFBYTE_I8MM)
bool has_i8mm() {
  if (!has_dotprod()) return false;
#if defined(__linux__)
  return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#elif defined(__APPLE__)
  return has_feature("hw.optional.arm.FEAT_I8MM");
#else
  return false;
#endif
}

const Kernels kernels_neon_with_i8mm = with_matrix("i8mm", kernels_neon, kernels_i8mm);
#endif

const Entry kEntries[] = {
#if defined(HALFBYTE_I8MM)
    {&kernels_neon_with_i8mm, has_i8mm},
#endif
    {&kernels_neon, has_dotprod},
    {&kernels_scalar, always}};
#else
const Entry kEntries[] = {{&kernels_scalar, always}};
#endif

std::atomic<const Kernels *> current{nullptr};

std::string listed(const std::vector<std::string> &names) {
  std::string all;
  for (const auto &name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

const Kernels *named(const std::string &name) {
  for (const Entry &e : kEntries)
    if (name == e.table->name) {
      if (e.runs_here()) return e.table;
      throw std::invalid_argument(
          "instruction set '" + name +
          "' is not supported by this machine; supported: " + listed(supported_sets()));
    }
  throw std::invalid_argument("instruction set '" + name +
                              "' is unknown; supported here: " + listed(supported_sets()));
}

}  // namespace

std::vector<std::string> known_sets() {
  std::vector<std::string> names;
  for (const Entry &e : kEntries) names.push_back(e.table->name);
  return names;
}

std::vector<std::string> supported_sets() {
  std::vector<std::string> names;
  for (const Entry &e : kEntries)
    if (e.runs_here()) names.push_back(e.table->name);
  return names;
}

const Kernels &kernels() {
  const Kernels *table = current.load(std::memory_order_acquire);
  if (!table) {
    const char *forced = std::getenv("HALFBYTE_CPU");
    table = forced && *forced ? named(forced) : named(supported_sets().front());
    current.store(table, std::memory_order_release);
  }
  return *table;
}

namespace {

constexpr int kNever = INT_MAX;
//                      name     prefetch        one_panel fused alternative_tile_from
const Core kCores[] = {{"plain", 0, 0, 0, kNever},
                       {"intel", kPrefetchBytes, 0, 0, kNever},
                       // Zen 5: two products and two more vector operations a cycle.
                       {"zen5", 8192, 4, 256, 17}};
const Core &kPlain = kCores[0], &kIntel = kCores[1], &kZen5 = kCores[2];
std::atomic<const Core *> replaced_core{nullptr};

const Core &core_here() {
  static const Core &here = []() -> const Core & {
#if defined(__x86_64__) || defined(_M_X64)
    unsigned r[4];
    cpuid(0, 0, r);
    if (r[1] == 0x756e6547 && r[3] == 0x49656e69 && r[2] == 0x6c65746e)
      return kIntel;  // "GenuineIntel"
    const bool amd =
        r[1] == 0x68747541 && r[3] == 0x69746e65 && r[2] == 0x444d4163;  // "AuthenticAMD"
    cpuid(1, 0, r);
    if (amd && (r[0] >> 8 & 15) + (r[0] >> 20 & 255) >= 26) return kZen5;
#endif
    return kPlain;
  }();
  return here;
}

}  // namespace

const Core &core_for(const Kernels &set) {
  const Core *replaced = replaced_core.load(std::memory_order_acquire);
  const Core &core = replaced ? *replaced : core_here();
  return core.one_panel_tokens && !set.one_panel_tiles ? kPlain : core;
}

std::vector<std::string> known_cores() {
  std::vector<std::string> names;
  for (const Core &c : kCores) names.push_back(c.name);
  return names;
}

void use_core(const std::string &name) {
  const Core *chosen = nullptr;
  for (const Core &c : kCores)
    if (name == c.name) chosen = &c;
  if (!chosen && !name.empty())
    throw std::invalid_argument("core '" + name + "' is unknown; known: " + listed(known_cores()));
  replaced_core.store(chosen, std::memory_order_release);
}

void use_set(const std::string &name) { current.store(named(name), std::memory_order_release); }

}  // namespace halfbyte
