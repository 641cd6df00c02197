// A GPU of one core: threads of a threadgroup as fibres, with every load and store looked at.
//
// A kernel's object code calls `__sanitizer_cov_loadN` and `__sanitizer_cov_storeN` before each memory access (clang's
// -fsanitize-coverage=trace-loads,trace-stores) and the functions of include/metal_stdlib at barriers and simdgroup operations.
// Fibres run one at a time until they meet one of those; the last to arrive lets the others go on.
//
// Two accesses to one byte by different threads, at least one a write, race unless a barrier stands between them: a
// threadgroup barrier, or a simdgroup barrier when both threads are of one simdgroup, with the flag of the memory in question.

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#if !defined(__x86_64__) || defined(HB_UCONTEXT)
#include <ucontext.h>
#endif

namespace {

constexpr int WIDTH = 32;             // threads of a simdgroup, as on every Apple GPU
constexpr size_t STACK = 256 * 1024;  // bytes of a fibre's stack, a guard page below

// ---- context switch -------------------------------------------------------------------------------------------------------

#if defined(__x86_64__) && !defined(HB_UCONTEXT)
using Context = void*;
extern "C" void hb_switch(Context* from, Context to);
__asm__(R"(
.text
.globl hb_switch
.type hb_switch, @function
hb_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hb_switch, .-hb_switch
)");
void prepare(Context* c, char* stack, void (*entry)()) {
  uint64_t* top = reinterpret_cast<uint64_t*>(stack + STACK) - 1;  // aligned as after a call: 8 bytes off 16
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  *c = top;
}
void go(Context* from, Context* to) { hb_switch(from, *to); }
#else
using Context = ucontext_t;
void prepare(Context* c, char* stack, void (*entry)()) {
  getcontext(c);
  c->uc_stack.ss_sp = stack;
  c->uc_stack.ss_size = STACK;
  c->uc_link = nullptr;
  makecontext(c, entry, 0);
}
void go(Context* from, Context* to) { swapcontext(from, to); }
#endif

// ---- memory ---------------------------------------------------------------------------------------------------------------

struct Access {  // who touched a byte last, and between which barriers; group 0 is nobody
  uint32_t group = 0, threadgroup_epoch = 0, simdgroup_epoch = 0;
  uint16_t thread = 0;
};
struct Shadow {
  Access write, read, other_read;  // the last reader and one more of another thread
};
struct Region {
  const char* name;
  char* base;
  size_t size;
  bool writable, shared;       // shared: threadgroup memory
  uint64_t reads = 0, writes = 0;
  std::vector<uint8_t> known;  // byte holds a value; empty for inputs
  std::vector<Shadow> shadow;
};

enum State { READY, WAITING, DONE };
struct Thread {
  Context context;
  char* stack = nullptr;
  State state = DONE;
  const char* where = "";  // what it waits for
  void* site = nullptr;    // and from which instruction
  uint32_t position[3];
  uint32_t deposit[8], result[8];
};
struct Rendezvous {  // a barrier or simdgroup operation some threads have reached
  int arrived = 0;
  void* site = nullptr;
  const char* what = "";
};

struct Machine {
  std::vector<Region> regions;
  std::vector<Thread> threads;
  Context scheduler;
  int current = 0, count = 0, finished = 0;
  uint32_t group[3], groups[3], size[3], grid[3], group_number = 0;
  // Barriers passed, by memory: [0] device, [1] threadgroup.
  uint32_t threadgroup_epoch[2];
  std::vector<uint32_t> simdgroup_epoch[2];
  Rendezvous whole;
  std::vector<Rendezvous> simd;
  bool failed = false;
  char fault[600];
  char* module_low = nullptr;
  char* module_high = nullptr;
  void (*kernel)(uint64_t*) = nullptr;
  uint64_t* arguments = nullptr;
  size_t argument_count = 0;
  uint64_t counts[3];  // arrivals of threads: threadgroup barriers, simdgroup barriers, matrix products
} M;

[[noreturn]] void fail(const char* format, ...) {
  char text[400];
  va_list a;
  va_start(a, format);
  vsnprintf(text, sizeof text, format, a);
  va_end(a);
  snprintf(M.fault, sizeof M.fault, "%s [group (%u, %u, %u), thread %d]", text, M.group[0], M.group[1], M.group[2], M.current);
  M.failed = true;
  go(&M.threads[M.current].context, &M.scheduler);
  abort();
}

int simdgroup_of(int thread) { return thread / WIDTH; }
int lanes_of(int simdgroup) { return M.count - simdgroup * WIDTH < WIDTH ? M.count - simdgroup * WIDTH : WIDTH; }

bool ordered(const Access& a, const Region& r) {
  if (!a.group) return true;
  if (a.group != M.group_number) return false;  // nothing orders one threadgroup against another in a dispatch
  if (a.thread == M.current) return true;
  const int kind = r.shared;
  if (a.threadgroup_epoch != M.threadgroup_epoch[kind]) return true;
  const int s = simdgroup_of(M.current);
  return simdgroup_of(a.thread) == s && a.simdgroup_epoch != M.simdgroup_epoch[kind][s];
}

Access here(const Region& r) {
  const int kind = r.shared;
  return {M.group_number, M.threadgroup_epoch[kind], M.simdgroup_epoch[kind][simdgroup_of(M.current)], uint16_t(M.current)};
}

Region* find(char* p) {
  static size_t last = 0;
  if (last < M.regions.size() && p >= M.regions[last].base && p < M.regions[last].base + M.regions[last].size)
    return &M.regions[last];
  for (size_t i = 0; i < M.regions.size(); ++i)
    if (p >= M.regions[i].base && p < M.regions[i].base + M.regions[i].size) {
      last = i;
      return &M.regions[i];
    }
  return nullptr;
}

const Region* nearest(char* p, bool shared) {
  const Region* best = nullptr;
  size_t distance = SIZE_MAX;
  for (const Region& r : M.regions) {
    const size_t d = p < r.base ? size_t(r.base - p) : size_t(p - r.base);
    if (r.shared == shared && d < distance) best = &r, distance = d;
  }
  return best;
}

void touch(char* p, size_t bytes, bool write) {
  const Thread& t = M.threads[M.current];
  if (p >= t.stack && p + bytes <= t.stack + STACK) return;
  if (p >= reinterpret_cast<char*>(M.arguments) && p < reinterpret_cast<char*>(M.arguments + M.argument_count)) return;
  const char* verb = write ? "write" : "read";
  Region* r = find(p);
  const bool in_module = p >= M.module_low && p < M.module_high;
  if (!r || p + bytes > r->base + r->size) {
    const Region* n = r ? r : nearest(p, in_module);
    if (n)
      fail("out of bounds: %s of %zu bytes at byte %td of %s, which has %zu", verb, bytes, p - n->base, n->name, n->size);
    fail("out of bounds: %s of %zu bytes at address %p", verb, bytes, static_cast<void*>(p));
  }
  const size_t at = size_t(p - r->base);
  ++(write ? r->writes : r->reads);
  if (reinterpret_cast<uintptr_t>(p) % bytes)
    fail("misaligned: %s of %zu bytes at byte %zu of %s", verb, bytes, at, r->name);
  if (!r->writable) {
    if (write) fail("write to the read-only buffer %s at byte %zu", r->name, at);
    return;
  }
  const Access now = here(*r);
  for (size_t i = at; i < at + bytes; ++i) {
    Shadow& s = r->shadow[i];
    if (!ordered(s.write, *r))
      fail("race: %s at byte %zu of %s after thread %d%s wrote it, no barrier between", verb, i, r->name, s.write.thread,
           s.write.group == M.group_number ? "" : " of another group");
    if (write) {
      const Access* reader = !ordered(s.read, *r) ? &s.read : !ordered(s.other_read, *r) ? &s.other_read : nullptr;
      if (reader)
        fail("race: write at byte %zu of %s after thread %d%s read it, no barrier between", i, r->name, reader->thread,
             reader->group == M.group_number ? "" : " of another group");
      s.write = now;
      r->known[i] = 1;
    } else {
      if (!r->known[i]) fail("uninitialised: read at byte %zu of %s, which nobody wrote", i, r->name);
      if (s.read.thread != now.thread || s.read.group != now.group) {
        if (!ordered(s.read, *r)) s.other_read = s.read;
        s.read = now;
      } else {
        s.read = now;
      }
    }
  }
}

// ---- meeting points -------------------------------------------------------------------------------------------------------

void yield() { go(&M.threads[M.current].context, &M.scheduler); }

// Waits until all `expected` threads are at the same place; true for the one that arrives last.
bool meet(Rendezvous& r, int expected, const char* what, void* site) {
  if (r.arrived && (r.site != site || r.what != what))
    fail("divergence: %s reached here while other threads wait at %s elsewhere", what, r.what);
  r.site = site;
  r.what = what;
  if (++r.arrived < expected) {
    Thread& t = M.threads[M.current];
    t.where = what;
    t.state = WAITING;
    yield();
    return false;
  }
  r.arrived = 0;
  return true;
}

void release(int first, int last) {
  for (int i = first; i < last; ++i)
    if (M.threads[i].state == WAITING) M.threads[i].state = READY;
}

void body() {
  M.kernel(M.arguments);
  M.threads[M.current].state = DONE;
  ++M.finished;
  yield();
  abort();
}

// The register that says how float32 subnormals are treated, and its value with them taken for zero.
#if defined(__x86_64__)
uint64_t float_control() { return _mm_getcsr(); }
void set_float_control(uint64_t c) { _mm_setcsr(unsigned(c)); }
constexpr uint64_t FLUSH = 0x8040;
#elif defined(__aarch64__)
uint64_t float_control() {
  uint64_t c;
  __asm__ volatile("mrs %0, fpcr" : "=r"(c));
  return c;
}
void set_float_control(uint64_t c) { __asm__ volatile("msr fpcr, %0" ::"r"(c)); }
constexpr uint64_t FLUSH = 1 << 24;
#else
uint64_t float_control() { return 0; }
void set_float_control(uint64_t) {}
constexpr uint64_t FLUSH = 0;
#endif

float as_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
uint32_t as_uint(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

// Row and column of element i (0 or 1) of a lane's share of an 8x8 matrix. Apple documents none, and no kernel can see this one.
void place(int lane, int i, int* row, int* column) {
  *row = lane / 4;
  *column = 2 * (lane % 4) + i;
}

}  // namespace

extern "C" {

// ---- called by kernels ----------------------------------------------------------------------------------------------------

#define TRACE(n)                                                                                          \
  void __sanitizer_cov_load##n(void* p) { touch(static_cast<char*>(p), n, false); }                       \
  void __sanitizer_cov_store##n(void* p) { touch(static_cast<char*>(p), n, true); }
TRACE(1) TRACE(2) TRACE(4) TRACE(8) TRACE(16)
void __sanitizer_cov_trace_pc_guard(uint32_t*) {}
void __sanitizer_cov_trace_pc_guard_init(uint32_t*, uint32_t*) {}

#define UNDEFINED(name, text) \
  void __ubsan_handle_##name##_minimal() { fail("undefined: %s", text); }
UNDEFINED(out_of_bounds, "index beyond an array of the thread's own")
UNDEFINED(divrem_overflow, "integer division by zero")

void hb_barrier(int scope, int flags) {
  void* site = __builtin_return_address(0);
  const int s = simdgroup_of(M.current);
  ++M.counts[scope ? 0 : 1];
  if (scope) {  // the whole threadgroup
    if (!meet(M.whole, M.count, "threadgroup_barrier", site)) return;
    for (int kind = 0; kind < 2; ++kind)
      if (flags & (1 << kind)) ++M.threadgroup_epoch[kind];
    release(0, M.count);
  } else {
    if (!meet(M.simd[s], lanes_of(s), "simdgroup_barrier", site)) return;
    for (int kind = 0; kind < 2; ++kind)
      if (flags & (1 << kind)) ++M.simdgroup_epoch[kind][s];
    release(s * WIDTH, s * WIDTH + lanes_of(s));
  }
}

// One 32-bit value a lane in, one out. op: 0 sum of floats, 1 max of floats, 2 sum of ints, 3 value of lane `argument`, 4 of
// lane ^ argument, 5 of lane + argument, 6 only meet.
uint32_t hb_simd(int op, uint32_t value, uint32_t argument) {
  void* site = __builtin_return_address(0);
  static const char* names[] = {"simd_sum", "simd_max", "simd_sum", "simd_shuffle", "simd_shuffle_xor", "simd_shuffle_down", "simdgroup operation"};
  const int s = simdgroup_of(M.current), n = lanes_of(s);
  Thread* lanes = &M.threads[s * WIDTH];
  Thread& mine = M.threads[M.current];
  mine.deposit[0] = value;
  mine.deposit[1] = argument;
  if (meet(M.simd[s], n, names[op], site)) {
    float sum[WIDTH] = {};
    for (int i = 0; i < n; ++i) sum[i] = as_float(lanes[i].deposit[0]);
    for (int step = 1; step < WIDTH; step *= 2)
      for (int i = 0; i + step < WIDTH; i += 2 * step)
        if (op == 0) sum[i] += sum[i + step];
    for (int i = 0; i < n; ++i) {
      const uint32_t a = lanes[i].deposit[1];
      uint32_t out = 0;
      if (op == 0) out = as_uint(sum[0]);
      else if (op == 1) {
        float best = as_float(lanes[0].deposit[0]);
        for (int j = 1; j < n; ++j) best = as_float(lanes[j].deposit[0]) > best ? as_float(lanes[j].deposit[0]) : best;
        out = as_uint(best);
      } else if (op == 2) {
        for (int j = 0; j < n; ++j) out += lanes[j].deposit[0];
      } else if (op < 6) {
        const uint32_t from = op == 3 ? a : op == 4 ? i ^ a : i + a;
        if (from >= uint32_t(n) && op != 5) fail("%s from lane %u of %d", names[op], from, n);
        out = lanes[from < uint32_t(n) ? from : i].deposit[0];
      }
      lanes[i].result[0] = out;
    }
    release(s * WIDTH, s * WIDTH + n);
  }
  return mine.result[0];
}

// d = a b + c on 8x8 matrices in float32, two elements a lane each.
void hb_simd_mma(const float* in, float* out) {
  void* site = __builtin_return_address(0);
  const int s = simdgroup_of(M.current);
  if (lanes_of(s) != WIDTH) fail("divergence: a simdgroup matrix needs all %d lanes, the simdgroup has %d", WIDTH, lanes_of(s));
  Thread* lanes = &M.threads[s * WIDTH];
  Thread& mine = M.threads[M.current];
  ++M.counts[2];
  for (int i = 0; i < 6; ++i) mine.deposit[i] = as_uint(in[i]);
  if (meet(M.simd[s], WIDTH, "simdgroup_multiply_accumulate", site)) {
    float a[8][8], b[8][8], c[8][8];
    int r, k;
    for (int lane = 0; lane < WIDTH; ++lane)
      for (int i = 0; i < 2; ++i) {
        place(lane, i, &r, &k);
        a[r][k] = as_float(lanes[lane].deposit[i]);
        b[r][k] = as_float(lanes[lane].deposit[2 + i]);
        c[r][k] = as_float(lanes[lane].deposit[4 + i]);
      }
    for (int row = 0; row < 8; ++row)
      for (int j = 0; j < 8; ++j)
        for (int column = 0; column < 8; ++column) c[row][column] = __builtin_fmaf(a[row][j], b[j][column], c[row][column]);
    for (int lane = 0; lane < WIDTH; ++lane)
      for (int i = 0; i < 2; ++i) {
        place(lane, i, &r, &k);
        lanes[lane].result[i] = as_uint(c[r][k]);
      }
    release(s * WIDTH, s * WIDTH + WIDTH);
  }
  out[0] = as_float(mine.result[0]);
  out[1] = as_float(mine.result[1]);
}

uint32_t hb_place(int i) {
  int row, column;
  place(M.current % WIDTH, i, &row, &column);
  return uint32_t(row * 8 + column);
}

// Built-in values of a thread: which 0 position in grid, 1 in threadgroup, 2 group in grid, 3 threads of a group, 4 of the
// grid, 5 groups of the grid; 6 index in threadgroup, 7 lane, 8 simdgroup, 9 simdgroups, 10 width.
uint32_t hb_built_in(int which, int axis) {
  const Thread& t = M.threads[M.current];
  switch (which) {
    case 0: return M.group[axis] * M.size[axis] + t.position[axis];
    case 1: return t.position[axis];
    case 2: return M.group[axis];
    case 3: return M.size[axis];
    case 4: return M.grid[axis];
    case 5: return M.groups[axis];
    case 6: return uint32_t(M.current);
    case 7: return uint32_t(M.current % WIDTH);
    case 8: return uint32_t(simdgroup_of(M.current));
    case 9: return uint32_t((M.count + WIDTH - 1) / WIDTH);
    default: return WIDTH;
  }
}

// a b + c of half precision numbers, rounded to odd in float32: rounding that to half is rounding once.
float hb_fma_to_odd(float a, float b, float c) {
  const double exact = double(a) * b + c;  // 22 bits and 11 bits within 80 binary places: inexact only far below half an ulp
  float f = float(exact);
  if (double(f) != exact && !(as_uint(f) & 1)) {
    const uint32_t u = as_uint(f);
    f = as_float((double(f) < exact) == (f > 0) ? u + 1 : u - 1);
  }
  return f;
}

// float to bfloat16, to nearest even: the compiler's own conversion calls this, and older libraries lack it.
__bf16 __truncsfbf2(float f) {
  uint32_t u = as_uint(f);
  u = (u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const uint16_t bits = uint16_t(u);
  __bf16 out;
  memcpy(&out, &bits, 2);
  return out;
}

// ---- called by the test harness -------------------------------------------------------------------------------------------

void hb_begin(char* module_low, char* module_high) {
  M.regions.clear();
  M.module_low = module_low;
  M.module_high = module_high;
  memset(M.counts, 0, sizeof M.counts);
}

void hb_region(const char* name, char* base, size_t size, int writable, int shared) {
  Region r{name, base, size, writable != 0, shared != 0, 0, 0, {}, {}};
  if (writable) {
    r.known.resize(size);
    r.shadow.resize(size);
  }
  M.regions.push_back(std::move(r));
}

// Runs a grid of threads. Returns null, or the text of the first fault. flush: float32 subnormals are zero, as on the GPU.
const char* hb_run(void (*kernel)(uint64_t*), uint64_t* arguments, size_t argument_count, const uint32_t* grid,
                   const uint32_t* size, int flush) {
  M.kernel = kernel;
  M.arguments = arguments;
  M.argument_count = argument_count;
  M.failed = false;
  M.group_number = 0;
  for (int a = 0; a < 3; ++a) {
    M.grid[a] = grid[a];
    M.size[a] = size[a];
    M.groups[a] = (grid[a] + size[a] - 1) / size[a];
  }
  const int most = int(size[0] * size[1] * size[2]);
  if (int(M.threads.size()) < most) M.threads.resize(most);
  for (int i = 0; i < most; ++i)
    if (!M.threads[i].stack) {
      char* low = static_cast<char*>(mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      mprotect(low, 4096, PROT_NONE);
      M.threads[i].stack = low + 4096;
    }
  const uint64_t control = float_control();
  set_float_control(flush ? control | FLUSH : control & ~FLUSH);
  for (M.group[2] = 0; M.group[2] < M.groups[2] && !M.failed; ++M.group[2])
    for (M.group[1] = 0; M.group[1] < M.groups[1] && !M.failed; ++M.group[1])
      for (M.group[0] = 0; M.group[0] < M.groups[0] && !M.failed; ++M.group[0]) {
        uint32_t extent[3];  // the last groups of a grid are smaller when sizes do not divide
        for (int a = 0; a < 3; ++a) {
          const uint32_t left = grid[a] - M.group[a] * size[a];
          extent[a] = left < size[a] ? left : size[a];
        }
        M.count = int(extent[0] * extent[1] * extent[2]);
        ++M.group_number;
        M.finished = 0;
        M.whole = {};
        const int simdgroups = (M.count + WIDTH - 1) / WIDTH;
        M.simd.assign(simdgroups, {});
        for (int kind = 0; kind < 2; ++kind) {
          M.threadgroup_epoch[kind] = 0;
          M.simdgroup_epoch[kind].assign(simdgroups, 0);
        }
        for (Region& r : M.regions)
          if (r.shared) {
            memset(r.base, 0xff, r.size);
            memset(r.known.data(), 0, r.size);
            r.shadow.assign(r.size, {});
          }
        for (int i = 0; i < M.count; ++i) {
          Thread& t = M.threads[i];
          t.position[0] = i % extent[0];
          t.position[1] = i / extent[0] % extent[1];
          t.position[2] = i / (extent[0] * extent[1]);
          t.state = READY;
          prepare(&t.context, t.stack, body);
        }
        while (M.finished < M.count && !M.failed) {
          bool moved = false;
          for (int i = 0; i < M.count && !M.failed; ++i)
            if (M.threads[i].state == READY) {
              M.current = i;
              moved = true;
              go(&M.scheduler, &M.threads[i].context);
            }
          if (!moved && !M.failed) {
            int waiting = 0;
            for (int i = 0; i < M.count; ++i)
              if (M.threads[i].state == WAITING) waiting = i;
            snprintf(M.fault, sizeof M.fault, "divergence: thread %d waits at %s that others never reach (%d of %d threads have ended) [group (%u, %u, %u)]",
                     waiting, M.threads[waiting].where, M.finished, M.count, M.group[0], M.group[1], M.group[2]);
            M.failed = true;
          }
        }
      }
  set_float_control(control);
  return M.failed ? M.fault : nullptr;
}

// What the last run did: which 0 to 2 arrivals, see `counts`.
uint64_t hb_count(int which) { return M.counts[which]; }
// Accesses of a region, by the address it begins at.
uint64_t hb_accesses(const char* base, int writes) {
  for (const Region& r : M.regions)
    if (r.base == base) return writes ? r.writes : r.reads;
  return 0;
}

// Whether every byte of an output was written.
int64_t hb_first_unwritten(const char* base) {
  for (const Region& r : M.regions)
    if (r.base == base && r.writable)
      for (size_t i = 0; i < r.size; ++i)
        if (!r.known[i]) return int64_t(i);
  return -1;
}
}
