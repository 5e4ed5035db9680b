// matmul_all_reduce: y = psum over ranks of x[rows, k] @ w[k, n], the same on all ranks; k is this
// rank's part of the contracted dimension.
//
// What is computed (Params), where it lies in the heap (Layout), and the CPU back end's body; the
// CUDA launcher is in matmul_all_reduce_cuda.h. Python: jflux/_ops/matmul_all_reduce.py.
//
// Protocol. It begins as matmul_reduce_scatter: each rank owns as many rows of the sum, and gets
// the peers' partial tiles of them. An own tile that is summed goes to y, and at once to a slot in
// every peer's workspace, with a signal. Whoever has nothing else to do takes the peers' finished
// tiles and copies them to y, which XLA owns, so that peers cannot write to it.
//
// Deadlock: computing and summing tiles waits for no finished tile, so what keeps
// matmul_reduce_scatter going (core/tile_order.h) does so here, and in the end every finished tile
// has been sent.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_H_

#include <cstdint>

#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"

namespace jflux {

struct MatmulAllReduceParams {
  MatmulReduceScatterParams scatter;  // rows.outer is 1

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(OpId::kMatmulAllReduce))
        .Add(scatter.rows.world)
        .Add(scatter.rows.inner)
        .Add(scatter.n)
        .Add(static_cast<int64_t>(scatter.out_dtype))
        .Get();
  }
};

// A slot for each partial tile that a rank gets, and behind these one for each finished tile: they
// are as large, and numbered in the same way.
struct MatmulAllReduceLayout {
  ReduceScatterLayout partial;

  static MatmulAllReduceLayout Make(const MatmulAllReduceParams& p, int32_t tile_m, int32_t tile_n,
                                    int32_t parts) {
    return {ReduceScatterLayout::Make(p.scatter, tile_m, tile_n, parts)};
  }

  // Of a tile that `src` has finished; offsets into a half's signals and a half's data.
  JFLUX_HD int64_t SignalOffset(int src, Tile tile, int part) const {
    return partial.SignalOffset(partial.world + src, partial.SlotOf(src, tile), part);
  }
  JFLUX_HD int64_t SlotOffset(int src, Tile tile) const {
    return partial.SlotOffset(partial.world + src, partial.SlotOf(src, tile));
  }
  JFLUX_HD WorkspaceLayout Workspace() const {
    return WorkspaceLayout::For(partial.SignalOffset(2 * partial.world, 0, 0),
                                partial.SlotOffset(2 * partial.world, 0));
  }
};

struct MatmulAllReduceArrays {
  const void* x;         // [rows, k]
  const void* w;         // [k, n], or [n, k] if transpose_rhs
  void* y;               // [rows, n]
  const void* residual;  // as y, the same on all ranks; or null
};

// The CPU back end's body for one rank; false if a wait failed (the reason is in ctx.fault).
bool MatmulAllReduceCpu(const MatmulAllReduceParams& params, const ScatterTiling& tiling,
                        const MatmulAllReduceArrays& arrays, const SymmetricView& view,
                        uint32_t epoch, const WaitContext& ctx);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_H_
