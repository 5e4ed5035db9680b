// The order in which a rank computes the tiles of a product. The host precomputes what all tiles
// share; At(t) is a pure function of the tile's number.
//
// Rows are virtual rows (core/rows.h): rank r owns [r * rows_per_rank, (r + 1) * rows_per_rank). A
// tile row has `tile_m` rows and may straddle ranks. With 4 ranks and 8 tile rows, rank 1 computes:
//
//   all-gather + matmul: local rows first, then the other ranks' rows in the order of arrival
//       rank   0 0 | 1 1 | 2 2 | 3 3
//       order  6 7 | 0 1 | 2 3 | 4 5
//
//   matmul + reduce-scatter: the other ranks' rows first, local rows last
//       rank   0 0 | 1 1 | 2 2 | 3 3
//       order  4 5 | 6 7 | 0 1 | 2 3
//
// In each phase no two ranks work for, or wait for, the same peer, and communication overlaps with
// compute at both ends.
//
// With few rows, all tile rows form a single raster group (group_m == 0): all tiles of a column, in
// the orders above, precede the next column.
//
// Deadlock (matmul + reduce-scatter): a tile with local rows waits for the same tile of every peer.
// All ranks make progress because
//
//   1. tiles without local rows wait for nobody and come first;
//   2. then come the tiles that straddle ranks, column by column, top to bottom in each column: the
//      same relative order on all ranks that share them;
//   3. hence the first unfinished tile in that order is running or next on every rank it needs.
//
// In a single raster group this holds column by column.
#ifndef JFLUX_CORE_TILE_ORDER_H_
#define JFLUX_CORE_TILE_ORDER_H_

#include <cstdint>

#include "core/platform.h"

namespace jflux {

struct Tile {
  int32_t m;          // tile row
  int32_t n;          // tile column
  int32_t split = 0;  // index of the k split
};

struct TileGrid {
  int32_t tiles_m;
  int32_t tiles_n;
  int32_t group_m;  // tile rows of a raster group, which is traversed over all n so that w's tiles
                    // are reused from L2; 0: all tile rows, of all ranks
  int32_t concurrent_tiles = 0;  // tiles that run at the same time; 0: not considered
};

// The t-th tile over `rows` consecutive positions, in raster groups of `group_m` positions: all of
// n for each group. Tile::m is a position in [0, rows).
JFLUX_HD constexpr Tile GroupedTile(int32_t t, int32_t rows, int32_t tiles_n, int32_t group_m) {
  const int32_t per_group = group_m * tiles_n;
  const int32_t first = t / per_group * group_m;
  const int32_t size = Min(group_m, rows - first);
  const int32_t in_group = t % per_group;
  return Tile{first + in_group % size, in_group / size};
}

// The tile rows that contain rows of `rank`: [FirstTileOf, LastTileOf].
JFLUX_HD constexpr int32_t FirstTileOf(int rank, int64_t rows_per_rank, int32_t tile_m) {
  return static_cast<int32_t>(Quotient(rank * rows_per_rank, tile_m));
}
JFLUX_HD constexpr int32_t LastTileOf(int rank, int64_t rows_per_rank, int32_t tile_m) {
  return static_cast<int32_t>(Quotient((rank + 1) * rows_per_rank - 1, tile_m));
}

// all-gather + matmul. Local rows have raster groups of their own: the rows of a raster group are
// needed at the same time.
//
// If the local tiles do not fill the first wave, the next raster group would cover all other rows,
// and so wait for the last of them to arrive. Instead, the wave is filled with tiles of the nearest
// rows, in columns n < fill. In those columns the later raster group has one rank less:
//
//     n     0 1 2 3 4 5 6        1 local, 2 nearest, 3 and 4 the raster group over the other rows
//   local   1 1 1 1 1 1 1
//   nearest 2 2 2 4 4 4 4
//           3 3 3 4 4 4 4
//           3 3 3 4 4 4 4
struct GatherOrder {
  TileGrid grid;
  int32_t start;  // first tile row with local rows only
  int32_t local;
  int32_t nearest;  // tile rows that fill the first wave
  int32_t fill;

