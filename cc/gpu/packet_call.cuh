// How a kernel's CTAs begin and end a call that exchanges packets (core/packet.h).
#ifndef JFLUX_GPU_PACKET_CALL_CUH_
#define JFLUX_GPU_PACKET_CALL_CUH_

#include <cstdint>

#include "core/dtype.h"
#include "core/packet.h"
#include "gpu/call.cuh"
#include "gpu/device_state.h"
#include "runtime/heap_cuda.h"

namespace jflux {

// What every packet kernel is given.
struct PacketArgs {
  DeviceState* state;
  SymmetricView view;
  PacketLayout layout;
  uint32_t signature, op;
};

template <typename Params>
PacketArgs PacketArgsFor(const Params& p, OpId op, int64_t site, int64_t blocks,
                         const CudaDevice& device, const SymmetricView& view) {
  // The order of places (BeginPackets) only helps where all ranks have as many.
  const uint32_t signature = SignatureBuilder().Add(p.Signature()).Add(site).Add(blocks).Get();
  return PacketArgs{reinterpret_cast<DeviceState*>(device.heap), view, p.Workspace(), signature,
                    static_cast<uint32_t>(op)};
}

// CTAs for so many threads' work, of which all can be running.
inline int64_t PacketBlocks(int64_t work, int threads, int sm_count) {
  return Min<int64_t>(CeilDiv<int64_t>(work, threads), 2 * sm_count);
}

struct PacketTurn {
  PacketCall call;
  uint32_t block;  // this cluster's place
  bool greets;     // whether this CTA exchanges the greetings
};

// All threads of a CTA, in clusters of kCtas.
template <int kCtas = 1>
__device__ __forceinline__ PacketTurn BeginPackets(const PacketArgs& args) {
  const DeviceState state = *args.state;  // on its way together with the turn
  auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  const Turn taken = TakeTurn<kCtas>(header);
  const WaitContext wait{state.fault, &header->stop,  0,
                         args.op,     args.view.rank, state.hooks.skip_waits != 0};
  const PacketTurn turn{PacketCall{args.view, args.layout, taken.epoch, args.signature, wait,
                                   /*timeout_ns=*/state.deadline_ns},
                        taken.place, taken.first};
  DelayCall(state, taken.epoch, args.view.rank);
  const auto peer = static_cast<int>(threadIdx.x);
  if (turn.greets && peer < args.view.world && peer != args.view.rank) turn.call.SendHello(peer);
  return turn;
}

// All threads of a CTA, after their last packet; `ok`: no wait of this thread failed.
__device__ __forceinline__ void EndPackets(const PacketArgs& args, const PacketTurn& turn,
                                           bool ok) {
  const auto peer = static_cast<int>(threadIdx.x);
  if (turn.greets && peer < args.view.world && peer != args.view.rank) {
    ok &= turn.call.AwaitHello(peer);
  }
  if (__syncthreads_or(!ok) && threadIdx.x == 0) EndOfWaits(args);
}

}  // namespace jflux

#endif  // JFLUX_GPU_PACKET_CALL_CUH_
