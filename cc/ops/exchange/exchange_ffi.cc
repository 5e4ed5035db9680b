// FFI handlers of the exchanges.
#include <string>

#include "ops/exchange/exchange_plan.h"
#include "runtime/fault.h"
#include "runtime/ffi.h"

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
  p.x = Shards{op == kAllGatherId ? 1 : ranks, x_outer, x_inner};
  p.y = Shards{op == kReduceScatterId ? 1 : ranks, y_outer, y_inner};
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
                ffi::Span<const int64_t> groups, int64_t, int64_t workspace_bytes, int64_t world,
                int64_t x_inner, int64_t x_outer, int64_t y_inner, int64_t y_outer,
                ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(kOp, chunked, world, x_inner, x_outer, y_inner, y_outer, x, *y);
  if (!p) return FailedFuture(DoNotFit(kOp));
  const ExchangeArrays arrays{x.untyped_data(), y->untyped_data()};
  return JoinFfiCall(
      kOp, site, run_id, device, groups, world, {p->WorkspaceBytes(), workspace_bytes},
      [p = *p, arrays](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
        return ExchangeCpu(p, arrays, view, epoch, ctx);
      });
}

// Attributes in alphabetical order, operands and results, as Cpu() and Cuda() take them.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding)
      .template Attr<bool>("chunked")
      .template Attr<ffi::Span<const int64_t>>("groups")
      .template Attr<int64_t>("site")
      .template Attr<int64_t>("workspace_bytes")
      .template Attr<int64_t>("world")
      .template Attr<int64_t>("x_inner")
      .template Attr<int64_t>("x_outer")
      .template Attr<int64_t>("y_inner")
      .template Attr<int64_t>("y_outer")
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
};
XLA_FFI_DEFINE_HANDLER(kAllGatherCpu, Cpu<kAllGatherId>, Bindings(BindCpu()));
XLA_FFI_DEFINE_HANDLER(kAllToAllCpu, Cpu<kAllToAllId>, Bindings(BindCpu()));
XLA_FFI_DEFINE_HANDLER(kReduceScatterCpu, Cpu<kReduceScatterId>, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
template <OpId kOp>
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, bool chunked, ffi::Span<const int64_t> groups,
                int64_t site, int64_t workspace_bytes, int64_t world, int64_t x_inner,
                int64_t x_outer, int64_t y_inner, int64_t y_outer, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(kOp, chunked, world, x_inner, x_outer, y_inner, y_outer, x, *y);
  if (!p) return DoNotFit(kOp);
  const ExchangeArrays arrays{x.untyped_data(), y->untyped_data()};
  return LaunchCudaCall(
      kOp, ordinal, groups, world, {p->WorkspaceBytes(), workspace_bytes},
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchExchange(*p, arrays, site, device, view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kAllGatherCuda, Cuda<kAllGatherId>, Bindings(BindCuda()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kAllToAllCuda, Cuda<kAllToAllId>, Bindings(BindCuda()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kReduceScatterCuda, Cuda<kReduceScatterId>, Bindings(BindCuda()),
                       {ffi::Traits::kCmdBufferCompatible});
bool (*const kLoadKernels)(std::string* error) = LoadExchangeKernels;
#else
constexpr XLA_FFI_Handler* kAllGatherCuda = nullptr;
constexpr XLA_FFI_Handler* kAllToAllCuda = nullptr;
constexpr XLA_FFI_Handler* kReduceScatterCuda = nullptr;
constexpr bool (*kLoadKernels)(std::string* error) = nullptr;
#endif

}  // namespace

// Listed in cc/ops/registry.cc. The first one loads the kernels of all.
extern const Op kAllGatherOp, kAllToAllOp, kReduceScatterOp;
const Op kAllGatherOp = {kAllGatherId, "all_gather",      kAllGatherCpu, kAllGatherCuda,
                         kLoadKernels, /*most_splits=*/1, PlanExchange};
const Op kAllToAllOp = {kAllToAllId, "all_to_all",      kAllToAllCpu, kAllToAllCuda,
                        nullptr,     /*most_splits=*/1, PlanExchange};
const Op kReduceScatterOp = {kReduceScatterId,   "reduce_scatter", kReduceScatterCpu,
                             kReduceScatterCuda, nullptr,          /*most_splits=*/1,
                             PlanExchange};

}  // namespace jflux
