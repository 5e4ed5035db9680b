// How a storer sends to peers while the other CTAs of this GPU do: with a permit, of which there
// are few, and in pieces, of which few are under way (gpu/senders.h).
//
// A storer has a permit as long as it sends one tile. Meanwhile it waits for its own copies, and
// for the tile's next block to be staged, which takes neither another CTA nor a peer.
// (A tile's consumers cannot be a tile apart: SendingStorers gives permits only where a tile has
// more k blocks than there are stages.)
#ifndef JFLUX_GPU_SEND_PERMITS_CUH_
#define JFLUX_GPU_SEND_PERMITS_CUH_

#include "core/layout.h"
#include "core/permits.h"
#include "gpu/gemm_call.cuh"
#include "gpu/ptx.cuh"
#include "gpu/senders.h"

namespace jflux {

// One lane's. Without permits (0) all send at once, and in one piece.
struct SendPermits {
  Permits permits;

  __device__ __forceinline__ void Acquire(const CallContext& call, int32_t block_m,
                                          int32_t tile_n) const {
    if (permits.count == 0) return;
    const uint64_t start = call.Start();
    permits.Acquire();
    call.Done(EventKind::kWaitToSend, start, block_m, tile_n);
  }
  __device__ __forceinline__ void Release() const { permits.Release(); }

  // Copies out of `smem`, as committed groups; returns when few are under way.
  __device__ __forceinline__ void Store(char* to, uint32_t smem, int bytes) const {
    if (permits.count == 0) {
      ptx::BulkStore(to, smem, bytes);
      return ptx::BulkCommit();
    }
    for (int at = 0; at < bytes; at += kSendPieceBytes) {
      ptx::BulkStore(to + at, smem + at, Min(kSendPieceBytes, bytes - at));
      ptx::BulkCommit();
      ptx::BulkWait<kSendPieces - 1>();
    }
  }
};

template <typename Args>
__device__ __forceinline__ SendPermits PermitsOf(const Args& args) {
  auto* header = args.view.template At<ChannelHeader>(args.view.rank, 0);
  return {{&header->permits_taken, &header->permits_returned, args.permits}};
}

}  // namespace jflux

#endif  // JFLUX_GPU_SEND_PERMITS_CUH_
