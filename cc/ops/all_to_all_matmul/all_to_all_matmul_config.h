// Pure functions for the plan of an all_to_all_matmul on GPUs: its layout, its GEMM configuration
// if no tuning table has one, and how many CTAs send.
#ifndef JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_CONFIG_H_
#define JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_CONFIG_H_

#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "ops/all_to_all_matmul/all_to_all_matmul.h"
#include "ops/all_to_all_matmul/shard_panels.h"
#include "runtime/op.h"

namespace jflux {

// The rows of a tile must follow each other in x and in y.
inline constexpr char kWhatFitsAllToAllMatmul[] =
    "16-bit operands and results of one type, n and columns of a shard of x that are multiples of "
    "8, and, with leading dimensions, shards whose rows are a multiple of 128";
inline bool FitsKernel(const AllToAllMatmulParams& p) {
  const bool strided = p.rows.outer > 1 && (p.split_rows || p.concat_rows);
  return SizeOf(p.dtype) == 2 && p.out_dtype == p.dtype && p.k % 8 == 0 && p.n % 8 == 0 &&
         (!strided || p.rows.inner % kGemmTileM == 0);
}

inline ShardPanels CudaLayoutOf(const AllToAllMatmulParams& p) {
  static_assert(KPanelLayout::kPanelRows == kGemmTileM && KPanelLayout::kColumns == kGemmTileK);
  return ShardPanels::Make(p.rows.world, p.rows.PerRank(), p.k);
}

inline ShardTileOrder TileOrderOf(const AllToAllMatmulParams& p, const GemmChoice& c,
                                  int sm_count) {
  const TileGrid shard = GridOf(c, p.rows.PerRank(), p.n, sm_count);
  return ShardTileOrder{p.concat_rows ? p.rows.world : 1, shard.tiles_m, shard.tiles_n,
                        c.group_m == 0 ? shard.tiles_m : c.group_m};
}

// Limits the tile rows of a raster group if the all-to-all concatenates columns. The first wave of
// tiles begins with the own term, while the peers' parts of the raster group arrive. The last term
// begins when (world - 1) / world of the wave are over. By then (world - 1) / world of the g rows
// of the raster group must have arrived:
//
//   g * columns <= SMs * kGemmTileM * tile_n
//
// `columns`: a row arrives in the time of its product with this many columns of w. The limit does
// not depend on n: a raster group over more columns has more waves, each as long. All raster groups
// have one size. Otherwise nearly all rows would be in the first one (docs/experiments/0034).
inline GemmChoice TermGroups(GemmChoice c, int world, int64_t rows, const Machine& machine) {
  if (world == 1) return c;
  const double columns = kReferenceColumns * machine.sm_count / kReferenceSms / machine.LinkShare();
  const double wave = static_cast<double>(machine.sm_count) * kGemmTileM * c.tile_n;
  const double most = wave / columns / (kGemmTileM * c.cluster_m);
  const auto limit = static_cast<int64_t>(Min(most, static_cast<double>(c.group_m)));
  const int64_t tiles = CeilDiv<int64_t>(rows, kGemmTileM * c.cluster_m);
  c.group_m = static_cast<int32_t>(EvenGroup(tiles, limit));
  return c;
}

// rows, k: of a shard. If the all-to-all concatenates rows, each shard is rounded up to whole
// tiles, and the estimate counts the rounded rows.
inline GemmChoice ChooseAllToAllMatmul(int world, int64_t rows, int64_t k, int64_t n,
                                       bool concat_rows, const Machine& machine,
                                       bool transpose_rhs = false) {
  const int64_t shards = concat_rows ? world : 1, sum = concat_rows ? k : world * k;
  if (shards == 1 && rows <= kGemmTileM) return ChooseFew(rows, n, sum, machine, /*most=*/1);
  const TileCosts costs = Loading(kGatherCosts, k, n, transpose_rhs, world);
  const auto cost = [&](const GemmChoice& c) {
    const int64_t m = shards * RoundUp<int64_t>(rows, kGemmTileM * c.cluster_m);
    return EstimateCost(c, m, n, sum, machine, costs, kExposed / machine.LinkShare());
  };
  GemmChoice best{192, 1, 16};
  for (const GemmChoice& c : kCompiled) {
    if (cost(c) < cost(best)) best = c;
  }
  // Shorter raster groups if a shard has more than one, as in ChooseGemm.
  if (best.cluster_m == 2 && rows > kGemmTileM * best.cluster_m * best.group_m) best.group_m = 4;
  return concat_rows ? GatherGroups(best, world, rows, n, machine)
                     : TermGroups(best, world, rows, machine);
}

// How many CTAs send: as many as in an all-gather with the same world and n, since a rank sends as
// many bytes per operation. With few rows all CTAs send.
inline int32_t AllToAllMatmulSenders(const AllToAllMatmulParams& p, const Machine& machine) {
  const Machine used{Min(machine.sm_count, kMostSms), machine.link_gbps};
  return p.rows.PerRank() <= kGemmTileM ? used.sm_count : SendingCtas(p.rows.world, p.n, used);
}

bool PlanAllToAllMatmul(const Fields& call, const Machine& machine, Fields* plan,
                        std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_TO_ALL_MATMUL_ALL_TO_ALL_MATMUL_CONFIG_H_
