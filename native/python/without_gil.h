// The interpreter's lock, released while computing, and how that ends when the interpreter does.
//
// A daemon thread that requests the lock of an interpreter that is shutting down is ended by
// pthread_exit, whose unwinding through C++ frames aborts the process. So `close` (registered with
// Python's atexit) waits until every computation has the lock back, and computations that start
// later keep it.
#pragma once

#include <Python.h>

#include <atomic>

namespace halfbyte {

class WithoutGil {
 public:
  WithoutGil() {
    if (closed_) return;
    ++running_;
    state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (!state_) return;
    PyEval_RestoreThread(state_);
    --running_;
  }
  WithoutGil(const WithoutGil &) = delete;
  WithoutGil &operator=(const WithoutGil &) = delete;

  static void close();

 private:
  // Both change only under the lock.
  static std::atomic<bool> closed_;
  static std::atomic<int> running_;
  PyThreadState *state_ = nullptr;
};

}  // namespace halfbyte
