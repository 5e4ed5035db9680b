#include "runtime/elastic_pool.h"

#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace jflux {
namespace {

struct Pool {
  std::mutex mutex;
  std::condition_variable ready;
  std::deque<std::function<void()>> tasks;
  size_t idle = 0;

  void Work() {
    // A thread inherits the floating-point mode of the thread that starts it, and starters differ:
    // XLA's threads flush denormals, Python's do not. Reset it, so that the same call gives the
    // same bits whoever starts this thread.
    std::fesetenv(FE_DFL_ENV);
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      ++idle;
      const bool got =
          ready.wait_for(lock, std::chrono::seconds(5), [this] { return !tasks.empty(); });
      --idle;
      if (!got) return;
      std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }
};

}  // namespace

void RunOnPool(std::function<void()> task) {
  static auto* pool = new Pool;  // its threads may outlive main()
  std::lock_guard<std::mutex> lock(pool->mutex);
  pool->tasks.push_back(std::move(task));
  if (pool->idle >= pool->tasks.size()) {
    pool->ready.notify_one();
  } else {
    std::thread([] { pool->Work(); }).detach();
  }
}

}  // namespace jflux
