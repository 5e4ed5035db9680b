// Workspace layout and the orders of sending and multiplying of the GPU all_to_all_matmul.
//
// A shard travels like the rows of an all-gather (core/k_panel_layout.h): in k-panels of 64
// columns, row block by row block, with a signal for each chunk. Each peer's shard has its own
// region in a rank's workspace, which starts with a row block and a k-panel, whatever the shard's
// rows and columns. In step s a rank sends to the rank s before it and receives from the rank s
// after it. Step 0 is the local shard, which is read from x.
//
//   columns concatenated  a tile sums over all ranks' k-panels, the local ones first; w's rows are
//                         [k of rank 0 | k of rank 1 | ...], a term of the product for each rank
//   rows concatenated     a tile has rows of one shard; local tiles come first
//
// The last k-panel of a shard is padded with zeros, and so are the rows of w that the term reads.
#ifndef JFLUX_CORE_SHARD_PANELS_H_
#define JFLUX_CORE_SHARD_PANELS_H_

#include <cstdint>

#include "core/k_panel_layout.h"
#include "core/layout.h"
#include "core/rows.h"
#include "core/signal.h"
#include "core/tile_order.h"

namespace jflux {

struct ShardPanels {
  int32_t peers;
  KPanelLayout shard;  // layout of one shard

  // The panels of shards of so many rows.
  static ShardPanels Make(int world, int64_t rows, int64_t row_bytes) {
    return ShardPanels{world - 1, KPanelLayout::Make(Rows{1, 1, rows}, row_bytes)};
  }

  JFLUX_HD KPanelLayout::RowRange RangeOf(int32_t row_block) const {
    return shard.RangeOf(0, row_block);
  }
  // The workspace as rows of kBlockBytes: the rows of one shard, and the row at which a k-panel
  // starts.
  JFLUX_HD int64_t ShardRows() const { return shard.RowOf(shard.row_blocks, 0); }
  JFLUX_HD int64_t RowOf(int step, int32_t row_block, int32_t k_panel) const {
    return (step - 1) * ShardRows() + shard.RowOf(row_block, k_panel);
  }
  // Offset into the signals of a half.
  JFLUX_HD int64_t SignalOffset(int step, int32_t row_block, int32_t chunk) const {
    return (step - 1) * shard.SignalOffset(0, shard.row_blocks, 0) +
           shard.SignalOffset(0, row_block, chunk);
  }
  JFLUX_HD WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(SignalOffset(peers + 1, 0, 0), peers * ShardRows() * kBlockBytes);
  }
};

// The order in which a rank multiplies its tiles: shard by shard, in the order in which they are
// sent, if rows are concatenated. Else there is a single shard of rows.
struct ShardTileOrder {
  int32_t steps;             // shards of rows
  int32_t tiles_m, tiles_n;  // of one shard
  int32_t group_m;           // tile rows of a raster group

  JFLUX_HD constexpr int32_t Total() const { return steps * tiles_m * tiles_n; }
  // The tile rows of step s start at s * tiles_m.
  JFLUX_HD constexpr Tile At(int32_t t) const {
    const int32_t step = t / (tiles_m * tiles_n);
    const Tile tile = GroupedTile(t - step * tiles_m * tiles_n, tiles_m, tiles_n, group_m);
    return Tile{step * tiles_m + tile.m, tile.n};
  }
};

// The order in which a rank sends its chunks: as the peers need them, in raster groups of `group`
// row blocks, k-panel by k-panel. If columns are concatenated, a peer's first raster group needs
// all ranks' shards before its second one needs any.
struct ShardSendOrder {
  int32_t peers, row_blocks, chunks;  // chunks: of a row block
  int32_t group;
  bool concat_rows;

  static ShardSendOrder Make(const ShardPanels& panels, int32_t group, bool concat_rows) {
    return ShardSendOrder{panels.peers, panels.shard.row_blocks, panels.shard.Chunks(), group,
                          concat_rows};
  }

  JFLUX_HD int32_t Count() const { return peers * row_blocks * chunks; }
  JFLUX_HD ChunkSend At(int32_t i) const {
    if (concat_rows) {
      const int32_t step = i / (row_blocks * chunks);
      const Tile t = GroupedTile(i - step * row_blocks * chunks, row_blocks, chunks, group);
      return ChunkSend{1 + step, t.m, t.n};
    }
    const Tile t = GroupedTile(i, row_blocks, peers * chunks, group);
    const int32_t step = t.n / chunks;
    return ChunkSend{1 + step, t.m, t.n - step * chunks};
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_SHARD_PANELS_H_
