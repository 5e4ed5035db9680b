// matmul_all_reduce: y = psum over ranks of x[rows, k] @ w[k, n], the same on all ranks. k is this
// rank's part of the contracted dimension.
//
// The call (Params), its workspace layout, and the CPU back end's body; the CUDA launcher is in
// matmul_all_reduce_cuda.h. Python: jflux/_ops/products/matmul_all_reduce.py.
//
// Protocol. First matmul_reduce_scatter: each rank owns the same number of rows of the sum and
// receives the peers' partial tiles of them. A finished local tile goes to y and to a slot in every
// peer's workspace, with a signal. Idle warps copy the peers' finished tiles to y. Peers cannot
// write to y, which XLA owns.
//
// Deadlock: computing and summing tiles waits for no finished tile, so matmul_reduce_scatter's
// argument holds (core/tile_order.h), and eventually every finished tile has been sent.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_H_

#include <cstdint>

#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"

namespace jflux {

inline constexpr OpId kMatmulAllReduceId{8};

struct MatmulAllReduceParams {
  MatmulReduceScatterParams scatter;  // rows.outer is 1

  uint32_t Signature() const {
    return SignatureBuilder()
        .Add(static_cast<int64_t>(kMatmulAllReduceId))
        .Add(scatter.rows.world)
        .Add(scatter.rows.inner)
        .Add(scatter.n)
        .Add(static_cast<int64_t>(scatter.out_dtype))
        .Get();
  }
};

// A slot for each partial tile, then a slot for each finished tile, with the same sizes and
// numbering.
struct MatmulAllReduceLayout {
  ReduceScatterLayout partial;

  static MatmulAllReduceLayout Make(const MatmulAllReduceParams& p, int32_t tile_m, int32_t tile_n,
                                    int32_t signals_per_slot) {
    return {ReduceScatterLayout::Make(p.scatter, tile_m, tile_n, signals_per_slot)};
  }

  // Offsets of a tile that `src` has finished, into the signals and into the data of a half.
  JFLUX_HD int64_t SignalOffset(int src, Tile tile, int signal) const {
    return partial.SignalOffset(partial.world + src, partial.SlotOf(src, tile), signal);
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

// The CPU back end's body for one rank. False if a wait failed; ctx.fault has the reason.
bool MatmulAllReduceCpu(const MatmulAllReduceParams& params, const ScatterTiling& tiling,
                        const MatmulAllReduceArrays& arrays, const SymmetricView& view,
                        uint64_t epoch, const WaitContext& ctx);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_H_
