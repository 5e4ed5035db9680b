// How a store warp sends to peers while the other CTAs of this GPU multiply. A semaphore limits how
// many store warps send at a time. Each sends in chunks, few of which are in flight
// (gpu/senders.h).
//
// A store warp holds its ticket while it sends one tile. Meanwhile it waits only for its own copies
// and for the tile's next m64 block to be staged, so no holder waits for another CTA or a peer.
// This holds because of SendingStoreWarps, which allows the semaphore only if k takes more
// than kMostStagedBytes, so that a tile has more k-blocks than there are stages (GemmConfig asserts
// it). Otherwise two consumers that share tiles could be a whole tile apart, and the next m64 block
// could wait for a peer.
#ifndef JFLUX_GPU_SEND_SEMAPHORE_CUH_
#define JFLUX_GPU_SEND_SEMAPHORE_CUH_

#include "core/layout.h"
#include "core/ticket_semaphore.h"
#include "gpu/gemm_call.cuh"
#include "gpu/ptx.cuh"
#include "gpu/senders.h"

namespace jflux {

// Used by one lane. Without a limit (count 0) all store warps send at once, each m64 block as one
// chunk.
struct SendSemaphore {
  TicketSemaphore semaphore;

  __device__ __forceinline__ void Acquire(const CallContext& call, int32_t row_block,
                                          int32_t tile_n) const {
    if (semaphore.count == 0) return;
    const uint64_t start = call.Start();
    // If the wait fails, this warp sends without a ticket, so that the kernel ends soon.
    semaphore.Acquire(call.wait, row_block);
    call.Done(EventKind::kWaitToSend, start, row_block, tile_n);
  }
  __device__ __forceinline__ void Release() const { semaphore.Release(); }

  // Copies from `smem` in committed bulk groups. Returns when at most kSendChunksInFlight - 1 are
  // in flight.
  __device__ __forceinline__ void Store(char* to, uint32_t smem, int bytes) const {
    if (semaphore.count == 0) {
      ptx::BulkStore(to, smem, bytes);
      return ptx::BulkCommit();
    }
    for (int at = 0; at < bytes; at += kSendChunkBytes) {
      ptx::BulkStore(to + at, smem + at, Min(kSendChunkBytes, bytes - at));
      ptx::BulkCommit();
      ptx::BulkWait<kSendChunksInFlight - 1>();
    }
  }
};

template <typename Args>
__device__ __forceinline__ SendSemaphore SemaphoreOf(const Args& args) {
  auto* header = args.view.template At<WorkspaceHeader>(args.view.rank, 0);
  return {{&header->tickets_issued, &header->tickets_released, args.senders}};
}

}  // namespace jflux

#endif  // JFLUX_GPU_SEND_SEMAPHORE_CUH_
