#include "pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <fstream>
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

// A waiting worker polls this many times before it sleeps: about 20 microseconds, so that the
// products of one token find it awake while an idle pool costs nothing.
constexpr int kPolls = 1000;

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
    for (int poll = 0; active_.load(std::memory_order_acquire) != 0; ++poll) {
      if (poll < 100 * kPolls)
        relax();
      else
        std::this_thread::yield();
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
      int poll = 0;
      while (generation_.load(std::memory_order_acquire) == seen && poll < kPolls) relax(), ++poll;
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

std::atomic<int> requested{0}, usable{0};

// The pool and the lock that its user holds. A fork copies neither the threads nor a usable lock:
// the child abandons both (a few bytes are lost).
struct Owner {
  std::mutex busy;
  Pool *pool = nullptr;
};
Owner *owner = new Owner;

#if defined(__linux__) || defined(__APPLE__)
void abandon_after_fork() { owner = new Owner; }
struct AtFork {
  AtFork() { pthread_atfork(nullptr, nullptr, abandon_after_fork); }
} at_fork;
#endif

// The first line of a file, "" when it cannot be read.
std::string first_line(const std::string &path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

constexpr int kUnlimited = 1 << 20;

// Threads that a quota of microseconds a period allows, kUnlimited for none ("max", -1).
int threads_of_quota(const std::string &quota, const std::string &period) {
  const long long q = std::atoll(quota.c_str()), p = std::atoll(period.c_str());
  return q > 0 && p > 0 ? (int)((q + p - 1) / p) : kUnlimited;
}

// The quota of one group: `cpu.max` ("quota period") of version 2, or the two files of version 1.
int threads_of_group(const std::string &group) {
  const std::string both = first_line(group + "/cpu.max");
  if (const size_t space = both.find(' '); space != std::string::npos)
    return threads_of_quota(both.substr(0, space), both.substr(space));
  return threads_of_quota(first_line(group + "/cpu.cfs_quota_us"),
                          first_line(group + "/cpu.cfs_period_us"));
}

}  // namespace

int quota_threads(const std::string &groups_of_process, const std::string &mount) {
  int threads = std::min(threads_of_group(mount), threads_of_group(mount + "/cpu"));
  std::ifstream file(groups_of_process);
  for (std::string line; std::getline(file, line);) {
    // id:controllers:path; version 2 has id 0 and no controllers.
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version2 = controllers == ",,";
    if (!version2 && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string root = version2 ? mount : mount + "/cpu";
    for (std::string path = line.substr(second + 1); path.size() > 1; path.resize(path.rfind('/')))
      threads = std::min(threads, threads_of_group(root + path));
  }
  return threads;
}

int usable_threads() {
  int n = (int)std::thread::hardware_concurrency();
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) n = CPU_COUNT(&set);
#endif
  n = std::min(n, quota_threads("/proc/self/cgroup", "/sys/fs/cgroup"));
  if (const char *openmp = std::getenv("OMP_NUM_THREADS"))
    if (const int asked = std::atoi(openmp); asked > 0) n = std::min(n, asked);
  return n < 1 ? 1 : n;
}

void set_threads(int threads) {
  usable = 0;
  requested = threads > 0 ? threads : 0;
}

// Asking the system takes longer than a small product, so its answer is kept until `set_threads` is
// called again.
int threads() {
  if (const int n = requested) return n;
  if (!usable) usable = usable_threads();
  return usable;
}

void parallel(int64_t count, Task task, const void *context) {
  Owner *current = owner;
  const int workers = (count < 2 ? 1 : threads()) - 1;
  if (workers > 0 && current->busy.try_lock()) {
    std::lock_guard<std::mutex> lock(current->busy, std::adopt_lock);
    if (current->pool && current->pool->workers() != workers) {
      delete current->pool;
      current->pool = nullptr;
    }
    if (!current->pool) current->pool = new Pool(workers);
    current->pool->run(count, task, context);
    return;
  }
  for (int64_t i = 0; i < count; ++i) task(context, i);
}

}  // namespace halfbyte
