// The CPU back end of matmul_all_reduce: one rank's part of the protocol, in host memory.
#include <cstring>
#include <vector>

#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "runtime/cpu_matmul.h"

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

// The CPU back end of matmul_all_reduce of few rows: one rank's part, in host memory. It sends all
// m64 blocks before it waits for the first. Meanwhile y holds its own, rounded as the peer receives
// them.

namespace {

// An m64 block of a slice: its rows and columns in y.
struct M64 {
  int32_t slice;
  int number;
  int64_t row0, rows, col0, cols;
};

std::vector<M64> M64BlocksOf(const FewRowsLayout& layout, int32_t slice_n, int64_t rows,
                             int64_t n) {
  std::vector<M64> blocks;
  for (int32_t slice = 0; slice < layout.slices; ++slice) {
    const int64_t col0 = static_cast<int64_t>(slice) * slice_n;
    for (int b = 0; b < layout.m64_blocks; ++b) {
      const int64_t row0 = b * 64;
      blocks.push_back(
          {slice, b, row0, Min<int64_t>(64, rows - row0), col0, Min<int64_t>(slice_n, n - col0)});
    }
  }
  return blocks;
}

}  // namespace

bool FewRowsCpu(const MatmulAllReduceParams& params, int32_t slice_n,
                const MatmulAllReduceArrays& arrays, const SymmetricView& view, uint64_t epoch,
                const WaitContext& ctx) {
  const MatmulReduceScatterParams& p = params.scatter;
  const auto layout = FewRowsLayoutOf(params, slice_n);
  const WorkspaceLayout workspace = layout.Workspace();
  const int64_t signals = workspace.SignalOffset(epoch), data = workspace.DataOffset(epoch);
  const Signal signal = MakeSignal(epoch, params.Signature());
  const int peer = 1 - view.rank;
  const auto blocks = M64BlocksOf(layout, slice_n, p.rows.Total(), p.n);
  const CpuRhs rhs(arrays.w, p.dtype, p.k, p.n, p.transpose_rhs);
  const DType wide = rhs.compute_dtype();
  const int64_t element = SizeOf(p.out_dtype);
  // Byte offset in y of row i of an m64 block. In the workspace its rows are contiguous.
  const auto in_y = [&](const M64& b, int64_t i) {
    return ((b.row0 + i) * p.n + b.col0) * element;
  };
  auto* y = static_cast<char*>(arrays.y);

  std::vector<char> product(64 * slice_n * SizeOf(wide));
  for (const M64& b : blocks) {
    rhs.Multiply(static_cast<const char*>(arrays.x) + b.row0 * p.k * SizeOf(p.dtype), b.rows,
                 b.col0, b.cols, product.data());
    char* sent = view.At(peer, data + layout.M64Offset(b.slice, b.number));
    for (int64_t i = 0; i < b.rows; ++i) {
      char* local = y + in_y(b, i);
      Convert(product.data() + i * b.cols * SizeOf(wide), wide, local, p.out_dtype, b.cols);
      std::memcpy(sent + i * b.cols * element, local, b.cols * element);
    }
    StoreRelease(view.At<Signal>(peer, signals + layout.SignalOffset(b.slice, b.number)), signal);
  }

  std::vector<char> sum(slice_n * SizeOf(wide));
  for (const M64& b : blocks) {
    const auto* word = view.At<Signal>(view.rank, signals + layout.SignalOffset(b.slice, b.number));
    if (!WaitSignal(word, signal, peer, b.slice, ctx)) return false;
    const char* partial = view.At(view.rank, data + layout.M64Offset(b.slice, b.number));
    for (int64_t i = 0; i < b.rows; ++i) {
      char* local = y + in_y(b, i);
      Convert(local, p.out_dtype, sum.data(), wide, b.cols);
      Accumulate(partial + i * b.cols * element, p.out_dtype, sum.data(), wide, b.cols);
      if (arrays.residual != nullptr) {
        Accumulate(static_cast<const char*>(arrays.residual) + in_y(b, i), p.out_dtype, sum.data(),
                   wide, b.cols);
      }
      Convert(sum.data(), wide, local, p.out_dtype, b.cols);
    }
  }
  return true;
}

}  // namespace jflux
