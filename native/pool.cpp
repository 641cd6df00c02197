#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace halfbyte {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// A waiting worker looks this often before it sleeps: about 20 microseconds, so that the products of one token find it
// awake while an idle pool costs nothing.
constexpr int kLooks = 1000;

class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto &t : threads_) t.join();
  }
  int workers() const { return (int)threads_.size(); }

  void run(int64_t count, Task task, const void *context) {
    task_ = task, context_ = context, count_ = count;
    next_.store(0, std::memory_order_relaxed);
    active_.store((int)threads_.size(), std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake_.notify_all();
    drain();
    for (int look = 0; active_.load(std::memory_order_acquire) != 0; ++look) {
      if (look < 100 * kLooks) relax();
      else std::this_thread::yield();
    }
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void drain() {
    for (;;) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) return;
      try {
        task_(context_, i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::current_exception();
      }
    }
  }

  void work() {
    uint64_t seen = 0;
    for (;;) {
      int look = 0;
      while (generation_.load(std::memory_order_acquire) == seen && look < kLooks) relax(), ++look;
      if (generation_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      ++seen;
      if (stop_) return;
      drain();
      active_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> active_{0}, sleepers_{0};
  std::exception_ptr error_;
  bool stop_ = false;
  Task task_ = nullptr;
  const void *context_ = nullptr;
  int64_t count_ = 0;
};

std::atomic<int> wanted{0}, usable{0};

// The pool and the lock that says who uses it. A fork copies neither the threads nor a sane lock: the child forgets
// both (and leaks a few bytes).
struct Owner {
  std::mutex busy;
  Pool *pool = nullptr;
};
Owner *owner = new Owner;

#if defined(__linux__) || defined(__APPLE__)
void forget_after_fork() { owner = new Owner; }
struct AtFork {
  AtFork() { pthread_atfork(nullptr, nullptr, forget_after_fork); }
} at_fork;
#endif

int quota_threads() {
  long long quota = -1, period = -1;
  char word[32] = "";
  if (FILE *f = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    if (std::fscanf(f, "%31s %lld", word, &period) == 2 && std::strcmp(word, "max") != 0) std::sscanf(word, "%lld", &quota);
    std::fclose(f);
  } else {
    if (FILE *q = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r")) {
      if (std::fscanf(q, "%lld", &quota) != 1) quota = -1;
      std::fclose(q);
    }
    if (FILE *p = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r")) {
      if (std::fscanf(p, "%lld", &period) != 1) period = -1;
      std::fclose(p);
    }
  }
  if (quota <= 0 || period <= 0) return 1 << 20;
  return (int)((quota + period - 1) / period);
}

}  // namespace

int usable_threads() {
  int n = (int)std::thread::hardware_concurrency();
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
#endif
  const int quota = quota_threads();
  n = n < quota ? n : quota;
  return n < 1 ? 1 : n;
}

void set_threads(int threads) {
  usable = 0;
  wanted = threads > 0 ? threads : 0;
}

// Asking the system takes longer than a small product: once, until `set_threads` is called again.
int threads() {
  if (const int n = wanted) return n;
  if (!usable) usable = usable_threads();
  return usable;
}

void parallel(int64_t count, Task task, const void *context) {
  Owner *mine = owner;
  const int workers = (count < 2 ? 1 : threads()) - 1;
  if (workers > 0 && mine->busy.try_lock()) {
    std::lock_guard<std::mutex> lock(mine->busy, std::adopt_lock);
    if (mine->pool && mine->pool->workers() != workers) {
      delete mine->pool;
      mine->pool = nullptr;
    }
    if (!mine->pool) mine->pool = new Pool(workers);
    mine->pool->run(count, task, context);
    return;
  }
  for (int64_t i = 0; i < count; ++i) task(context, i);
}

}  // namespace halfbyte
