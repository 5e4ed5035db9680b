// The tiles of a product whose parts go to different ranks whole: nothing is summed on the way.
//
// Each rank owns one piece of the product, and its tiles are counted within the piece, so that no
// tile has two owners: the last row and column of tiles of a piece may be cut short. With 4 ranks
// and pieces of 2 tiles, in the order in which rank 1 computes them:
//
//       owner  0 0 | 1 1 | 2 2 | 3 3
//       order  4 5 | 6 7 | 0 1 | 2 3
//
// What others wait for comes first, the next rank's piece at the head: at any moment the ranks send
// to different peers, and what the peers send has arrived by the time that the own piece, which
// comes last, is done. A receiver takes the pieces in the order in which they arrive, which is that
// of SendPeer (core/tile_order.h).
//
// Deadlock: no tile waits for a peer.
#ifndef JFLUX_CORE_PIECE_TILES_H_
#define JFLUX_CORE_PIECE_TILES_H_

#include <cstdint>

#include "core/platform.h"
#include "core/tile_order.h"

namespace jflux {

struct PieceGrid {
  int32_t world;
  int32_t tiles_m, tiles_n;  // of one piece
  int32_t group_m;           // tile rows that share a sweep over a piece's columns

  JFLUX_HD constexpr int32_t PerPiece() const { return tiles_m * tiles_n; }
  JFLUX_HD constexpr int32_t Total() const { return world * PerPiece(); }
};

struct PieceTile {
  int32_t owner;
  int32_t m, n;  // within the owner's piece
};

// The i-th tile of a piece.
JFLUX_HD constexpr Tile TileInPiece(int32_t i, const PieceGrid& grid) {
  return GroupedTile(i, grid.tiles_m, grid.tiles_n, grid.group_m);
}

// The t-th tile of a rank.
JFLUX_HD constexpr PieceTile PieceTileAt(int32_t t, const PieceGrid& grid, int rank) {
  const int32_t step = t / grid.PerPiece();
  const Tile tile = TileInPiece(t - step * grid.PerPiece(), grid);
  return PieceTile{(rank + 1 + step) % grid.world, tile.m, tile.n};
}

}  // namespace jflux

#endif  // JFLUX_CORE_PIECE_TILES_H_
