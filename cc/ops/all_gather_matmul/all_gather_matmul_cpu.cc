// The CPU back end of all_gather_matmul: one rank's part of the protocol, in host memory.
#include <cstring>
#include <vector>

#include "core/tile_order.h"
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "runtime/cpu_matmul.h"

namespace jflux {
namespace {

// Offsets of this call's signals and data in the workspace.
struct Half {
  int64_t signals, data;
};

// Sends every chunk of the local shard to every rank, this one included, so that all tiles read one
// array.
void SendShard(const AllGatherLayout& layout, const void* x, const SymmetricView& view, Half half,
               Signal signal) {
  const auto* shard = static_cast<const char*>(x);
  for (int step = 0; step < view.world; ++step) {  // step 0: the local copy, whose tiles come first
    const int peer = SendPeer(view.rank, step, view.world);
    for (int64_t c = 0; c < layout.chunks; ++c) {
      std::memcpy(view.At(peer, half.data + layout.ChunkOffset(view.rank, c)),
                  shard + c * layout.chunk_bytes, layout.ChunkSize(c));
      StoreRelease(view.At<Signal>(peer, half.signals + layout.SignalOffset(view.rank, c)), signal);
    }
  }
}

// Waits for the chunks that contain virtual rows [first, last).
bool WaitRows(const AllGatherMatmulParams& p, const AllGatherLayout& layout,
              const SymmetricView& view, Half half, int64_t first, int64_t last, Signal signal,
              const WaitContext& ctx) {
  const int64_t row_bytes = p.k * SizeOf(p.dtype);
  for (int src = p.rows.OwnerOf(first); src <= p.rows.OwnerOf(last - 1); ++src) {
    const int64_t base = src * p.rows.PerRank();
    const int64_t begin = (Max(first, base) - base) * row_bytes;
    const int64_t end = (Min(last, base + p.rows.PerRank()) - base) * row_bytes;
    for (int64_t c = begin / layout.chunk_bytes; c * layout.chunk_bytes < end; ++c) {
      const auto* word = view.At<Signal>(view.rank, half.signals + layout.SignalOffset(src, c));
      if (!WaitSignal(word, signal, src, c, ctx)) return false;
    }
  }
  return true;
}

}  // namespace

bool AllGatherMatmulCpu(const AllGatherMatmulParams& p, const CpuTiling& tiling,
                        const AllGatherMatmulArrays& arrays, const SymmetricView& view,
                        uint64_t epoch, const WaitContext& ctx) {
  const AllGatherLayout layout = AllGatherLayout::Make(p, tiling.chunk_bytes);
  const WorkspaceLayout workspace = layout.Workspace();
  const Half half{workspace.SignalOffset(epoch), workspace.DataOffset(epoch)};
  const Signal signal = MakeSignal(epoch, p.Signature());
  SendShard(layout, arrays.x, view, half, signal);

  const int64_t total = p.rows.Total(), row_bytes = p.k * SizeOf(p.dtype);
  const TileGrid grid{static_cast<int32_t>(CeilDiv<int64_t>(total, tiling.tile_m)),
                      static_cast<int32_t>(CeilDiv<int64_t>(p.n, tiling.tile_n)), /*group_m=*/1};
  const auto order =
      GatherOrder::Make(grid, view.rank, view.world, p.rows.PerRank(), tiling.tile_m);
  const CpuRhs rhs(arrays.w, p.DTypeOfW(), p.k, p.n, p.transpose_rhs, p.dtype);
  const char* data = view.At(view.rank, half.data);
  std::vector<char> product(static_cast<int64_t>(tiling.tile_m) * tiling.tile_n *
                            SizeOf(rhs.compute_dtype()));
  for (int32_t t = 0; t < grid.tiles_m * grid.tiles_n; ++t) {
    const Tile tile = order.At(t);
    const int64_t row0 = static_cast<int64_t>(tile.m) * tiling.tile_m;
    const int64_t col0 = static_cast<int64_t>(tile.n) * tiling.tile_n;
    const int64_t rows = Min<int64_t>(tiling.tile_m, total - row0);
    const int64_t cols = Min<int64_t>(tiling.tile_n, p.n - col0);
    if (!WaitRows(p, layout, view, half, row0, row0 + rows, signal, ctx)) return false;
    rhs.Multiply(data + row0 * row_bytes, rows, col0, cols, product.data());
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t actual = p.rows.Actual(row0 + i);
      Convert(product.data() + i * cols * SizeOf(rhs.compute_dtype()), rhs.compute_dtype(),
              static_cast<char*>(arrays.y) + (actual * p.n + col0) * SizeOf(p.out_dtype),
              p.out_dtype, cols);
      if (arrays.gathered != nullptr && tile.n == 0) {
        std::memcpy(static_cast<char*>(arrays.gathered) + actual * row_bytes,
                    data + (row0 + i) * row_bytes, row_bytes);
      }
    }
  }
  return true;
}

}  // namespace jflux
