// core/ticket_semaphore.h in the model checker: no more holders than the count, and nobody waits
// for ever, in all schedules of two and three threads.
#include "model/atomics.h"

namespace jflux {
namespace {

enum class Broken { kNothing, kReleasesTwice, kReleasesFirst, kNoRelease, kCountsOneMore };

void Check(int threads, int times, int count, uint64_t before = 0, Broken broken = Broken::kNothing,
           const char* what = nullptr) {
  const auto Count = [](uint64_t* number, uint64_t add, int most) {
    model::Checker::Current()->Do(model::Kind::kCount, model::Order::kRelaxed, number, add, most);
  };
  uint64_t *issued = ModelWord(10), *released = ModelWord(11), *holders = ModelWord(12);
  const int granted = count + (broken == Broken::kCountsOneMore);
  const TicketSemaphore semaphore{issued, released, granted};
  Fault faults[4]{};
  model::Checker checker(threads, times, [&](int thread, int) {
    if (!semaphore.Acquire(ModelWait(thread, &faults[thread]), /*item=*/0)) {
      model::Fail("a wait for a ticket failed");
    }
    if (broken == Broken::kReleasesFirst) semaphore.Release();
    Count(holders, 1, count);
    Count(holders, ~uint64_t{0}, count);
    if (broken == Broken::kReleasesFirst || broken == Broken::kNoRelease) return;
    semaphore.Release();
    if (broken == Broken::kReleasesTwice) semaphore.Release();
  });
  checker.Initialize(issued, before);
  checker.Initialize(released, before);
  Explore("semaphore of " + std::to_string(count) + ", " + std::to_string(threads) + " threads, " +
              std::to_string(times) + " times",
          checker, what);
}

TEST(NoMoreThanTheCount) {
  Check(2, 3, 1);
  Check(3, 2, 1);
  Check(3, 2, 2);
  Check(3, 3, 1);
  Check(4, 1, 2);
}

TEST(TheWrapOfTheTickets) {
  Check(3, 1, 1, ~uint64_t{0} - 1);
  Check(3, 1, 2, (uint64_t{1} << 63) - 1);
}

TEST(BrokenSemaphores) {
  Check(3, 1, 1, 0, Broken::kReleasesTwice, "a second release");
  Check(2, 1, 1, 0, Broken::kReleasesFirst, "released before the work");
  Check(2, 1, 1, 0, Broken::kNoRelease, "no release");
  Check(3, 1, 2, 0, Broken::kCountsOneMore, "one permit too many");
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
