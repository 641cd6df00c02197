// Threads that stay: one pool a process, sized from affinity and cgroup limits, made anew in a forked child.
#pragma once

#include <cstdint>

namespace halfbyte {

// Threads this process may use: the affinity mask, cut by the cgroup's CPU quota (v1 and v2).
int usable_threads();

// Threads a call uses at most; 0 restores `usable_threads()`.
void set_threads(int threads);
int threads();

using Task = void (*)(const void *context, int64_t index);

// Runs task(context, 0 .. count - 1), each index once, on the pool and the calling thread. A call that finds the pool
// busy (another Python thread) runs its indices alone: the result does not depend on who computed which index. An
// exception of a task is rethrown here once all have ended.
void parallel(int64_t count, Task task, const void *context);

template <class Body>
void parallel_for(int64_t count, const Body &body) {
  parallel(count, [](const void *context, int64_t index) { (*static_cast<const Body *>(context))(index); }, &body);
}

}  // namespace halfbyte