  static constexpr GatherOrder Make(const TileGrid& grid, int rank, int world,
                                    int64_t rows_per_rank, int32_t tile_m) {
    GatherOrder o{grid, 0, 0, 0, 0};
    o.start = static_cast<int32_t>((rank * rows_per_rank + tile_m - 1) / tile_m);
    const auto end = rank + 1 == world ? grid.tiles_m
                                       : static_cast<int32_t>((rank + 1) * rows_per_rank / tile_m);
    o.local = Max(0, end - o.start);
    const int32_t others = grid.tiles_m - o.local;
    o.nearest = Min(o.local, others);
    if (o.nearest > 0 && others <= grid.group_m) {
      o.fill = Min(CeilDiv(Max(0, grid.concurrent_tiles - o.local * grid.tiles_n), o.nearest),
                   grid.tiles_n);
    }
    return o;
  }

  JFLUX_HD constexpr Tile At(int32_t t) const {
    if (grid.group_m == 0) {
      const int32_t n = t / grid.tiles_m;
      return Wrapped(Tile{t - n * grid.tiles_m, n}, 0, 0);
    }
    const int32_t others = grid.tiles_m - local;
    if (t < local * grid.tiles_n) return InGroups(t, local, grid.tiles_n, grid.group_m, 0, 0);
    t -= local * grid.tiles_n;
    if (t < nearest * fill) return InGroups(t, nearest, fill, nearest, local, 0);
    t -= nearest * fill;
    if (t < (others - nearest) * fill) {
      return InGroups(t, others - nearest, fill, others - nearest, local + nearest, 0);
    }
    t -= (others - nearest) * fill;
    return InGroups(t, others, grid.tiles_n - fill, grid.group_m, local, fill);
  }

 private:
  JFLUX_HD constexpr Tile InGroups(int32_t t, int32_t rows, int32_t columns, int32_t group,
                                   int32_t first_m, int32_t first_n) const {
    return Wrapped(GroupedTile(t, rows, columns, group), first_m, first_n);
  }
  // Positions count from `start` and wrap around.
  JFLUX_HD constexpr Tile Wrapped(Tile p, int32_t first_m, int32_t first_n) const {
    const int32_t m = start + first_m + p.m;
    return Tile{m < grid.tiles_m ? m : m - grid.tiles_m, first_n + p.n};
  }
};

// matmul + reduce-scatter.
struct ScatterOrder {
  TileGrid grid;        // with a single raster group: of one column
  int32_t first, last;  // tile rows with local rows
  bool head, tail;      // whether other ranks have rows in the first one, and in the last one if
                        // that is another
  bool single_group;

  static constexpr ScatterOrder Make(const TileGrid& all_tiles, int rank, int world,
                                     int64_t rows_per_rank, int32_t tile_m) {
    ScatterOrder o{all_tiles, 0, 0, false, false, all_tiles.group_m == 0};
    // In a single raster group each column is a grid of its own.
    if (o.single_group) o.grid = TileGrid{all_tiles.tiles_m, 1, all_tiles.tiles_m};
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
    const int32_t local = last - first + 1, others = grid.tiles_m - local;
    // 1. tiles without local rows, from the next rank's on
    if (t < others * grid.tiles_n) {
      const Tile p = GroupedTile(t, others, grid.tiles_n, grid.group_m);
      const int32_t m = last + 1 + p.m;
      return Tile{m < grid.tiles_m ? m : m - grid.tiles_m, column + p.n};
    }
    t -= others * grid.tiles_n;
    // 2. tiles that straddle ranks: the first and the last tile row with local rows
    const int32_t shared = (head ? 1 : 0) + (tail ? 1 : 0);
    if (t < shared * grid.tiles_n) {
      const bool is_first = head && (shared == 1 || t % 2 == 0);
      return Tile{is_first ? first : last, column + t / shared};
    }
    t -= shared * grid.tiles_n;
    // 3. tiles with local rows only
    const Tile p = GroupedTile(t, local - shared, grid.tiles_n, grid.group_m);
    return Tile{first + (head ? 1 : 0) + p.m, column + p.n};
  }
};

// The peer that a rank sends to in step 1 .. world-1 of an all-gather: first the previous rank,
// which needs the rows first.
JFLUX_HD constexpr int SendPeer(int rank, int step, int world) {
  return (rank + world - step) % world;
}

}  // namespace jflux

#endif  // JFLUX_CORE_TILE_ORDER_H_
