// The orders of core/tile_order.h over a grid of shapes: every tile once, in the documented order,
// and no deadlock for any number of tiles in flight per rank.
#include "core/tile_order.h"

#include <algorithm>
#include <array>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

struct Shape {
  int world;
  int64_t rows_per_rank;
  int32_t tile_m, tiles_n, group_m;
  int32_t at_once = 0;

  int64_t Total() const { return world * rows_per_rank; }
  TileGrid Grid() const {
    return {static_cast<int32_t>((Total() + tile_m - 1) / tile_m), tiles_n, group_m, at_once};
  }
  int32_t Tiles() const { return Grid().tiles_m * tiles_n; }
  bool OneRasterGroup() const { return group_m == 0; }
  // Tile rows do not straddle ranks.
  bool Even() const { return rows_per_rank % tile_m == 0; }

  // By definition, not by the arithmetic under test.
  bool Owns(int rank, int32_t m) const {
    for (int64_t row = static_cast<int64_t>(m) * tile_m; row < (m + 1) * tile_m; ++row) {
      if (row < Total() && row / rows_per_rank == rank) return true;
    }
    return false;
  }
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "world " << s.world << " rows_per_rank " << s.rows_per_rank << " tile_m "
             << s.tile_m << " tiles_n " << s.tiles_n << " group_m " << s.group_m << " at_once "
             << s.at_once;
}

template <typename F>
void ForAllShapes(F&& f) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (int64_t rows :
         {1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 128, 129, 256, 300}) {
      for (int32_t tile_m : {4, 16, 32, 128}) {
        for (int32_t tiles_n : {1, 2, 3, 4}) {
          for (int32_t group_m : {0, 1, 2, 4, 8}) f(Shape{world, rows, tile_m, tiles_n, group_m});
          for (int32_t at_once : {1, 3, 7, 132}) f(Shape{world, rows, tile_m, tiles_n, 8, at_once});
        }
      }
    }
  }
}

using Order = Tile (*)(int32_t, const TileGrid&, int, int, int64_t, int32_t);
constexpr Order kGather = [](int32_t t, const TileGrid& g, int r, int w, int64_t rows, int32_t m) {
  return GatherOrder::Make(g, r, w, rows, m).At(t);
};
constexpr Order kScatter = [](int32_t t, const TileGrid& g, int r, int w, int64_t rows, int32_t m) {
  return ScatterOrder::Make(g, r, w, rows, m).At(t);
};

std::vector<Tile> TilesOf(Order order, const Shape& s, int rank) {
  std::vector<Tile> tiles;
  const TileGrid grid = s.Grid();
  for (int32_t t = 0; t < s.Tiles(); ++t) {
    tiles.push_back(order(t, grid, rank, s.world, s.rows_per_rank, s.tile_m));
  }
  return tiles;
}

// Ownership: owners[m] counts the ranks with rows in tile row m; owns[rank][m].
struct Ownership {
  explicit Ownership(const Shape& s) : owners(s.Grid().tiles_m) {
    for (int rank = 0; rank < s.world; ++rank) {
      for (int32_t m = 0; m < s.Grid().tiles_m; ++m) {
        owns[rank].push_back(s.Owns(rank, m));
        owners[m] += owns[rank][m];
      }
    }
  }
  bool Alone(int rank, int32_t m) const { return owns[rank][m] && owners[m] == 1; }

  std::vector<int> owners;
  std::array<std::vector<char>, kMaxRanks> owns;
};

TEST(EveryTileOnce) {
  ForAllShapes([](const Shape& s) {
    for (Order order : {kGather, kScatter}) {
      for (int rank = 0; rank < s.world; ++rank) {
        std::vector<char> seen(s.Tiles());
        for (const Tile& tile : TilesOf(order, s, rank)) {
          const bool inside =
              tile.m >= 0 && tile.m < s.Grid().tiles_m && tile.n >= 0 && tile.n < s.tiles_n;
          EXPECT(inside) << s << " rank " << rank << " tile " << tile.m << "," << tile.n;
          if (!inside) continue;
          char& count = seen[tile.m * s.tiles_n + tile.n];
          EXPECT(count == 0) << (order == kGather ? "gather " : "scatter ") << s << " rank " << rank
                             << " repeats tile " << tile.m << "," << tile.n;
          count = 1;
        }
      }
    }
  });
}

TEST(FirstAndLastTileOfARank) {
  ForAllShapes([](const Shape& s) {
    if (s.tiles_n != 1 || s.group_m != 1) return;
    const Ownership o(s);
    for (int rank = 0; rank < s.world; ++rank) {
      const int32_t first = FirstTileOf(rank, s.rows_per_rank, s.tile_m);
      const int32_t last = LastTileOf(rank, s.rows_per_rank, s.tile_m);
      for (int32_t m = 0; m < s.Grid().tiles_m; ++m) {
        EXPECT(o.owns[rank][m] == (first <= m && m <= last)) << s << " rank " << rank << " m " << m;
      }
    }
  });
}

