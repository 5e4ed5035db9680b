// core/k_panel_layout.h: the offsets of k-panels, and the order in which chunks are sent.
#include "core/k_panel_layout.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

bool Disjoint(Ranges ranges) {
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) return false;
  }
  return true;
}

bool Inside(const Ranges& ranges, int64_t bytes) {
  for (const auto& [begin, end] : ranges) {
    if (begin < 0 || end > bytes) return false;
  }
  return true;
}

template <typename F>
void ForAllShapes(F&& f) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (int64_t rows : {1, 3, 16, 32, 33, 64, 65, 127, 128, 129, 200, 256, 300, 511}) {
      for (int64_t k : {8, 64, 72, 136, 320, 328}) f(Rows{world, 1, rows}, k);
    }
  }
}

TEST(RangesAreARanksRows) {
  ForAllShapes([](const Rows& rows, int64_t k) {
    const auto layout = KPanelLayout::Make(rows, 2 * k);
    for (int src = 0; src < rows.world; ++src) {
      int64_t next = src * rows.PerRank();
      for (int32_t i = 0; i < layout.RowBlocksOf(src); ++i) {
        const int32_t row_block = layout.FirstRowBlock(src) + i;
        const auto range = layout.RangeOf(src, row_block);
        EXPECT_EQ(row_block * int64_t{KPanelLayout::kPanelRows} + range.begin, next);
        EXPECT(range.begin < range.end && range.end <= KPanelLayout::kPanelRows);
        next += range.end - range.begin;
      }
      EXPECT_EQ(next, (src + 1) * rows.PerRank());
      EXPECT(layout.RowBlocksOf(src) <= layout.rank_row_blocks);
    }
  });
}

// Every element of every rank's rows has its own offset, and so has every signal.
TEST(RoomForEverything) {
  ForAllShapes([](const Rows& rows, int64_t k) {
    const auto layout = KPanelLayout::Make(rows, 2 * k);
    Ranges data, signals;
    for (int src = 0; src < rows.world; ++src) {
      int64_t columns = 0;
      for (int32_t i = 0; i < layout.RowBlocksOf(src); ++i) {
        const int32_t row_block = layout.FirstRowBlock(src) + i;
        const auto range = layout.RangeOf(src, row_block);
        for (int32_t chunk = 0; chunk < layout.Chunks(); ++chunk) {
          const int64_t s = layout.SignalOffset(src, row_block, chunk);
          signals.push_back({s, s + static_cast<int64_t>(sizeof(Signal))});
          for (int p = 0; p < KPanelLayout::kBoxes; ++p) {
            const auto box = layout.BoxOf(range, chunk, p);
            if (box.rows <= 0) continue;
            EXPECT_EQ(layout.ChunkOf(box.k_panel), chunk);
            EXPECT(box.rows <= KPanelLayout::kBoxRows);
            const int64_t first = layout.RowOf(row_block, box.k_panel) + range.begin + box.row;
            data.push_back({first * kBlockBytes, (first + box.rows) * kBlockBytes});
            const int64_t scales = layout.ScaleOffset(row_block, box.k_panel) +
                                   (range.begin + box.row) * int64_t{sizeof(float)};
            data.push_back({scales, scales + box.rows * int64_t{sizeof(float)}});
            columns += box.rows;
          }
        }
      }
      EXPECT_EQ(columns, rows.PerRank() * layout.k_panels);
    }
    const WorkspaceLayout workspace = layout.Workspace(/*with_scales=*/true);
    EXPECT(layout.Workspace().data_bytes <= workspace.data_bytes);
    EXPECT(Disjoint(data) && Inside(data, workspace.data_bytes)) << rows.world << " " << rows.inner;
    EXPECT(Disjoint(signals) && Inside(signals, workspace.SignalBytes()))
        << rows.world << " " << rows.inner;
  });
}

