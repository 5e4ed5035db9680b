// How a kernel's CTAs begin and end a call that exchanges packets (core/packet.h).
#ifndef JFLUX_GPU_PACKET_CALL_CUH_
#define JFLUX_GPU_PACKET_CALL_CUH_

#include <cooperative_groups.h>

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

// CTAs for so many threads' work, of which all can be running.
inline int64_t PacketBlocks(int64_t work, int threads, int sm_count) {
  return Min<int64_t>(CeilDiv<int64_t>(work, threads), 2 * sm_count);
}

struct PacketTurn {
  PacketCall call;
  uint32_t block;  // this cluster's place in the order in which clusters begin
  bool greets;     // whether this thread's CTA exchanges the greetings
};

// All threads of a CTA, in clusters of kCtas. Clusters work in the order in which they begin, not
// that of their numbers: whichever may run, the lowest place that some rank waits for is running on
// all ranks, or is the next to. The place and the epoch are one word, taken at once; the last
// cluster to take its place raises the epoch for the next call.
template <int kCtas = 1>
__device__ __forceinline__ PacketTurn BeginPackets(const PacketArgs& args) {
  namespace cg = cooperative_groups;
  __shared__ uint64_t taken;
  const DeviceState state = *args.state;  // on its way together with the word below
  auto* header = args.view.template At<ChannelHeader>(args.view.rank, 0);
  const bool leads = kCtas == 1 || cg::this_cluster().block_rank() == 0;
  if (leads && threadIdx.x == 0) {
    static_assert(offsetof(ChannelHeader, epoch) == 0 && offsetof(ChannelHeader, next_send) == 4);
    auto* word = reinterpret_cast<unsigned long long*>(header);
    taken = atomicAdd(word, 1ull << 32);
    if (taken >> 32 == gridDim.x / kCtas - 1) {
      atomicExch(word, NextEpoch(static_cast<uint32_t>(taken)));
    }
  }
  uint64_t mine;
  if constexpr (kCtas == 1) {
    __syncthreads();
    mine = taken;
  } else {  // the leader's CTA stays: a cluster's members exchange more before they end
    cg::this_cluster().sync();
    mine = *cg::this_cluster().map_shared_rank(&taken, 0);
  }
  const uint32_t epoch = NextEpoch(static_cast<uint32_t>(mine));
  const WaitContext wait{state.fault, &header->stop,  0,
                         args.op,     args.view.rank, state.hooks.skip_waits != 0};
  const auto block = static_cast<uint32_t>(mine >> 32);
  const PacketTurn turn{PacketCall{args.view, args.layout, epoch, args.signature, wait,
                                   /*patience_ns=*/state.deadline_ns},
                        block, leads && block == 0};
  DelayCall(state, epoch, args.view.rank);
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
