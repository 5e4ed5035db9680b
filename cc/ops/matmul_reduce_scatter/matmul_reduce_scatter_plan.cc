// The plan of a matmul_reduce_scatter.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_config.h"
#include "runtime/product_plan.h"

namespace jflux {

bool PlanMatmulReduceScatter(const Fields& fields, const Machine& machine, Fields* plan,
                             std::string* why_not) {
  CallReader reader(fields);
  const ProductCall call = ProductCall::Read(reader);
  const int64_t first_k = reader.GetOr("first_k", call.k, 1, call.k);  // of the first term
  if (!reader.Check(why_not)) return false;
  const MatmulReduceScatterParams p{call.rows,  call.k,         call.n,
                                    call.dtype, call.out_dtype, call.transpose_rhs};
  if (machine.IsCpu()) {
    const ScatterTiling tiling;
    const auto layout =
        ReduceScatterLayout::Make(p, tiling.tile_m, tiling.tile_n, /*signals_per_slot=*/1);
    *plan = CpuPlan(layout.Workspace().TotalBytes());
    return true;
  }
  if (!IsPlannable(call, FitsKernel(p), kWhatFitsReduceScatter, why_not)) return false;
  const GemmChoice wanted = call.given.value_or(
      ChooseReduceScatter(p.rows.world, p.rows.PerRank(), p.n, p.k, machine, p.transpose_rhs));
  // Each of the CTAs that share k has some of the first term's.
  const GemmChoice choice = FitSplits(wanted, p.rows.Total(), first_k, kReduceSplits);
  *plan = ProductPlan{choice, ReduceScatterSenders(p, choice, machine),
                      CudaLayoutOf(p, choice).Workspace().TotalBytes()}
              .AsFields();
  return true;
}

}  // namespace jflux
