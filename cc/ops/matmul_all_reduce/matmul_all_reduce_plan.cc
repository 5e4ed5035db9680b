// The plan of a matmul_all_reduce.
#include "ops/matmul_all_reduce/matmul_all_reduce_config.h"
#include "runtime/product_plan.h"

namespace jflux {

bool PlanMatmulAllReduce(const Fields& fields, const Machine& machine, Fields* plan,
                         std::string* why_not) {
  CallReader reader(fields);
  const ProductCall call = ProductCall::Read(reader);
  if (call.rows.outer != 1) reader.Refuse("`outer` is not 1");
  if (!reader.Check(why_not)) return false;
  const MatmulAllReduceParams p{
      {call.rows, call.k, call.n, call.dtype, call.out_dtype, call.transpose_rhs}};
  if (machine.IsCpu()) {
    *plan = CpuPlan(MatmulAllReduceCpuWorkspace(p).TotalBytes());
    return true;
  }
  if (!IsPlannable(call, FitsKernel(p), kWhatFitsAllReduce, why_not)) return false;
  const GemmChoice wanted = call.given.value_or(ChooseAllReduce(
      p.scatter.rows.world, p.scatter.rows.inner, call.n, call.k, machine, call.transpose_rhs));
  const GemmChoice choice = Possible(p, wanted);
  *plan = ProductPlan{choice, AllReduceSenders(p, machine),
                      MatmulAllReduceWorkspace(p, choice).TotalBytes()}
              .AsFields();
  return true;
}

}  // namespace jflux
