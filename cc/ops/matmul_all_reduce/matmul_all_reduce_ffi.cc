// The plan and the FFI handlers of matmul_all_reduce.
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "runtime/ffi.h"
#include "runtime/product_plan.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

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

// x [rows, k] of this rank, w and the result y [rows, n] -> what to compute; empty if they do not
// fit together.
std::optional<MatmulAllReduceParams> ParamsOf(const ProductAttributes& a, const ffi::AnyBuffer& x,
                                              const ffi::AnyBuffer& w, const ffi::AnyBuffer& y) {
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() != 2 || w.dimensions().size() != 2 || a.outer != 1) {
    return std::nullopt;
  }
  MatmulAllReduceParams p{};
  p.scatter.rows = Rows{static_cast<int32_t>(a.call.world), 1, a.inner};
  p.scatter.k = x.dimensions()[1];
  p.scatter.n = w.dimensions()[a.transpose_rhs ? 0 : 1];
  p.scatter.dtype = *dtype;
  p.scatter.out_dtype = *out_dtype;
  p.scatter.transpose_rhs = a.transpose_rhs;
  const int64_t rows = p.scatter.rows.Total(), k = p.scatter.k, n = p.scatter.n;
  const auto count = [](const ffi::AnyBuffer& b) {
    return static_cast<int64_t>(b.element_count());
  };
  if (rows == 0 || k == 0 || n == 0) return std::nullopt;
  if (count(x) != rows * k || count(w) != k * n || count(y) != rows * n) return std::nullopt;
  return p;
}

// A call's arrays; empty if the residual does not fit.
std::optional<MatmulAllReduceArrays> ArraysOf(ffi::AnyBuffer x, ffi::AnyBuffer w,
                                              ffi::RemainingArgs residual, ffi::AnyBuffer y) {
  MatmulAllReduceArrays arrays{x.untyped_data(), w.untyped_data(), y.untyped_data(), nullptr};
  if (residual.size() > 1) return std::nullopt;
  if (residual.size() == 1) {
    const auto added = *residual.get<ffi::AnyBuffer>(0);
    if (added.element_type() != y.element_type() || added.element_count() != y.element_count()) {
      return std::nullopt;
    }
    arrays.residual = added.untyped_data();
  }
  return arrays;
}

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Dictionary attributes,
                ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs residual,
                ffi::Result<ffi::AnyBuffer> y) {
  ProductAttributes a;
  if (auto refused = ReadAttributes(kMatmulAllReduceId, attributes, &a)) {
    return FailedFuture(*refused);
  }
  if (!IsCpuPlan(a.choice, a.senders)) {
    return FailedFuture(InvalidArgument("matmul_all_reduce: malformed plan"));
  }
  const auto p = ParamsOf(a, x, w, *y);
  const auto arrays = ArraysOf(x, w, residual, *y);
  if (!p || !arrays) {
    return FailedFuture(InvalidArgument("matmul_all_reduce: operands do not fit"));
  }
  const ScatterTiling tiling;
  const int64_t bytes = MatmulAllReduceCpuWorkspace(*p).TotalBytes();
  return JoinFfiCall(kMatmulAllReduceId, site, run_id, device, a.call, bytes,
                     [p = *p, tiling, arrays = *arrays](const SymmetricView& view, uint64_t epoch,
                                                        const WaitContext& ctx) {
                       return AreFewRows(p)
                                  ? FewRowsCpu(p, tiling.tile_n, arrays, view, epoch, ctx)
                                  : MatmulAllReduceCpu(p, tiling, arrays, view, epoch, ctx);
                     });
}

// Operands x, w and perhaps the residual; the result y.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes, ffi::AnyBuffer x,
                ffi::AnyBuffer w, ffi::RemainingArgs residual, ffi::Result<ffi::AnyBuffer> y) {
  ProductAttributes a;
  if (auto refused = ReadAttributes(kMatmulAllReduceId, attributes, &a)) return *refused;
  const auto p = ParamsOf(a, x, w, *y);
  const auto arrays = ArraysOf(x, w, residual, *y);
  if (!p || !arrays) return InvalidArgument("matmul_all_reduce: operands do not fit");
  const auto plan = CudaPlanOf(a.choice, a.senders, a.call.workspace_bytes);
  if (!plan || !WhyNoKernel(*p).empty() || !(plan->choice == Possible(*p, plan->choice))) {
    return InvalidArgument("matmul_all_reduce: no kernel for this plan");
  }
  return LaunchCudaCall(
      kMatmulAllReduceId, ordinal, a.call, MatmulAllReduceWorkspace(*p, plan->choice).TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchMatmulAllReduce(*p, *arrays, *plan, a.call.site, device, view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMatmulAllReduceOp;
const Op kMatmulAllReduceOp = {kMatmulAllReduceId,   "matmul_all_reduce", kCpu,
                               JFLUX_IF_CUDA(kCuda), kCpuFormats,         kMatmulAllReduceFormats,
                               PlanMatmulAllReduce};

}  // namespace jflux
