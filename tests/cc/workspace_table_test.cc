// The CPU back end's table of workspaces: which call gets which, when one is reused, and the error
// when there is none.
#include "runtime/workspace_table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "core/platform.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr int64_t kBytes = 4096;

// A table in fresh memory, with a heap of `workspaces` times kBytes.
struct Fixture {
  explicit Fixture(int64_t workspaces) : heap_bytes(workspaces * kBytes) {}

  // seconds: timeout for room.
  bool Acquire(WorkspaceKey key, int world, WorkspaceLease* lease, std::string* error,
               int64_t bytes = kBytes, double seconds = 0) {
    const uint64_t deadline = NowNs() + static_cast<uint64_t>(seconds * 1e9);
    const auto clear = [this](int64_t offset, int64_t size) { cleared.push_back({offset, size}); };
    return table->Acquire(key, world, bytes, heap_bytes, deadline, clear, lease, error);
  }
  WorkspaceLease MustAcquire(uint64_t key, int world, int64_t bytes = kBytes) {
    WorkspaceLease lease;
    std::string error;
    EXPECT(Acquire({key, 1}, world, &lease, &error, bytes)) << error;
    return lease;
  }

  std::unique_ptr<WorkspaceTable> table{new WorkspaceTable()};  // (): zeros
  void Release(const WorkspaceLease& lease, int ranks, bool failed) {
    EXPECT(table->Release(lease, ranks, failed, NowNs() + 1'000'000'000));
  }
  void Abandon(uint64_t key, int world, int ranks) {
    EXPECT(table->Abandon({key, 1}, world, ranks, NowNs() + 1'000'000'000));
  }
  // The error of a rank that asks for a workspace, which it must not get.
  std::string Refusal(uint64_t key, int world, int64_t bytes = kBytes) {
    WorkspaceLease lease;
    std::string error;
    EXPECT(!Acquire({key, 1}, world, &lease, &error, bytes));
    return error;
  }

  int64_t heap_bytes;
  std::vector<std::pair<int64_t, int64_t>> cleared;  // under the table's lock
};

bool Same(const WorkspaceLease& a, const WorkspaceLease& b) {
  return a.index == b.index && a.epoch == b.epoch && a.offset == b.offset;
}

bool Contains(const std::string& text, int64_t number) {
  return text.find(std::to_string(number)) != std::string::npos;
}

TEST(OneKeyOneWorkspace) {
  Fixture f(8);
  const WorkspaceLease a = f.MustAcquire(1, 3), b = f.MustAcquire(2, 3);
  EXPECT(Same(f.MustAcquire(1, 3), a));
  EXPECT(Same(f.MustAcquire(2, 3), b));
  EXPECT(Same(f.MustAcquire(1, 3), a));
  EXPECT(a.index != b.index);
  EXPECT(a.epoch != 0 && b.epoch != 0);  // 0 is the value of fresh signals
  EXPECT_EQ(f.table->BytesInUse(), 2 * kBytes);
}

TEST(BothHalvesOfTheKeyCount) {
  Fixture f(8);
  WorkspaceLease a, b, c;
  std::string error;
  EXPECT(f.Acquire({1, 1}, 2, &a, &error));
  EXPECT(f.Acquire({1, 2}, 2, &b, &error));
  EXPECT(f.Acquire({2, 1}, 2, &c, &error));
  EXPECT(std::set<int>({a.index, b.index, c.index}).size() == 3);
}

TEST(WorkspacesDoNotOverlap) {
  Fixture f(64);
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int i = 0; i < 10; ++i) {
    const int64_t bytes = kBytes << (i % 3);
    const int64_t offset = f.MustAcquire(i, 2, bytes).offset;
    ranges.push_back({offset, offset + bytes});
  }
  std::sort(ranges.begin(), ranges.end());
  EXPECT(ranges.front().first >= 0 && ranges.back().second <= f.heap_bytes);
  for (size_t i = 1; i < ranges.size(); ++i) EXPECT(ranges[i].first >= ranges[i - 1].second);
}

TEST(ReusedWhenAllRanksHaveReleased) {
  Fixture f(8);
  const WorkspaceLease a = f.MustAcquire(1, 3);
  f.Release(a, 2, false);
  const WorkspaceLease b = f.MustAcquire(2, 3);
  EXPECT(b.index != a.index);
  EXPECT(Same(f.MustAcquire(1, 3), a));  // a late rank of the first call still finds it
  f.Release(a, 1, false);
  EXPECT_EQ(f.table->BytesInUse(), kBytes);
  uint64_t epoch = a.epoch;
  for (uint64_t key = 3; key < 20; ++key) {
    const WorkspaceLease c = f.MustAcquire(key, 4);
    EXPECT_EQ(c.index, a.index);
    EXPECT_EQ(c.offset, a.offset);
    EXPECT(c.epoch > epoch) << c.epoch << " after " << epoch;
    epoch = c.epoch;
    for (int rank = 0; rank < 4; ++rank) f.Release(c, 1, false);
  }
  EXPECT_EQ(f.table->BytesTouched(), 2 * kBytes);
  EXPECT(f.cleared.empty());  // a workspace's old signals are older than its next call
}

TEST(ReusedForItsOwnSizeOnly) {
  Fixture f(64);
  const WorkspaceLease big = f.MustAcquire(1, 1, 4 * kBytes);
  f.Release(big, 1, false);
  EXPECT(f.MustAcquire(2, 1, kBytes).index != big.index);
  EXPECT(f.MustAcquire(3, 1, 8 * kBytes).index != big.index);
  EXPECT_EQ(f.MustAcquire(4, 1, 4 * kBytes).index, big.index);
}

TEST(FreeWorkspacesMakeRoomForOtherSizes) {
  Fixture f(8);
  std::vector<WorkspaceLease> small;
  for (uint64_t key = 0; key < 4; ++key) small.push_back(f.MustAcquire(key, 1));
  for (const auto& lease : small) f.Release(lease, 1, false);
  EXPECT(f.cleared.empty());
  const WorkspaceLease big = f.MustAcquire(10, 1, 8 * kBytes);
  EXPECT_EQ(big.offset, 0);
  for (const auto& lease : small) EXPECT(big.epoch > lease.epoch);
  EXPECT(f.cleared.size() == 1 && f.cleared[0] == std::make_pair(int64_t{0}, 8 * kBytes));
  f.Release(big, 1, false);
  const WorkspaceLease kept = f.MustAcquire(11, 1, 2 * kBytes);
  EXPECT_EQ(f.MustAcquire(12, 1, 4 * kBytes).offset, kept.offset + 2 * kBytes);
  EXPECT_EQ(f.cleared.size(), 3u);
  EXPECT_EQ(f.table->BytesInUse(), 6 * kBytes);
}

TEST(VisitsFreeWorkspacesOnly) {
  Fixture f(64);
  const WorkspaceLease a = f.MustAcquire(1, 1), lost = f.MustAcquire(2, 2);
  f.MustAcquire(3, 1);
  f.Release(a, 1, false);
  f.Release(lost, 1, true);
  std::vector<int64_t> visited;
  f.table->ForEachFree([&](int64_t offset, int64_t bytes, uint64_t epoch) {
    visited.push_back(offset);
    EXPECT_EQ(bytes, kBytes);
    EXPECT_EQ(epoch, a.epoch);
  });
  EXPECT(visited == std::vector<int64_t>{a.offset});
}

TEST(AFailedWorkspaceComesBackWhenAllRanksAreDone) {
  for (bool last_fails : {true, false}) {
    Fixture f(8);
    const WorkspaceLease a = f.MustAcquire(1, 3);
    f.Release(a, 1, !last_fails);
    f.Release(a, 1, last_fails);
    for (uint64_t key = 2; key < 6; ++key) {  // the third rank may still write
      const WorkspaceLease b = f.MustAcquire(key, 2);
      EXPECT(b.index != a.index && b.offset != a.offset) << "key " << key;
      f.Release(b, 2, false);
    }
    EXPECT_EQ(f.table->BytesInUse(), kBytes);
    f.Release(a, 1, false);
    EXPECT_EQ(f.table->BytesInUse(), 0);
    const WorkspaceLease again = f.MustAcquire(9, 2), other = f.MustAcquire(10, 2);
    EXPECT(again.offset == a.offset || other.offset == a.offset);
    EXPECT(again.epoch > a.epoch && other.epoch > again.epoch);
  }
}

TEST(ARankThatComesAfterAFailureIsRefused) {
  Fixture f(8);
  const WorkspaceLease a = f.MustAcquire(1, 3);
  f.Release(a, 2, true);
  const uint64_t begin = NowNs();
  EXPECT(f.Refusal(1, 3).find("has failed on another rank") != std::string::npos);
  EXPECT(f.Refusal(1, 3, 2 * kBytes).find("has failed on another rank") != std::string::npos);
  EXPECT(NowNs() - begin < 1'000'000'000);
  f.Abandon(1, 3, 1);  // which is all that it has to do with the call
  EXPECT_EQ(f.table->BytesInUse(), 0);
  EXPECT_EQ(f.MustAcquire(2, 3).offset, a.offset);
  f.MustAcquire(1, 3);  // nothing is left of the failed call
}

TEST(ARankMayGiveUpBeforeOthersCome) {
  Fixture f(8);
  f.Abandon(1, 3, 2);
  EXPECT_EQ(f.table->BytesInUse(), 0);
  EXPECT(f.Refusal(1, 3).find("has failed on another rank") != std::string::npos);
  f.Abandon(1, 3, 1);
  f.MustAcquire(1, 3);
  f.Abandon(2, 3, 3);  // all ranks at once: nobody is left to be told
  f.MustAcquire(2, 3);
}

TEST(RanksThatDisagreeOnTheSizeGiveBothBack) {
  Fixture f(8);
  const WorkspaceLease a = f.MustAcquire(1, 2), b = f.MustAcquire(1, 2, 2 * kBytes);
  EXPECT(a.index != b.index);
  f.Release(a, 1, true);
  EXPECT_EQ(f.table->BytesInUse(), 3 * kBytes);
  f.Release(b, 1, true);
  EXPECT_EQ(f.table->BytesInUse(), 0);
}

// A process that died never gives up its part of a call.
TEST(CallsThatNobodyGivesUpLeaveTheTableUsable) {
  Fixture f(3);
  for (uint64_t key = 0; key < 5000; ++key) f.Abandon(key, 2, 1);
  EXPECT_EQ(f.table->BytesInUse(), 0);
  EXPECT(f.Refusal(4999, 2).find("has failed on another rank") != std::string::npos);
  const WorkspaceLease lost = f.MustAcquire(10'000, 2);
  f.Release(lost, 1, true);
  for (uint64_t key = 20'000; key < 20'100; ++key) f.Release(f.MustAcquire(key, 2), 2, false);
  f.MustAcquire(30'000, 2);
  f.MustAcquire(30'001, 2);
  const std::string error = f.Refusal(30'002, 2);
  EXPECT(error.find("8192 in use by other calls, 4096 lost to calls that failed") !=
         std::string::npos)
      << error;
}

TEST(TooLargeACallSaysHowMuchItNeeds) {
  Fixture f(2);
  WorkspaceLease lease;
  std::string error;
  const uint64_t begin = NowNs();
  EXPECT(!f.Acquire({1, 1}, 2, &lease, &error, 3 * kBytes, /*seconds=*/60));
  EXPECT(NowNs() - begin < 30'000'000'000);  // waiting would not help
  EXPECT(Contains(error, 3 * kBytes) && Contains(error, 2 * kBytes)) << error;
  EXPECT(error.find("jflux.init(heap_bytes=") != std::string::npos) << error;
}

TEST(OutOfMemorySaysHowMuchIsInUse) {
  Fixture f(5);
  f.MustAcquire(1, 2);
  f.MustAcquire(2, 2, 2 * kBytes);
  WorkspaceLease lease;
  std::string error;
  const uint64_t begin = NowNs();
  EXPECT(!f.Acquire({3, 1}, 2, &lease, &error, 4 * kBytes, /*seconds=*/0.05));
  EXPECT(NowNs() - begin >= 50'000'000);
  for (int64_t number : {4 * kBytes, 5 * kBytes, 3 * kBytes}) {
    EXPECT(Contains(error, number)) << number << " in: " << error;
  }
  EXPECT(error.find("jflux.init(heap_bytes=") != std::string::npos) << error;
  f.MustAcquire(4, 2, 2 * kBytes);  // the failure took nothing
}

TEST(WaitsForRoom) {
  Fixture f(1);
  const WorkspaceLease a = f.MustAcquire(1, 2);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    f.Release(a, 2, false);
  });
  WorkspaceLease b;
  std::string error;
  EXPECT(f.Acquire({2, 1}, 2, &b, &error, kBytes, /*seconds=*/60)) << error;
  other.join();
  EXPECT_EQ(b.offset, a.offset);
  EXPECT(b.epoch > a.epoch);
}

// A caller that runs out of room, or the user, asks for the usage while others run.
TEST(UsageMayBeReadWhileOthersAreBusy) {
  Fixture f(2);
  f.MustAcquire(1, 2);
  std::atomic<int> calls{0};
  std::thread busy([&] {
    for (uint64_t key = 2; key < 1000; ++key, ++calls) {
      WorkspaceLease lease;
      std::string error;
      if (f.Acquire({key, 2}, 1, &lease, &error)) f.Release(lease, 1, false);
    }
  });
  while (calls < 998) {
    const int64_t in_use = f.table->BytesInUse();
    EXPECT(in_use == kBytes || in_use == 2 * kBytes) << in_use;
  }
  busy.join();
}

TEST(ALockThatIsNeverGivenBackEndsInAnError) {
  Fixture f(2);
  f.Release(f.MustAcquire(1, 1), 1, false);
  int visits = 0;
  f.table->ForEachFree([&](int64_t, int64_t, uint32_t) {  // holds the lock, as if killed
    ++visits;
    WorkspaceLease lease;
    std::string error;
    EXPECT(!f.Acquire({2, 1}, 1, &lease, &error, kBytes, /*seconds=*/.05));
    EXPECT(error.find("a process ended or was stopped while it held the directory") !=
           std::string::npos)
        << error;
    const uint64_t soon = NowNs() + 50'000'000;
    EXPECT(!f.table->Release(lease, 1, false, soon));  // and says so
    EXPECT(!f.table->Abandon({2, 1}, 1, 1, soon));
  });
  EXPECT_EQ(visits, 1);
  f.MustAcquire(3, 1);
}

// Ranks make the same calls, each in its own order within a window, like XLA's executor.
TEST(AllRanksGetTheSameWorkspaceInWhateverOrder) {
  constexpr int kRanks = 4, kCalls = 400, kWindow = 8;
  Fixture f(kRanks * kWindow);
  std::vector<std::array<WorkspaceLease, kRanks>> leases(kCalls);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      std::mt19937 random(rank);
      for (int base = 0; base < kCalls; base += kWindow) {
        std::vector<int> calls;
        for (int i = base; i < base + kWindow; ++i) calls.push_back(i);
        std::shuffle(calls.begin(), calls.end(), random);
        for (int i : calls) {
          std::string error;
          const WorkspaceKey key{static_cast<uint64_t>(i), 7};
          EXPECT(f.Acquire(key, kRanks, &leases[i][rank], &error, kBytes, /*seconds=*/60)) << error;
        }
        std::shuffle(calls.begin(), calls.end(), random);
        for (int i : calls) {
          if (random() % 4 == 0) std::this_thread::yield();
          f.Release(leases[i][rank], 1, false);
        }
      }
    });
  }
  for (auto& r : ranks) r.join();
  std::set<std::pair<int64_t, uint32_t>> uses;
  for (const auto& call : leases) {
    for (int rank = 1; rank < kRanks; ++rank) EXPECT(Same(call[rank], call[0]));
    EXPECT(uses.insert({call[0].offset, call[0].epoch}).second) << "two calls in one epoch";
  }
  EXPECT_EQ(f.table->BytesInUse(), 0);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
