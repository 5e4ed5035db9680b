// core/shard_panels.h: where shards lie in a GPU's workspace, and the order in which a rank sends
// and multiplies them. By arithmetic for all small shapes; and for some shapes by threads that do
// what the warps of the kernel do.
#include "core/shard_panels.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "all_to_all_matmul_call.h"
#include "core/numbers.h"
#include "expect_right.h"
#include "gpu/gemm_config.h"
#include "testing.h"

namespace jflux {
namespace {

template <typename F>
void ForAllShapes(F&& f) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (int64_t rows : {1, 3, 16, 32, 33, 64, 65, 127, 128, 129, 200, 256, 300, 511}) {
      for (int64_t k : {8, 64, 72, 136, 320, 328}) f(world, rows, k);
    }
  }
}

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

// Whether the ranges lie within [0, bytes) and do not overlap.
bool HaveRoom(Ranges ranges, int64_t bytes) {
  std::sort(ranges.begin(), ranges.end());
  int64_t end = 0;
  for (const auto& range : ranges) {
    if (range.first < end) return false;
    end = range.second;
  }
  return end <= bytes;
}

// Every element of every peer's shard has its own offset, and so has every signal.
TEST(RoomForEveryShard) {
  ForAllShapes([](int world, int64_t rows, int64_t k) {
    const auto panels = ShardPanels::Make(world, rows, 2 * k);
    Ranges data, signals;
    for (int step = 1; step < world; ++step) {
      std::vector<int> seen(rows * k);
      for (int32_t block = 0; block < panels.shard.row_blocks; ++block) {
        for (int32_t chunk = 0; chunk < panels.shard.Chunks(); ++chunk) {
          const int64_t s = panels.SignalOffset(step, block, chunk);
          signals.push_back({s, s + static_cast<int64_t>(sizeof(Signal))});
          for (int i = 0; i < KPanelLayout::kBoxes; ++i) {
            const auto box = panels.shard.BoxOf(panels.RangeOf(block), chunk, i);
            if (box.rows <= 0) continue;
            EXPECT_EQ(panels.shard.ChunkOf(box.k_panel), chunk);
            const int64_t first = panels.RowOf(step, block, box.k_panel) + box.row;
            data.push_back({first * kBlockBytes, (first + box.rows) * kBlockBytes});
            for (int64_t r = 0; r < box.rows; ++r) {
              for (int64_t c = box.k_panel * int64_t{64};
                   c < Min((box.k_panel + 1) * int64_t{64}, k); ++c) {
                ++seen[(block * int64_t{128} + box.row + r) * k + c];
              }
            }
          }
        }
      }
      EXPECT(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }))
          << world << " " << rows << " " << k;
    }
    const WorkspaceLayout workspace = panels.Workspace();
    EXPECT(HaveRoom(data, workspace.data_bytes)) << world << " " << rows << " " << k;
    EXPECT(HaveRoom(signals, workspace.SignalBytes())) << world << " " << rows << " " << k;
  });
}

// What a rank sends in a step is what the peer waits for in that step: each chunk once, and nothing
// else. Sends wait for nothing, so no wait is for a waiting thread.
TEST(EveryChunkThatATileWaitsForIsSentOnce) {
  ForAllShapes([](int world, int64_t rows, int64_t k) {
    const auto panels = ShardPanels::Make(world, rows, 2 * k);
    const int32_t chunks = panels.shard.Chunks();
    for (bool concat_rows : {false, true}) {
      for (int32_t cluster_m : {1, 2}) {
        for (int32_t group_m : {1, 2, 3, 16}) {
          const auto send = ShardSendOrder::Make(panels, group_m * cluster_m, concat_rows);
          std::vector<int> sent((world - 1) * panels.shard.row_blocks * chunks);
          const auto at = [&](int step, int32_t block, int32_t chunk) -> int& {
            return sent[((step - 1) * panels.shard.row_blocks + block) * chunks + chunk];
          };
          for (int32_t u = 0; u < send.Count(); ++u) {
            const ChunkSend chunk = send.At(u);
            EXPECT(1 <= chunk.step && chunk.step < world && 0 <= chunk.row_block &&
                   chunk.row_block < panels.shard.row_blocks && 0 <= chunk.chunk &&
                   chunk.chunk < chunks);
            ++at(chunk.step, chunk.row_block, chunk.chunk);
          }
          EXPECT(std::all_of(sent.begin(), sent.end(), [](int count) { return count == 1; }))
              << world << " " << rows << " " << k << " group " << group_m;

          const auto tiles_m = static_cast<int32_t>(CeilDiv<int64_t>(rows, 128 * cluster_m));
          const ShardTileOrder order{concat_rows ? world : 1, tiles_m, /*tiles_n=*/3, group_m};
          std::set<std::pair<int32_t, int32_t>> tiles;
          for (int32_t t = 0; t < order.Total(); ++t) {
            const Tile tile = order.At(t);
            const int32_t step = tile.m / tiles_m;
            EXPECT(0 <= tile.m && step < order.steps && 0 <= tile.n && tile.n < 3);
            EXPECT(tiles.insert({tile.m, tile.n}).second);
            // Shards one after the other, the local one first.
            EXPECT_EQ(step, t / (tiles_m * 3));
          }
        }
      }
    }
  });
}

