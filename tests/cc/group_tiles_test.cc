// The tiles of core/group_tiles.h: each row of each group in one tile per column, none of another
// group, in raster groups.
#include "core/group_tiles.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

TEST(EveryRowOfAGroupOnceForEachColumn) {
  for (int32_t tile_rows : {4, 128, 256}) {
    for (int32_t tiles_n : {1, 3, 8}) {
      for (int32_t group_m : {1, 2, 16}) {
        const GroupTiles tiles{tile_rows, tiles_n, group_m};
        for (int32_t rows : {0, 1, 3, 4, 5, 127, 128, 129, 1000, 4096}) {
          const int32_t count = tiles.Count(rows);
          std::vector<int> seen(rows * tiles_n);
          for (int32_t t = 0; t < count; ++t) {
            const Tile tile = tiles.At(t, rows);
            EXPECT(0 <= tile.n && tile.n < tiles_n);
            const int32_t first = tile.m * tile_rows;
            EXPECT(0 <= first && first < rows) << rows << " rows, tile " << t;
            for (int32_t r = first; r < std::min(rows, first + tile_rows); ++r) {
              ++seen[r * tiles_n + tile.n];
            }
          }
          for (int times : seen) EXPECT_EQ(times, 1);
        }
      }
    }
  }
}

// The tiles of a raster group over all columns come before those of the next one.
TEST(RasterGroupsInOrder) {
  const GroupTiles tiles{128, 5, 4};
  const int32_t rows = 128 * 10 + 1;
  int32_t raster_group = 0;
  std::set<std::pair<int32_t, int32_t>> in_group;
  for (int32_t t = 0; t < tiles.Count(rows); ++t) {
    const Tile tile = tiles.At(t, rows);
    EXPECT(tile.m / 4 == raster_group || tile.m / 4 == raster_group + 1);
    if (tile.m / 4 > raster_group) {
      EXPECT_EQ(in_group.size(), size_t{4 * 5});
      in_group.clear();
      ++raster_group;
    }
    in_group.insert({tile.m, tile.n});
  }
  EXPECT_EQ(raster_group, 2);
  EXPECT_EQ(in_group.size(), size_t{3 * 5});
}

// No sizes have more blocks, and some have as many, if there are enough rows.
TEST(MostBlocksOfGroups) {
  constexpr int64_t kBlock = 4;
  for (int64_t groups : {1, 2, 3}) {
    for (int64_t rows = 0; rows < 14; ++rows) {
      int64_t most = 0;
      for (int64_t a = 0; a <= rows; ++a) {
        for (int64_t b = 0; a + b <= (groups > 1 ? rows : a); ++b) {
          const int64_t c = groups > 2 ? rows - a - b : 0;
          most = Max(most, CeilDiv(a, kBlock) + CeilDiv(b, kBlock) + CeilDiv(c, kBlock));
        }
      }
      EXPECT(most <= MostGroupBlocks(rows, groups, kBlock)) << rows;
      if (rows >= groups * kBlock) EXPECT_EQ(most, MostGroupBlocks(rows, groups, kBlock));
    }
  }
  EXPECT_EQ(MostGroupBlocks(8, 128, 128), 8);
}

TEST(AGroupWithoutRowsHasNoTiles) { EXPECT_EQ((GroupTiles{128, 4, 8}.Count(0)), 0); }

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
