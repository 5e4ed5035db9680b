// The CPU back end of all_to_all_matmul: one rank's part of the protocol, in host memory.
#include <cstring>
#include <vector>

#include "core/tile_order.h"
#include "ops/all_to_all_matmul/all_to_all_matmul.h"
#include "runtime/cpu_matmul.h"
#include "runtime/rank_call.h"

namespace jflux {
namespace {

struct Body : RankCall<AllToAllMatmulParams, AllToAllMatmulArrays, AllToAllMatmulLayout> {
  const AllToAllMatmulTiling& tiling;

  Signal* SignalAt(int dst, int src, int64_t chunk) const {
    return view.At<Signal>(dst, signals + layout.SignalOffset(src, chunk));
  }

  // The local shard goes first, to this rank: its tiles come first.
  void Send() const {
    const auto* x = static_cast<const char*>(arrays.x);
    for (int step = 0; step < view.world; ++step) {
      const int dst = SendPeer(view.rank, step, view.world);
      for (int64_t chunk = 0; chunk < layout.chunks; ++chunk) {
        const int64_t first = chunk * layout.chunk_rows;
        const int64_t end = Min(first + layout.chunk_rows, layout.rows_per_rank);
        for (int64_t r = first; r < end; ++r) {
          std::memcpy(view.At(dst, data + layout.RowOffset(view.rank, r)),
                      x + p.OffsetInX(dst, r) * SizeOf(p.dtype), layout.row_bytes);
        }
        StoreRelease(SignalAt(dst, view.rank, chunk), signal);
      }
    }
  }

  // Rows [first, end) of the shard from `src`.
  bool WaitShard(int src, int64_t first, int64_t end) const {
    for (int64_t c = first / layout.chunk_rows; c * layout.chunk_rows < end; ++c) {
      if (!WaitSignal(SignalAt(view.rank, src, c), signal, src, c, ctx)) return false;
    }
    return true;
  }
  // Rows [first, end) of the product.
  bool WaitRows(int64_t first, int64_t end) const {
    const int64_t per_rank = layout.rows_per_rank;
    for (int step = 0; step < view.world; ++step) {
      const int src = (view.rank + step) % view.world;
      const int64_t base = p.concat_rows ? src * per_rank : 0;
      const int64_t from = Max(first - base, int64_t{0}), to = Min(end - base, per_rank);
      if (from < to && !WaitShard(src, from, to)) return false;
    }
    return true;
  }

  bool Compute() const {
    const TileGrid grid{static_cast<int32_t>(CeilDiv<int64_t>(p.RowsOfY(), tiling.tile_m)),
                        static_cast<int32_t>(CeilDiv<int64_t>(p.n, tiling.tile_n)), /*group_m=*/1};
    // Rows of the local shard first, if some tiles need no others.
    const int64_t per_rank = layout.rows_per_rank;
    const auto order =
        p.concat_rows ? GatherOrder::Make(grid, view.rank, view.world, per_rank, tiling.tile_m)
                      : GatherOrder::Make(grid, /*rank=*/0, /*world=*/1, per_rank, tiling.tile_m);
    const CpuRhs rhs(arrays.w, p.dtype, p.KOfW(), p.n, p.transpose_rhs);
    const int64_t row_bytes = p.KOfW() * SizeOf(p.dtype);
    const char* gathered = view.At(view.rank, data);
    std::vector<char> product(static_cast<int64_t>(tiling.tile_m) * tiling.tile_n *
                              SizeOf(rhs.compute_dtype()));
    for (int32_t t = 0; t < grid.tiles_m * grid.tiles_n; ++t) {
      const Tile tile = order.At(t);
      const int64_t row0 = static_cast<int64_t>(tile.m) * tiling.tile_m;
      const int64_t col0 = static_cast<int64_t>(tile.n) * tiling.tile_n;
      const int64_t rows = Min<int64_t>(tiling.tile_m, p.RowsOfY() - row0);
      const int64_t cols = Min<int64_t>(tiling.tile_n, p.n - col0);
      if (!WaitRows(row0, row0 + rows)) return false;
      rhs.Multiply(gathered + row0 * row_bytes, rows, col0, cols, product.data());
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = p.RowOfY(row0 + i);
        Convert(product.data() + i * cols * SizeOf(rhs.compute_dtype()), rhs.compute_dtype(),
                static_cast<char*>(arrays.y) + (row * p.n + col0) * SizeOf(p.out_dtype),
                p.out_dtype, cols);
        if (arrays.gathered != nullptr && tile.n == 0) {
          std::memcpy(static_cast<char*>(arrays.gathered) + row * row_bytes,
                      gathered + (row0 + i) * row_bytes, row_bytes);
        }
      }
    }
    return true;
  }
};

}  // namespace

bool AllToAllMatmulCpu(const AllToAllMatmulParams& p, const AllToAllMatmulTiling& tiling,
                       const AllToAllMatmulArrays& arrays, const SymmetricView& view,
                       uint64_t epoch, const WaitContext& ctx) {
  const auto layout = AllToAllMatmulLayout::Make(p, tiling.chunk_bytes);
  const Body body{{p, arrays, layout, view, epoch, ctx}, tiling};
  body.Send();
  return body.Compute();
}

}  // namespace jflux
