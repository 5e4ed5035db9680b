#include "runtime/elastic_pool.h"

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace jflux {
namespace {

std::atomic<bool> g_refuse{false};

struct Pool {
  std::mutex mutex;
  std::condition_variable ready;
  std::deque<std::function<void()>> tasks;
  size_t idle = 0;  // threads that wait for a task, or are about to

  void Work() {
    // A thread inherits the floating-point mode of the thread that starts it, and starters differ:
    // XLA's threads flush denormals, Python's do not. Reset it, so that the same call gives the
    // same bits whoever starts this thread.
    std::fesetenv(FE_DFL_ENV);
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
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
      ++idle;
    }
  }
};

}  // namespace

bool StartThread(std::function<void()> body, std::string* error) {
  try {
    if (g_refuse)
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again),
                              "refused");
    std::thread(std::move(body)).detach();
    return true;
  } catch (const std::system_error& e) {
    *error = std::string("cannot start a thread: ") + e.what() +
             "; look at the limits on processes and memory (ulimit -u, the container's pids limit)";
    return false;
  }
}

bool RunOnPool(std::vector<std::function<void()>> tasks, std::string* error) {
  static auto* pool = new Pool;  // its threads may outlive main()
  std::lock_guard<std::mutex> lock(pool->mutex);
  // A thread counts as idle from here on, so that no other task is given to it. If a later thread
  // cannot be made, the earlier ones get no task, and exit by themselves.
  while (pool->idle < pool->tasks.size() + tasks.size()) {
    if (!StartThread([] { pool->Work(); }, error)) return false;
    ++pool->idle;
  }
  for (auto& task : tasks) {
    pool->tasks.push_back(std::move(task));
    pool->ready.notify_one();
  }
  return true;
}

void RefuseThreads(bool refuse) { g_refuse = refuse; }

}  // namespace jflux
