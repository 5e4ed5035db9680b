// The send warp of all_gather_attention's kernel: copies this rank's keys and values to its peers'
// workspaces, peer after peer, in the order of the chunks.
//
//   writes  the peers' workspaces and signals
//   waits   for no peer
//   order   bulk copies complete, proxy fence, StoreRelease of the chunk's signal
//   reset   the counters: LeaveCounters (gpu/gemm_call.cuh)
#ifndef JFLUX_OPS_ALL_GATHER_ATTENTION_KEY_SENDER_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_ATTENTION_KEY_SENDER_SM90_CUH_

#include "core/tile_order.h"
#include "gpu/chunk_sender.cuh"
#include "ops/all_gather_attention/all_gather_attention_args.cuh"

namespace jflux {

template <typename Shape>
struct KeySender {
  using Args = AllGatherAttentionArgs;
  using Buffers = SendBuffers<GatherSmem<Shape>>;

  struct Chunk {
    int32_t peer, chunk, bytes;
    const char* from;
    int64_t to;  // in a half of the peer's data
    __device__ int32_t BytesOf(int box) const {
      return Max(0, Min(kKeyBoxBytes, bytes - box * kKeyBoxBytes));
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
    return Order{args.layout.Chunks(), args.view.world - 1};
  }
  static __device__ Chunk ChunkOf(const Args& args, typename Order::Place place) {
    const KeyLayout& layout = args.layout;
    const int32_t rank = args.view.rank, peer = SendPeer(rank, place.step, args.view.world);
    const KeyLayout::Chunk c = layout.ChunkAt(place.chunk);
    const void* tensor = c.tensor == 0 ? args.arrays.k : args.arrays.v;
    return Chunk{peer, place.chunk, static_cast<int32_t>(c.bytes),
                 static_cast<const char*>(tensor) + layout.TensorOffset(c),
                 layout.DataOffset(layout.SlotOf(peer, rank), c)};
  }

  static __device__ void LoadBox(const Args&, Buffers& buffers, const Chunk& c, int i) {
    const int32_t bytes = c.BytesOf(i);
    if (bytes == 0) return;
    const uint32_t bar = buffers.smem.SendBoxFull(i);
    ptx::MbarrierArriveExpectTx(bar, bytes);
    ptx::BulkLoad(buffers.smem.SendBox(i), c.from + i * kKeyBoxBytes, bytes, bar);
  }
  static __device__ void StoreBox(const Args& args, const CallContext& call, Buffers& buffers,
                                  const Chunk& c, int i) {
    if (const int32_t bytes = c.BytesOf(i); bytes != 0) {
      char* to = args.view.At(c.peer, args.workspace.DataOffset(call.epoch) + c.to);
      ptx::BulkStore(to + i * kKeyBoxBytes, buffers.Await(i), bytes);
    }
    ptx::BulkCommit();  // even if empty: BulkWait counts groups
  }
  static __device__ void SignalChunk(const Args& args, const CallContext& call, const Chunk& c,
                                     uint64_t since) {
    if (c.bytes == 0) return;
    ptx::FenceProxyAsyncGlobal();
    StoreRelease(ChunkSignals(args, call, c.peer, args.view.rank) + c.chunk, call.signal);
    call.Done(EventKind::kSend, since, c.peer, c.chunk);
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_ATTENTION_KEY_SENDER_SM90_CUH_
