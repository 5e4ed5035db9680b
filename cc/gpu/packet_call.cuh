// Start and end of a call that exchanges LL packets (core/packet.h), for the CTAs of a kernel.
#ifndef JFLUX_GPU_PACKET_CALL_CUH_
#define JFLUX_GPU_PACKET_CALL_CUH_

#include <cstdint>

#include "core/packet.h"
#include "core/signal.h"
#include "gpu/call.cuh"
#include "gpu/device_state.h"
#include "jflux/call.h"
#include "runtime/cuda_device.h"

namespace jflux {

// Arguments of every packet kernel.
struct PacketArgs {
  DeviceState* state;
  SymmetricView view;
  PacketLayout layout;
  uint32_t signature, op;
};

template <typename Params>
PacketArgs PacketArgsFor(const Params& p, OpId op, int64_t site, int64_t ctas,
                         const CudaDevice& device, const SymmetricView& view) {
  // Ranks must launch equally many clusters: dynamic ids guarantee progress only then
  // (gpu/call.cuh).
  const uint32_t signature = SignatureBuilder().Add(p.Signature()).Add(site).Add(ctas).Get();
  return PacketArgs{device.state, view, p.Workspace(), signature, static_cast<uint32_t>(op)};
}

// The arguments of a kernel that sends its data in packets, or in chunks.
template <typename Params, typename Arrays>
struct PacketKernelArgs {
  PacketArgs packets;
  Params params;
  Arrays arrays;
};
template <typename Params, typename Arrays>
struct ChunkKernelArgs {
  shmem::CallArgs call;
  Params params;
  Arrays arrays;
};

template <typename Params, typename Arrays>
ChunkKernelArgs<Params, Arrays> ChunkArgsFor(const Params& p, const Arrays& arrays, OpId op,
                                             int64_t site, int64_t ctas,
                                             const WorkspaceLayout& layout,
                                             const CudaDevice& device, const SymmetricView& view) {
  ChunkKernelArgs<Params, Arrays> args{};
  args.call.state = device.state;
  args.call.view = view;
  args.call.layout = layout;
  args.call.signature = SignatureBuilder().Add(p.Signature()).Add(site).Add(ctas).Get();
  args.call.op = static_cast<uint32_t>(op);
  args.params = p;
  args.arrays = arrays;
  return args;
}

// CTAs of an SM that run at the same time: the kernels' launch bounds see to their registers.
inline constexpr int kPacketCtasPerSm = 2;

// CTAs for `work` threads, at most as many as run at the same time.
inline int64_t PacketCtas(int64_t work, int threads, int sm_count) {
  return Min<int64_t>(CeilDiv<int64_t>(work, threads), kPacketCtasPerSm * sm_count);
}

struct PacketCta {
  PacketCall call;
  uint32_t cluster_id;  // dynamic id (gpu/call.cuh)
  bool sends_hello;     // whether this CTA exchanges the hellos
};

// Called first, by all threads of all CTAs, in clusters of kCtas.
template <int kCtas = 1>
__device__ __forceinline__ PacketCta BeginPackets(const PacketArgs& args) {
  const DeviceState state = *args.state;  // loaded while the dynamic id is fetched
  auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  const DynamicId taken = TakeDynamicId<kCtas>(args.view);
  const WaitContext wait = WaitOf(args.state, &header->stop, args.op, args.view.rank, state.hooks);
  if (taken.overlaps) TrapOnOverlap(args.view, wait);
  const PacketCta cta{PacketCall{args.view, args.layout, taken.epoch, args.signature, wait},
                      taken.id, taken.first};
  DelayCall(state, taken.epoch, args.view.rank);
  const auto peer = static_cast<int>(threadIdx.x);
  if (cta.sends_hello && cta.call.Scrubs()) {
    cta.call.Scrub(threadIdx.x, blockDim.x);
    __syncthreads();
    FenceRelease();  // after the barrier it also covers what the other threads have cleared
  }
  if (cta.sends_hello && peer < args.view.world && peer != args.view.rank) cta.call.SendHello(peer);
  return cta;
}

// Called last, by all threads of a CTA. `ok`: no wait of this thread failed.
template <int kCtas = 1>
__device__ __forceinline__ void EndPackets(const PacketArgs& args, const PacketCta& cta, bool ok) {
  const auto peer = static_cast<int>(threadIdx.x);
  if (cta.sends_hello && peer < args.view.world && peer != args.view.rank) {
    ok &= cta.call.AwaitHello(peer);
  }
  if (__syncthreads_or(!ok) && threadIdx.x == 0) TrapIfFaulted(args.view, cta.call.wait);
  LeaveAfterDynamicId<kCtas>(args.view);
}

}  // namespace jflux

#endif  // JFLUX_GPU_PACKET_CALL_CUH_