// A rank sends all its rows to every peer once; to itself, its rows of row blocks that it shares
// with others.
TEST(EveryChunkIsSentOnce) {
  ForAllShapes([](const Rows& rows, int64_t k) {
    const auto layout = KPanelLayout::Make(rows, 2 * k);
    for (int32_t group : {0, 1, 2, 3}) {
      for (int rank = 0; rank < rows.world; ++rank) {
        const SendOrder order(layout, rank, group);
        const int32_t blocks = layout.RowBlocksOf(rank), chunks = layout.Chunks();
        std::vector<int> sent(rows.world * blocks * chunks);
        for (int32_t u = 0; u < order.Count(); ++u) {
          const ChunkSend send = order.At(u);
          const int32_t row_block = send.row_block - layout.FirstRowBlock(rank);
          const bool inside = 0 <= send.step && send.step < rows.world && 0 <= row_block &&
                              row_block < blocks && 0 <= send.chunk && send.chunk < chunks;
          EXPECT(inside) << rows.world << " " << rows.inner << " chunk " << u;
          if (inside) ++sent[(send.step * blocks + row_block) * chunks + send.chunk];
        }
        for (int step = 0; step < rows.world; ++step) {
          for (int32_t row_block = 0; row_block < blocks; ++row_block) {
            bool shared = false;  // by definition, not by the arithmetic under test
            for (int64_t i = 0; i < KPanelLayout::kPanelRows; ++i) {
              const int64_t row = (layout.FirstRowBlock(rank) + row_block) * int64_t{128} + i;
              shared |= row < rows.Total() && row / rows.PerRank() != rank;
            }
            const int expected = step > 0 || shared ? 1 : 0;
            for (int32_t chunk = 0; chunk < chunks; ++chunk) {
              EXPECT_EQ(sent[(step * blocks + row_block) * chunks + chunk], expected);
            }
          }
        }
      }
    }
  });
}

TEST(OneRasterGroupSendsPanelByPanel) {
  ForAllShapes([](const Rows& rows, int64_t k) {
    const auto layout = KPanelLayout::Make(rows, 2 * k);
    const SendOrder order(layout, rows.world - 1, /*group=*/0);
    for (int32_t u = 1; u < order.Count(); ++u) {
      EXPECT(order.At(u - 1).chunk <= order.At(u).chunk);
    }
  });
}

TEST(RasterGroupsGoToOneRankAfterTheOther) {
  const Rows rows{4, 1, 1024};
  const auto layout = KPanelLayout::Make(rows, 2 * 320);
  const SendOrder order(layout, 1, /*group=*/4);
  EXPECT_EQ(order.Count(), 3 * 8 * 5);
  for (int32_t u = 0; u < order.Count(); ++u) {
    const ChunkSend send = order.At(u);
    EXPECT_EQ(send.step, u / 40 + 1);
    EXPECT_EQ((send.row_block - 8) / 4, u % 40 / 20);  // raster groups of row blocks,
    EXPECT_EQ(send.chunk, u % 20 / 4);                 // k-panel by k-panel
  }
}

TEST(FewRowsShareAChunk) {
  EXPECT_EQ(KPanelLayout::Make(Rows{4, 1, 16}, 2 * 12288).Chunks(), 48);
  EXPECT_EQ(KPanelLayout::Make(Rows{4, 1, 64}, 2 * 12288).Chunks(), 96);
  EXPECT_EQ(KPanelLayout::Make(Rows{4, 1, 128}, 2 * 12288).Chunks(), 192);
  // The last chunk may have fewer k-panels than the others.
  const auto layout = KPanelLayout::Make(Rows{2, 1, 5}, 2 * 328);
  EXPECT_EQ(layout.Chunks(), 2);
  int boxes = 0;
  for (int i = 0; i < 4; ++i) boxes += layout.BoxOf(layout.RangeOf(1, 0), 1, i).rows > 0;
  EXPECT_EQ(boxes, 2);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
