// The order of core/scattered_tiles.h, on random routings: every tile once, and every row of a
// segment in a tile of its class or of an earlier one; every token in one item.
#include "core/scattered_tiles.h"

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

int32_t SegmentOf(const ScatteredTiles& order, int32_t token, int64_t per_rank) {
  int32_t segment = 0;
  while (order.FirstToken(segment + 1, per_rank) <= token) ++segment;
  return segment;
}

// The class that completes a segment.
int32_t ClassOf(const ScatteredTiles& order, int32_t segment) {
  if (order.parts == 0) return 0;
  const int32_t all = order.Segments(), next = (order.rank + 1) * order.parts;
  return (segment - next + 2 * all) % all;
}

void Check(const ScatteredTiles& order, const std::vector<Tokens>& groups, int64_t per_rank) {
  std::vector<std::set<std::pair<int32_t, int32_t>>> seen(groups.size());
  for (int32_t c = 0; c < order.Classes(); ++c) {
    for (size_t e = 0; e < groups.size(); ++e) {
      const Tokens& tokens = groups[e];
      const auto rows = static_cast<int32_t>(tokens.size());
      const auto before = [&](int32_t s) {
        return LowerBound(0, rows, order.FirstToken(s, per_rank),
                          [&](int32_t i) { return tokens[i]; });
      };
      const TileRows of_class = order.RowsOfClass(c, before);
      EXPECT(0 <= of_class.begin && of_class.begin <= of_class.end);
      int32_t blocks = 0;
      for (int32_t t = 0; t < order.Count(of_class); ++t) {
        const Tile tile = order.At(t, of_class);
        EXPECT(seen[e].insert({tile.m, tile.n}).second) << "tile " << tile.m << " twice";
        EXPECT(0 <= tile.n && tile.n < order.tiles.tiles_n);
        const int32_t first = tile.m * order.tiles.tile_rows;
        const int32_t end = std::min(first + order.tiles.tile_rows, rows);
        EXPECT(0 <= first && first < end);
        blocks += CeilDiv(end - first, 64);
        int32_t earliest = order.Classes();
        for (int32_t r = first; r < end; ++r) {
          earliest = std::min(earliest, ClassOf(order, SegmentOf(order, tokens[r], per_rank)));
        }
        EXPECT_EQ(earliest, c) << "world " << order.world << " rank " << order.rank << " parts "
                               << order.parts << " tile row " << tile.m;
      }
      if (order.tiles.tile_rows % 64 == 0) {
        EXPECT_EQ(order.BlocksOf(of_class, rows), blocks);
      }
    }
  }
  for (size_t e = 0; e < groups.size(); ++e) {
    const auto rows = static_cast<int32_t>(groups[e].size());
    EXPECT_EQ(static_cast<int32_t>(seen[e].size()), order.tiles.Count(rows));
  }
}

TEST(EveryTileOnceInTheClassOfItsFirstSegment) {
  std::mt19937 random(1);
  const auto upto = [&](int32_t most) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(most + 1));
  };
  for (int i = 0; i < 4000; ++i) {
    ScatteredTiles order{};
    order.world = 1 + upto(7);
    order.rank = upto(order.world - 1);
    order.parts = upto(4);
    order.tiles = {i % 4 == 0 ? 64 * (1 + upto(1)) : 1 + upto(5), 1 + upto(2), 1 + upto(3)};
    const int64_t per_rank = 1 + upto(i % 4 == 0 ? 90 : 20);
    std::vector<Tokens> groups(1 + upto(4));
    const int32_t choices = 1 + upto(2), dropped = upto(3);
    // Sometimes only the tokens of some ranks are in a group.
    const int32_t first = upto(1) * upto(static_cast<int32_t>(order.world * per_rank));
    for (int64_t token = first; token < order.world * per_rank; ++token) {
      for (int32_t j = 0; j < choices; ++j) {
        // Skewed: the first groups get more, and some get none. Some tokens have no group.
        const int32_t e = upto(upto(static_cast<int32_t>(groups.size()) - 1));
        if (upto(9) >= dropped) groups[e].push_back(static_cast<int32_t>(token));
      }
    }
    Check(order, groups, per_rank);
  }
}

TEST(OwnTokensComeLast) {
  // 2 ranks with 10 tokens each, one group of 20 rows, tiles of 4: the one in the middle has both.
  for (int32_t rank : {0, 1}) {
    const ScatteredTiles order{{{4, 1, 1}, 2, rank, 1}};
    const auto before = [](int32_t s) { return 10 * s; };
    const TileRows peers = order.RowsOfClass(0, before), own = order.RowsOfClass(1, before);
    EXPECT_EQ(peers.begin, rank == 0 ? 2 : 0);
    EXPECT_EQ(peers.end, rank == 0 ? 5 : 3);
    EXPECT_EQ(own.begin, rank == 0 ? 0 : 3);
    EXPECT_EQ(own.end, rank == 0 ? 2 : 5);
  }
}

TEST(EveryTokenIsInOneItem) {
  for (int32_t world = 1; world <= kMaxRanks; ++world) {
    for (int32_t parts = 0; parts <= 4; ++parts) {
      for (int32_t tokens = 1; tokens <= 23; ++tokens) {
        for (int32_t item_tokens : {1, 2, 5, 16}) {
          const int32_t rank = tokens % world;
          const SumItems items{world, rank, parts, tokens, item_tokens};
          const ScatteredTiles order{{{1, 1, 1}, world, rank, parts}};
          std::set<std::pair<int32_t, int32_t>> seen, places;
          int32_t last_class = 0;
          for (int32_t i = 0; i < items.Count(); ++i) {
            const SumItems::Item item = items.At(i);
            EXPECT(0 <= item.count && item.count <= item_tokens);
            EXPECT(0 <= item.place && item.place < items.OfOwner());
            EXPECT(places.insert({item.owner, item.place}).second);
            EXPECT(last_class <= item.cls);
            last_class = item.cls;
            EXPECT(i < items.Count() - items.OfOwner() || item.owner == rank);
            for (int32_t t = item.first; t < item.first + item.count; ++t) {
              EXPECT(0 <= t && t < tokens && seen.insert({item.owner, t}).second);
              EXPECT_EQ(ClassOf(order, SegmentOf(order, item.owner * tokens + t, tokens)),
                        item.cls);
            }
            // The owner knows the item's tokens by its place.
            const SumItems owners{world, item.owner, parts, tokens, item_tokens};
            const auto own = owners.At(owners.Count() - owners.OfOwner() + item.place);
            EXPECT(own.owner == item.owner && own.first == item.first && own.count == item.count);
          }
          EXPECT_EQ(static_cast<int32_t>(seen.size()), world * tokens);
          // The last class has a token, so somebody waits for all tiles.
          const SumItems::Item first_of_last = items.At(items.Count() - items.OfPart());
          EXPECT(first_of_last.count > 0 && first_of_last.cls == order.Classes() - 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
