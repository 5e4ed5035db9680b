// How a kernel's CTAs begin and end a call that exchanges packets (core/packet.h).
#ifndef JFLUX_GPU_PACKET_CALL_CUH_
#define JFLUX_GPU_PACKET_CALL_CUH_

#include <cstdint>

#include "core/packet.h"
#include "gpu/call.cuh"
#include "gpu/device_state.h"

namespace jflux {

// What every packet kernel is given.
struct PacketArgs {
  DeviceState* state;
  SymmetricView view;
  PacketLayout layout;
  uint32_t signature, op;
};

struct PacketTurn {
  PacketCall call;
  uint32_t block;  // this CTA's place in the order in which CTAs begin
};

// All threads of a CTA.
__device__ __forceinline__ PacketTurn BeginPackets(const PacketArgs& args) {
  const DeviceState state = *args.state;  // on its way together with the turn
  auto* header = args.view.template At<ChannelHeader>(args.view.rank, 0);
  const Turn taken = TakeTurn(header);
  const WaitContext wait{state.fault, &header->stop,  0,
                         args.op,     args.view.rank, state.hooks.skip_waits != 0};
  const PacketTurn turn{PacketCall{args.view, args.layout, taken.epoch, args.signature, wait,
                                   /*patience_ns=*/state.deadline_ns},
                        taken.place};
  DelayCall(state, taken.epoch, args.view.rank);
  const auto peer = static_cast<int>(threadIdx.x);
  if (turn.block == 0 && peer < args.view.world && peer != args.view.rank)
    turn.call.SendHello(peer);
  return turn;
}

// All threads of a CTA, after their last packet; `ok`: no wait of this thread failed.
__device__ __forceinline__ void EndPackets(const PacketArgs& args, const PacketTurn& turn,
                                           bool ok) {
  const auto peer = static_cast<int>(threadIdx.x);
  if (turn.block == 0 && peer < args.view.world && peer != args.view.rank) {
    ok &= turn.call.AwaitHello(peer);
  }
  if (__syncthreads_or(!ok) && threadIdx.x == 0) EndOfWaits(args);
}

}  // namespace jflux

#endif  // JFLUX_GPU_PACKET_CALL_CUH_
