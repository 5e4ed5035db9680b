// The order of the tiles of a grouped product whose rows are gathered from all ranks.
//
// Row i of the product is a copy of a token. In a group, rows are sorted by token, and so by the
// rank that has the token. Each rank's tokens are `parts` segments, which arrive one after the
// other: first those of the next rank, then those of the one after it. So tiles have classes:
//
//   class 0       tiles whose rows are all this rank's own
//   class c > 0   tiles that need the c-th segment that arrives, and none that arrives later
//
// Class follows class, and in a class group follows group, each in raster groups. With 2 ranks, 1
// part, and 2 groups of 5 tile rows, rank 1 computes:
//
//   group            0 0 0 0 0 | 1 1 1 1 1
//   ranks of rows    0 0 * 1 1 | 0 * 1 1 1      *: rows of both
//   order            5 6 7 0 1 | 8 9 2 3 4
//
// A group's tile rows of one class follow each other. So a class of a group is a range, which
// depends only on where the segments begin in the group.
#ifndef JFLUX_CORE_GATHERED_TILES_H_
#define JFLUX_CORE_GATHERED_TILES_H_

#include <cstdint>

#include "group_tiles.h"
#include "platform.h"
#include "tile_order.h"

namespace jflux {

struct TileRows {
  int32_t begin, end;
};

// The tiles of a grouped product whose groups' rows are sorted by token, and so by segment.
struct SegmentedTiles {
  GroupTiles tiles;
  int32_t world, rank;
  int32_t parts;  // segments of each rank's tokens. 0: all tokens are one segment, all tiles one
                  // class, in the order of the groups

  JFLUX_HD constexpr int32_t Segments() const { return parts == 0 ? 1 : world * parts; }
  JFLUX_HD constexpr int64_t FirstToken(int32_t segment, int64_t tokens_per_rank) const {
    if (parts == 0) return segment == 0 ? 0 : world * tokens_per_rank;
    return segment / parts * tokens_per_rank + segment % parts * tokens_per_rank / parts;
  }

  // Tiles of some tile rows of a group.
  JFLUX_HD constexpr int32_t Count(TileRows r) const { return (r.end - r.begin) * tiles.tiles_n; }
  // The t-th tile of them. Tile::m is a tile row of the group.
  JFLUX_HD constexpr Tile At(int32_t t, TileRows r) const {
    const Tile tile = GroupedTile(t, r.end - r.begin, tiles.tiles_n, tiles.group_m);
    return Tile{r.begin + tile.m, tile.n};
  }
};

struct GatheredTiles : SegmentedTiles {
  JFLUX_HD constexpr int32_t Classes() const { return parts == 0 ? 1 : (world - 1) * parts + 1; }

  // The tile rows of class `c` of a group. before(s): how many rows of the group are of segments
  // before s; before(Segments()): all.
  template <typename Before>
  JFLUX_HD constexpr TileRows RowsOfClass(int32_t c, Before&& before) const {
    const int32_t rows = before(Segments());
    if (parts == 0) return TileRows{0, CeilDiv(rows, tiles.tile_rows)};
    const int32_t own = rank * parts;
    // The tile rows before this one have a row that is before the own ones.
    const int32_t first_without = CeilDiv(before(own), tiles.tile_rows);
    if (c == 0) return Ending(before(own), before(own + parts), rows, first_without);
    const int32_t later = own + parts + c - 1;  // counted on past the last segment
    if (later < world * parts) {
      return Ending(before(later), before(later + 1), rows, first_without);
    }
    const int32_t segment = later - world * parts;
    const int32_t begin = Full(before(segment), rows);
    // One whose rows are both before and among the own ones waits for the last segment.
    const int32_t end = segment + 1 == own ? first_without : Full(before(segment + 1), rows);
    return TileRows{begin, Max(begin, end)};
  }

 private:
  // Tile rows whose rows are all among the first `some` of the group's.
  JFLUX_HD constexpr int32_t Full(int32_t some, int32_t rows) const {
    return some == rows ? CeilDiv(rows, tiles.tile_rows) : some / tiles.tile_rows;
  }
  // Tile rows from `least` on whose last row is in [begin, end).
  JFLUX_HD constexpr TileRows Ending(int32_t begin, int32_t end, int32_t rows,
                                     int32_t least) const {
    const int32_t first = Max(least, Full(begin, rows));
    return TileRows{first, Max(first, Full(end, rows))};
  }
};

// The first i in [begin, end) with load(i) >= key, or `end`: load must not decrease. Four elements
// are loaded at a time, since in device memory that takes as long as one.
template <typename Load>
JFLUX_HD constexpr int32_t LowerBound(int32_t begin, int32_t end, int64_t key, Load&& load) {
  while (end - begin > 4) {
    const int32_t step = (end - begin) / 5;
    bool less[4]{};
    JFLUX_UNROLL
    for (int i = 0; i < 4; ++i) less[i] = load(begin + (i + 1) * step) < key;
    int32_t from = begin, to = end;
    JFLUX_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int32_t at = begin + (i + 1) * step;
      if (less[i]) {
        from = at + 1;
      } else {
        to = Min(to, at);
      }
    }
    begin = from;
    end = to;
  }
  while (begin < end && load(begin) < key) ++begin;
  return begin;
}

}  // namespace jflux

#endif  // JFLUX_CORE_GATHERED_TILES_H_
