// How a store warp sends to peers while the other CTAs of this GPU multiply. A semaphore limits how
// many store warps send at a time, and each sends in chunks, few of which are in flight
// (gpu/senders.h).
//
// A store warp holds its ticket while it sends one tile. Meanwhile it waits for its own copies, and
// for the next row block of the tile to be staged. Neither needs another CTA or a peer:
// SendingStorers limits the senders only where a tile has more k-blocks than there are stages, so
// that the tile's two consumers are never a whole tile apart.
#ifndef JFLUX_GPU_SEND_SEMAPHORE_CUH_
#define JFLUX_GPU_SEND_SEMAPHORE_CUH_

#include "core/layout.h"
#include "core/ticket_semaphore.h"
#include "gpu/gemm_call.cuh"
#include "gpu/ptx.cuh"
#include "gpu/senders.h"

namespace jflux {

// One lane's. Without a limit (0) all send at once, and as one chunk.
struct SendSemaphore {
  TicketSemaphore semaphore;

  __device__ __forceinline__ void Acquire(const CallContext& call, int32_t block_m,
                                          int32_t tile_n) const {
    if (semaphore.count == 0) return;
    const uint64_t start = call.Start();
    semaphore.Acquire();
    call.Done(EventKind::kWaitToSend, start, block_m, tile_n);
  }
  __device__ __forceinline__ void Release() const { semaphore.Release(); }

  // Copies out of `smem`, as committed groups; returns when few are under way.
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
