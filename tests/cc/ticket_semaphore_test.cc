// core/ticket_semaphore.h: threads that hold it, and threads that wait for it.
#include "core/ticket_semaphore.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "runtime/fault.h"
#include "testing.h"

namespace jflux {
namespace {

struct Counters {
  uint64_t taken, returned;
  TicketSemaphore Of(int32_t count) { return TicketSemaphore{&taken, &returned, count}; }
};

// What the waits of one rank share.
struct Rank {
  Fault fault{};
  uint64_t stop = 0;
  WaitContext Context(uint64_t timeout_ns) {
    return WaitContext{&fault, &stop, NowNs() + timeout_ns, /*op=*/0, /*rank=*/3, /*skip=*/false};
  }
};
constexpr uint64_t kMinute = 60'000'000'000, kMilliseconds = 1'000'000;

// `threads` threads acquire it `times` times each. Some poll slowly, so that others overtake them.
int MostAtOnce(Counters& counters, int32_t count, int threads, int times) {
  std::atomic<int> now{0}, most{0};
  std::vector<std::thread> running;
  Rank rank;
  const WaitContext wait = rank.Context(kMinute);
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      const TicketSemaphore own = counters.Of(count);
      for (int i = 0; i < times; ++i) {
        EXPECT(own.Acquire(wait, 0));
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

// A holder that does not return its ticket in time, and comes back later.
TEST(AFailedAcquireKeepsTheCountersBalanced) {
  Counters counters{7, 7};
  const TicketSemaphore semaphore = counters.Of(1);
  Rank rank;
  EXPECT(semaphore.Acquire(rank.Context(kMinute), 0));
  const uint64_t begin = NowNs();
  EXPECT(!semaphore.Acquire(rank.Context(50 * kMilliseconds), /*item=*/17));
  EXPECT(NowNs() - begin >= 50 * kMilliseconds);
  EXPECT_EQ(static_cast<FaultKind>(rank.fault.kind), FaultKind::kNoTicket);
  EXPECT_EQ(rank.fault.rank, 3);
  EXPECT_EQ(rank.fault.tile, 17);
  EXPECT_EQ(rank.fault.expected, 8u);  // its ticket
  EXPECT_EQ(rank.fault.seen, 7u);      // returned
  const std::string text = Describe(rank.fault, 0.05);
  EXPECT(text.find("rank 3 waited 0.05 s to send (row block 17; ticket 8") != std::string::npos)
      << text;
  // Others of the rank give up at once.
  EXPECT(!semaphore.Acquire(rank.Context(kMinute), 0));
  // All three return their tickets, in any order.
  semaphore.Release();
  semaphore.Release();
  semaphore.Release();
  EXPECT_EQ(counters.taken, 10u);
  EXPECT_EQ(counters.returned, 10u);
  // The next call finds it as it should be: one at a time.
  Rank next;
  EXPECT(semaphore.Acquire(next.Context(kMinute), 0));
  EXPECT(!semaphore.Acquire(next.Context(10 * kMilliseconds), 0));
  semaphore.Release();
  semaphore.Release();
  EXPECT_EQ(counters.taken, counters.returned);
}

// Half of the threads give up at once, whenever that is. On a busy machine threads may run one
// after the other, and none has to wait: then they run again.
TEST(WhoGivesUpLosesNoTicket) {
  constexpr int kCount = 3, kThreads = 8, kTimes = 300;
  Counters counters{0, 0};
  std::atomic<int> failed{0};
  int rounds = 0;
  for (; failed == 0 && rounds < 50; ++rounds) {
    std::vector<std::thread> running;
    for (int t = 0; t < kThreads; ++t) {
      running.emplace_back([&, t] {
        const TicketSemaphore own = counters.Of(kCount);
        for (int i = 0; i < kTimes; ++i) {
          Rank rank;
          failed += !own.Acquire(rank.Context(t % 2 == 0 ? kMinute : 0), 0);
          if (i % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
          own.Release();
        }
      });
    }
    for (auto& thread : running) thread.join();
  }
  EXPECT(failed > 0);
  EXPECT_EQ(counters.taken, static_cast<uint64_t>(rounds * kThreads * kTimes));
  EXPECT_EQ(counters.returned, counters.taken);
  EXPECT(MostAtOnce(counters, kCount, kThreads, 100) <= kCount);  // the next call
}

TEST(NoLimit) {
  Counters counters{3, 3};
  EXPECT(MostAtOnce(counters, 0, 4, 10) >= 1);
  EXPECT(counters.taken == 3 && counters.returned == 3);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
