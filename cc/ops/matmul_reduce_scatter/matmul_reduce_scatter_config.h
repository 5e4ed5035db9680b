// Pure functions for the plan of a matmul_reduce_scatter on GPUs: its layout, its GEMM
// configuration if no tuning table has one, and how many store warps send.
#ifndef JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_CONFIG_H_
#define JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_CONFIG_H_

#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/op.h"

namespace jflux {

inline constexpr char kWhatFitsReduceScatter[] =
    "16-bit operands, results of their type or float32, k and n that are multiples of 8, and, with "
    "leading dimensions, shards whose rows are a multiple of 128";
inline bool FitsKernel(const MatmulReduceScatterParams& p) {
  return SizeOf(p.dtype) == 2 && (p.out_dtype == p.dtype || p.out_dtype == DType::kF32) &&
         p.k % 8 == 0 && p.n % 8 == 0 && (p.rows.outer == 1 || p.rows.inner % kGemmTileM == 0);
}

inline ReduceScatterLayout CudaLayoutOf(const MatmulReduceScatterParams& p, const GemmChoice& c) {
  MatmulReduceScatterParams whole_tiles = p;
  whole_tiles.n = RoundUp<int64_t>(p.n, c.tile_n);
  return ReduceScatterLayout::Make(whole_tiles, kGemmTileM, c.tile_n / c.splits,
                                   /*signals_per_slot=*/kGemmTileM / 64);
}

inline GemmChoice ChooseReduceScatter(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                                      const Machine& machine, bool transpose_rhs = false) {
  const int64_t m = world * rows_per_rank;
  if (m <= kGemmTileM) return ChooseFew(m, n, k, machine, kReduceSplits);
  // Tiles that ranks share wait in the middle of a raster group: at 996 rows on 2 x H200 1.13 of
  // XLA's time, and .92 with tiles of 192 columns.
  TileCosts costs = Loading(kScatterCosts, k, n, transpose_rhs);
  if (rows_per_rank % kGemmTileM != 0) costs.shared = 1.2;
  return ChooseGemm(world, rows_per_rank, n, k, machine, costs);
}

// Store warps that may send at a time; 0: all. params.k is that of all terms. In one raster group,
// or one wave, peers wait for the parts of the last tiles, which nothing hides: then all send.
inline int32_t ReduceScatterSenders(const MatmulReduceScatterParams& p, const GemmChoice& c,
                                    const Machine& machine) {
  const TileGrid grid = GridOf(c, p.rows.Total(), p.n, machine.sm_count);
  const bool hides = c.group_m != 0 && !IsOneWave(c, grid.tiles_m * grid.tiles_n, machine.sm_count);
  return hides ? SendingStoreWarps(p.k, p.out_dtype == DType::kF32 ? 2 : 1, machine) : 0;
}

bool PlanMatmulReduceScatter(const Fields& call, const Machine& machine, Fields* plan,
                             std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_REDUCE_SCATTER_MATMUL_REDUCE_SCATTER_CONFIG_H_
