// The CPU back end of the exchanges: one thread does a rank's part.
#include "ops/exchange/exchange_body.h"
#include "runtime/packet_call_cpu.h"

namespace jflux {

bool ExchangeCpu(const ExchangeParams& p, const ExchangeArrays& arrays, const SymmetricView& view,
                 uint32_t epoch, const WaitContext& ctx) {
  return RunPackets(p, view, epoch, ctx, [&](const PacketCall& call) {
    return WithNumbers(p.dtype, [&](auto number) {
      return ExchangeBody<decltype(number)>{p, arrays, call}.Run(0, 1);
    });
  });
}

}  // namespace jflux
