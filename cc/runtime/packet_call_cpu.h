// Start and end of a call that exchanges LL packets (core/packet.h) on the CPU back end.
#ifndef JFLUX_RUNTIME_PACKET_CALL_CPU_H_
#define JFLUX_RUNTIME_PACKET_CALL_CPU_H_

#include <cstdint>

#include "core/packet.h"

namespace jflux {

// body(call) returns false if a wait failed.
template <typename Params, typename Body>
bool RunPackets(const Params& p, const SymmetricView& view, uint64_t epoch, const WaitContext& ctx,
                Body&& body) {
  const PacketCall call{view, p.Workspace(), epoch, p.Signature(), ctx};
  if (call.Scrubs()) {
    call.Scrub(0, 1);
    FenceRelease();
  }
  for (int peer = 0; peer < p.world; ++peer) {
    if (peer != view.rank) call.SendHello(peer);
  }
  if (!body(call)) return false;
  for (int peer = 0; peer < p.world; ++peer) {
    if (peer != view.rank && !call.AwaitHello(peer)) return false;
  }
  return true;
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_PACKET_CALL_CPU_H_