// A rank sends in the order in which its peers' tiles need the chunks.
TEST(WhatIsNeededFirstIsSentFirst) {
  const auto panels = ShardPanels::Make(4, 8 * 128, 2 * 320);  // 8 row blocks of 5 chunks
  const auto terms = ShardSendOrder::Make(panels, 4, /*concat_rows=*/false);
  const auto rows = ShardSendOrder::Make(panels, 4, /*concat_rows=*/true);
  EXPECT_EQ(terms.Count(), 3 * 8 * 5);
  for (int32_t u = 0; u < terms.Count(); ++u) {
    const ChunkSend term = terms.At(u);  // a raster group, peer by peer, k-panel by k-panel
    EXPECT_EQ(term.row_block / 4, u / 60);
    EXPECT_EQ(term.step, 1 + u % 60 / 20);
    EXPECT_EQ(term.chunk, u % 20 / 4);
    const ChunkSend row = rows.At(u);  // a peer, raster group by raster group
    EXPECT_EQ(row.step, 1 + u / 40);
    EXPECT_EQ(row.row_block / 4, u % 40 / 20);
    EXPECT_EQ(row.chunk, u % 20 / 4);
  }
}

// Acts like the kernel's warps, with threads: per rank, `kThreads` threads send and as many compute
// tiles, each taking work from the rank's counters. Data are 16-bit types.
class ScheduledCall : public AllToAllMatmulData {
 public:
  static constexpr int kThreads = 2;

  ScheduledCall(const AllToAllMatmulParams& p, const GemmChoice& choice, uint32_t seed)
      : AllToAllMatmulData(p, seed),
        choice_(choice),
        panels_(ShardPanels::Make(p.rows.world, p.rows.PerRank(), 2 * p.k)),
        send_(ShardSendOrder::Make(panels_, choice.group_m * choice.cluster_m, p.concat_rows)),
        order_{p.concat_rows ? p.rows.world : 1,
               static_cast<int32_t>(CeilDiv<int64_t>(p.rows.PerRank(), 128 * choice.cluster_m)),
               static_cast<int32_t>(CeilDiv<int64_t>(p.n, choice.tile_n)), choice.group_m} {}

  WorkspaceLayout Workspace() const override { return panels_.Workspace(); }

  bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(kAllToAllMatmulId);
    const Half half{Workspace().SignalOffset(epoch), Workspace().DataOffset(epoch),
                    MakeSignal(epoch, p_.Signature())};
    std::atomic<int32_t> next_transfer{0}, next_tile{0};
    std::atomic<bool> failed{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&] {
        for (int32_t u = next_transfer++; u < send_.Count(); u = next_transfer++) {
          SendChunk(view, half, send_.At(u));
        }
      });
      threads.emplace_back([&] {
        for (int32_t t = next_tile++; t < order_.Total(); t = next_tile++) {
          for (int32_t cta = 0; cta < choice_.cluster_m; ++cta) {
            if (!Compute(view, half, order_.At(t), cta, ctx)) failed = true;
          }
        }
      });
    }
    for (auto& t : threads) t.join();
    return !failed;
  }

 private:
  struct Half {
    int64_t signals, data;
    Signal signal;
  };
  Signal* SignalAt(const SymmetricView& view, const Half& half, int rank, int step, int32_t block,
                   int32_t chunk) const {
    return view.At<Signal>(rank, half.signals + panels_.SignalOffset(step, block, chunk));
  }
  static constexpr int32_t kColumns = kBlockBytes / sizeof(BF16);  // of a panel
  BF16* PanelRow(const SymmetricView& view, const Half& half, int rank, int step, int32_t block,
                 int32_t panel, int32_t row) const {
    return view.At<BF16>(rank, half.data + (panels_.RowOf(step, block, panel) + row) * kBlockBytes);
  }

  void SendChunk(const SymmetricView& view, const Half& half, const ChunkSend& send) {
    const auto* x = static_cast<const BF16*>(ArraysOf(view.rank).x);
    const int dst = SendPeer(view.rank, send.step, view.world);
    for (int i = 0; i < KPanelLayout::kBoxes; ++i) {
      const auto box = panels_.shard.BoxOf(panels_.RangeOf(send.row_block), send.chunk, i);
      for (int32_t r = 0; r < box.rows; ++r) {
        const int64_t row = send.row_block * int64_t{KPanelLayout::kPanelRows} + box.row + r;
        const int64_t first = box.k_panel * int64_t{kColumns};
        const int64_t columns = Min<int64_t>(kColumns, p_.k - first);
        BF16* to = PanelRow(view, half, dst, send.step, send.row_block, box.k_panel, box.row + r);
        std::memset(to, 0, kBlockBytes);
        std::memcpy(to, x + p_.OffsetInX(dst, row) + first, columns * sizeof(BF16));
      }
    }
    StoreRelease(SignalAt(view, half, dst, send.step, send.row_block, send.chunk), half.signal);
  }

  bool Compute(const SymmetricView& view, const Half& half, Tile tile, int32_t cta,
               const WaitContext& ctx) {
    const int32_t blocks = order_.tiles_m * choice_.cluster_m;
    const int32_t row_block = tile.m * choice_.cluster_m + cta;
    const int first_step = p_.concat_rows ? row_block / blocks : 0;
    const int32_t block = row_block - first_step * blocks;
    if (block * int64_t{128} >= p_.rows.PerRank()) return true;  // below the shard
    const int32_t rows = panels_.RangeOf(block).end;
    const int64_t n0 = static_cast<int64_t>(tile.n) * choice_.tile_n;
    const int64_t columns = Min<int64_t>(choice_.tile_n, p_.n - n0);
    std::vector<float> sums(rows * columns);
    for (int term = 0; term < (p_.concat_rows ? 1 : view.world); ++term) {
      for (int32_t panel = 0; panel < panels_.shard.k_panels; ++panel) {
        if (!AddPanel(view, half, first_step + term, block, panel, rows, n0, columns, &sums, ctx)) {
          return false;
        }
      }
    }
    auto* y = static_cast<BF16*>(ArraysOf(view.rank).y);
    for (int32_t r = 0; r < rows; ++r) {
      const int64_t row = (p_.concat_rows ? SourceOf(view, first_step) * p_.rows.PerRank() : 0) +
                          block * int64_t{128} + r;
      for (int64_t c = 0; c < columns; ++c) {
        y[p_.RowOfY(row) * p_.n + n0 + c] = BF16::From(sums[r * columns + c]);
      }
    }
    return true;
  }
  static int SourceOf(const SymmetricView& view, int step) {
    return (view.rank + step) % view.world;
  }

  // One k-block: 64 columns of a source's shard, times its rows of w, with zeros beyond the shard.
  bool AddPanel(const SymmetricView& view, const Half& half, int step, int32_t block, int32_t panel,
                int32_t rows, int64_t n0, int64_t columns, std::vector<float>* sums,
                const WaitContext& ctx) {
    const int src = SourceOf(view, step);
    const AllToAllMatmulArrays arrays = ArraysOf(view.rank);
    const auto* x = static_cast<const BF16*>(arrays.x);
    const auto* w = static_cast<const BF16*>(arrays.w);
    if (step != 0) {
      const int32_t chunk = panels_.shard.ChunkOf(panel);
      const Signal* word = SignalAt(view, half, view.rank, step, block, chunk);
      if (!WaitSignal(word, half.signal, src, chunk, ctx)) return false;
    }
    for (int32_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < kColumns; ++i) {
        const int64_t column = panel * int64_t{kColumns} + i;
        const bool inside = column < p_.k;
        const float a = step != 0 ? float(PanelRow(view, half, view.rank, step, block, panel, r)[i])
                        : inside
                            ? float(x[p_.OffsetInX(view.rank, block * int64_t{128} + r) + column])
                            : 0.0f;
        EXPECT(inside || a == 0);
        if (!inside) continue;
        const int64_t of_w = (p_.concat_rows ? 0 : src * p_.k) + column;
        for (int64_t c = 0; c < columns; ++c) {
          const float b =
              p_.transpose_rhs ? w[(n0 + c) * p_.KOfW() + of_w] : w[of_w * p_.n + n0 + c];
          (*sums)[r * columns + c] += a * b;
        }
      }
    }
    return true;
  }

  GemmChoice choice_;
  ShardPanels panels_;
  ShardSendOrder send_;
  ShardTileOrder order_;
};

TEST(TheKernelsScheduleComputesIt) {
  const struct {
    int64_t outer, inner, k, n;
    GemmChoice choice;
  } shapes[] = {
      {1, 128, 64, 3, {4, 1, 1}},  // full row blocks, full k-panels
      {1, 300, 8, 6, {4, 2, 1}},   // the second CTA of the last cluster has no rows
      {1, 20, 72, 5, {4, 1, 2}},   // several k-panels in a chunk
      {1, 50, 136, 2, {4, 2, 1}}, {2, 128, 72, 3, {4, 1, 2}},  // outer rows
  };
  RunOptions options;
  options.max_delay_us = 100;
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (const auto& s : shapes) {
      for (int way = 0; way < 4; ++way) {
        // Sums of 8 * 136 such products stay below 256: 6 standard deviations.
        const auto p = ParamsOf(Rows{world, s.outer, s.inner}, s.k, s.n, DType::kBF16, DType::kBF16,
                                way, way % 2 == 0, false);
        const auto seed = static_cast<uint32_t>(100 * world + 10 * (&s - shapes) + way);
        ExpectRight(world, options, seed, [&](uint32_t call_seed) {
          return std::make_unique<ScheduledCall>(p, s.choice, call_seed);
        });
      }
    }
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
