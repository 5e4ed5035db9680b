// In which order a rank computes the tiles of a product: what is the same for all tiles, made once
// by the host, and a pure function of the tile's number.
//
// Rows are virtual rows (core/rows.h): rank r owns [r * rows_per_rank, (r + 1) * rows_per_rank).
// A tile row is `tile_m` rows; it may straddle ranks. With 4 ranks, 8 tile rows, as rank 1 sees it:
//
//   all-gather + matmul: own rows first, then what arrives, in the order in which it arrives
//       rank   0 0 | 1 1 | 2 2 | 3 3
//       order  6 7 | 0 1 | 2 3 | 4 5
//
//   matmul + reduce-scatter: what others wait for first, own rows last
//       rank   0 0 | 1 1 | 2 2 | 3 3
//       order  4 5 | 6 7 | 0 1 | 2 3
//
// So no two ranks work for, or wait for, the same peer in the same phase, and neither end of the
// communication is exposed.
//
// Few rows are one raster group over n instead (group_m == 0): of each column all tiles, in these
// orders, before the next column's.
//
// Deadlock: a tile with own rows waits, in matmul + reduce-scatter, for the same tile of every
// peer. Tiles without own rows wait for nobody and come first. Of the tiles with own rows, those
// that straddle come first, column by column and from top to bottom in each, which is the same
// order on all ranks that share one; so of the unfinished ones the first in that order is always
// either being computed or next to be taken. In one raster group that holds column by column.
#ifndef JFLUX_CORE_TILE_ORDER_H_
#define JFLUX_CORE_TILE_ORDER_H_

#include <cstdint>

#include "core/platform.h"

namespace jflux {

struct Tile {
  int32_t m;          // tile row
  int32_t n;          // tile column
  int32_t split = 0;  // which part of k, where that is split
};

struct TileGrid {
  int32_t tiles_m;
  int32_t tiles_n;
  int32_t group_m;  // tile rows that share a raster group over n, so that w's tiles are reused from
                    // L2; 0: all of them do, whoever's they are
  int32_t at_once = 0;  // tiles that are computed at the same time, where that matters
};

// The t-th tile of a raster group over `rows` consecutive positions: `group_m` positions at a time,
// all of n for each group. Tile::m is a position in [0, rows).
JFLUX_HD constexpr Tile GroupedTile(int32_t t, int32_t rows, int32_t tiles_n, int32_t group_m) {
  const int32_t per_group = group_m * tiles_n;
  const int32_t first = t / per_group * group_m;
  const int32_t size = Min(group_m, rows - first);
  const int32_t in_group = t % per_group;
  return Tile{first + in_group % size, in_group / size};
}

// Tile rows that hold rows of `rank`: [First, Last].
JFLUX_HD constexpr int32_t FirstTileOf(int rank, int64_t rows_per_rank, int32_t tile_m) {
  return static_cast<int32_t>(Quotient(rank * rows_per_rank, tile_m));
}
JFLUX_HD constexpr int32_t LastTileOf(int rank, int64_t rows_per_rank, int32_t tile_m) {
  return static_cast<int32_t>(Quotient((rank + 1) * rows_per_rank - 1, tile_m));
}

// all-gather + matmul. Own rows are swept by themselves: what shares a raster group must be there
// at once.
//
// If the own tiles do not keep all workers busy, the rest of them would start with a raster group
// over all other rows, and so wait for the last to arrive. They take tiles of the nearest rows
// instead; in the columns concerned (n < fill) the raster group then has one rank less:
//
//     n   0 1 2 3 4 5 6        1 own, 2 nearest, 3 and 4 the raster group over the others
//   own   1 1 1 1 1 1 1
//  next   2 2 2 4 4 4 4
//         3 3 3 4 4 4 4
//         3 3 3 4 4 4 4
struct GatherOrder {
  TileGrid grid;
  int32_t start;  // the first tile row that needs nobody else's rows, and how many there are
  int32_t own;
  int32_t near;  // tile rows that fill the first wave, and tile columns of them
  int32_t fill;

  static constexpr GatherOrder Make(const TileGrid& grid, int rank, int world,
                                    int64_t rows_per_rank, int32_t tile_m) {
    GatherOrder o{grid, 0, 0, 0, 0};
    o.start = static_cast<int32_t>((rank * rows_per_rank + tile_m - 1) / tile_m);
    const auto end = rank + 1 == world ? grid.tiles_m
                                       : static_cast<int32_t>((rank + 1) * rows_per_rank / tile_m);
    o.own = Max(0, end - o.start);
    const int32_t others = grid.tiles_m - o.own;
    o.near = Min(o.own, others);
    if (o.near > 0 && others <= grid.group_m) {
      o.fill = Min(CeilDiv(Max(0, grid.at_once - o.own * grid.tiles_n), o.near), grid.tiles_n);
    }
    return o;
  }

