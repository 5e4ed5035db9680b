// FFI handlers of the exchanges.
#include <string>

#include "ops/exchange/exchange.h"
#include "runtime/fault.h"
#include "runtime/ffi.h"
#include "runtime/targets.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/exchange/exchange_cuda.h"
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// How one shard lies in x and in y, in bytes (core/units.h) -> what to compute; empty if operands
// do not fit.
std::optional<ExchangeParams> ParamsOf(OpId op, bool chunked, int64_t world, int64_t x_inner,
                                       int64_t x_outer, int64_t y_inner, int64_t y_outer,
                                       const ffi::AnyBuffer& x, const ffi::AnyBuffer& y) {
  const auto ranks = static_cast<int32_t>(world);
  ExchangeParams p{};
  p.op = op;
  p.world = ranks;
  p.x = Shards{op == OpId::kAllGather ? 1 : ranks, x_outer, x_inner};
  p.y = Shards{op == OpId::kReduceScatter ? 1 : ranks, y_outer, y_inner};
  p.chunked = chunked;
  p.dtype = DType::kF32;
  if (p.Sums()) {
    const auto dtype = DTypeOf(x.element_type());
    if (!dtype) return std::nullopt;
    p.dtype = *dtype;
  }
  const auto bytes = [](const Shards& shards) { return shards.world * shards.Bytes(); };
  if (x.element_type() != y.element_type() || x_outer < 1 || x_inner < 1 ||
      p.x.Bytes() != p.y.Bytes() || bytes(p.x) != static_cast<int64_t>(x.size_bytes()) ||
      bytes(p.y) != static_cast<int64_t>(y.size_bytes())) {
    return std::nullopt;
  }
  return p;
}

ffi::Error DoNotFit(OpId op) {
  return InvalidArgument(std::string(NameOf(op)) + ": operands do not fit");
}

template <OpId kOp>
ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, bool chunked,
                ffi::Span<const int64_t> groups, int64_t, int64_t world, int64_t x_inner,
                int64_t x_outer, int64_t y_inner, int64_t y_outer, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(kOp, chunked, world, x_inner, x_outer, y_inner, y_outer, x, *y);
  if (!p) return FailedFuture(DoNotFit(kOp));
  const ExchangeArrays arrays{x.untyped_data(), y->untyped_data()};
  return JoinFfiCall(
      kOp, site, run_id, device, groups, world, p->WorkspaceBytes(),
      [p = *p, arrays](const SymmetricView& view, uint32_t epoch, const WaitContext& ctx) {
        return ExchangeCpu(p, arrays, view, epoch, ctx);
      });
}

// Attributes in alphabetical order, operands and results, as Cpu() and Cuda() take them.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding)
      .template Attr<bool>("chunked")
      .template Attr<ffi::Span<const int64_t>>("groups")
      .template Attr<int64_t>("site")
      .template Attr<int64_t>("world")
      .template Attr<int64_t>("x_inner")
      .template Attr<int64_t>("x_outer")
      .template Attr<int64_t>("y_inner")
      .template Attr<int64_t>("y_outer")
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
};
constexpr auto CpuBinding = [] {
  return Bindings(
      ffi::Ffi::Bind().Ctx<ffi::State<CallSite>>().Ctx<ffi::RunId>().Ctx<ffi::DeviceOrdinal>());
};

XLA_FFI_DEFINE_HANDLER(kAllGatherCpu, Cpu<OpId::kAllGather>, CpuBinding());
XLA_FFI_DEFINE_HANDLER(kAllToAllCpu, Cpu<OpId::kAllToAll>, CpuBinding());
XLA_FFI_DEFINE_HANDLER(kReduceScatterCpu, Cpu<OpId::kReduceScatter>, CpuBinding());

#ifdef JFLUX_WITH_CUDA
template <OpId kOp>
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, bool chunked, ffi::Span<const int64_t> groups,
                int64_t site, int64_t world, int64_t x_inner, int64_t x_outer, int64_t y_inner,
                int64_t y_outer, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(kOp, chunked, world, x_inner, x_outer, y_inner, y_outer, x, *y);
  if (!p) return DoNotFit(kOp);
  const ExchangeArrays arrays{x.untyped_data(), y->untyped_data()};
  const auto launch = [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
    return LaunchExchange(*p, arrays, site, device, view, stream, error);
  };
  if (chunked) {
    return LaunchCudaCall(
        kOp, ordinal, groups, world, [&](int) { return p->Slots().Workspace(); }, launch);
  }
  return LaunchCudaCall(kOp, ordinal, groups, world, [&](int) { return p->Workspace(); }, launch);
}

constexpr auto CudaBinding = [] {
  return Bindings(
      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>());
};

XLA_FFI_DEFINE_HANDLER(kAllGatherCuda, Cuda<OpId::kAllGather>, CudaBinding(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kAllToAllCuda, Cuda<OpId::kAllToAll>, CudaBinding(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kReduceScatterCuda, Cuda<OpId::kReduceScatter>, CudaBinding(),
                       {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

XLA_FFI_Error* AllGatherCpuHandler(XLA_FFI_CallFrame* frame) { return kAllGatherCpu(frame); }
XLA_FFI_Error* AllToAllCpuHandler(XLA_FFI_CallFrame* frame) { return kAllToAllCpu(frame); }
XLA_FFI_Error* ReduceScatterCpuHandler(XLA_FFI_CallFrame* frame) {
  return kReduceScatterCpu(frame);
}

#ifdef JFLUX_WITH_CUDA
XLA_FFI_Error* AllGatherCudaHandler(XLA_FFI_CallFrame* frame) { return kAllGatherCuda(frame); }
XLA_FFI_Error* AllToAllCudaHandler(XLA_FFI_CallFrame* frame) { return kAllToAllCuda(frame); }
XLA_FFI_Error* ReduceScatterCudaHandler(XLA_FFI_CallFrame* frame) {
  return kReduceScatterCuda(frame);
}
#endif

}  // namespace jflux
