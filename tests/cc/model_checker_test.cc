// model/checker.h itself: what C++ lets two threads see of each other, on programs of a few
// accesses whose outcomes are known.
#include <set>

#include "model/atomics.h"

namespace jflux {
namespace {

// The pairs of values that a two-thread program may end with. body(thread) returns one of them.
std::set<std::pair<uint64_t, uint64_t>> Outcomes(const std::function<uint64_t(int)>& body,
                                                 model::Weakened weakened = {}) {
  std::set<std::pair<uint64_t, uint64_t>> found;
  for (uint64_t a : {0, 1, 2}) {
    for (uint64_t b : {0, 1, 2}) {
      // If both end with these values, the second of them counts too far.
      uint64_t* ended = ModelWord(30);
      model::Checker checker(
          2, 1,
          [&](int thread, int) {
            if (body(thread) != (thread == 0 ? a : b)) return;
            model::Checker::Current()->Do(model::Kind::kCount, model::Order::kRelaxed, ended, 1, 1);
          },
          weakened);
      if (!checker.Run().error.empty()) found.emplace(a, b);
    }
  }
  return found;
}

using Pairs = std::set<std::pair<uint64_t, uint64_t>>;

uint64_t* X() { return ModelWord(20); }
uint64_t* Y() { return ModelWord(21); }

// Thread 0 writes x, then y; thread 1 reads y, then x. It returns 2 y + x, but 3 as 1.
Pairs MessagePassing(bool release, bool acquire, bool fence = false) {
  return Outcomes([=](int thread) -> uint64_t {
    if (thread == 0) {
      StoreRelaxed(X(), 1);
      if (fence) FenceRelease();
      release ? StoreRelease(Y(), 1) : StoreRelaxed(Y(), 1);
      return 0;
    }
    const uint64_t y = acquire ? LoadAcquire(Y()) : LoadRelaxed(Y());
    const uint64_t x = LoadRelaxed(X());
    return y == 1 ? (x == 1 ? 1 : 2) : 0;
  });
}

TEST(MessagesNeedReleaseAndAcquire) {
  const Pairs in_order{{0, 0}, {0, 1}}, any{{0, 0}, {0, 1}, {0, 2}};
  EXPECT(MessagePassing(true, true) == in_order);
  EXPECT(MessagePassing(false, true, /*fence=*/true) == in_order);
  EXPECT(MessagePassing(false, true) == any);
  EXPECT(MessagePassing(true, false) == any);
}

TEST(StoresMayBeSeenLate) {  // store buffering: both may read 0, also with release and acquire
  const Pairs found = Outcomes([](int thread) {
    StoreRelease(thread == 0 ? X() : Y(), 1);
    return LoadAcquire(thread == 0 ? Y() : X());
  });
  EXPECT(found == (Pairs{{0, 0}, {0, 1}, {1, 0}, {1, 1}}));
}

TEST(OneWordIsReadInOrder) {
  const Pairs found = Outcomes([](int thread) -> uint64_t {
    if (thread == 0) {
      StoreRelaxed(X(), 1);
      StoreRelaxed(X(), 2);
      return 0;
    }
    const uint64_t first = LoadRelaxed(X()), second = LoadRelaxed(X());
    return second < first ? 2 : 0;
  });
  EXPECT(found == (Pairs{{0, 0}}));
}

TEST(AdditionsAreAtomic) {
  const Pairs found = Outcomes([](int) { return AddRelaxed(X(), 1); });
  EXPECT(found == (Pairs{{0, 1}, {1, 0}}));
}

TEST(OneOfTwoExchangesSucceeds) {
  const Pairs found = Outcomes([](int) -> uint64_t { return CompareExchange(X(), 0, 1); });
  EXPECT(found == (Pairs{{0, 1}, {1, 0}}));
}

std::string ErrorOf(int threads, const std::function<void(int)>& body) {
  return model::Checker(threads, 1, [&](int thread, int) { body(thread); }).Run().error;
}

void Await(uint64_t* word) {
  for (uint32_t attempt = 0; LoadAcquire(word) == 0; ++attempt) PollPause(attempt);
}

TEST(WaitsInACircle) {
  const auto wait_first = [](int thread) {
    Await(thread == 0 ? X() : Y());
    StoreRelease(thread == 0 ? Y() : X(), 1);
  };
  EXPECT_EQ(ErrorOf(2, wait_first), "threads wait for ever");
  const auto store_first = [](int thread) {
    StoreRelease(thread == 0 ? Y() : X(), 1);
    Await(thread == 0 ? X() : Y());
  };
  EXPECT_EQ(ErrorOf(2, store_first), "");
}

TEST(LimitsOfTheCheckerAreErrors) {
  const auto two_writers = [](int) { StoreRelaxed(X(), 1); };
  EXPECT(ErrorOf(2, two_writers).find("model: two threads store") != std::string::npos);
  const auto unequal_attempts = [](int) {
    for (uint32_t attempt = 0; LoadRelaxed(attempt == 0 ? X() : Y()) == 0; ++attempt) {
      PollPause(attempt);
    }
  };
  EXPECT(ErrorOf(1, unequal_attempts).find("model: an attempt") != std::string::npos);
}

TEST(TheScheduleThatFailsIsShown) {
  model::Checker checker(2, 1, [](int thread, int) {
    if (thread == 0) return StoreRelease(X(), 1);
    if (LoadAcquire(X()) == 1) model::Fail("seen");
  });
  const model::Checker::Result result = checker.Run();
  EXPECT_EQ(result.error, "thread 1: seen");
  EXPECT_EQ(result.trace.size(), 2u);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
