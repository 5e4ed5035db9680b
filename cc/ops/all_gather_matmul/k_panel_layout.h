// How the rows of an all-gather travel between GPUs: in panels of 64 columns of k, which is what
// one step of the main loop reads. A tile can begin with the first panel of its rows, and goes on
// as fast as the others come.
//
//   a rank's rows of x                     the workspace of each peer
//
//          panel 0   1   2                 block 0: panel 0 [128 rows][64]
//         +-------+---+---+                         panel 1 [128 rows][64]
//    rows |chunk 0| 1 | 2 |  block 0                panel 2 [128 rows][64]
//         +-------+---+---+                block 1: panel 0 ...
//         |   3   | 4 | 5 |  block 1
//         +-------+---+---+                a signal for each chunk and rank
//
// Blocks are the tiles' rows: 128 of all ranks' virtual rows (core/rows.h), so the first and the
// last block that a rank has rows in may hold others' rows too. A chunk is what one rank has of a
// block, in one panel, or in two or four if the rank has few rows. It moves in four boxes of up to
// 32 rows. Columns past k are zeros.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_K_PANEL_LAYOUT_H_
#define JFLUX_OPS_ALL_GATHER_MATMUL_K_PANEL_LAYOUT_H_

#include <cstdint>

#include "core/layout.h"
#include "core/rows.h"
#include "core/signal.h"
#include "core/tile_order.h"

namespace jflux {

struct KPanelLayout {
  static constexpr int32_t kBlockRows = 128;  // kGemmTileM
  static constexpr int32_t kColumns = 64;     // kGemmTileK
  static constexpr int32_t kRowBytes = 2 * kColumns;
  static constexpr int32_t kBoxes = 4, kBoxRows = 32;

  int32_t world;
  int64_t rows_per_rank;
  int32_t panels;
  int32_t block_rows;    // kBlockRows, or all rows, if they are fewer
  int32_t blocks;        // of all rows
  int32_t rank_blocks;   // the most that one rank has rows in
  int32_t chunk_panels;  // 1, 2 or 4

  static KPanelLayout Make(const Rows& rows, int64_t k) {
    KPanelLayout l{};
    l.world = rows.world;
    l.rows_per_rank = rows.PerRank();
    l.panels = static_cast<int32_t>(CeilDiv<int64_t>(k, kColumns));
    l.block_rows = static_cast<int32_t>(Min<int64_t>(rows.Total(), kBlockRows));
    l.blocks = static_cast<int32_t>(CeilDiv<int64_t>(rows.Total(), kBlockRows));
    for (int r = 0; r < l.world; ++r) l.rank_blocks = Max(l.rank_blocks, l.BlocksOf(r));
    l.chunk_panels = l.rows_per_rank <= kBoxRows ? 4 : l.rows_per_rank <= 2 * kBoxRows ? 2 : 1;
    return l;
  }

  JFLUX_HD int32_t FirstBlock(int src) const { return FirstTileOf(src, rows_per_rank, kBlockRows); }
  JFLUX_HD int32_t BlocksOf(int src) const {
    return LastTileOf(src, rows_per_rank, kBlockRows) - FirstBlock(src) + 1;
  }
  // What `src` has of a block, as rows of the block: [begin, end).
  struct Part {
    int32_t begin, end;
  };
  JFLUX_HD Part PartOf(int src, int32_t block) const {
    const int64_t own = src * rows_per_rank - static_cast<int64_t>(block) * kBlockRows;
    return Part{static_cast<int32_t>(Max<int64_t>(own, 0)),
                static_cast<int32_t>(Min<int64_t>(own + rows_per_rank, kBlockRows))};
  }

  // Of a rank's part of a block.
  JFLUX_HD int32_t Chunks() const { return CeilDiv(panels, chunk_panels); }
  JFLUX_HD int32_t ChunkOf(int32_t panel) const {
    return chunk_panels == 1 ? panel : panel / chunk_panels;
  }
  // Box i of a chunk: rows [row, row + rows) of the part; none, if rows <= 0.
  struct Box {
    int32_t panel, row, rows;
  };
  JFLUX_HD Box BoxOf(Part part, int32_t chunk, int i) const {
    const int32_t in_panel = kBoxes / chunk_panels;  // boxes
    const int32_t panel = chunk * chunk_panels + i / in_panel, row = i % in_panel * kBoxRows;
    const int32_t rows = Min(kBoxRows, part.end - part.begin - row);
    return Box{panel, row, panel < panels ? rows : 0};
  }

