// core/ticket_semaphore.h: threads that hold it, and threads that wait for it.
#include "core/ticket_semaphore.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

struct Counters {
  uint64_t taken, returned;
  TicketSemaphore Of(int32_t count) { return TicketSemaphore{&taken, &returned, count}; }
};

// `threads` threads acquire it `times` times each. Some poll slowly, so that others overtake them.
int MostAtOnce(Counters& counters, int32_t count, int threads, int times) {
  std::atomic<int> now{0}, most{0};
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      const TicketSemaphore own = counters.Of(count);
      for (int i = 0; i < times; ++i) {
        own.Acquire();
        const int holders = ++now;
        for (int seen = most; holders > seen && !most.compare_exchange_weak(seen, holders);) {
        }
        if ((t + i) % 7 == 0) std::this_thread::yield();
        --now;
        own.Release();
      }
    });
  }
  for (auto& thread : running) thread.join();
  return most;
}

TEST(WhoLooksLateIsNotForgotten) {
  Counters counters{5, 5};
  const TicketSemaphore semaphore = counters.Of(2);
  EXPECT(semaphore.IsGranted(5) && semaphore.IsGranted(6) && !semaphore.IsGranted(7));
  counters.returned = 6;  // one of the first two
  EXPECT(semaphore.IsGranted(7) && !semaphore.IsGranted(8));
  counters.returned = 20;  // many later tickets have been released
  EXPECT(semaphore.IsGranted(7));
}

TEST(NoMoreThanTheCount) {
  for (int32_t count : {1, 2, 8}) {
    for (uint64_t before : {uint64_t{0}, ~uint64_t{0} - 20, (uint64_t{1} << 63) - 20}) {
      Counters counters{before, before};
      const int threads = 2 * count + 1, times = 200;
      const int most = MostAtOnce(counters, count, threads, times);
      EXPECT(1 <= most && most <= count) << most << " of " << count;
      EXPECT_EQ(counters.taken, before + threads * times);
      EXPECT_EQ(counters.returned, counters.taken);
    }
  }
}

TEST(NoLimit) {
  Counters counters{3, 3};
  EXPECT(MostAtOnce(counters, 0, 4, 10) >= 1);
  EXPECT(counters.taken == 3 && counters.returned == 3);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
