// The plan and the FFI handlers of the exchanges.
#include <string>

#include "ops/exchange/exchange.h"
#include "runtime/fault.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

// Fields of a call: world, shard_bytes and chunked. Of the plan: workspace_bytes.
bool PlanExchange(CallReader& call, const Machine&, Fields* plan, std::string* why_not) {
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
    read("chunked", &chunked)("x_inner", &x_inner)("x_outer", &x_outer)("y_inner", &y_inner)(
        "y_outer", &y_outer);
  }
};

template <OpId kOp>
struct Call : CallOf<kOp, ExchangeCpu, LaunchExchange> {
  using CallOf<kOp, ExchangeCpu, LaunchExchange>::p,
      CallOf<kOp, ExchangeCpu, LaunchExchange>::arrays;

  std::string Read(const Attributes& a, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
    const auto ranks = static_cast<int32_t>(a.call.world);
    p.op = kOp;
    p.world = ranks;
    p.x = Shards{kOp == kAllGatherId ? 1 : ranks, a.x_outer, a.x_inner};
    p.y = Shards{kOp == kReduceScatterId ? 1 : ranks, a.y_outer, a.y_inner};
    p.chunked = a.chunked;
    p.dtype = DType::kF32;
    if (p.Sums()) {
      const auto dtype = DTypeOf(x.element_type());
      if (!dtype) return kDoNotFit;
      p.dtype = *dtype;
    }
    const auto bytes = [](const Shards& shards) { return shards.world * shards.Bytes(); };
    if (x.element_type() != y->element_type() || a.x_outer < 1 || a.x_inner < 1 ||
        p.x.Bytes() != p.y.Bytes() || bytes(p.x) != static_cast<int64_t>(x.size_bytes()) ||
        bytes(p.y) != static_cast<int64_t>(y->size_bytes())) {
      return kDoNotFit;
    }
    arrays = {x.untyped_data(), y->untyped_data()};
    return "";
  }
  int64_t WorkspaceBytes() const { return p.WorkspaceBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllGatherOp, kAllToAllOp, kReduceScatterOp;
const Op kAllGatherOp = {kAllGatherId,
                         "all_gather",
                         OnCpu<Call<kAllGatherId>>,
                         JFLUX_IF_CUDA(OnCuda<Call<kAllGatherId>>),
                         kMovesBytes,
                         kMovesBytes,
                         PlanExchange};
const Op kAllToAllOp = {kAllToAllId,
                        "all_to_all",
                        OnCpu<Call<kAllToAllId>>,
                        JFLUX_IF_CUDA(OnCuda<Call<kAllToAllId>>),
                        kMovesBytes,
                        kMovesBytes,
                        PlanExchange};
const Op kReduceScatterOp = {kReduceScatterId,
                             "reduce_scatter",
                             OnCpu<Call<kReduceScatterId>>,
                             JFLUX_IF_CUDA(OnCuda<Call<kReduceScatterId>>),
                             kExchangeFormats,
                             kExchangeFormats,
                             PlanExchange};

}  // namespace jflux
