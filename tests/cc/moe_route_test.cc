// The CPU body of moe_route against its definition.
#include "ops/moe_route/moe_route.h"

#include <random>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

struct Routing {
  std::vector<int32_t> counts, offsets, destination, source;
};

Routing Route(const std::vector<int32_t>& indices, int64_t experts, int64_t capacity,
              std::string* wrong) {
  const auto slots = static_cast<int64_t>(indices.size());
  Routing r{std::vector<int32_t>(experts, 77), std::vector<int32_t>(experts + 1, 77),
            std::vector<int32_t>(slots, 77), std::vector<int32_t>(slots, 77)};
  *wrong = MoeRouteCpu(
      {slots, experts, capacity},
      {indices.data(), r.counts.data(), r.offsets.data(), r.destination.data(), r.source.data()});
  return r;
}

// Expert after expert, each expert's slots in order.
Routing Defined(const std::vector<int32_t>& indices, int64_t experts, int64_t capacity) {
  Routing r;
  r.destination.assign(indices.size(), -1);
  r.offsets.push_back(0);
  for (int64_t e = 0; e < experts; ++e) {
    int32_t count = 0;
    for (size_t s = 0; s < indices.size(); ++s) {
      if (indices[s] != e || (capacity >= 0 && count == capacity)) continue;
      r.destination[s] = static_cast<int32_t>(r.source.size());
      r.source.push_back(static_cast<int32_t>(s));
      ++count;
    }
    r.counts.push_back(count);
    r.offsets.push_back(r.offsets.back() + count);
  }
  r.source.resize(indices.size(), -1);
  return r;
}

TEST(EqualsItsDefinition) {
  std::mt19937 rng(1);
  for (const int64_t experts : {1, 2, 5, 64}) {
    for (const int slots : {0, 1, 7, 200}) {
      for (const int64_t capacity : {-1, 0, 1, 9}) {
        for (const int least : {-1, 0, static_cast<int>(experts) - 1}) {
          std::uniform_int_distribution<int32_t> any(least, static_cast<int32_t>(experts) - 1);
          std::vector<int32_t> indices(slots);
          for (int32_t& e : indices) e = any(rng);
          std::string wrong;
          const Routing got = Route(indices, experts, capacity, &wrong);
          const Routing want = Defined(indices, experts, capacity);
          EXPECT_EQ(wrong, "");
          EXPECT(got.counts == want.counts && got.offsets == want.offsets) << experts << slots;
          EXPECT(got.destination == want.destination) << experts << " " << slots << " " << capacity;
          EXPECT(got.source == want.source) << experts << " " << slots << " " << capacity;
        }
      }
    }
  }
}

TEST(WrongIndices) {
  for (const int32_t bad : {-2, 3}) {
    std::string wrong;
    Route({0, 2, bad, 1}, 3, -1, &wrong);
    EXPECT_EQ(wrong,
              "slot 2 of topk_indices is " + std::to_string(bad) + ", and there are 3 experts");
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
