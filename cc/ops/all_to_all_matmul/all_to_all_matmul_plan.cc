// The plan of an all_to_all_matmul.
#include "ops/all_to_all_matmul/all_to_all_matmul_config.h"
#include "runtime/product_plan.h"

namespace jflux {

// The call's k is the columns of a shard of x.
bool PlanAllToAllMatmul(const Fields& fields, const Machine& machine, Fields* plan,
                        std::string* why_not) {
  CallReader reader(fields);
  const ProductCall call = ProductCall::Read(reader);
  AllToAllMatmulParams p{};
  p.rows = call.rows;
  p.k = call.k;
  p.n = call.n;
  p.dtype = call.dtype;
  p.out_dtype = call.out_dtype;
  p.transpose_rhs = call.transpose_rhs;
  p.split_rows = reader.GetOr("split_rows", 0, 0, 1) == 1;
  p.concat_rows = reader.GetOr("concat_rows", 0, 0, 1) == 1;
  if (!reader.Check(why_not)) return false;
  if (machine.IsCpu()) {
    const AllToAllMatmulTiling tiling;
    const auto layout = AllToAllMatmulLayout::Make(p, tiling.chunk_bytes);
    *plan = CpuPlan(layout.Workspace().TotalBytes());
    return true;
  }
  if (!IsPlannable(call, FitsKernel(p), kWhatFitsAllToAllMatmul, why_not)) return false;
  const GemmChoice wanted = call.given.value_or(ChooseAllToAllMatmul(
      p.rows.world, p.rows.PerRank(), p.k, p.n, p.concat_rows, machine, p.transpose_rhs));
  const GemmChoice choice = FitSplits(wanted, p.RowsOfY(), p.KOfW(), /*most=*/1);
  *plan = ProductPlan{choice, AllToAllMatmulSenders(p, machine),
                      CudaLayoutOf(p).Workspace().TotalBytes()}
              .AsFields();
  return true;
}

}  // namespace jflux
