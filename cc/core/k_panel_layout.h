// Workspace layout and send order of the GPU all-gather. Rows travel in k-panels: a k-block of a
// row block, which is what one step of the main loop reads. A tile can start when the first k-panel
// of its rows has arrived, and continues as the others arrive.
//
//   a rank's rows of x                        the workspace of each peer
//
//        k-panel 0   1   2                    row block 0: k-panel 0 [128 rows][128 bytes]
//            +-------+---+---+                             k-panel 1 [128 rows][128 bytes]
//       rows |chunk 0| 1 | 2 |  row block 0                k-panel 2 [128 rows][128 bytes]
//            +-------+---+---+                row block 1: k-panel 0 ...
//            |   3   | 4 | 5 |  row block 1
//            +-------+---+---+                a signal for each chunk and rank
//
// A row block is a tile row: 128 consecutive virtual rows (core/rows.h) of all ranks. The first and
// the last row block of a rank may also contain rows of other ranks. A chunk is one rank's rows of
// a row block in one k-panel, or in two or four if the rank has few rows. It is copied in four
// boxes of up to 32 rows. Bytes past the end of a row are zeros.
//
// Rows of 8 bits may have scales. These follow the data of all k-panels: a float32 for each row of
// a k-panel, in the same order, which is x's scale of that row and k-block. A scale of whole rows
// is that of k-panel 0. They travel with the chunk that has the rows, under its signal.
//
//   writes  the send warps of the rank that owns the rows (gather_sender_sm90.cuh)
//   waits   scheduler warps and copies to `gathered`, for the chunk's signal
//   order   the copy completes and the lanes' stores of scales are synchronised, then the signal is
//           stored with release at system scope
//   reset   never (core/signal.h)
#ifndef JFLUX_CORE_K_PANEL_LAYOUT_H_
#define JFLUX_CORE_K_PANEL_LAYOUT_H_

#include <cstdint>

#include "core/format.h"
#include "core/layout.h"
#include "core/rows.h"
#include "core/signal.h"
#include "core/tile_order.h"

namespace jflux {

struct KPanelLayout {
  static constexpr int32_t kPanelRows = 128;  // kGemmTileM
  static constexpr int32_t kBoxes = 4, kBoxRows = 32;

  int32_t world;
  int64_t rows_per_rank;
  int32_t k_panels;
  int32_t k_panel_rows;     // min(kPanelRows, all rows)
  int32_t row_blocks;       // of all rows
  int32_t rank_row_blocks;  // the most in which one rank has rows
  int32_t chunk_k_panels;   // 1, 2 or 4

  static KPanelLayout Make(const Rows& rows, int64_t row_bytes) {
    KPanelLayout l{};
    l.world = rows.world;
    l.rows_per_rank = rows.PerRank();
    l.k_panels = static_cast<int32_t>(CeilDiv<int64_t>(row_bytes, kBlockBytes));
    l.k_panel_rows = static_cast<int32_t>(Min<int64_t>(rows.Total(), kPanelRows));
    l.row_blocks = static_cast<int32_t>(CeilDiv<int64_t>(rows.Total(), kPanelRows));
    for (int r = 0; r < l.world; ++r) l.rank_row_blocks = Max(l.rank_row_blocks, l.RowBlocksOf(r));
    l.chunk_k_panels = l.rows_per_rank <= kBoxRows ? 4 : l.rows_per_rank <= 2 * kBoxRows ? 2 : 1;
    return l;
  }

  JFLUX_HD int32_t FirstRowBlock(int src) const {
    return FirstTileOf(src, rows_per_rank, kPanelRows);
  }
  JFLUX_HD int32_t RowBlocksOf(int src) const {
    return LastTileOf(src, rows_per_rank, kPanelRows) - FirstRowBlock(src) + 1;
  }
  // The rows of `src` in a row block, relative to the row block: [begin, end).
  struct RowRange {
    int32_t begin, end;
  };
  JFLUX_HD RowRange RangeOf(int src, int32_t row_block) const {
    const int64_t local = src * rows_per_rank - static_cast<int64_t>(row_block) * kPanelRows;
    return RowRange{static_cast<int32_t>(Max<int64_t>(local, 0)),
                    static_cast<int32_t>(Min<int64_t>(local + rows_per_rank, kPanelRows))};
  }

  // Chunks of one rank in one row block.
  JFLUX_HD int32_t Chunks() const { return CeilDiv(k_panels, chunk_k_panels); }
  JFLUX_HD int32_t ChunkOf(int32_t k_panel) const {
    return chunk_k_panels == 1 ? k_panel : k_panel / chunk_k_panels;
  }
  // Box i of a chunk: rows [row, row + rows) of the range; empty if rows <= 0.
  struct Box {
    int32_t k_panel, row, rows;
  };
  JFLUX_HD Box BoxOf(RowRange range, int32_t chunk, int i) const {
    const int32_t boxes_per_k_panel = kBoxes / chunk_k_panels;
    const int32_t k_panel = chunk * chunk_k_panels + i / boxes_per_k_panel,
                  row = i % boxes_per_k_panel * kBoxRows;
    const int32_t rows = Min(kBoxRows, range.end - range.begin - row);
    return Box{k_panel, row, k_panel < k_panels ? rows : 0};
  }

