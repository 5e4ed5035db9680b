// FFI handlers of matmul_all_reduce.
#include "ops/matmul_all_reduce/few_rows.h"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ops/matmul_all_reduce/matmul_all_reduce_config.h"
#include "runtime/ffi.h"
#include "runtime/targets.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/matmul_all_reduce/matmul_all_reduce_cuda.h"
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// x [rows, k] of this rank, w and the result y [rows, n] -> what to compute; empty if they do not
// fit together.
std::optional<MatmulAllReduceParams> ParamsOf(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
                                              const ffi::AnyBuffer& y, int64_t world, int64_t inner,
                                              bool transpose_rhs) {
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() != 2 || w.dimensions().size() != 2) return std::nullopt;
  MatmulAllReduceParams p{};
  p.scatter.rows = Rows{static_cast<int32_t>(world), 1, inner};
  p.scatter.k = x.dimensions()[1];
  p.scatter.n = w.dimensions()[transpose_rhs ? 0 : 1];
  p.scatter.dtype = *dtype;
  p.scatter.out_dtype = *out_dtype;
  p.scatter.transpose_rhs = transpose_rhs;
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

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Span<const int64_t>,
                ffi::Span<const int64_t> groups, int64_t inner, int64_t, int64_t,
                bool transpose_rhs, int64_t world, ffi::AnyBuffer x, ffi::AnyBuffer w,
                ffi::RemainingArgs residual, ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(x, w, *y, world, inner, transpose_rhs);
  const auto arrays = ArraysOf(x, w, residual, *y);
  if (!p || !arrays) {
    return FailedFuture(InvalidArgument("matmul_all_reduce: operands do not fit"));
  }
  const ScatterTiling tiling;
  const WorkspaceLayout workspace =
      AreFewRows(*p) ? FewRowsLayoutOf(*p, tiling.tile_n).Workspace()
                     : MatmulAllReduceLayout::Make(*p, tiling.tile_m, tiling.tile_n, 1).Workspace();
  return JoinFfiCall(
      OpId::kMatmulAllReduce, site, run_id, device, groups, world, workspace.TotalBytes(),
      [p = *p, tiling, arrays = *arrays](const SymmetricView& view, uint32_t epoch,
                                         const WaitContext& ctx) {
        return AreFewRows(p) ? FewRowsCpu(p, tiling.tile_n, arrays, view, epoch, ctx)
                             : MatmulAllReduceCpu(p, tiling, arrays, view, epoch, ctx);
      });
}

XLA_FFI_DEFINE_HANDLER(
    kCpu, Cpu,
    ProductAttributes(
        ffi::Ffi::Bind().Ctx<ffi::State<CallSite>>().Ctx<ffi::RunId>().Ctx<ffi::DeviceOrdinal>())
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .RemainingArgs()
        .Ret<ffi::AnyBuffer>());

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Span<const int64_t> choice,
                ffi::Span<const int64_t> groups, int64_t inner, int64_t, int64_t site,
                bool transpose_rhs, int64_t world, ffi::AnyBuffer x, ffi::AnyBuffer w,
                ffi::RemainingArgs residual, ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(x, w, *y, world, inner, transpose_rhs);
  const auto arrays = ArraysOf(x, w, residual, *y);
  if (!p || !FitsKernel(*p) || !arrays) {
    return InvalidArgument("matmul_all_reduce: operands do not fit");
  }
  if (!IsPossibleChoice(choice)) {
    return InvalidArgument("matmul_all_reduce: no kernel for this `choice`");
  }
  const auto choice_for = [&](int sm_count) {
    return Possible(*p, ChoiceOf(choice).value_or(ChooseAllReduce(
                            p->scatter.rows.world, inner, p->scatter.n, p->scatter.k, sm_count)));
  };
  return LaunchCudaCall(
      OpId::kMatmulAllReduce, ordinal, groups, world,
      [&](int sm_count) { return MatmulAllReduceWorkspace(*p, choice_for(sm_count)); },
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchMatmulAllReduce(*p, *arrays, choice_for(device.sm_count), site, device, view,
                                     stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda,
                       ProductAttributes(ffi::Ffi::Bind()
                                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                             .Ctx<ffi::DeviceOrdinal>())
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

XLA_FFI_Error* MatmulAllReduceCpuHandler(XLA_FFI_CallFrame* frame) { return kCpu(frame); }

#ifdef JFLUX_WITH_CUDA
XLA_FFI_Error* MatmulAllReduceCudaHandler(XLA_FFI_CallFrame* frame) { return kCuda(frame); }
#endif

}  // namespace jflux