  // Offsets into a half's signals and a half's data.
  JFLUX_HD int64_t SignalOffset(int src, int32_t block, int32_t chunk) const {
    const int64_t part = static_cast<int64_t>(src) * rank_blocks + block - FirstBlock(src);
    return (part * Chunks() + chunk) * static_cast<int64_t>(sizeof(Signal));
  }
  // The workspace as an array of rows of 64 columns.
  JFLUX_HD int64_t RowOf(int32_t block, int32_t panel) const {
    return (static_cast<int64_t>(block) * panels + panel) * block_rows;
  }
  JFLUX_HD WorkspaceLayout Workspace() const {
    const int64_t signals = static_cast<int64_t>(world) * rank_blocks * Chunks();
    return WorkspaceLayout::For(signals * static_cast<int64_t>(sizeof(Signal)),
                                RowOf(blocks, 0) * kRowBytes);
  }
};

// A chunk on its way: to SendPeer(rank, step, world), which for step 0 is the rank itself.
struct SendUnit {
  int32_t step, block, chunk;
};

// In which order a rank sends its chunks, as a pure function of their number: to the rank that
// needs them first, then to the next one, `group` blocks side by side, panel by panel. If all rows
// are one raster group (group == 0), every rank needs the first panel of all of them first.
//
// Blocks that hold others' rows too are read from the workspace. The rank sends its part of them to
// itself, right after what goes first.
class SendOrder {
 public:
  JFLUX_HD SendOrder(const KPanelLayout& layout, int rank, int32_t group)
      : chunks_(layout.Chunks()),
        first_(layout.FirstBlock(rank)),
        blocks_(layout.BlocksOf(rank)),
        peers_(layout.world - 1),
        group_(group) {
    const int64_t begin = rank * layout.rows_per_rank, end = begin + layout.rows_per_rank;
    shares_first_ = Remainder(begin, KPanelLayout::kBlockRows) != 0;
    const bool shares_last =
        rank + 1 < layout.world && Remainder(end, KPanelLayout::kBlockRows) != 0;
    own_ = blocks_ == 1 ? (shares_first_ || shares_last ? 1 : 0)
                        : (shares_first_ ? 1 : 0) + (shares_last ? 1 : 0);
  }

  JFLUX_HD int32_t Units() const { return (peers_ * blocks_ + own_) * chunks_; }

  JFLUX_HD SendUnit At(int32_t u) const {
    const int32_t sent = peers_ * blocks_;  // parts
    if (group_ == 0) {
      const Tile t = GroupedTile(u, sent + own_, chunks_, sent + own_);
      return t.m < sent ? SendUnit{t.m / blocks_ + 1, first_ + t.m % blocks_, t.n}
                        : SendUnit{0, OwnBlock(t.m - sent), t.n};
    }
    const int32_t each = blocks_ * chunks_;
    int32_t step = 1;
    if (u >= each) {
      u -= each;
      if (u < own_ * chunks_) {
        const Tile t = GroupedTile(u, own_, chunks_, own_);
        return SendUnit{0, OwnBlock(t.m), t.n};
      }
      u -= own_ * chunks_;
      step = 2 + u / each;
      u %= each;
    }
    const Tile t = GroupedTile(u, blocks_, chunks_, group_);
    return SendUnit{step, first_ + t.m, t.n};
  }

 private:
  // The i-th block that others have rows in too.
  JFLUX_HD int32_t OwnBlock(int32_t i) const {
    return i == 0 && (shares_first_ || blocks_ == 1) ? first_ : first_ + blocks_ - 1;
  }

  int32_t chunks_, first_, blocks_, peers_, group_, own_;
  bool shares_first_;
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_K_PANEL_LAYOUT_H_
