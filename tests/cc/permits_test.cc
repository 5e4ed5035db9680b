// core/permits.h: threads that hold permits, and those that wait for them.
#include "core/permits.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

struct Counters {
  uint64_t taken, returned;
  Permits Of(int32_t count) { return Permits{&taken, &returned, count}; }
};

// `threads` threads, each `times` times. Some are slow to look, so that others overtake them.
int MostAtOnce(Counters& counters, int32_t permits, int threads, int times) {
  std::atomic<int> now{0}, most{0};
  std::vector<std::thread> running;
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      const Permits own = counters.Of(permits);
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
  const Permits permits = counters.Of(2);
  EXPECT(permits.IsGranted(5) && permits.IsGranted(6) && !permits.IsGranted(7));
  counters.returned = 6;  // one of the first two
  EXPECT(permits.IsGranted(7) && !permits.IsGranted(8));
  counters.returned = 20;  // many more have come and gone
  EXPECT(permits.IsGranted(7));
}

TEST(NoMoreThanThereArePermits) {
  for (int32_t permits : {1, 2, 8}) {
    for (uint64_t before : {uint64_t{0}, ~uint64_t{0} - 20, (uint64_t{1} << 63) - 20}) {
      Counters counters{before, before};
      const int threads = 2 * permits + 1, times = 200;
      const int most = MostAtOnce(counters, permits, threads, times);
      EXPECT(1 <= most && most <= permits) << most << " of " << permits;
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
