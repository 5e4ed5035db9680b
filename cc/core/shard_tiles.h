// Tile order of a product whose result is sharded: each shard goes to one rank, and nothing is
// summed.
//
// Tiles are numbered within a shard, so every tile has one owner. The last tile row and column of a
// shard may be cut short. With 4 ranks and shards of 2 tiles, rank 1 computes:
//
//       owner  0 0 | 1 1 | 2 2 | 3 3
//       order  4 5 | 6 7 | 0 1 | 2 3
//
// The next rank's shard comes first and the local shard last. Two consequences:
//
//   - At any time the ranks send to different peers.
//   - The peers' tiles have arrived by the time the local shard is done.
//
// A receiver takes the shards in the order of arrival, which is that of SendPeer
// (core/tile_order.h).
//
// Deadlock: no tile waits for a peer.
#ifndef JFLUX_CORE_SHARD_TILES_H_
#define JFLUX_CORE_SHARD_TILES_H_

#include <cstdint>

#include "core/platform.h"
#include "core/tile_order.h"

namespace jflux {

struct ShardGrid {
  int32_t world;
  int32_t tiles_m, tiles_n;  // of one shard
  int32_t group_m;           // tile rows of a raster group within a shard

  JFLUX_HD constexpr int32_t PerShard() const { return tiles_m * tiles_n; }
  JFLUX_HD constexpr int32_t Total() const { return world * PerShard(); }
};

struct ShardTile {
  int32_t owner;
  int32_t m, n;  // within the owner's shard
};

// The i-th tile within a shard.
JFLUX_HD constexpr Tile TileInShard(int32_t i, const ShardGrid& grid) {
  return GroupedTile(i, grid.tiles_m, grid.tiles_n, grid.group_m);
}

// The t-th tile that `rank` computes.
JFLUX_HD constexpr ShardTile ShardTileAt(int32_t t, const ShardGrid& grid, int rank) {
  const int32_t step = t / grid.PerShard();
  const Tile tile = TileInShard(t - step * grid.PerShard(), grid);
  return ShardTile{(rank + 1 + step) % grid.world, tile.m, tile.n};
}

}  // namespace jflux

#endif  // JFLUX_CORE_SHARD_TILES_H_
