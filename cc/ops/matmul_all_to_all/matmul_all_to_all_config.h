// Pure functions for the plan of a matmul_all_to_all on GPUs: its layout, its GEMM configuration
// if no tuning table has one, and how many store warps send.
#ifndef JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CONFIG_H_
#define JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CONFIG_H_

#include "core/shard_tiles.h"
#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "runtime/op.h"

namespace jflux {

// The rows of a tile must follow each other in x and in y.
inline constexpr char kWhatFitsAllToAll[] =
    "16-bit operands and results of one type, k and n that are multiples of 8, and, with leading "
    "dimensions, shards whose rows are a multiple of 128";
inline bool FitsKernel(const MatmulAllToAllParams& p) {
  const bool strided = p.rows.outer > 1 && (p.split_rows || p.concat_rows);
  return SizeOf(p.dtype) == 2 && p.out_dtype == p.dtype && p.k % 8 == 0 && p.n % 8 == 0 &&
         (!strided || p.rows.inner % kGemmTileM == 0);
}

inline AllToAllLayout CudaLayoutOf(const MatmulAllToAllParams& p, const GemmChoice& c) {
  return AllToAllLayout::Make(p, kGemmTileM, c.tile_n);
}

inline ShardGrid ShardGridOf(const MatmulAllToAllParams& p, const GemmChoice& c, int sm_count) {
  const TileGrid shard = GridOf(c, p.rows.PerRank(), p.n, sm_count);
  return ShardGrid{p.rows.world, shard.tiles_m, shard.tiles_n,
                   c.group_m == 0 ? shard.tiles_m : c.group_m};
}

// The configuration for `world` shards of `rows` rows and n columns. Each shard has whole tiles of
// its own, so the estimate counts the padding of every shard's last tiles.
inline GemmChoice ChooseAllToAll(int world, int64_t rows, int64_t n, int64_t k,
                                 const Machine& machine, bool transpose_rhs = false) {
  const TileCosts costs = Loading(kScatterCosts, k, n, transpose_rhs);
  const auto cost = [&](const GemmChoice& c) {
    const int64_t m = world * RoundUp<int64_t>(rows, kGemmTileM * c.cluster_m);
    return EstimateCost(c, m, n, k, machine, costs, kExposed / machine.LinkShare());
  };
  GemmChoice best{192, 1, 16};
  for (const GemmChoice& c : kCompiled) {
    if (cost(c) < cost(best)) best = c;
  }
  // Shorter raster groups, as ChooseGemm has them, where one shard is several.
  if (best.cluster_m == 2 && rows > kGemmTileM * best.cluster_m * best.group_m) best.group_m = 4;
  return best;
}

// Store warps that may send at a time; 0: all. All do if the tiles are one wave.
inline int32_t AllToAllSenders(const MatmulAllToAllParams& p, const GemmChoice& c,
                               const Machine& machine) {
  const int32_t tiles = ShardGridOf(p, c, machine.sm_count).Total();
  return IsOneWave(c, tiles, machine.sm_count) ? 0 : SendingStoreWarps(p.k, 1, machine);
}

bool PlanMatmulAllToAll(const Fields& call, const Machine& machine, Fields* plan,
                        std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_MATMUL_ALL_TO_ALL_MATMUL_ALL_TO_ALL_CONFIG_H_
