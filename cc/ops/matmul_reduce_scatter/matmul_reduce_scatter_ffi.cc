// FFI handlers of matmul_reduce_scatter.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/ffi.h"
#include "runtime/targets.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_cuda.h"
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// x [..., k] of this rank, w and the result y -> what to compute; empty if they do not fit
// together.
std::optional<MatmulReduceScatterParams> ParamsOf(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
                                                  const ffi::AnyBuffer& y, int64_t world,
                                                  int64_t outer, int64_t inner,
                                                  bool transpose_rhs) {
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() < 2 || w.dimensions().size() != 2) return std::nullopt;
  MatmulReduceScatterParams p{};
  p.rows = Rows{static_cast<int32_t>(world), outer, inner};
  p.k = x.dimensions().back();
  p.n = w.dimensions()[transpose_rhs ? 0 : 1];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = transpose_rhs;
  const auto count = [](const ffi::AnyBuffer& b) {
    return static_cast<int64_t>(b.element_count());
  };
  if (p.rows.PerRank() == 0 || p.k == 0 || p.n == 0) return std::nullopt;
  if (count(x) != p.rows.Total() * p.k || count(w) != p.k * p.n ||
      count(y) != p.rows.PerRank() * p.n) {
    return std::nullopt;
  }
  return p;
}

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Span<const int64_t>,
                ffi::Span<const int64_t> groups, int64_t inner, int64_t outer, int64_t,
                bool transpose_rhs, int64_t world, ffi::AnyBuffer x, ffi::AnyBuffer w,
                ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(x, w, *y, world, outer, inner, transpose_rhs);
  if (!p) return FailedFuture(InvalidArgument("matmul_reduce_scatter: operands do not fit"));
  const MatmulReduceScatterArrays arrays{x.untyped_data(), w.untyped_data(), y->untyped_data()};

  const ScatterTiling tiling;
  const int64_t bytes =
      ReduceScatterLayout::Make(*p, tiling.tile_m, tiling.tile_n, 1).Workspace().TotalBytes();
  return JoinFfiCall(
      OpId::kMatmulReduceScatter, site, run_id, device, groups, world, bytes,
      [p = *p, tiling, arrays](const SymmetricView& view, uint32_t epoch, const WaitContext& ctx) {
        return MatmulReduceScatterCpu(p, tiling, arrays, view, epoch, ctx);
      });
}

XLA_FFI_DEFINE_HANDLER(
    kCpu, Cpu,
    ProductAttributes(
        ffi::Ffi::Bind().Ctx<ffi::State<CallSite>>().Ctx<ffi::RunId>().Ctx<ffi::DeviceOrdinal>())
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>());

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, bool adds_bias, bool adds_residual,
                ffi::Span<const int64_t> choice, ffi::Span<const int64_t> groups, int64_t inner,
                int64_t outer, int64_t site, bool transpose_rhs, int64_t world,
                ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y) {
  // Operands x_0 .. x_p-1, w_0 .. w_p-1, and perhaps the bias and the residual.
  const size_t added = (adds_bias ? 1 : 0) + (adds_residual ? 1 : 0);
  const size_t count = args.size() < added ? 0 : (args.size() - added) / 2;
  if (count < 1 || count > kMaxWeights || args.size() != 2 * count + added) {
    return InvalidArgument("matmul_reduce_scatter: operands do not fit");
  }
  MatmulReduceScatterOperands operands{};
  operands.terms = static_cast<int32_t>(count);
  operands.y = y->untyped_data();
  std::optional<MatmulReduceScatterParams> p;
  int64_t k = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto x = *args.get<ffi::AnyBuffer>(i), w = *args.get<ffi::AnyBuffer>(count + i);
    p = ParamsOf(x, w, *y, world, outer, inner, transpose_rhs);
    if (!p) return InvalidArgument("matmul_reduce_scatter: operands do not fit");
    operands.products[i] = {x.untyped_data(), w.untyped_data(), p->k};
    k += p->k;
  }
  p->k = k;
  if (adds_bias) {
    const auto bias = *args.get<ffi::AnyBuffer>(2 * count);
    if (bias.element_type() != ffi::F32 || static_cast<int64_t>(bias.element_count()) != p->n) {
      return InvalidArgument("matmul_reduce_scatter: the bias does not fit");
    }
    operands.bias = static_cast<const float*>(bias.untyped_data());
  }
  if (adds_residual) {
    const auto residual = *args.get<ffi::AnyBuffer>(args.size() - 1);
    if (residual.element_type() != y->element_type() ||
        residual.element_count() != y->element_count()) {
      return InvalidArgument("matmul_reduce_scatter: the residual does not fit");
    }
    operands.residual = residual.untyped_data();
  }
  if (!IsPossibleChoice(choice)) {
    return InvalidArgument("matmul_reduce_scatter: no kernel for this `choice`");
  }
  const auto choice_for = [&](int sm_count) {
    const GemmChoice wanted = ChoiceOf(choice).value_or(
        ChooseReduceScatter(p->rows.world, p->rows.PerRank(), p->n, p->k, sm_count));
    return FitSplits(wanted, p->rows.Total(), operands.products[0].k, kReduceSplits);
  };
  return LaunchCudaCall(
      OpId::kMatmulReduceScatter, ordinal, groups, world,
      [&](int sm_count) { return MatmulReduceScatterWorkspace(*p, choice_for(sm_count)); },
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchMatmulReduceScatter(*p, operands, choice_for(device.sm_count), site, device,
                                         view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda,
                       ProductAttributes(ffi::Ffi::Bind()
                                             .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                             .Ctx<ffi::DeviceOrdinal>()
                                             .Attr<bool>("adds_bias")
                                             .Attr<bool>("adds_residual"))
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

XLA_FFI_Error* MatmulReduceScatterCpuHandler(XLA_FFI_CallFrame* frame) { return kCpu(frame); }

#ifdef JFLUX_WITH_CUDA
XLA_FFI_Error* MatmulReduceScatterCudaHandler(XLA_FFI_CallFrame* frame) { return kCuda(frame); }
#endif

}  // namespace jflux
