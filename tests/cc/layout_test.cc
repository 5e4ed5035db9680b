// Offsets of core/layout.h, core/rows.h and the ops' layouts: nothing overlaps, and everything is
// inside the workspace.
#include "core/layout.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/format.h"
#include "core/rows.h"
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "testing.h"

namespace jflux {
namespace {

using Ranges = std::vector<std::pair<int64_t, int64_t>>;  // [begin, end)

bool Disjoint(Ranges ranges) {
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) return false;
  }
  return true;
}

bool Inside(const Ranges& ranges, int64_t size) {
  return std::all_of(ranges.begin(), ranges.end(), [&](const auto& r) {
    return 0 <= r.first && r.first < r.second && r.second <= size;
  });
}

bool IsPowerOfTwo(int64_t v) { return v > 0 && (v & (v - 1)) == 0; }

bool Holds(WorkspaceLayout c, int64_t signal_bytes, int64_t data_bytes) {
  return c.SignalBytes() >= signal_bytes && c.data_bytes >= data_bytes;
}

TEST(WorkspaceIsTheSmallestThatHolds) {
  const std::vector<int64_t> sizes = {0,       1,       8,       4095,    4096,     4097,
                                      65535,   65536,   65537,   1 << 20, 3 << 20,  (1 << 21) + 1,
                                      1 << 24, 5 << 24, 1 << 28, 1 << 30, 3ll << 31};
  for (int64_t data : sizes) {
    for (int64_t signal : {0, 1, 8, 4096, 4097, 8192, 8200, 1 << 16, 1 << 20}) {
      const auto c = WorkspaceLayout::For(signal, data);
      EXPECT(IsPowerOfTwo(c.data_bytes)) << c.data_bytes;
      EXPECT(Holds(c, signal, data)) << signal << " " << data;
      const bool smaller_would_do = c.data_bytes > WorkspaceLayout::kMinDataBytes &&
                                    Holds(WorkspaceLayout{c.data_bytes / 2}, signal, data);
      EXPECT(!smaller_would_do) << signal << " " << data;
    }
  }
}

TEST(WorkspaceRegionsFollowEachOther) {
  for (int64_t data = WorkspaceLayout::kMinDataBytes; data <= 1ll << 33; data *= 2) {
    const WorkspaceLayout c{data};
    const Ranges regions = {{0, sizeof(WorkspaceHeader)},
                            {c.SignalOffset(0), c.SignalOffset(0) + c.SignalBytes()},
                            {c.SignalOffset(1), c.SignalOffset(1) + c.SignalBytes()},
                            {c.DataOffset(0), c.DataOffset(0) + data},
                            {c.DataOffset(1), c.DataOffset(1) + data}};
    EXPECT(std::is_sorted(regions.begin(), regions.end()));
    EXPECT(Disjoint(regions)) << data;
    EXPECT_EQ(regions.back().second, c.TotalBytes());
    for (const auto& [begin, end] : regions) EXPECT_EQ(begin % kHeapAlign, 0);
    EXPECT_EQ(c.TotalBytes() % kHeapAlign, 0);
    EXPECT_EQ(WorkspaceLayout::OfTotal(c.TotalBytes()).data_bytes, data);
    for (uint64_t epoch : {2u, 7u, 0xffffffffu}) {
      EXPECT_EQ(c.SignalOffset(epoch), c.SignalOffset(epoch & 1));
      EXPECT_EQ(c.DataOffset(epoch), c.DataOffset(epoch & 1));
    }
  }
}

TEST(EpochAndIdShareAWord) {
  for (uint64_t epoch : {uint64_t{1}, uint64_t{0xffffffff}, kEpochMask}) {
    const uint64_t word = EpochWord(epoch);
    EXPECT_EQ(IdOfWord(word), 0u);
    for (uint64_t id : {uint64_t{1}, uint64_t{131}, static_cast<uint64_t>(kMostIds - 1)}) {
      EXPECT_EQ(EpochOfWord(word + id), epoch);
      EXPECT_EQ(IdOfWord(word + id), id);
    }
  }
}

// `others` of another launch are never taken for this one's, however many of its own there are.
TEST(AnotherKernelInAWorkspaceIsSeen) {
  for (uint32_t launch : {1u, 2u, 3u, 1000u, 0x80000000u, 0xffffffffu}) {
    for (uint64_t own : {0, 1, 132, 264, 4608}) {
      const uint64_t inside = own * Presence(launch);
      EXPECT(IsAlone(inside, launch)) << own << " of " << launch;
      for (uint32_t other : {1u, 2u, 3u, 1001u, 0x80000001u, 0xffffffffu, 0xfffffffeu}) {
        for (uint64_t others : {1, 2, 66, 264, 4608}) {
          if (other == launch) continue;
          EXPECT(!IsAlone(inside + others * Presence(other), launch))
              << own << " of " << launch << ", " << others << " of " << other;
        }
      }
    }
  }
}

TEST(ViewAddsOffsets) {
  char memory[2][64];
  SymmetricView view{};
  for (int r = 0; r < 2; ++r) view.base[r] = memory[r];
  EXPECT(view.At(1, 24) == &memory[1][24]);
  EXPECT(static_cast<void*>(view.At<Signal>(0, 8)) == &memory[0][8]);
}