TEST(GatherStartsWithOwnRows) {
  ForAllShapes([](const Shape& s) {
    if (s.OneRasterGroup()) return;
    const Ownership o(s);
    for (int rank = 0; rank < s.world; ++rank) {
      // Tile rows with local rows only.
      int32_t whole = 0;
      for (int32_t m = 0; m < s.Grid().tiles_m; ++m) {
        whole += o.Alone(rank, m);
      }
      const auto tiles = TilesOf(kGather, s, rank);
      for (int32_t t = 0; t < whole * s.tiles_n; ++t) {
        EXPECT(o.Alone(rank, tiles[t].m)) << s << " rank " << rank << " position " << t;
      }
    }
  });
}

TEST(GatherTakesOtherRowsAsTheyArrive) {
  ForAllShapes([](const Shape& s) {
    if (!s.Even() || s.at_once != 0 || s.OneRasterGroup()) return;
    for (int rank = 0; rank < s.world; ++rank) {
      // From one raster group to the next, the distance from the local rows only grows.
      const auto tiles = TilesOf(kGather, s, rank);
      const int32_t own = static_cast<int32_t>(s.rows_per_rank / s.tile_m);
      const int32_t first = rank * own;
      for (int32_t t = own * s.tiles_n; t < s.Tiles(); ++t) {
        const int32_t group = (t / s.tiles_n - own) / s.group_m;
        const int32_t position = (tiles[t].m - first + s.Grid().tiles_m) % s.Grid().tiles_m - own;
        EXPECT(position / s.group_m == group) << s << " rank " << rank << " position " << t;
      }
    }
  });
}

TEST(GatherKeepsAllWorkersBusyWithNearRows) {
  ForAllShapes([](const Shape& s) {
    const int32_t own = static_cast<int32_t>(s.rows_per_rank / s.tile_m);
    if (!s.Even() || own == 0 || s.Grid().tiles_m - own > s.group_m || s.OneRasterGroup()) return;
    for (int rank = 0; rank < s.world; ++rank) {
      const auto tiles = TilesOf(kGather, s, rank);
      // Local rows or the next rank's, unless these are not enough.
      const int32_t first = Min(s.at_once, 2 * own * s.tiles_n);
      for (int32_t t = 0; t < first && s.world > 1; ++t) {
        const int64_t owner = tiles[t].m / own;
        EXPECT((owner - rank + s.world) % s.world <= 1) << s << " rank " << rank << " tile " << t;
      }
    }
  });
}

// In a single raster group, every column is ordered like a grid of one column.
TEST(OneRasterGroupIsColumnByColumn) {
  ForAllShapes([](const Shape& s) {
    if (!s.OneRasterGroup()) return;
    Shape column = s;
    column.tiles_n = 1;
    column.group_m = s.Grid().tiles_m;
    for (Order order : {kGather, kScatter}) {
      for (int rank = 0; rank < s.world; ++rank) {
        const auto tiles = TilesOf(order, s, rank), one = TilesOf(order, column, rank);
        for (int32_t t = 0; t < s.Tiles(); ++t) {
          const int32_t in_column = t % s.Grid().tiles_m;
          EXPECT(tiles[t].n == t / s.Grid().tiles_m && tiles[t].m == one[in_column].m)
              << (order == kGather ? "gather " : "scatter ") << s << " position " << t;
        }
      }
    }
  });
}

TEST(ScatterEndsWithOwnRows) {
  ForAllShapes([](const Shape& s) {
    if (s.OneRasterGroup()) return;
    const Ownership o(s);
    for (int rank = 0; rank < s.world; ++rank) {
      int phase = 0;             // 0: other ranks' rows, 1: shared rows, 2: local rows only
      int32_t last_shared = -1;  // shared tile rows ascend
      for (const Tile& tile : TilesOf(kScatter, s, rank)) {
        const int now = o.Alone(rank, tile.m) ? 2 : o.owns[rank][tile.m] ? 1 : 0;
        EXPECT(now >= phase) << s << " rank " << rank << " tile " << tile.m << "," << tile.n;
        phase = now;
        if (now != 1) continue;
        const int32_t number = tile.n * s.Grid().tiles_m + tile.m;
        EXPECT(number > last_shared) << s << " rank " << rank;
        last_shared = number;
      }
    }
  });
}

TEST(NoTwoRanksOnOnePeer) {
  ForAllShapes([](const Shape& s) {
    if (!s.Even()) return;
    for (Order order : {kGather, kScatter}) {
      std::vector<std::vector<Tile>> tiles;
      for (int rank = 0; rank < s.world; ++rank) tiles.push_back(TilesOf(order, s, rank));
      for (int32_t t = 0; t < s.Tiles(); ++t) {
        unsigned busy = 0;
        for (int rank = 0; rank < s.world; ++rank) {
          busy |= 1u << (tiles[rank][t].m * s.tile_m / s.rows_per_rank);
        }
        EXPECT(busy == (1u << s.world) - 1)
            << (order == kGather ? "gather " : "scatter ") << s << " position " << t;
      }
      // Both start next to the local rows; only the gather starts with the local rows.
      for (int rank = 0; rank < s.world; ++rank) {
        const int owner = static_cast<int>(tiles[rank][0].m * s.tile_m / s.rows_per_rank);
        EXPECT(owner == (order == kGather ? rank : (rank + 1) % s.world)) << s << " rank " << rank;
      }
    }
  });
}

