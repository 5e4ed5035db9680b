// FFI handlers of all_gather_matmul.
#include <algorithm>

#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "runtime/ffi.h"
#include "runtime/targets.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/all_gather_matmul/all_gather_matmul_cuda.h"
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// x [..., k] of this rank, w, and the results y[, gathered] -> what to compute; empty if they
// do not fit together.
std::optional<AllGatherMatmulParams> ParamsOf(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
                                              const ffi::AnyBuffer& y, int64_t world, int64_t outer,
                                              int64_t inner, bool transpose_rhs, bool gathered) {
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() < 2 || w.dimensions().size() != 2) return std::nullopt;
  AllGatherMatmulParams p{};
  p.rows = Rows{static_cast<int32_t>(world), outer, inner};
  p.k = x.dimensions().back();
  p.n = w.dimensions()[transpose_rhs ? 0 : 1];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = transpose_rhs;
  p.return_gathered = gathered;
  const auto count = [](const ffi::AnyBuffer& b) {
    return static_cast<int64_t>(b.element_count());
  };
  if (p.rows.PerRank() == 0 || p.k == 0 || p.n == 0) return std::nullopt;
  if (count(x) != p.rows.PerRank() * p.k || count(w) != p.k * p.n ||
      count(y) != p.rows.Total() * p.n) {
    return std::nullopt;
  }
  return p;
}

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Span<const int64_t>,
                ffi::Span<const int64_t> groups, int64_t inner, int64_t outer, int64_t,
                bool transpose_rhs, int64_t world, ffi::AnyBuffer x, ffi::AnyBuffer w,
                ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets rest) {
  const auto p = ParamsOf(x, w, *y, world, outer, inner, transpose_rhs, rest.size() > 0);
  if (!p) return FailedFuture(InvalidArgument("all_gather_matmul: operands do not fit"));
  AllGatherMatmulArrays arrays{x.untyped_data(), w.untyped_data(), y->untyped_data(), nullptr};
  if (rest.size() > 0) arrays.gathered = (*rest.get<ffi::AnyBuffer>(0))->untyped_data();

  const CpuTiling tiling;
  const int64_t bytes = AllGatherLayout::Make(*p, tiling.chunk_bytes).Workspace().TotalBytes();
  return JoinFfiCall(
      OpId::kAllGatherMatmul, site, run_id, device, groups, world, bytes,
      [p = *p, tiling, arrays](const SymmetricView& view, uint32_t epoch, const WaitContext& ctx) {
        return AllGatherMatmulCpu(p, tiling, arrays, view, epoch, ctx);
      });
}

XLA_FFI_DEFINE_HANDLER(
    kCpu, Cpu,
    ProductAttributes(
        ffi::Ffi::Bind().Ctx<ffi::State<CallSite>>().Ctx<ffi::RunId>().Ctx<ffi::DeviceOrdinal>())
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .RemainingRets());

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, int64_t activation,
                ffi::Span<const int64_t> biased, ffi::Span<const int64_t> choice, bool gated,
                ffi::Span<const int64_t> groups, int64_t inner, int64_t outer, int64_t site,
                bool sums, bool transpose_rhs, int64_t world, ffi::AnyBuffer x,
                ffi::RemainingArgs rest, ffi::RemainingRets results) {
  // Operands x, w_0 .. w_p-1, and a bias for each of them that is `biased`. Results: all y (of
  // which there is one if they are gated), p sums if there are `sums`, and perhaps the gathered x.
  const size_t count = biased.size(), products = gated ? 1 : count;
  const size_t biases = std::count(biased.begin(), biased.end(), 1);
  const size_t computed = products + (sums ? count : 0);
  const bool gathered = results.size() == computed + 1;
  if (count < 1 || count > kMaxWeights || rest.size() != count + biases ||
      results.size() != computed + (gathered ? 1 : 0) || (gated && count != 2) ||
      !IsActivation(activation)) {
    return InvalidArgument("all_gather_matmul: operands do not fit");
  }
  AllGatherMatmulOperands operands{};
  operands.x = x.untyped_data();
  operands.weights = static_cast<int32_t>(count);
  operands.activation = static_cast<Activation>(activation);
  operands.gated = gated;
  size_t next_bias = count;
  std::optional<AllGatherMatmulParams> p;
  int64_t columns = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto w = *rest.get<ffi::AnyBuffer>(i);
    auto y = *results.get<ffi::AnyBuffer>(gated ? 0 : i);
    p = ParamsOf(x, w, *y, world, outer, inner, transpose_rhs, gathered);
    if (!p) return InvalidArgument("all_gather_matmul: operands do not fit");
    auto& product = operands.products[i];
    product.w = w.untyped_data();
    product.y = y->untyped_data();
    product.n = p->n;
    if (sums) product.sums = (*results.get<ffi::AnyBuffer>(products + i))->untyped_data();
    if (biased[i] == 1) {
      const auto bias = *rest.get<ffi::AnyBuffer>(next_bias++);
      if (bias.element_type() != ffi::F32 || static_cast<int64_t>(bias.element_count()) != p->n) {
        return InvalidArgument("all_gather_matmul: a bias does not fit");
      }
      product.bias = static_cast<const float*>(bias.untyped_data());
    }
    columns += p->n;
  }
  p->n = columns;
  if (gathered) operands.gathered = (*results.get<ffi::AnyBuffer>(computed))->untyped_data();
  if (!IsPossibleChoice(choice)) {
    return InvalidArgument("all_gather_matmul: no kernel for this `choice`");
  }
  const auto choice_for = [&](int sm_count) {
    const GemmChoice c = ChoiceOf(choice).value_or(
        ChooseAllGather(p->rows.world, p->rows.PerRank(), p->n, p->k, sm_count));
    return gated ? ForGate(c, p->rows.Total(), p->n, p->k, sm_count)
                 : FitSplits(c, p->rows.Total(), p->k, kGatherSplits);
  };
  return LaunchCudaCall(
      OpId::kAllGatherMatmul, ordinal, groups, world,
      [&](int) { return CudaLayoutOf(*p).Workspace(); },
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchAllGatherMatmul(*p, operands, choice_for(device.sm_count), site, device, view,
                                     stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attr<int64_t>("activation")
                           .Attr<ffi::Span<const int64_t>>("biased")
                           .Attr<ffi::Span<const int64_t>>("choice")
                           .Attr<bool>("gated")
                           .Attr<ffi::Span<const int64_t>>("groups")
                           .Attr<int64_t>("inner")
                           .Attr<int64_t>("outer")
                           .Attr<int64_t>("site")
                           .Attr<bool>("sums")
                           .Attr<bool>("transpose_rhs")
                           .Attr<int64_t>("world")
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

XLA_FFI_Error* AllGatherMatmulCpuHandler(XLA_FFI_CallFrame* frame) { return kCpu(frame); }

#ifdef JFLUX_WITH_CUDA
XLA_FFI_Error* AllGatherMatmulCudaHandler(XLA_FFI_CallFrame* frame) { return kCuda(frame); }
#endif

}  // namespace jflux
