// ops/all_gather_matmul/k_panel_layout.h: where panels of rows lie, and in which order they are
// sent.
#include "ops/all_gather_matmul/k_panel_layout.h"

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

TEST(PartsAreARanksRows) {
  ForAllShapes([](const Rows& rows, int64_t k) {
    const auto layout = KPanelLayout::Make(rows, k);
    for (int src = 0; src < rows.world; ++src) {
      int64_t next = src * rows.PerRank();
      for (int32_t i = 0; i < layout.BlocksOf(src); ++i) {
        const int32_t block = layout.FirstBlock(src) + i;
        const auto part = layout.PartOf(src, block);
        EXPECT_EQ(block * int64_t{KPanelLayout::kBlockRows} + part.begin, next);
        EXPECT(part.begin < part.end && part.end <= KPanelLayout::kBlockRows);
        next += part.end - part.begin;
      }
      EXPECT_EQ(next, (src + 1) * rows.PerRank());
      EXPECT(layout.BlocksOf(src) <= layout.rank_blocks);
    }
  });
}

// Every element of every rank's rows has a place of its own, and so has every signal.
TEST(RoomForEverything) {
  ForAllShapes([](const Rows& rows, int64_t k) {
    const auto layout = KPanelLayout::Make(rows, k);
    Ranges data, signals;
    for (int src = 0; src < rows.world; ++src) {
      int64_t columns = 0;
      for (int32_t i = 0; i < layout.BlocksOf(src); ++i) {
        const int32_t block = layout.FirstBlock(src) + i;
        const auto part = layout.PartOf(src, block);
        for (int32_t chunk = 0; chunk < layout.Chunks(); ++chunk) {
          const int64_t s = layout.SignalOffset(src, block, chunk);
          signals.push_back({s, s + static_cast<int64_t>(sizeof(Signal))});
          for (int p = 0; p < KPanelLayout::kBoxes; ++p) {
            const auto box = layout.BoxOf(part, chunk, p);
            if (box.rows <= 0) continue;
            EXPECT_EQ(layout.ChunkOf(box.panel), chunk);
            EXPECT(box.rows <= KPanelLayout::kBoxRows);
            const int64_t first = layout.RowOf(block, box.panel) + part.begin + box.row;
            data.push_back(
                {first * KPanelLayout::kRowBytes, (first + box.rows) * KPanelLayout::kRowBytes});
            columns += box.rows;
          }
        }
      }
      EXPECT_EQ(columns, rows.PerRank() * layout.panels);
    }
    const WorkspaceLayout workspace = layout.Workspace();
    EXPECT(Disjoint(data) && Inside(data, workspace.data_bytes)) << rows.world << " " << rows.inner;
    EXPECT(Disjoint(signals) && Inside(signals, workspace.SignalBytes()))
        << rows.world << " " << rows.inner;
  });
}

// A rank sends all of its rows to every peer once; to itself, what is in a block with others'.
TEST(EveryChunkIsSentOnce) {
  ForAllShapes([](const Rows& rows, int64_t k) {
    const auto layout = KPanelLayout::Make(rows, k);
    for (int32_t group : {0, 1, 2, 3}) {
      for (int rank = 0; rank < rows.world; ++rank) {
        const SendOrder order(layout, rank, group);
        const int32_t blocks = layout.BlocksOf(rank), chunks = layout.Chunks();
        std::vector<int> sent(rows.world * blocks * chunks);
        for (int32_t u = 0; u < order.Units(); ++u) {
          const SendUnit unit = order.At(u);
          const int32_t block = unit.block - layout.FirstBlock(rank);
          const bool inside = 0 <= unit.step && unit.step < rows.world && 0 <= block &&
                              block < blocks && 0 <= unit.chunk && unit.chunk < chunks;
          EXPECT(inside) << rows.world << " " << rows.inner << " unit " << u;
          if (inside) ++sent[(unit.step * blocks + block) * chunks + unit.chunk];
        }
        for (int step = 0; step < rows.world; ++step) {
          for (int32_t block = 0; block < blocks; ++block) {
            bool shared = false;  // by definition, not by the arithmetic under test
            for (int64_t i = 0; i < KPanelLayout::kBlockRows; ++i) {
              const int64_t row = (layout.FirstBlock(rank) + block) * int64_t{128} + i;
              shared |= row < rows.Total() && row / rows.PerRank() != rank;
            }
            const int expected = step > 0 || shared ? 1 : 0;
            for (int32_t chunk = 0; chunk < chunks; ++chunk) {
              EXPECT_EQ(sent[(step * blocks + block) * chunks + chunk], expected);
            }
          }
        }
      }
    }
  });
}

TEST(OneRasterGroupSendsPanelByPanel) {
  ForAllShapes([](const Rows& rows, int64_t k) {
    const auto layout = KPanelLayout::Make(rows, k);
    const SendOrder order(layout, rows.world - 1, /*group=*/0);
    for (int32_t u = 1; u < order.Units(); ++u) {
      EXPECT(order.At(u - 1).chunk <= order.At(u).chunk);
    }
  });
}

TEST(RasterGroupsGoToOneRankAfterTheOther) {
  const Rows rows{4, 1, 1024};
  const auto layout = KPanelLayout::Make(rows, 320);
  const SendOrder order(layout, 1, /*group=*/4);
  EXPECT_EQ(order.Units(), 3 * 8 * 5);
  for (int32_t u = 0; u < order.Units(); ++u) {
    const SendUnit unit = order.At(u);
    EXPECT_EQ(unit.step, u / 40 + 1);
    EXPECT_EQ((unit.block - 8) / 4, u % 40 / 20);  // a group of blocks,
    EXPECT_EQ(unit.chunk, u % 20 / 4);             // panel by panel
  }
}

TEST(FewRowsShareAChunk) {
  EXPECT_EQ(KPanelLayout::Make(Rows{4, 1, 16}, 12288).Chunks(), 48);
  EXPECT_EQ(KPanelLayout::Make(Rows{4, 1, 64}, 12288).Chunks(), 96);
  EXPECT_EQ(KPanelLayout::Make(Rows{4, 1, 128}, 12288).Chunks(), 192);
  // The last chunk may have fewer panels than the others.
  const auto layout = KPanelLayout::Make(Rows{2, 1, 5}, 328);
  EXPECT_EQ(layout.Chunks(), 2);
  int boxes = 0;
  for (int i = 0; i < 4; ++i) boxes += layout.BoxOf(layout.PartOf(1, 0), 1, i).rows > 0;
  EXPECT_EQ(boxes, 2);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
