// The plan and the FFI handlers of matmul_all_reduce.
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

bool PlanMatmulAllReduce(CallReader& reader, const Machine& machine, Fields* plan,
                         std::string* why_not) {
  const ProductCall call = ProductCall::Read(reader);
  if (call.rows.outer != 1) reader.Refuse("`outer` is not 1");
  if (!reader.Check(why_not)) return false;
  const MatmulAllReduceParams p{
      {call.rows, call.k, call.n, call.dtype, call.out_dtype, call.transpose_rhs}};
  if (machine.IsCpu()) {
    *plan = CpuPlan(MatmulAllReduceCpuWorkspace(p).TotalBytes());
    return true;
  }
  if (!IsPlannable(call, WhyNoKernel(p, FormatsOf(machine)), why_not)) return false;
  const GemmChoice wanted =
      call.given.value_or(ChooseAllReduce(p.scatter.rows.world, p.scatter.rows.inner, call.n,
                                          call.k, call.dtype, machine, call.transpose_rhs));
  const GemmChoice choice = Possible(p, wanted);
  *plan = ProductPlan{choice, AllReduceSenders(p, machine),
                      MatmulAllReduceWorkspace(p, choice).TotalBytes()}
              .AsFields();
  return true;
}

// x [rows, k] of this rank, w and perhaps the residual; the result y [rows, n].
template <typename Call>
bool ReadOperands(const ProductAttributes& a, Call* call, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::RemainingArgs residual, ffi::AnyBuffer y) {
  MatmulAllReduceParams& p = call->p;
  MatmulAllReduceArrays& arrays = call->arrays;
  const auto product = ProductOf<MatmulReduceScatterParams>(a, x, w, y);
  if (!product || x.dimensions().size() != 2 || a.outer != 1 || residual.size() > 1) return false;
  p.scatter = *product;
  const int64_t rows = p.scatter.rows.Total(), k = p.scatter.k, n = p.scatter.n;
  if (CountOf(x) != rows * k || CountOf(w) != k * n || CountOf(y) != rows * n) return false;
  arrays = {x.untyped_data(), w.untyped_data(), y.untyped_data(), nullptr};
  if (residual.size() == 0) return true;
  const auto added = *residual.get<ffi::AnyBuffer>(0);
  arrays.residual = added.untyped_data();
  return added.element_type() == y.element_type() && CountOf(added) == CountOf(y);
}

struct CallOnCpu : TiledCall<kMatmulAllReduceId, MatmulAllReduceCpu> {
  std::string Read(const ProductAttributes& a, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs residual, ffi::Result<ffi::AnyBuffer> y) {
    if (!IsCpuPlan(a.choice, a.senders)) return kMalformed;
    return ReadOperands(a, this, x, w, residual, *y) ? "" : kDoNotFit;
  }
  int64_t WorkspaceBytes() const { return MatmulAllReduceCpuWorkspace(p).TotalBytes(); }
  bool Run(const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) const {
    return AreFewRows(p) ? FewRowsCpu(p, tiling.tile_n, arrays, view, epoch, ctx)
                         : MatmulAllReduceCpu(p, tiling, arrays, view, epoch, ctx);
  }
};

struct CallOnCuda : PlannedCall<kMatmulAllReduceId, LaunchMatmulAllReduce> {
  std::string Read(const ProductAttributes& a, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs residual, ffi::Result<ffi::AnyBuffer> y) {
    if (!ReadOperands(a, this, x, w, residual, *y)) return kDoNotFit;
    return ReadPlan(a) && WhyNoKernel(p).empty() && plan.choice == Possible(p, plan.choice)
               ? ""
               : kNoKernel;
  }
  int64_t WorkspaceBytes() const { return MatmulAllReduceWorkspace(p, plan.choice).TotalBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMatmulAllReduceOp;
const Op kMatmulAllReduceOp = {kMatmulAllReduceId, "matmul_all_reduce",
                               OnCpu<CallOnCpu>,   JFLUX_IF_CUDA(OnCuda<CallOnCuda>),
                               kCpuFormats,        kMatmulAllReduceFormats,
                               PlanMatmulAllReduce};

}  // namespace jflux
