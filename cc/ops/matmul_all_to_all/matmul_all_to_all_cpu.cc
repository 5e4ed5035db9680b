// The CPU back end of matmul_all_to_all: one rank's part of the protocol, in host memory.
#include <cstring>
#include <vector>

#include "core/shard_tiles.h"
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "runtime/cpu_matmul.h"
#include "runtime/rank_call.h"

namespace jflux {
namespace {

struct Body : RankCall<MatmulAllToAllParams, MatmulAllToAllArrays, AllToAllLayout> {
  const ShardTiling& tiling;

  // A tile's rows and columns in its shard.
  struct Span {
    int64_t row0, rows, col0, cols;
  };
  Span SpanOf(int32_t m, int32_t n) const {
    Span s;
    s.row0 = static_cast<int64_t>(m) * tiling.tile_m;
    s.col0 = static_cast<int64_t>(n) * tiling.tile_n;
    s.rows = Min<int64_t>(tiling.tile_m, p.rows.PerRank() - s.row0);
    s.cols = Min<int64_t>(tiling.tile_n, p.n - s.col0);
    return s;
  }

  char* SlotAt(int dst, int64_t slot) const { return view.At(dst, data + layout.SlotOffset(slot)); }
  Signal* SignalAt(int dst, int64_t slot) const {
    return view.At<Signal>(dst, signals + layout.SignalOffset(slot));
  }

  // The rows of x for a tile. Copied to `gathered` if they are not contiguous.
  const char* RowsOf(int dst, const Span& s, std::vector<char>* gathered) const {
    const int64_t row_bytes = p.k * SizeOf(p.dtype);
    const auto* x = static_cast<const char*>(arrays.x);
    if (!p.split_rows || p.rows.outer == 1) return x + p.RowOfX(dst, s.row0) * row_bytes;
    gathered->resize(s.rows * row_bytes);
    for (int64_t i = 0; i < s.rows; ++i) {
      std::memcpy(gathered->data() + i * row_bytes, x + p.RowOfX(dst, s.row0 + i) * row_bytes,
                  row_bytes);
    }
    return gathered->data();
  }

  // Writes a tile from `src`, whose rows are contiguous and in p.out_dtype, to its place in y.
  void WriteToY(int src, const Span& s, const char* tile) const {
    const int64_t size = SizeOf(p.out_dtype);
    for (int64_t i = 0; i < s.rows; ++i) {
      std::memcpy(static_cast<char*>(arrays.y) + (p.OffsetInY(src, s.row0 + i) + s.col0) * size,
                  tile + i * s.cols * size, s.cols * size);
    }
  }

  void Compute(const ShardGrid& grid) const {
    const CpuRhs rhs(arrays.w, p.dtype, p.k, p.ColumnsOfW(), p.transpose_rhs);
    const int64_t elements = static_cast<int64_t>(tiling.tile_m) * tiling.tile_n;
    std::vector<char> wide(elements * SizeOf(rhs.compute_dtype()));
    std::vector<char> own(elements * SizeOf(p.out_dtype)), gathered;
    for (int32_t t = 0; t < grid.Total(); ++t) {
      const ShardTile tile = ShardTileAt(t, grid, view.rank);
      const Span s = SpanOf(tile.m, tile.n);
      rhs.Multiply(RowsOf(tile.owner, s, &gathered), s.rows, p.ColumnOfW(tile.owner, s.col0),
                   s.cols, wide.data());
      const bool is_local = tile.owner == view.rank;
      const int64_t slot = layout.SlotOf(tile.owner, view.rank, tile.m, tile.n);
      char* to = is_local ? own.data() : SlotAt(tile.owner, slot);
      Convert(wide.data(), rhs.compute_dtype(), to, p.out_dtype, s.rows * s.cols);
      if (is_local) {
        WriteToY(view.rank, s, to);
      } else {
        StoreRelease(SignalAt(tile.owner, slot), signal);
      }
    }
  }

  bool Receive(const ShardGrid& grid) const {
    for (int step = 1; step < view.world; ++step) {
      const int src = SendPeer(view.rank, step, view.world);
      for (int32_t i = 0; i < grid.PerShard(); ++i) {
        const Tile tile = TileInShard(i, grid);
        const int64_t slot = layout.SlotOf(view.rank, src, tile.m, tile.n);
        if (!WaitSignal(SignalAt(view.rank, slot), signal, src, slot, ctx)) return false;
        WriteToY(src, SpanOf(tile.m, tile.n), SlotAt(view.rank, slot));
      }
    }
    return true;
  }
};

}  // namespace

bool MatmulAllToAllCpu(const MatmulAllToAllParams& p, const ShardTiling& tiling,
                       const MatmulAllToAllArrays& arrays, const SymmetricView& view,
                       uint64_t epoch, const WaitContext& ctx) {
  const auto layout = AllToAllLayout::Make(p, tiling.tile_m, tiling.tile_n);
  const ShardGrid grid{p.rows.world, layout.tiles_m, layout.tiles_n, /*group_m=*/1};
  const Body body{{p, arrays, layout, view, epoch, ctx}, tiling};
  body.Compute(grid);
  return body.Receive(grid);
}

}  // namespace jflux
