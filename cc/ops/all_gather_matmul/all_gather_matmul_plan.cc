// The plan of an all_gather_matmul.
#include "ops/all_gather_matmul/all_gather_matmul_config.h"
#include "runtime/product_plan.h"

namespace jflux {

bool PlanAllGatherMatmul(const Fields& fields, const Machine& machine, Fields* plan,
                         std::string* why_not) {
  CallReader reader(fields);
  const ProductCall call = ProductCall::Read(reader);
  const bool gated = reader.GetOr("gated", 0, 0, 1) == 1;
  if (!reader.Check(why_not)) return false;
  const AllGatherMatmulParams p{call.rows,          call.k, call.n, call.dtype, call.out_dtype,
                                call.transpose_rhs, false};
  if (machine.IsCpu()) {
    const CpuTiling tiling;
    *plan = CpuPlan(AllGatherLayout::Make(p, tiling.chunk_bytes).Workspace().TotalBytes());
    return true;
  }
  if (!IsPlannable(call, FitsKernel(p), kWhatFitsAllGather, why_not)) return false;
  const int64_t rows = p.rows.Total();
  const int world = p.rows.world;
  const GemmChoice wanted = call.given.value_or(
      ChooseAllGather(world, p.rows.PerRank(), p.n, p.k, machine, p.transpose_rhs));
  const GemmChoice choice =
      gated ? ForGate(wanted, rows, p.n, p.k, machine,
                      Loading(kGatherCosts, p.k, p.n / 2, p.transpose_rhs, world))
            : FitSplits(wanted, rows, p.k, kGatherSplits);
  *plan =
      ProductPlan{choice, AllGatherSenders(p, machine), CudaLayoutOf(p).Workspace().TotalBytes()}
          .AsFields();
  return true;
}

}  // namespace jflux
