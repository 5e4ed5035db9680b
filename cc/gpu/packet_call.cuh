// How a kernel's CTAs begin and end a call that exchanges packets (core/packet.h).
#ifndef JFLUX_GPU_PACKET_CALL_CUH_
#define JFLUX_GPU_PACKET_CALL_CUH_

#include <cstdint>

#include "core/dtype.h"
#include "core/packet.h"
#include "gpu/device_state.h"
#include "gpu/gemm_call.cuh"
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
  return PacketArgs{reinterpret_cast<DeviceState*>(device.heap), view, p.Channel(), signature,
                    static_cast<uint32_t>(op)};
}

struct PacketTurn {
  PacketCall call;
  uint32_t block;  // this CTA's place in the order in which CTAs begin
};

// All threads of a CTA. CTAs work in the order in which they begin, not that of their numbers:
// whichever may run, the lowest place that some rank waits for is running on all ranks, or is the
// next to. The place and the epoch are one word, taken at once; the last CTA to take its place
// raises the epoch for the next call.
__device__ __forceinline__ PacketTurn BeginPackets(const PacketArgs& args) {
  __shared__ uint64_t taken;
  const DeviceState state = *args.state;  // on its way together with the word below
  auto* header = args.view.template At<ChannelHeader>(args.view.rank, 0);
  if (threadIdx.x == 0) {
    static_assert(offsetof(ChannelHeader, epoch) == 0 && offsetof(ChannelHeader, next_send) == 4);
    auto* word = reinterpret_cast<unsigned long long*>(header);
    taken = atomicAdd(word, 1ull << 32);
    if (taken >> 32 == gridDim.x - 1) atomicExch(word, NextEpoch(static_cast<uint32_t>(taken)));
  }
  __syncthreads();
  const uint32_t epoch = NextEpoch(static_cast<uint32_t>(taken));
  const WaitContext wait{state.fault, &header->stop,  0,
                         args.op,     args.view.rank, state.hooks.skip_waits != 0};
  const PacketTurn turn{PacketCall{args.view, args.layout, epoch, args.signature, wait,
                                   /*patience_ns=*/state.deadline_ns},
                        static_cast<uint32_t>(taken >> 32)};
  DelayCall(state, epoch, args.view.rank);
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
