// The CPU back end of the exchanges: one thread runs a rank's part.
#include "ops/exchange/exchange_body.h"
#include "runtime/packet_call_cpu.h"

namespace jflux {

bool ExchangeCpu(const ExchangeParams& p, const ExchangeArrays& arrays, const SymmetricView& view,
                 uint64_t epoch, const WaitContext& ctx) {
  if (p.chunked) {
    const auto run = [&](const shmem::Context& call) {
      return WithFormat(p.dtype, [&](auto format) {
        return ChunkedExchangeBody<Number<format>>{p, arrays, call}.Run();
      });
    };
    return shmem::internal::RunCall(view, p.Slots().Workspace(), epoch, p.Signature(), ctx, run);
  }
  return RunPackets(p, view, epoch, ctx, [&](const PacketCall& call) {
    return WithFormat(p.dtype, [&](auto format) {
      return ExchangeBody<Number<format>>{p, arrays, call}.Run(0, 1);
    });
  });
}

}  // namespace jflux