  // Offsets into the signals and into the data of a half.
  JFLUX_HD int64_t SignalOffset(int src, int32_t row_block, int32_t chunk) const {
    const int64_t range =
        static_cast<int64_t>(src) * rank_row_blocks + row_block - FirstRowBlock(src);
    return (range * Chunks() + chunk) * static_cast<int64_t>(sizeof(Signal));
  }
  // The row of the workspace, seen as rows of kBlockBytes, at which a k-panel starts.
  JFLUX_HD int64_t RowOf(int32_t row_block, int32_t k_panel) const {
    return (static_cast<int64_t>(row_block) * k_panels + k_panel) * k_panel_rows;
  }
  // Scales of a k-panel, in whole vectors.
  JFLUX_HD int32_t ScaleRows() const { return RoundUp(k_panel_rows, 4); }
  // Into the data of a half: of the scale of a k-panel's first row.
  JFLUX_HD int64_t ScaleOffset(int32_t row_block, int32_t k_panel) const {
    return RowOf(row_blocks, 0) * kBlockBytes +
           (static_cast<int64_t>(row_block) * k_panels + k_panel) * ScaleRows() *
               static_cast<int64_t>(sizeof(float));
  }
  JFLUX_HD WorkspaceLayout Workspace(bool with_scales = false) const {
    const int64_t signals = static_cast<int64_t>(world) * rank_row_blocks * Chunks();
    return WorkspaceLayout::For(signals * static_cast<int64_t>(sizeof(Signal)),
                                ScaleOffset(with_scales ? row_blocks : 0, 0));
  }
};

// A chunk to send to SendPeer(rank, step, world); step 0 is the rank itself.
struct ChunkSend {
  int32_t step, row_block, chunk;
};

// The order in which a rank sends its chunks, as a pure function of their number.
//
// The peer that needs the rows first comes first. For each peer, raster groups of `group` row
// blocks are sent k-panel by k-panel. With a single raster group (group == 0) every rank needs the
// first k-panel of all rows first, so all peers' first k-panels come first.
//
// Tiles read a row block that also contains rows of other ranks from the workspace. So the rank
// also sends its rows of such a row block to itself, right after the chunks for the first peer.
class SendOrder {
 public:
  JFLUX_HD SendOrder(const KPanelLayout& layout, int rank, int32_t group)
      : chunks_(layout.Chunks()),
        first_(layout.FirstRowBlock(rank)),
        row_blocks_(layout.RowBlocksOf(rank)),
        peers_(layout.world - 1),
        group_(group) {
    const int64_t begin = rank * layout.rows_per_rank, end = begin + layout.rows_per_rank;
    first_is_shared_ = Remainder(begin, KPanelLayout::kPanelRows) != 0;
    const bool last_is_shared =
        rank + 1 < layout.world && Remainder(end, KPanelLayout::kPanelRows) != 0;
    shared_ = row_blocks_ == 1 ? (first_is_shared_ || last_is_shared ? 1 : 0)
                               : (first_is_shared_ ? 1 : 0) + (last_is_shared ? 1 : 0);
  }

  JFLUX_HD int32_t Count() const { return (peers_ * row_blocks_ + shared_) * chunks_; }

  JFLUX_HD ChunkSend At(int32_t i) const {
    const int32_t sent = peers_ * row_blocks_;  // row blocks, over all peers
    if (group_ == 0) {
      const Tile t = GroupedTile(i, sent + shared_, chunks_, sent + shared_);
      return t.m < sent ? ChunkSend{t.m / row_blocks_ + 1, first_ + t.m % row_blocks_, t.n}
                        : ChunkSend{0, SharedRowBlock(t.m - sent), t.n};
    }
    const int32_t each = row_blocks_ * chunks_;
    int32_t step = 1;
    if (i >= each) {
      i -= each;
      if (i < shared_ * chunks_) {
        const Tile t = GroupedTile(i, shared_, chunks_, shared_);
        return ChunkSend{0, SharedRowBlock(t.m), t.n};
      }
      i -= shared_ * chunks_;
      step = 2 + i / each;
      i %= each;
    }
    const Tile t = GroupedTile(i, row_blocks_, chunks_, group_);
    return ChunkSend{step, first_ + t.m, t.n};
  }

 private:
  // The i-th row block that also contains rows of other ranks.
  JFLUX_HD int32_t SharedRowBlock(int32_t i) const {
    return i == 0 && (first_is_shared_ || row_blocks_ == 1) ? first_ : first_ + row_blocks_ - 1;
  }

  int32_t chunks_, first_, row_blocks_, peers_, group_, shared_;
  bool first_is_shared_;
};

}  // namespace jflux

#endif  // JFLUX_CORE_K_PANEL_LAYOUT_H_