TEST(AllGatherLayoutHasRoomForEverything) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (int64_t inner : {1, 3, 16, 33}) {
      for (int64_t k : {1, 7, 64, 200}) {
        for (DType dtype : {DType::kBF16, DType::kF32, DType::kF64}) {
          for (int64_t chunk_bytes : {64, 72, 100, 4096, 1 << 20}) {
            AllGatherMatmulParams p{};
            p.rows = Rows{world, 2, inner};
            p.k = k;
            p.dtype = dtype;
            const auto layout = AllGatherLayout::Make(p, chunk_bytes);
            const WorkspaceLayout workspace = layout.Workspace();
            Ranges signals, data;
            for (int src = 0; src < world; ++src) {
              int64_t sent = 0;
              for (int64_t c = 0; c < layout.chunks; ++c) {
                const int64_t s = layout.SignalOffset(src, c), d = layout.ChunkOffset(src, c);
                signals.push_back({s, s + sizeof(Signal)});
                data.push_back({d, d + layout.ChunkSize(c)});
                sent += layout.ChunkSize(c);
                EXPECT_EQ(s % static_cast<int64_t>(sizeof(Signal)), 0);
              }
              EXPECT_EQ(sent, 2 * inner * k * SizeOf(dtype));
            }
            EXPECT(Disjoint(signals) && Disjoint(data)) << world << " " << inner << " " << k;
            EXPECT(Inside(signals, workspace.SignalBytes())) << world << " " << inner << " " << k;
            EXPECT(Inside(data, workspace.data_bytes)) << world << " " << inner << " " << k;
            // The workspace is the gathered array in virtual-row order.
            EXPECT_EQ(data.back().second, world * 2 * inner * k * SizeOf(dtype));
          }
        }
      }
    }
  }
}

TEST(ReduceScatterLayoutHasRoomForEverything) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (int64_t inner : {1, 2, 5, 16, 33, 64, 100}) {
      for (int32_t tile_m : {4, 16, 32, 128}) {
        for (int64_t n : {1, 8, 9, 40}) {
          for (int signals_per_slot : {1, 2, 3}) {
            MatmulReduceScatterParams p{};
            p.rows = Rows{world, 1, inner};
            p.n = n;
            p.out_dtype = n % 2 ? DType::kBF16 : DType::kF32;
            const auto layout =
                ReduceScatterLayout::Make(p, tile_m, /*tile_n=*/8, signals_per_slot);
            const WorkspaceLayout workspace = layout.Workspace();
            EXPECT(layout.slot_bytes >= tile_m * 8 * SizeOf(p.out_dtype));
            Ranges signals, data;
            for (int src = 0; src < world; ++src) {
              for (int32_t slot = 0; slot < layout.slots; ++slot) {
                data.push_back({layout.SlotOffset(src, slot),
                                layout.SlotOffset(src, slot) + layout.slot_bytes});
                for (int signal = 0; signal < signals_per_slot; ++signal) {
                  const int64_t s = layout.SignalOffset(src, slot, signal);
                  signals.push_back({s, s + sizeof(Signal)});
                }
              }
            }
            EXPECT(Disjoint(signals) && Disjoint(data)) << world << " " << inner << " " << tile_m;
            EXPECT(Inside(signals, workspace.SignalBytes()))
                << world << " " << inner << " " << tile_m;
            EXPECT(Inside(data, workspace.data_bytes)) << world << " " << inner << " " << tile_m;
            // Each tile with rows of `dst` has a slot of its own there.
            const auto tiles_m = static_cast<int32_t>(CeilDiv<int64_t>(world * inner, tile_m));
            for (int dst = 0; dst < world; ++dst) {
              std::vector<char> taken(layout.slots);
              for (int32_t m = 0; m < tiles_m; ++m) {
                const int64_t begin = static_cast<int64_t>(m) * tile_m, end = begin + tile_m;
                if (end <= dst * inner || begin >= (dst + 1) * inner) continue;
                for (int32_t col = 0; col < layout.tiles_n; ++col) {
                  const int32_t slot = layout.SlotOf(dst, Tile{m, col});
                  const bool valid = slot >= 0 && slot < layout.slots && !taken[slot];
                  EXPECT(valid) << world << " " << inner << " " << tile_m << " slot " << slot;
                  if (valid) taken[slot] = 1;
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(RowsActualIsWhereTheRowLies) {
  for (int world = 1; world <= kMaxRanks; ++world) {
    for (int64_t outer : {1, 2, 3, 5}) {
      for (int64_t inner : {1, 2, 7, 16}) {
        const Rows rows{world, outer, inner};
        EXPECT_EQ(rows.PerRank(), outer * inner);
        EXPECT_EQ(rows.Total(), world * outer * inner);
        std::vector<char> seen(rows.Total());
        int64_t v = 0;  // the gathered array [outer, world, inner], read rank by rank
        for (int rank = 0; rank < world; ++rank) {
          for (int64_t o = 0; o < outer; ++o) {
            for (int64_t i = 0; i < inner; ++i, ++v) {
              const int64_t actual = o * world * inner + rank * inner + i;
              EXPECT_EQ(rows.OwnerOf(v), rank);
              EXPECT_EQ(rows.Actual(v), actual);
              seen[actual] = 1;
            }
          }
        }
        EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), rows.Total());
      }
    }
  }
}

TEST(DTypeSizes) {
  EXPECT_EQ(SizeOf(DType::kF16), 2);
  EXPECT_EQ(SizeOf(DType::kBF16), 2);
  EXPECT_EQ(SizeOf(DType::kF32), 4);
  EXPECT_EQ(SizeOf(DType::kF64), 8);
  EXPECT_EQ(SizeOf(DType::kF8E4M3FN), 1);
  EXPECT_EQ(BlockElements(DType::kS8), 128);
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
