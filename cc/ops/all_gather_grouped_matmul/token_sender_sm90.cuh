// The send warp of all_gather_grouped_matmul's kernel: copies this rank's tokens to its peers'
// workspaces, peer after peer, in the order of the tokens.
//
//   writes  the peers' workspaces and signals
//   waits   for no peer
//   order   bulk copies complete, proxy fence, StoreRelease of the chunk's signal
//   reset   the counters: LeaveCounters (gpu/gemm_call.cuh)
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_TOKEN_SENDER_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_TOKEN_SENDER_SM90_CUH_

#include "core/tile_order.h"
#include "gpu/chunk_sender.cuh"
#include "gpu/gemm_smem.cuh"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_args.cuh"

namespace jflux {

template <typename Config>
struct TokenSender {
  using Args = AllGatherGroupedMatmulArgs;
  using Buffers = SendBuffers<GemmSmem<Config>>;

  struct Chunk {
    int32_t peer, chunk, bytes;
    __device__ int32_t BytesOf(int box) const {
      return Max(0, Min(kTokenBoxBytes, bytes - box * kTokenBoxBytes));
    }
  };
  struct Order {
    int32_t chunks, peers;
    struct Place {
      int32_t step, chunk;
    };
    __device__ int32_t Count() const { return chunks * peers; }
    __device__ Place At(int32_t i) const { return Place{1 + i / chunks, i % chunks}; }
  };
  static __device__ Order OrderOf(const Args& args) {
    return Order{args.layout.chunks, args.view.world - 1};
  }
  static __device__ Chunk ChunkOf(const Args& args, typename Order::Place place) {
    return Chunk{SendPeer(args.view.rank, place.step, args.view.world), place.chunk,
                 static_cast<int32_t>(args.layout.ChunkSize(place.chunk))};
  }

  // Boxes are smaller than what the main loop sets aside for them, and lie close together.
  static __device__ uint32_t BoxAt(const Buffers& buffers, int i) {
    return buffers.smem.SendBox(0) + i * kTokenBoxBytes;
  }
  static __device__ void LoadBox(const Args& args, Buffers& buffers, const Chunk& c, int i) {
    const int32_t bytes = c.BytesOf(i);
    if (bytes == 0) return;
    const uint32_t bar = buffers.smem.SendBoxFull(i);
    ptx::MbarrierArriveExpectTx(bar, bytes);
    ptx::BulkLoad(BoxAt(buffers, i),
                  args.x_data + c.chunk * args.layout.chunk_bytes + i * kTokenBoxBytes, bytes, bar);
  }
  static __device__ void StoreBox(const Args& args, const CallContext& call, Buffers& buffers,
                                  const Chunk& c, int i) {
    if (const int32_t bytes = c.BytesOf(i); bytes != 0) {
      buffers.Await(i);
      char* to = args.view.At(c.peer, args.workspace.DataOffset(call.epoch) +
                                          args.layout.ChunkOffset(args.view.rank, c.chunk));
      ptx::BulkStore(to + i * kTokenBoxBytes, BoxAt(buffers, i), bytes);
    }
    ptx::BulkCommit();  // even if empty: BulkWait counts groups
  }
  static __device__ void SignalChunk(const Args& args, const CallContext& call, const Chunk& c,
                                     uint64_t since) {
    if (c.bytes == 0) return;
    ptx::FenceProxyAsyncGlobal();
    StoreRelease(ChunkSignal(args, call, c.peer, args.view.rank, c.chunk), call.signal);
    call.Done(EventKind::kSend, since, c.peer, c.chunk);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_TOKEN_SENDER_SM90_CUH_
