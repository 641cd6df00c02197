// One pool of threads a process, sized from its limits and made again in a forked child.
#pragma once

#include <cstdint>
#include <string>

namespace halfbyte {

// Threads this process may use: the least of its affinity mask, the CPU quotas of its control group
// and the groups above it, and OMP_NUM_THREADS.
int usable_threads();

// The quota alone, versions 1 and 2, rounded up to whole threads. The arguments are
// /proc/self/cgroup and /sys/fs/cgroup, or what a test puts in their place.
int quota_threads(const std::string &groups_of_process, const std::string &mount);

// Threads a call uses at most; 0 restores `usable_threads()`.
void set_threads(int threads);
int threads();

using Task = void (*)(const void *context, int64_t index);

// Runs task(context, 0 .. count - 1), each index once, on the pool and the calling thread. A call
// that finds the pool busy (another Python thread) runs its indices itself; results do not depend
// on which thread computed an index. An exception of a task is rethrown here when all have ended.
void parallel(int64_t count, Task task, const void *context);

template <class Body>
void parallel_for(int64_t count, const Body &body) {
  parallel(
      count,
      [](const void *context, int64_t index) { (*static_cast<const Body *>(context))(index); },
      &body);
}

}  // namespace halfbyte
