// The CPU back end of all_reduce: one thread does a rank's part.
#include "ops/all_reduce/all_reduce_body.h"

namespace jflux {
namespace {

template <typename T>
bool Run(const AllReduceParams& p, const AllReduceArrays& arrays, const PacketCall& call) {
  return AllReduceBody<T>{p, arrays, call}.Run(0, 1);
}

bool RunAs(const AllReduceParams& p, const AllReduceArrays& arrays, const PacketCall& call) {
  switch (p.dtype) {
    case DType::kF16:
      return Run<F16>(p, arrays, call);
    case DType::kBF16:
      return Run<BF16>(p, arrays, call);
    case DType::kF32:
      return Run<float>(p, arrays, call);
    case DType::kF64:
      return Run<double>(p, arrays, call);
  }
  return false;
}

}  // namespace

bool AllReduceCpu(const AllReduceParams& p, const AllReduceArrays& arrays,
                  const SymmetricView& view, uint32_t epoch, const WaitContext& ctx) {
  const PacketCall call{view, p.Channel(), epoch, p.Signature(), ctx, /*patience_ns=*/0};
  for (int peer = 0; peer < p.world; ++peer) {
    if (peer != view.rank) call.SendHello(peer);
  }
  if (!RunAs(p, arrays, call)) return false;
  for (int peer = 0; peer < p.world; ++peer) {
    if (peer != view.rank && !call.AwaitHello(peer)) return false;
  }
  return true;
}

}  // namespace jflux