TEST(SendPeerIsAPermutation) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_EQ(SendPeer(rank, 0, world), rank);
      unsigned peers = 0;
      for (int step = 1; step < world; ++step) peers |= 1u << SendPeer(rank, step, world);
      EXPECT_EQ(peers, ((1u << world) - 1) & ~(1u << rank));
    }
    for (int step = 0; step < world; ++step) {
      unsigned receivers = 0;
      for (int rank = 0; rank < world; ++rank) {
        const int peer = SendPeer(rank, step, world);
        receivers |= 1u << peer;
        // GatherOrder needs the next rank's rows first, then those of the rank after it.
        EXPECT_EQ(rank, (peer + step) % world);
      }
      EXPECT_EQ(receivers, (1u << world) - 1);
    }
  }
}

// Simulates the waits of matmul + reduce-scatter. A rank takes its tiles in order and has at most
// workers[rank] unfinished tiles. A tile is computed and sent when it is taken. It finishes at once
// if it has no local rows, else when every rank has computed it. True if all ranks finish. Possible
// steps never disable each other, so one order of events stands for all.
bool Finishes(const Shape& s, const Ownership& o, const std::vector<std::vector<Tile>>& orders,
              const std::array<int, kMaxRanks>& workers) {
  const int32_t tiles = s.Tiles();
  std::vector<int> computed(tiles);
  std::array<int32_t, kMaxRanks> next{};
  std::array<std::vector<int32_t>, kMaxRanks> waiting;
  for (bool progress = true; progress;) {
    progress = false;
    for (int rank = 0; rank < s.world; ++rank) {
      auto& mine = waiting[rank];
      for (size_t i = 0; i < mine.size();) {
        if (computed[mine[i]] == s.world) {
          mine[i] = mine.back();
          mine.pop_back();
          progress = true;
        } else {
          ++i;
        }
      }
      while (next[rank] < tiles && static_cast<int>(mine.size()) < workers[rank]) {
        const Tile tile = orders[rank][next[rank]++];
        const int32_t number = tile.m * s.tiles_n + tile.n;
        ++computed[number];
        if (o.owns[rank][tile.m] && computed[number] < s.world) mine.push_back(number);
        progress = true;
      }
    }
  }
  for (int rank = 0; rank < s.world; ++rank) {
    if (next[rank] < tiles || !waiting[rank].empty()) return false;
  }
  return true;
}

std::vector<std::array<int, kMaxRanks>> WorkerMixes() {
  std::vector<std::array<int, kMaxRanks>> mixes;
  for (int c : {1, 2, 3, 132}) mixes.push_back({c, c, c, c, c, c, c, c});
  mixes.push_back({1, 132, 2, 3, 1, 132, 3, 2});
  mixes.push_back({132, 1, 1, 132, 3, 2, 1, 132});
  mixes.push_back({3, 2, 1, 1, 132, 132, 2, 1});
  return mixes;
}

TEST(ScatterNeverDeadlocks) {
  // An all-gather cannot deadlock: it waits for sends only, and sends wait for nothing.
  const auto mixes = WorkerMixes();
  ForAllShapes([&](const Shape& s) {
    const Ownership o(s);
    std::vector<std::vector<Tile>> orders;
    for (int rank = 0; rank < s.world; ++rank) orders.push_back(TilesOf(kScatter, s, rank));
    for (const auto& workers : mixes) {
      EXPECT(Finishes(s, o, orders, workers)) << s << " workers of rank 0: " << workers[0];
    }
  });
}

// The simulation detects deadlocks: two plausible orders that are wrong.
TEST(WrongOrdersDeadlock) {
  const Shape s{3, 7, 4, 2, 1};  // tile rows 1 and 3 are shared, by ranks 0 and 1 and by 1 and 2
  const Ownership o(s);
  std::vector<std::vector<Tile>> own_first, one_descends;
  for (int rank = 0; rank < s.world; ++rank) {
    own_first.push_back(TilesOf(kGather, s, rank));
    auto tiles = TilesOf(kScatter, s, rank);
    const auto shared = [&](const Tile& t) { return o.owns[rank][t.m] && o.owners[t.m] > 1; };
    const auto begin = std::find_if(tiles.begin(), tiles.end(), shared);
    if (rank == 1) std::reverse(begin, std::find_if_not(begin, tiles.end(), shared));
    one_descends.push_back(tiles);
  }
  const std::array<int, kMaxRanks> one{1, 1, 1, 1, 1, 1, 1, 1}, four{4, 4, 4, 4, 4, 4, 4, 4};
  EXPECT(!Finishes(s, o, own_first, one));
  EXPECT(!Finishes(s, o, one_descends, one));
  EXPECT(Finishes(s, o, one_descends, four));  // enough workers hide it, until shapes grow
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
