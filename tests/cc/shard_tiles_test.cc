// The order of core/shard_tiles.h over a grid of shapes: every tile once, the peers' shards first,
// no two ranks on one peer, and tiles received in the order in which they are sent.
#include "core/shard_tiles.h"

#include <vector>

#include "testing.h"

namespace jflux {

static std::ostream& operator<<(std::ostream& out, const ShardGrid& g) {
  return out << "world " << g.world << " tiles " << g.tiles_m << " x " << g.tiles_n << " group_m "
             << g.group_m;
}

namespace {

template <typename F>
void ForAllGrids(F&& f) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (int32_t tiles_m : {1, 2, 3, 5, 8, 17}) {
      for (int32_t tiles_n : {1, 2, 3, 7}) {
        for (int32_t group_m : {1, 2, 4, 16}) f(ShardGrid{world, tiles_m, tiles_n, group_m});
      }
    }
  }
}

TEST(EveryTileOnce) {
  ForAllGrids([](const ShardGrid& g) {
    for (int rank = 0; rank < g.world; ++rank) {
      std::vector<char> seen(g.Total());
      for (int32_t t = 0; t < g.Total(); ++t) {
        const ShardTile tile = ShardTileAt(t, g, rank);
        const bool inside = 0 <= tile.owner && tile.owner < g.world && 0 <= tile.m &&
                            tile.m < g.tiles_m && 0 <= tile.n && tile.n < g.tiles_n;
        EXPECT(inside) << g << " rank " << rank << " position " << t;
        if (!inside) continue;
        char& count = seen[(tile.owner * g.tiles_m + tile.m) * g.tiles_n + tile.n];
        EXPECT(count == 0) << g << " rank " << rank << " repeats position " << t;
        count = 1;
      }
    }
  });
}

TEST(TheNextRanksShardFirstAndTheOwnOneLast) {
  ForAllGrids([](const ShardGrid& g) {
    for (int rank = 0; rank < g.world; ++rank) {
      for (int32_t t = 0; t < g.Total(); ++t) {
        const int step = t / (g.tiles_m * g.tiles_n);
        EXPECT_EQ(ShardTileAt(t, g, rank).owner, (rank + 1 + step) % g.world) << g << " at " << t;
      }
      EXPECT_EQ(ShardTileAt(g.Total() - 1, g, rank).owner, rank) << g;
    }
  });
}

TEST(NoTwoRanksOnOnePeer) {
  ForAllGrids([](const ShardGrid& g) {
    for (int32_t t = 0; t < g.Total(); ++t) {
      unsigned busy = 0;
      for (int rank = 0; rank < g.world; ++rank) busy |= 1u << ShardTileAt(t, g, rank).owner;
      EXPECT_EQ(busy, (1u << g.world) - 1) << g << " at " << t;
    }
  });
}

// The tile that a receiver takes at step s, position i, is the one its sender computes there.
TEST(TilesAreReceivedInTheOrderInWhichTheyAreSent) {
  ForAllGrids([](const ShardGrid& g) {
    for (int rank = 0; rank < g.world; ++rank) {
      for (int step = 1; step < g.world; ++step) {
        const int src = SendPeer(rank, step, g.world);
        for (int32_t i = 0; i < g.PerShard(); ++i) {
          const ShardTile sent = ShardTileAt((step - 1) * g.PerShard() + i, g, src);
          const Tile received = TileInShard(i, g);
          EXPECT(sent.owner == rank && sent.m == received.m && sent.n == received.n)
              << g << " rank " << rank << " step " << step << " tile " << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
