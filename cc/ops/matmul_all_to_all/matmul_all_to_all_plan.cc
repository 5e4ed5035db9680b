// The plan of a matmul_all_to_all.
#include "ops/matmul_all_to_all/matmul_all_to_all_config.h"
#include "runtime/product_plan.h"

namespace jflux {

bool PlanMatmulAllToAll(const Fields& fields, const Machine& machine, Fields* plan,
                        std::string* why_not) {
  CallReader reader(fields);
  const ProductCall call = ProductCall::Read(reader);
  MatmulAllToAllParams p{call.rows,          call.k, call.n, call.dtype, call.out_dtype,
                         call.transpose_rhs, false,  false};
  p.split_rows = reader.GetOr("split_rows", 0, 0, 1) == 1;
  p.concat_rows = reader.GetOr("concat_rows", 0, 0, 1) == 1;
  if (!reader.Check(why_not)) return false;
  if (machine.IsCpu()) {
    const ShardTiling tiling;
    const auto layout = AllToAllLayout::Make(p, tiling.tile_m, tiling.tile_n);
    *plan = CpuPlan(layout.Workspace().TotalBytes());
    return true;
  }
  if (!IsPlannable(call, FitsKernel(p), kWhatFitsAllToAll, why_not)) return false;
  const GemmChoice wanted = call.given.value_or(
      ChooseAllToAll(p.rows.world, p.rows.PerRank(), p.n, p.k, machine, p.transpose_rhs));
  const GemmChoice choice = FitSplits(wanted, p.rows.Total(), p.k, /*most=*/1);
  *plan = ProductPlan{choice, AllToAllSenders(p, choice, machine),
                      CudaLayoutOf(p, choice).Workspace().TotalBytes()}
              .AsFields();
  return true;
}

}  // namespace jflux
