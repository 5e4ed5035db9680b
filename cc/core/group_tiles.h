// The tiles of a grouped product: its rows are sorted by group, and only the device knows how many
// rows each group has.
//
//   rows    0 . . . 299 | 300 . 319 | 320 . . . . 1000     sizes {300, 20, 0, 681}
//   tiles   0 1 2       | 3         | 4 5 6 7 8 9          tile rows of 128 rows, each of which has
//                                                          tiles_n tiles
//
// Tiles do not straddle groups: a group's last tile has fewer rows. A group without rows has no
// tiles. Groups follow each other, so that the tiles that run at the same time share one group's
// weights and rows in L2.
#ifndef JFLUX_CORE_GROUP_TILES_H_
#define JFLUX_CORE_GROUP_TILES_H_

#include <cstdint>

#include "platform.h"
#include "tile_order.h"

namespace jflux {

inline constexpr int32_t kMostGroups = 2047;  // that gpu/group_table.cuh has room for

// The most blocks of `block` rows that groups of `rows` rows together have, where each group begins
// a block. jflux/_ops/_quantize_groups.py has the same.
JFLUX_HD constexpr int64_t MostGroupBlocks(int64_t rows, int64_t groups, int64_t block) {
  // A group of s rows has at most (s + block - 1) / block blocks, and at most s.
  return Min(rows, (rows + groups * (block - 1)) / block);
}

struct GroupTiles {
  int32_t tile_rows;  // of a cluster
  int32_t tiles_n;
  int32_t group_m;  // tile rows of a raster group

  JFLUX_HD constexpr int32_t Count(int32_t rows) const {
    return CeilDiv(rows, tile_rows) * tiles_n;
  }
  // The t-th tile of a group of `rows` rows: Tile::m is a tile row of the group.
  JFLUX_HD constexpr Tile At(int32_t t, int32_t rows) const {
    return GroupedTile(t, CeilDiv(rows, tile_rows), tiles_n, group_m);
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_GROUP_TILES_H_
