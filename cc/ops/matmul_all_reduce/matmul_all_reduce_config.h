// Pure functions for the plan of a matmul_all_reduce on GPUs: its layout, its GEMM configuration
// if no tuning table has one, and how many store warps send.
#ifndef JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CONFIG_H_
#define JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CONFIG_H_

#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "ops/matmul_all_reduce/few_rows.h"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "runtime/op.h"

namespace jflux {

// Whether the protocol is that of few_rows.h: all rows are one tile, of two ranks.
inline bool AreFewRows(int world, int64_t rows) { return world == 2 && rows <= kGemmTileM; }
inline bool AreFewRows(const MatmulAllReduceParams& p) {
  return AreFewRows(p.scatter.rows.world, p.scatter.rows.Total());
}

inline constexpr char kWhatFitsAllReduce[] =
    "16-bit operands and results of one type, k and n that are multiples of 8, and a multiple of "
    "128 rows for each rank (two ranks: or up to 128 rows in all)";
inline bool FitsKernel(const MatmulAllReduceParams& p) {
  const MatmulReduceScatterParams& s = p.scatter;
  return SizeOf(s.dtype) == 2 && s.out_dtype == s.dtype && s.k % 8 == 0 && s.n % 8 == 0 &&
         (AreFewRows(p) || s.rows.inner % kGemmTileM == 0);
}

inline MatmulAllReduceLayout CudaLayoutOf(const MatmulAllReduceParams& p, const GemmChoice& c) {
  return MatmulAllReduceLayout::Make(p, kGemmTileM, c.tile_n, /*signals_per_slot=*/kGemmTileM / 64);
}

inline FewRowsLayout FewRowsLayoutOf(const MatmulAllReduceParams& p, const GemmChoice& c) {
  const MatmulReduceScatterParams& s = p.scatter;
  return FewRowsLayout::Make(static_cast<int32_t>(CeilDiv<int64_t>(s.n, c.tile_n)) * c.splits,
                             c.tile_n / c.splits, s.rows.Total(), SizeOf(s.out_dtype));
}

// The workspaces that a call takes, on a CPU and on a GPU.
inline WorkspaceLayout MatmulAllReduceCpuWorkspace(const MatmulAllReduceParams& p) {
  const ScatterTiling tiling;
  return AreFewRows(p)
             ? FewRowsLayoutOf(p, tiling.tile_n).Workspace()
             : MatmulAllReduceLayout::Make(p, tiling.tile_m, tiling.tile_n, 1).Workspace();
}
inline WorkspaceLayout MatmulAllReduceWorkspace(const MatmulAllReduceParams& p,
                                                const GemmChoice& c) {
  return AreFewRows(p) ? FewRowsLayoutOf(p, c).Workspace() : CudaLayoutOf(p, c).Workspace();
}

// Measured as kScatterCosts.
inline constexpr TileCosts kReduceCosts{1.04, kScatterCosts.narrow, kExposed};

// Up to 2048 rows are one raster group over w: then tiles are finished, and sent to the peers, from
// the beginning on. More are shorter raster groups, faster at 4096 (docs/experiments/0027); and on
// two ranks, from 1024 rows on, tiles of 128 and 256 columns: the peer's rows come first then, and
// travel behind the own ones (docs/experiments/0051).
inline GemmChoice ChooseAllReduce(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                                  const Machine& machine, bool transpose_rhs = false) {
  const int64_t m = world * rows_per_rank;
  if (AreFewRows(world, m)) {
    return ChooseSplits(GemmChoice{kSharedKTile, 1, 1}, m, n, k, machine, kReduceSplits);
  }
  GemmChoice c =
      ChooseGemm(world, rows_per_rank, n, k, machine, Loading(kReduceCosts, k, n, transpose_rhs));
  const bool peers_first = world == 2 && m >= 1024 && c.tile_n % 128 == 0;
  if (m <= 2048 && !peers_first) c.group_m = 0;
  return c;
}

// What a choice from elsewhere becomes. Few rows have kernels for one tile only.
inline GemmChoice Possible(const MatmulAllReduceParams& p, const GemmChoice& c) {
  const MatmulReduceScatterParams& s = p.scatter;
  if (!AreFewRows(p)) return FitSplits(c, s.rows.Total(), s.k, /*most=*/1);
  return FitSplits(GemmChoice{kSharedKTile, 1, 1, c.splits}, s.rows.Total(), s.k, kReduceSplits);
}

// Store warps that may send at a time; 0: all. A finished tile goes to all peers. With fewer than
// 16 it was slower (2 x H200). Few rows are one wave, and all send.
inline int32_t AllReduceSenders(const MatmulAllReduceParams& p, const Machine& machine) {
  if (AreFewRows(p)) return 0;
  const int32_t warps = SendingStoreWarps(p.scatter.k, p.scatter.rows.world - 1, machine);
  return warps == 0 ? 0 : Max(16, warps);
}

bool PlanMatmulAllReduce(const Fields& call, const Machine& machine, Fields* plan,
                         std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_REDUCE_MATMUL_ALL_REDUCE_CONFIG_H_
