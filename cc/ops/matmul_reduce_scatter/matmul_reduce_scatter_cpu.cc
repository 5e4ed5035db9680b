// The CPU back end of matmul_reduce_scatter: one rank's part of the protocol, in host memory.
#include <cstring>
#include <vector>

#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/cpu_matmul.h"

namespace jflux {
namespace {

// One rank's call.
struct Body {
  const MatmulReduceScatterParams& p;
  const ScatterTiling& tiling;
  const SymmetricView& view;
  const WaitContext& ctx;
  const ReduceScatterLayout& layout;
  const CpuHalf& half;

  struct Span {
    int64_t row0, rows, col0, cols;
  };

  // Rows of the tile that rank `dst` owns, relative to the tile: [FirstRow, LastRow).
  int64_t FirstRow(int dst, const Span& s) const {
    return Max<int64_t>(dst * p.rows.PerRank() - s.row0, 0);
  }
  int64_t LastRow(int dst, const Span& s) const {
    return Min<int64_t>((dst + 1) * p.rows.PerRank() - s.row0, s.rows);
  }

  // Writes the tile's rows to their owners and signals. `product` is in p.out_dtype.
  void Send(Tile tile, const Span& s, const char* product) const {
    const int64_t row_bytes = s.cols * SizeOf(p.out_dtype);
    const int last = p.rows.OwnerOf(s.row0 + s.rows - 1);
    for (int dst = p.rows.OwnerOf(s.row0); dst <= last; ++dst) {
      if (dst == view.rank) continue;
      const int32_t slot = layout.SlotOf(dst, tile);
      const int64_t first = FirstRow(dst, s);
      std::memcpy(view.At(dst, half.data + layout.SlotOffset(view.rank, slot)) + first * row_bytes,
                  product + first * row_bytes, (LastRow(dst, s) - first) * row_bytes);
      StoreRelease(view.At<Signal>(dst, half.signals + layout.SignalOffset(view.rank, slot, 0)),
                   half.signal);
    }
  }

  // Sums the local rows of the tile over all ranks, in rank order, and writes y.
  bool Reduce(Tile tile, const Span& s, const char* product, DType sum_dtype,
              const MatmulReduceScatterArrays& arrays) const {
    const int32_t slot = layout.SlotOf(view.rank, tile);
    for (int src = 0; src < view.world; ++src) {
      if (src == view.rank) continue;
      const auto* word =
          view.At<Signal>(view.rank, half.signals + layout.SignalOffset(src, slot, 0));
      if (!WaitSignal(word, half.signal, src, slot, ctx)) return false;
    }
    const int64_t row_bytes = s.cols * SizeOf(p.out_dtype);
    std::vector<char> sum(s.cols * SizeOf(sum_dtype));
    for (int64_t i = FirstRow(view.rank, s); i < LastRow(view.rank, s); ++i) {
      std::memset(sum.data(), 0, sum.size());
      for (int src = 0; src < view.world; ++src) {
        const char* part = src == view.rank
                               ? product
                               : view.At(view.rank, half.data + layout.SlotOffset(src, slot));
        Accumulate(part + i * row_bytes, p.out_dtype, sum.data(), sum_dtype, s.cols);
      }
      const int64_t own_row = s.row0 + i - view.rank * p.rows.PerRank();
      const int64_t in_y = (own_row * p.n + s.col0) * SizeOf(p.out_dtype);
      if (arrays.residual != nullptr) {
        Accumulate(static_cast<const char*>(arrays.residual) + in_y, p.out_dtype, sum.data(),
                   sum_dtype, s.cols);
      }
      Convert(sum.data(), sum_dtype, static_cast<char*>(arrays.y) + in_y, p.out_dtype, s.cols);
    }
    return true;
  }
};

}  // namespace

bool MatmulReduceScatterCpu(const MatmulReduceScatterParams& p, const ScatterTiling& tiling,
                            const MatmulReduceScatterArrays& arrays, const SymmetricView& view,
                            uint64_t epoch, const WaitContext& ctx) {
  const auto layout =
      ReduceScatterLayout::Make(p, tiling.tile_m, tiling.tile_n, /*signals_per_slot=*/1);
  const WorkspaceLayout workspace = layout.Workspace();
  const CpuHalf half{workspace.SignalOffset(epoch), workspace.DataOffset(epoch),
                     MakeSignal(epoch, p.Signature())};
  return ScatterTilesCpu(p, tiling, layout, arrays, view, half, ctx, [](Tile) {});
}

bool ScatterTilesCpu(const MatmulReduceScatterParams& p, const ScatterTiling& tiling,
                     const ReduceScatterLayout& layout, const MatmulReduceScatterArrays& arrays,
                     const SymmetricView& view, const CpuHalf& half, const WaitContext& ctx,
                     const std::function<void(Tile)>& finished) {
  const Body body{p, tiling, view, ctx, layout, half};
  const int64_t total = p.rows.Total(), row_bytes = p.k * SizeOf(p.dtype);
  const TileGrid grid{static_cast<int32_t>(CeilDiv<int64_t>(total, tiling.tile_m)), layout.tiles_n,
                      /*group_m=*/1};
  const auto order =
      ScatterOrder::Make(grid, view.rank, view.world, p.rows.PerRank(), tiling.tile_m);
  const CpuRhs rhs(arrays.w, p.dtype, p.k, p.n, p.transpose_rhs);
  const int64_t tile_elements = static_cast<int64_t>(tiling.tile_m) * tiling.tile_n;
  std::vector<char> wide(tile_elements * SizeOf(rhs.compute_dtype()));
  std::vector<char> product(tile_elements * SizeOf(p.out_dtype));
  std::vector<char> gathered_rows(p.rows.outer > 1 ? tiling.tile_m * row_bytes : 0);
  for (int32_t t = 0; t < grid.tiles_m * grid.tiles_n; ++t) {
    const Tile tile = order.At(t);
    Body::Span s;
    s.row0 = static_cast<int64_t>(tile.m) * tiling.tile_m;
    s.col0 = static_cast<int64_t>(tile.n) * tiling.tile_n;
    s.rows = Min<int64_t>(tiling.tile_m, total - s.row0);
    s.cols = Min<int64_t>(tiling.tile_n, p.n - s.col0);
    const char* a = static_cast<const char*>(arrays.x) + s.row0 * row_bytes;
    if (p.rows.outer > 1) {
      for (int64_t i = 0; i < s.rows; ++i) {
        std::memcpy(gathered_rows.data() + i * row_bytes,
                    static_cast<const char*>(arrays.x) + p.rows.Actual(s.row0 + i) * row_bytes,
                    row_bytes);
      }
      a = gathered_rows.data();
    }
    rhs.Multiply(a, s.rows, s.col0, s.cols, wide.data());
    Convert(wide.data(), rhs.compute_dtype(), product.data(), p.out_dtype, s.rows * s.cols);
    body.Send(tile, s, product.data());
    const bool own = tile.m >= FirstTileOf(view.rank, p.rows.PerRank(), tiling.tile_m) &&
                     tile.m <= LastTileOf(view.rank, p.rows.PerRank(), tiling.tile_m);
    if (!own) continue;
    if (!body.Reduce(tile, s, product.data(), rhs.compute_dtype(), arrays)) return false;
    finished(tile);
  }
  return true;
}

}  // namespace jflux
