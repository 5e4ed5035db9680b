// The order of core/gathered_tiles.h, on random routings: every tile once, own rows first, and no
// tile before a segment that its class waits for.
#include "core/gathered_tiles.h"

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

// The tokens of a group's rows, sorted.
using Tokens = std::vector<int32_t>;

// Rows before each segment.
std::vector<int32_t> BoundsOf(const GatheredTiles& order, const Tokens& tokens, int64_t per_rank) {
  std::vector<int32_t> bounds;
  for (int32_t s = 0; s <= order.Segments(); ++s) {
    const auto rows = static_cast<int32_t>(tokens.size());
    bounds.push_back(
        LowerBound(0, rows, order.FirstToken(s, per_rank), [&](int32_t i) { return tokens[i]; }));
  }
  return bounds;
}

// When the segment of a token arrives; 0: it is the rank's own.
int32_t ArrivalOf(const GatheredTiles& order, int32_t token, int64_t per_rank) {
  const auto owner = static_cast<int32_t>(token / per_rank);
  if (owner == order.rank) return 0;
  int32_t segment = owner * order.parts;
  while (order.FirstToken(segment + 1, per_rank) <= token) ++segment;
  const int32_t after = (order.rank + 1) * order.parts, all = order.Segments();
  return (segment - after + all) % all + 1;
}

void Check(const GatheredTiles& order, const std::vector<Tokens>& groups, int64_t per_rank) {
  std::vector<std::set<std::pair<int32_t, int32_t>>> seen(groups.size());
  for (int32_t c = 0; c < order.Classes(); ++c) {
    for (size_t e = 0; e < groups.size(); ++e) {
      const std::vector<int32_t> bounds = BoundsOf(order, groups[e], per_rank);
      const auto before = [&](int32_t s) { return bounds[s]; };
      const TileRows rows = order.RowsOfClass(c, before);
      EXPECT(0 <= rows.begin && rows.begin <= rows.end);
      for (int32_t t = 0; t < order.Count(rows); ++t) {
        const Tile tile = order.At(t, rows);
        EXPECT(seen[e].insert({tile.m, tile.n}).second) << "tile " << tile.m << " twice";
        EXPECT(0 <= tile.n && tile.n < order.tiles.tiles_n);
        const int32_t first = tile.m * order.tiles.tile_rows;
        const int32_t end = std::min<int32_t>(first + order.tiles.tile_rows, groups[e].size());
        EXPECT(0 <= first && first < end);
        if (order.parts == 0) continue;
        for (int32_t r = first; r < end; ++r) {
          const int32_t arrival = ArrivalOf(order, groups[e][r], per_rank);
          EXPECT(arrival <= c) << "rank " << order.rank << ", class " << c << ", arrival "
                               << arrival;
        }
      }
    }
  }
  for (size_t e = 0; e < groups.size(); ++e) {
    const auto rows = static_cast<int32_t>(groups[e].size());
    EXPECT_EQ(static_cast<int32_t>(seen[e].size()), order.tiles.Count(rows));
  }
}

TEST(EveryTileOnceAndNoneTooEarly) {
  std::mt19937 random(1);
  const auto upto = [&](int32_t most) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(most + 1));
  };
  for (int i = 0; i < 3000; ++i) {
    GatheredTiles order{};
    order.world = 1 + upto(7);
    order.rank = upto(order.world - 1);
    order.parts = upto(3);
    order.tiles = {1 + upto(5), 1 + upto(2), 1 + upto(3)};
    const int64_t per_rank = 1 + upto(20);
    std::vector<Tokens> groups(1 + upto(4));
    const int32_t choices = 1 + upto(2), dropped = upto(3);
    for (int64_t token = 0; token < order.world * per_rank; ++token) {
      for (int32_t j = 0; j < choices; ++j) {
        // Skewed: the first groups get more, and some get none. Some tokens have no group.
        const int32_t e = upto(upto(static_cast<int32_t>(groups.size()) - 1));
        if (upto(9) >= dropped) groups[e].push_back(static_cast<int32_t>(token));
      }
    }
    Check(order, groups, per_rank);
  }
}

TEST(TilesOfOwnRowsComeFirst) {
  // 2 ranks with 10 tokens each, one group of 20 rows, tiles of 4: the one in the middle has both.
  Tokens tokens(20);
  for (int32_t i = 0; i < 20; ++i) tokens[i] = i;
  for (int32_t rank : {0, 1}) {
    const GatheredTiles order{{{4, 1, 1}, 2, rank, 1}};
    const std::vector<int32_t> bounds = BoundsOf(order, tokens, 10);
    const auto before = [&](int32_t s) { return bounds[s]; };
    const TileRows own = order.RowsOfClass(0, before), other = order.RowsOfClass(1, before);
    EXPECT_EQ(own.begin, rank == 0 ? 0 : 3);
    EXPECT_EQ(own.end, rank == 0 ? 2 : 5);
    EXPECT_EQ(other.begin, rank == 0 ? 2 : 0);
    EXPECT_EQ(other.end, rank == 0 ? 5 : 3);
  }
}

TEST(LowerBoundIsTheStandardOne) {
  std::mt19937 random(2);
  for (int i = 0; i < 2000; ++i) {
    std::vector<int32_t> sorted(random() % 70);
    for (int32_t& v : sorted) v = static_cast<int32_t>(random() % 50);
    std::sort(sorted.begin(), sorted.end());
    const auto key = static_cast<int32_t>(random() % 52);
    const auto end = static_cast<int32_t>(sorted.size());
    const auto begin = static_cast<int32_t>(random() % (sorted.size() + 1));
    const auto found = LowerBound(begin, end, key, [&](int32_t at) { return sorted[at]; });
    const auto wanted = std::lower_bound(sorted.begin() + begin, sorted.end(), key);
    EXPECT_EQ(found, static_cast<int32_t>(wanted - sorted.begin()));
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
