// The GPU back ends' reserved workspaces, which need no GPU: who gets which place.
#include "runtime/workspace_map.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

using Groups = std::vector<int64_t>;
constexpr int64_t kFirst = 4096;
const Groups kPair{0, 1}, kSwapped{1, 0}, kFour{0, 1, 2, 3};

std::optional<int64_t> Find(WorkspaceMap* map, const Groups& groups, int64_t bytes) {
  return map->Find(groups.data(), groups.size(), bytes);
}

TEST(OneWorkspacePerGroupsAndSize) {
  WorkspaceMap map(kFirst, 1000, WorkspaceMap::Places::kHere);
  EXPECT_EQ(*Find(&map, kPair, 100), kFirst);
  EXPECT_EQ(*Find(&map, kPair, 200), kFirst + 100);
  EXPECT_EQ(*Find(&map, kSwapped, 100), kFirst + 300);
  EXPECT_EQ(*Find(&map, kFour, 100), kFirst + 400);
  EXPECT_EQ(*Find(&map, kPair, 100), kFirst);
  EXPECT_EQ(*Find(&map, kFour, 100), kFirst + 400);
  EXPECT_EQ(map.BytesTaken(), 500);
}

TEST(AFullMapStillTakesWhatFits) {
  WorkspaceMap map(kFirst, 300, WorkspaceMap::Places::kHere);
  EXPECT(Find(&map, kPair, 200).has_value());
  EXPECT(!Find(&map, kPair, 101).has_value());
  EXPECT(!Find(&map, kPair, 101).has_value());
  EXPECT_EQ(map.BytesTaken(), 200);
  EXPECT_EQ(*Find(&map, kPair, 100), kFirst + 200);
  EXPECT(!Find(&map, kPair, 1).has_value());
}

TEST(AgreedPlacesAreOnlyAdded) {
  WorkspaceMap map(kFirst, 1000, WorkspaceMap::Places::kAgreed);
  std::string error;
  EXPECT(!Find(&map, kPair, 100).has_value());
  EXPECT_EQ(map.BytesTaken(), 0);
  EXPECT(map.Add(kFour, 100, 900, &error)) << error;
  EXPECT(map.Add(kPair, 100, 0, &error)) << error;
  EXPECT_EQ(*Find(&map, kPair, 100), kFirst);
  EXPECT_EQ(*Find(&map, kFour, 100), kFirst + 900);
  EXPECT(!Find(&map, kFour, 200).has_value());
  EXPECT_EQ(map.BytesTaken(), 1000);
}

TEST(APlaceOutsideOfTheHeapIsRefused) {
  WorkspaceMap map(kFirst, 1000, WorkspaceMap::Places::kAgreed);
  for (int64_t place : {-1, 901, 1000}) {
    std::string error;
    EXPECT(!map.Add(kPair, 100, place, &error));
    EXPECT(error.find("outside the heap") != std::string::npos) << error;
  }
  EXPECT(!Find(&map, kPair, 100).has_value());
}

TEST(ForEachStopsAtFalse) {
  WorkspaceMap map(kFirst, 1000, WorkspaceMap::Places::kHere);
  for (int64_t bytes : {100, 200, 300}) Find(&map, kPair, bytes);
  std::vector<int64_t> seen;
  const auto visit = [&](int64_t offset, int64_t bytes) {
    seen.push_back(offset);
    return bytes < 200;
  };
  EXPECT(!map.ForEach(visit));
  EXPECT(seen == (std::vector<int64_t>{kFirst, kFirst + 100}));
  EXPECT(map.ForEach([](int64_t, int64_t) { return true; }));
}

// Handlers and lowerings ask from several threads: each gets the same place as the others.
TEST(ThreadsAgree) {
  constexpr int kThreads = 4, kSizes = 64;
  WorkspaceMap map(kFirst, 1 << 20, WorkspaceMap::Places::kHere);
  std::vector<std::vector<int64_t>> offsets(kThreads, std::vector<int64_t>(kSizes));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kSizes; ++i) {
        const int size = (i * 7 + t * 13) % kSizes;  // another order on each thread
        offsets[t][size] = Find(&map, kPair, size + 1).value_or(-1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int t = 1; t < kThreads; ++t) EXPECT(offsets[t] == offsets[0]);
  EXPECT_EQ(map.BytesTaken(), kSizes * (kSizes + 1) / 2);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
