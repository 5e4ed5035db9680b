// Pure functions for the plan of an all_gather_matmul on GPUs: its layout, its GEMM
// configuration if no tuning table has one, and how many CTAs send.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_CONFIG_H_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_CONFIG_H_

#include "gpu/gemm_choice.h"
#include "gpu/senders.h"
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/all_gather_matmul/k_panel_layout.h"
#include "runtime/op.h"

namespace jflux {

inline constexpr char kWhatFitsAllGather[] =
    "16-bit operands, results of their type or float32, and k and n that are multiples of 8";
inline bool FitsKernel(const AllGatherMatmulParams& p) {
  return SizeOf(p.dtype) == 2 && (p.out_dtype == p.dtype || p.out_dtype == DType::kF32) &&
         p.k % 8 == 0 && p.n % 8 == 0;
}

inline KPanelLayout CudaLayoutOf(const AllGatherMatmulParams& p) {
  static_assert(KPanelLayout::kPanelRows == kGemmTileM && KPanelLayout::kColumns == kGemmTileK);
  return KPanelLayout::Make(p.rows, p.k);
}

inline GemmChoice ChooseAllGather(int world, int64_t rows_per_rank, int64_t n, int64_t k,
                                  const Machine& machine, bool transpose_rhs = false) {
  const int64_t m = world * rows_per_rank;
  if (m <= kGemmTileM) return ChooseFew(m, n, k, machine, kGatherSplits);
  const GemmChoice c = ChooseGemm(world, rows_per_rank, n, k, machine,
                                  Loading(kGatherCosts, k, n, transpose_rhs, world));
  return GatherGroups(c, world, rows_per_rank, n, machine);
}

// CTAs that may send. With few rows all do. (One raster group of 512 or 1024 rows is faster with
// fewer: 2 x H200.)
inline int32_t AllGatherSenders(const AllGatherMatmulParams& p, const Machine& machine) {
  const Machine used{Min(machine.sm_count, kMostSms), machine.link_gbps};
  return p.rows.Total() <= kGemmTileM ? used.sm_count : SendingCtas(p.rows.world, p.n, used);
}

bool PlanAllGatherMatmul(const Fields& call, const Machine& machine, Fields* plan,
                         std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_CONFIG_H_