  JFLUX_HD constexpr Tile At(int32_t t) const {
    if (grid.group_m == 0) {
      const int32_t n = t / grid.tiles_m;
      return Wrapped(Tile{t - n * grid.tiles_m, n}, 0, 0);
    }
    const int32_t others = grid.tiles_m - own;
    if (t < own * grid.tiles_n) return Swept(t, own, grid.tiles_n, grid.group_m, 0, 0);
    t -= own * grid.tiles_n;
    if (t < near * fill) return Swept(t, near, fill, near, own, 0);
    t -= near * fill;
    if (t < (others - near) * fill) {
      return Swept(t, others - near, fill, others - near, own + near, 0);
    }
    t -= (others - near) * fill;
    return Swept(t, others, grid.tiles_n - fill, grid.group_m, own, fill);
  }

 private:
  JFLUX_HD constexpr Tile Swept(int32_t t, int32_t rows, int32_t columns, int32_t group,
                                int32_t first_m, int32_t first_n) const {
    return Wrapped(GroupedTile(t, rows, columns, group), first_m, first_n);
  }
  // Positions are counted from `start`, and go round.
  JFLUX_HD constexpr Tile Wrapped(Tile p, int32_t first_m, int32_t first_n) const {
    const int32_t m = start + first_m + p.m;
    return Tile{m < grid.tiles_m ? m : m - grid.tiles_m, first_n + p.n};
  }
};

// matmul + reduce-scatter.
struct ScatterOrder {
  TileGrid grid;        // in one raster group, of a column
  int32_t first, last;  // tile rows with own rows
  bool head, tail;      // whether others share the first of them, and the last, if that is another
  bool single_group;

  static constexpr ScatterOrder Make(const TileGrid& whole, int rank, int world,
                                     int64_t rows_per_rank, int32_t tile_m) {
    ScatterOrder o{whole, 0, 0, false, false, whole.group_m == 0};
    // In one raster group, a column is a grid of its own.
    if (o.single_group) o.grid = TileGrid{whole.tiles_m, 1, whole.tiles_m};
    o.first = FirstTileOf(rank, rows_per_rank, tile_m);
    o.last = LastTileOf(rank, rows_per_rank, tile_m);
    const bool begins_in = rank * rows_per_rank % tile_m != 0;
    const bool ends_in = rank + 1 < world && (rank + 1) * rows_per_rank % tile_m != 0;
    o.head = begins_in || (ends_in && o.first == o.last);
    o.tail = ends_in && o.first != o.last;
    return o;
  }

  JFLUX_HD constexpr Tile At(int32_t t) const {
    const int32_t column = single_group ? t / grid.tiles_m : 0;
    t -= column * grid.tiles_m;
    const int32_t own = last - first + 1, others = grid.tiles_m - own;
    // 1. tiles without own rows, from the next rank's on
    if (t < others * grid.tiles_n) {
      const Tile p = GroupedTile(t, others, grid.tiles_n, grid.group_m);
      const int32_t m = last + 1 + p.m;
      return Tile{m < grid.tiles_m ? m : m - grid.tiles_m, column + p.n};
    }
    t -= others * grid.tiles_n;
    // 2. tiles with own rows that others share: the first and the last of the own tile rows
    const int32_t shared = (head ? 1 : 0) + (tail ? 1 : 0);
    if (t < shared * grid.tiles_n) {
      const bool is_first = head && (shared == 1 || t % 2 == 0);
      return Tile{is_first ? first : last, column + t / shared};
    }
    t -= shared * grid.tiles_n;
    // 3. tiles with own rows only
    const Tile p = GroupedTile(t, own - shared, grid.tiles_n, grid.group_m);
    return Tile{first + (head ? 1 : 0) + p.m, column + p.n};
  }
};

// Whom a rank sends to in step 1 .. world-1 of an all-gather: first the rank that will need it
// first, which is the previous one.
JFLUX_HD constexpr int SendPeer(int rank, int step, int world) {
  return (rank + world - step) % world;
}

}  // namespace jflux

#endif  // JFLUX_CORE_TILE_ORDER_H_
