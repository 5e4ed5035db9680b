// The send warp's pipeline: copies chunks of this rank's data to its peers, in four boxes, through
// shared memory, by TMA loads and bulk stores.
//
//   writes  the peers' workspaces and signals
//   waits   for no peer
//   order   bulk copies complete, proxy fence, StoreRelease of the chunk's signal (SignalChunk);
//           what lanes store beside the boxes, __syncwarp, the same StoreRelease
//   reset   the counters: LeaveCounters (gpu/gemm_call.cuh)
#ifndef JFLUX_GPU_CHUNK_SENDER_CUH_
#define JFLUX_GPU_CHUNK_SENDER_CUH_

#include <cstdint>

#include "core/layout.h"
#include "gpu/gemm_call.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// Shared memory for the four boxes of a chunk. Smem has SendBox(i), and SendBoxFull(i), an mbarrier
// with one arrival.
template <typename Smem>
struct SendBuffers {
  Smem smem;
  uint32_t parities = 0;  // one bit per box

  __device__ uint32_t Await(int i) {
    ptx::MbarrierWait(smem.SendBoxFull(i), (parities >> i) & 1);
    parities ^= 1u << i;
    return smem.SendBox(i);
  }
};

// Whether this CTA is among the first `senders` CTAs to ask. Called by a full warp.
template <typename Args>
__device__ bool MaySend(const Args& args) {
  if (args.senders >= gridDim.x) return true;
  auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  const bool leads = threadIdx.x % 32 == 0;
  return __shfl_sync(0xffffffff, leads ? atomicAdd(&header->senders, 1) : 0, 0) < args.senders;
}

// Called by a full warp.
template <typename Args>
__device__ int NextTransfer(const Args& args) {
  return __shfl_sync(0xffffffff, threadIdx.x % 32 == 0 ? TakeTransfer(args) : 0, 0);
}

// A sender of nothing but boxes derives from this.
struct BoxesAlone {
  struct Beside {};
  template <typename... Any>
  static __device__ __forceinline__ Beside LoadBeside(const Any&...) {
    return Beside{};
  }
  template <typename... Any>
  static __device__ __forceinline__ void StoreBeside(const Any&...) {}
};

// Sends chunks, taken from a counter, until all are taken. Called by a full warp: it computes
// coordinates, and one lane issues the copies. Sender provides
//
//   Buffers                          a SendBuffers
//   Chunk                            Chunk{} has no boxes
//   OrderOf(args)                    an order with Count(), and At(i) for i < Count()
//   ChunkOf(args, order.At(i)) -> Chunk
//   LoadBox(args, buffers, chunk, i)
//   StoreBox(args, call, buffers, chunk, i)
//                                    box i; commits a bulk group even if the box is empty
//   SignalChunk(args, call, chunk, since)
//   LoadBeside(args, chunk) -> Beside
//   StoreBeside(args, call, chunk, beside)
//                                    all lanes: what travels with a chunk beside its boxes
template <typename Sender, typename Args>
__device__ void SendChunks(const Args& args, const CallContext& call,
                           typename Sender::Buffers& buffers) {
  const auto order = Sender::OrderOf(args);
  const int transfers = order.Count();
  int transfer = NextTransfer(args);
  // Software pipeline: three boxes are loaded while the fourth is stored, and the next chunk
  // follows without a gap. A chunk's steps are latencies, which the other boxes hide.
  using Chunk = typename Sender::Chunk;
  Chunk chunk = Chunk{};
  if (transfer < transfers) {
    chunk = Sender::ChunkOf(args, order.At(transfer));
    if (ptx::ElectOne()) {
      for (int i = 0; i < 3; ++i) Sender::LoadBox(args, buffers, chunk, i);
    }
  }
  Chunk arriving = Chunk{};  // the previous chunk: its signal is still to be sent
  uint64_t start = call.Start(), arriving_since = 0;
  while (transfer < transfers) {
    const int next_transfer = NextTransfer(args);
    const Chunk next =
        next_transfer < transfers ? Sender::ChunkOf(args, order.At(next_transfer)) : Chunk{};
    const typename Sender::Beside beside = Sender::LoadBeside(args, chunk);
    if (ptx::ElectOne()) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Sender::StoreBox(args, call, buffers, chunk, i);
        ptx::BulkWaitRead<1>();  // the previous box's buffer is free
        if (i == 0) {
          Sender::LoadBox(args, buffers, chunk, 3);
        } else {
          Sender::LoadBox(args, buffers, next, i - 1);
        }
        if (i == 1) {
          ptx::BulkWait<2>();
          Sender::SignalChunk(args, call, arriving, arriving_since);
        }
      }
    }
    // Here, so that the signal of the chunk before has not waited for these stores.
    Sender::StoreBeside(args, call, chunk, beside);
    __syncwarp();
    arriving = chunk;
    arriving_since = start;
    start = call.Start();
    chunk = next;
    transfer = next_transfer;
  }
  if (ptx::ElectOne()) {
    ptx::BulkWait<0>();
    Sender::SignalChunk(args, call, arriving, arriving_since);
  }
  __syncwarp();
}

}  // namespace jflux

#endif  // JFLUX_GPU_CHUNK_SENDER_CUH_
