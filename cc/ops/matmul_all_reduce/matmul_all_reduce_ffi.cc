// The plan and the FFI handlers of matmul_all_reduce.
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

bool PlanMatmulAllReduce(CallReader& reader, const Machine& machine, Fields* plan,
                         std::string* why_not) {
  const ProductCall call = ProductCall::Read(reader);
  const auto scales = static_cast<Scales>(reader.GetOr("scales", 0, 0, 3));
  const DType w_dtype = reader.Has("w_dtype") ? reader.GetFormat("w_dtype") : call.dtype;
  if (call.rows.outer != 1) reader.Refuse("`outer` is not 1");
  if (!reader.Check(why_not)) return false;
  const MatmulAllReduceParams p{
      {call.rows, call.k, call.n, call.dtype, call.out_dtype, call.transpose_rhs, w_dtype}};
  if (machine.IsCpu()) {
    *plan = CpuPlan(MatmulAllReduceCpuWorkspace(p).TotalBytes());
    return true;
  }
  const bool portable = IsForPortable(machine);
  if (!IsPlannable(call, WhyNoKernel(p, portable), why_not)) return false;
  if (portable) {
    const GemmChoice choice = ChoosePortable(p.scatter.rows.world, p.scatter.rows.inner, machine);
    *plan = ProductPlan{choice, /*senders=*/0, MatmulAllReduceWorkspace(p, choice).TotalBytes()}
                .AsFields();
    return true;
  }
  const GemmChoice wanted =
      call.given.value_or(ChooseAllReduce(p.scatter.rows.world, p.scatter.rows.inner, call.n,
                                          call.k, call.dtype, machine, call.transpose_rhs));
  const GemmChoice choice = Possible(p, wanted, scales);
  *plan = ProductPlan{choice, AllReduceSenders(p, machine),
                      MatmulAllReduceWorkspace(p, choice).TotalBytes()}
              .AsFields();
  return true;
}

// x [rows, k] of this rank, w, perhaps the scales of x's rows and w's columns, and perhaps the
// residual; the result y [rows, n]. Why they do not fit, or "".
template <typename Call>
std::string ReadOperands(const ScaledAttributes& a, Call* call, ffi::AnyBuffer x, ffi::AnyBuffer w,
                         ffi::RemainingArgs rest, ffi::AnyBuffer y) {
  MatmulAllReduceParams& p = call->p;
  MatmulAllReduceArrays& arrays = call->arrays;
  DType w_dtype{};
  const auto product = ProductOf<MatmulReduceScatterParams>(a, x, w, y, &w_dtype);
  const size_t scales = a.scales != 0 ? 2 : 0;
  if (!product || x.dimensions().size() != 2 || a.outer != 1 || rest.size() < scales ||
      rest.size() > scales + 1) {
    return kDoNotFit;
  }
  p.scatter = *product;
  p.scatter.w_dtype = w_dtype;
  const int64_t rows = p.scatter.rows.Total(), k = p.scatter.k, n = p.scatter.n;
  if (CountOf(x) != rows * k || CountOf(w) != k * n || CountOf(y) != rows * n) return kDoNotFit;
  arrays = {x.untyped_data(), w.untyped_data(), y.untyped_data(), nullptr};
  if (rest.size() > scales) {
    const auto added = *rest.get<ffi::AnyBuffer>(scales);
    arrays.residual = added.untyped_data();
    if (added.element_type() != y.element_type() || CountOf(added) != CountOf(y)) return kDoNotFit;
  }
  return ReadScales(a.scales, rest, /*first=*/0, rows, n, CeilDiv<int64_t>(k, kScaleBlock),
                    p.scatter.dtype, &arrays);
}

struct CallOnCpu : TiledCall<kMatmulAllReduceId, MatmulAllReduceCpu> {
  std::string Read(const ScaledAttributes& a, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y) {
    if (!IsCpuPlan(a.choice, a.senders)) return kMalformed;
    if (a.scales != 0) return kDoNotFit;
    const std::string why = ReadOperands(a, this, x, w, rest, *y);
    return why.empty() && !AreForCpu(p.scatter) ? kDoNotFit : why;
  }
  int64_t WorkspaceBytes() const { return MatmulAllReduceCpuWorkspace(p).TotalBytes(); }
  bool Run(const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) const {
    return AreFewRows(p) ? FewRowsCpu(p, tiling.tile_n, arrays, view, epoch, ctx)
                         : MatmulAllReduceCpu(p, tiling, arrays, view, epoch, ctx);
  }
};

struct CallOnCuda : PlannedCall<kMatmulAllReduceId, LaunchMatmulAllReduce> {
  std::string Read(const ScaledAttributes& a, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y) {
    const std::string why = ReadOperands(a, this, x, w, rest, *y);
    if (!why.empty()) return why;
    if (!ReadPlan(a) || !WhyNoKernel(p, plan.choice.portable).empty()) return kNoKernel;
    if (plan.choice.portable) return arrays.scales == Scales::kNone ? "" : kNoKernel;
    return plan.choice == Possible(p, plan.choice, arrays.scales) ? "" : kNoKernel;
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
