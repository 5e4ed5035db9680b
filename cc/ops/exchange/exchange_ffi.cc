// The plan and the FFI handlers of the exchanges.
#include <string>

#include "ops/exchange/exchange.h"
#include "runtime/fault.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// Fields of a call: world, shard_bytes and chunked. Of the plan: workspace_bytes.
bool PlanExchange(const Fields& fields, const Machine&, Fields* plan, std::string* why_not) {
  CallReader call(fields);
  ExchangeParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.x = Shards{1, 1, call.Get("shard_bytes", 1, int64_t{1} << 40)};
  p.chunked = call.Get("chunked", 0, 1) == 1;
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"workspace_bytes", p.WorkspaceBytes()}};
  return true;
}

struct Attributes {
  CallAttributes call;
  bool chunked = false;
  // How one shard lies in x and in y, in bytes (core/units.h).
  int64_t x_inner = 0, x_outer = 0, y_inner = 0, y_outer = 0;

  void Read(AttributeReader& read) {
    call.Read(read);
    read("chunked", &chunked);
    read("x_inner", &x_inner);
    read("x_outer", &x_outer);
    read("y_inner", &y_inner);
    read("y_outer", &y_outer);
  }
};

// The parameters of the call; empty if operands do not fit.
std::optional<ExchangeParams> ParamsOf(OpId op, const Attributes& a, const ffi::AnyBuffer& x,
                                       const ffi::AnyBuffer& y) {
  const auto ranks = static_cast<int32_t>(a.call.world);
  ExchangeParams p{};
  p.op = op;
  p.world = ranks;
  p.x = Shards{op == kAllGatherId ? 1 : ranks, a.x_outer, a.x_inner};
  p.y = Shards{op == kReduceScatterId ? 1 : ranks, a.y_outer, a.y_inner};
  p.chunked = a.chunked;
  p.dtype = DType::kF32;
  if (p.Sums()) {
    const auto dtype = DTypeOf(x.element_type());
    if (!dtype) return std::nullopt;
    p.dtype = *dtype;
  }
  const auto bytes = [](const Shards& shards) { return shards.world * shards.Bytes(); };
  if (x.element_type() != y.element_type() || a.x_outer < 1 || a.x_inner < 1 ||
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
ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Dictionary attributes,
                ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  Attributes a;
  if (auto refused = ReadAttributes(kOp, attributes, &a)) return FailedFuture(*refused);
  const auto p = ParamsOf(kOp, a, x, *y);
  if (!p) return FailedFuture(DoNotFit(kOp));
  const ExchangeArrays arrays{x.untyped_data(), y->untyped_data()};
  return JoinFfiCall(
      kOp, site, run_id, device, a.call, p->WorkspaceBytes(),
      [p = *p, arrays](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
        return ExchangeCpu(p, arrays, view, epoch, ctx);
      });
}

// Operand and result.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding).template Arg<ffi::AnyBuffer>().template Ret<ffi::AnyBuffer>();
};
XLA_FFI_DEFINE_HANDLER(kAllGatherCpu, Cpu<kAllGatherId>, Bindings(BindCpu()));
XLA_FFI_DEFINE_HANDLER(kAllToAllCpu, Cpu<kAllToAllId>, Bindings(BindCpu()));
XLA_FFI_DEFINE_HANDLER(kReduceScatterCpu, Cpu<kReduceScatterId>, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
template <OpId kOp>
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> y) {
  Attributes a;
  if (auto refused = ReadAttributes(kOp, attributes, &a)) return *refused;
  const auto p = ParamsOf(kOp, a, x, *y);
  if (!p) return DoNotFit(kOp);
  const ExchangeArrays arrays{x.untyped_data(), y->untyped_data()};
  return LaunchCudaCall(
      kOp, ordinal, a.call, p->WorkspaceBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchExchange(*p, arrays, a.call.site, device, view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kAllGatherCuda, Cuda<kAllGatherId>, Bindings(BindCuda()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kAllToAllCuda, Cuda<kAllToAllId>, Bindings(BindCuda()),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kReduceScatterCuda, Cuda<kReduceScatterId>, Bindings(BindCuda()),
                       {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllGatherOp, kAllToAllOp, kReduceScatterOp;
const Op kAllGatherOp = {kAllGatherId, "all_gather", kAllGatherCpu, JFLUX_IF_CUDA(kAllGatherCuda),
                         kMovesBytes,  kMovesBytes,  PlanExchange};
const Op kAllToAllOp = {kAllToAllId, "all_to_all", kAllToAllCpu, JFLUX_IF_CUDA(kAllToAllCuda),
                        kMovesBytes, kMovesBytes,  PlanExchange};
const Op kReduceScatterOp = {
    kReduceScatterId, "reduce_scatter", kReduceScatterCpu, JFLUX_IF_CUDA(kReduceScatterCuda),
    kExchangeFormats, kExchangeFormats, PlanExchange};

}  // namespace jflux
