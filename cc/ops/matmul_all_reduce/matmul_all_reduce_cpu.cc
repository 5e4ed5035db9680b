// The CPU back end of matmul_all_reduce: one rank's part of the protocol, in host memory.
#include <cstring>

#include "ops/matmul_all_reduce/matmul_all_reduce.h"

namespace jflux {
namespace {

// The rows of a tile that a rank owns, and the tile's columns.
struct Box {
  int64_t row0, rows, col0, cols;
};

Box BoxOf(const MatmulReduceScatterParams& p, const ScatterTiling& tiling, int src, Tile tile) {
  const int64_t top = static_cast<int64_t>(tile.m) * tiling.tile_m, own = src * p.rows.PerRank();
  const int64_t col0 = static_cast<int64_t>(tile.n) * tiling.tile_n, row0 = Max(top, own);
  return Box{row0, Min(top + tiling.tile_m, own + p.rows.PerRank()) - row0, col0,
             Min<int64_t>(tiling.tile_n, p.n - col0)};
}

}  // namespace

bool MatmulAllReduceCpu(const MatmulAllReduceParams& params, const ScatterTiling& tiling,
                        const MatmulAllReduceArrays& arrays, const SymmetricView& view,
                        uint64_t epoch, const WaitContext& ctx) {
  const MatmulReduceScatterParams& p = params.scatter;
  const auto layout = MatmulAllReduceLayout::Make(params, tiling.tile_m, tiling.tile_n, 1);
  const WorkspaceLayout workspace = layout.Workspace();
  const int64_t signals = workspace.SignalOffset(epoch), data = workspace.DataOffset(epoch);
  const Signal signal = MakeSignal(epoch, params.Signature());
  const int64_t element = SizeOf(p.out_dtype), rows = p.rows.PerRank();
  auto* y = static_cast<char*>(arrays.y);
  // In a slot, a box's rows are contiguous.
  const auto in_y = [&](const Box& box, int64_t i) {
    return y + ((box.row0 + i) * p.n + box.col0) * element;
  };
  const auto send = [&](Tile tile) {
    const Box box = BoxOf(p, tiling, view.rank, tile);
    for (int step = 1; step < view.world; ++step) {
      const int peer = SendPeer(view.rank, step, view.world);
      char* slot = view.At(peer, data + layout.SlotOffset(view.rank, tile));
      for (int64_t i = 0; i < box.rows; ++i) {
        std::memcpy(slot + i * box.cols * element, in_y(box, i), box.cols * element);
      }
      StoreRelease(view.At<Signal>(peer, signals + layout.SignalOffset(view.rank, tile, 0)),
                   signal);
    }
  };
  const int64_t own = view.rank * rows * p.n * element;  // bytes
  MatmulReduceScatterArrays scattered{arrays.x, arrays.w, y + own};
  if (arrays.residual != nullptr) {
    scattered.residual = static_cast<const char*>(arrays.residual) + own;
  }
  if (!ScatterTilesCpu(p, tiling, layout.partial, scattered, view, {signals, data, signal}, ctx,
                       send)) {
    return false;
  }
  for (int step = 1; step < view.world; ++step) {
    const int src = (view.rank + step) % view.world;
    const int32_t last = LastTileOf(src, rows, tiling.tile_m);
    for (int32_t m = FirstTileOf(src, rows, tiling.tile_m); m <= last; ++m) {
      for (int32_t n = 0; n < layout.partial.tiles_n; ++n) {
        const Tile tile{m, n};
        const auto* word = view.At<Signal>(view.rank, signals + layout.SignalOffset(src, tile, 0));
        if (!WaitSignal(word, signal, src, layout.partial.SlotOf(src, tile), ctx)) return false;
        const char* slot = view.At(view.rank, data + layout.SlotOffset(src, tile));
        const Box box = BoxOf(p, tiling, src, tile);
        for (int64_t i = 0; i < box.rows; ++i) {
          std::memcpy(in_y(box, i), slot + i * box.cols * element, box.cols * element);
        }
      }
    }
  }
  return true;
}

}  // namespace jflux
