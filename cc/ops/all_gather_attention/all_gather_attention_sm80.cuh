// all_gather_attention in portable code: flash_attention's portable forward kernel, which sends,
// and waits for what it copies. The workspace and the order of keys are those of Hopper's kernel.
//
// The first CTAs to ask send before they compute: a warp takes a chunk of this rank's keys and
// values from a counter, copies it by vectors to a peer's workspace, and stores its signal. The
// other CTAs start with their items' own keys. Items are taken from a counter, so CTAs that send
// have fewer of them.
//
//   writes  sending warps: the peers' workspaces and signals
//   waits   the first warp of a CTA, for the keys of the next part (flash_attention_sm80.cuh); of
//           one CTA for all keys, after its last item
//   order   stores of a chunk, __syncwarp, release fence and the chunk's signal. A reader acquires
//           the signal at system scope; a barrier of the CTA stands before the copies that read
//   reset   never: core/signal.h; the counters: LeaveCounters (gpu/gemm_call.cuh)
//
// Deadlock: items wait for sends only, and sends wait for nothing.
//
// A mask may need no key of some peer. But in each call a rank must receive what every peer sends
// (core/signal.h), so one CTA waits for that.
#ifndef JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_SM80_CUH_
#define JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_SM80_CUH_

#include "core/tile_order.h"
#include "gpu/copy_vectors.cuh"
#include "gpu/gemm_call.cuh"
#include "ops/all_gather_attention/all_gather_attention.h"
#include "ops/flash_attention/flash_attention_sm80.cuh"

namespace jflux {

// Of attention::Args padded_keys and key_blocks count the keys of all ranks.
struct AllGatherAttentionArgs80 : attention::Args {
  DeviceState* state;
  SymmetricView view;
  uint32_t signature, op;
  WorkspaceLayout workspace;
  KeyLayout layout;
  uint32_t senders;            // CTAs that may send
  int32_t key_blocks_of_rank;  // of each rank

  // The signals, on `rank`, of the chunks of `src`.
  __device__ Signal* ChunkSignals(const CallContext& call, int32_t rank, int32_t src) const {
    return view.At<Signal>(rank, workspace.SignalOffset(call.epoch) +
                                     layout.SignalOffset(layout.SlotOf(rank, src), 0));
  }
};

// The keys of all ranks, as an item meets them: this rank's, then those of the next ranks.
// attention::OwnKeys80 says what the functions are.
template <typename Shape>
class GatheredKeys80 {
 public:
  using Args = AllGatherAttentionArgs80;

  // `arrived`: of the first warp, lane i: chunks of rank i that are known to have arrived.
  __device__ GatheredKeys80(const Args& args, const CallContext& call, const attention::Item& item,
                            int32_t& arrived)
      : args_(args),
        call_(call),
        item_(item),
        arrived_(arrived),
        src_(args.view.rank),
        parts_(KindsOf(src_), args.key_blocks_of_rank, args.keys) {
    FindRows();
  }

  __device__ __forceinline__ BlockKind Next() {
    for (;;) {
      const BlockKind kind = parts_.Next();
      if (kind != BlockKind::kEnd) return kind;
      const int32_t next = src_ + 1 == args_.view.world ? 0 : src_ + 1;
      if (next == args_.view.rank) return kind;
      src_ = next;
      parts_ = attention::Parts80<Shape>(KindsOf(src_), args_.key_blocks_of_rank, args_.keys);
      FindRows();
    }
  }
  // In a timeline this is a wait for rows, of a rank and its first chunks.
  __device__ __forceinline__ void Await() {
    if (src_ == args_.view.rank) return;
    const int32_t rows = Min(args_.keys, First() + Shape::kStageKeys);
    const int32_t count = args_.layout.ChunksOf(item_.batch, rows);
    const int32_t known = __shfl_sync(0xffffffff, arrived_, src_);
    if (count <= known) return;
    AwaitChunks(args_, call_, src_, known, count);
    if (static_cast<int32_t>(threadIdx.x) == src_) arrived_ = count;
    __syncwarp();
  }
  __device__ attention::HeadRows80 K() const { return k_; }
  __device__ attention::HeadRows80 V() const {
    return attention::HeadRows80{k_.data + v_, k_.row_bytes, k_.rows};
  }
  __device__ int32_t First() const { return parts_.First(); }
  __device__ int32_t Number() const {
    return src_ * args_.key_blocks_of_rank * Shape::kKeys + First();
  }

  // Out of line, for the main loop's sake.
  static __device__ __noinline__ void AwaitChunks(const Args& args, const CallContext& call,
                                                  int32_t src, int32_t known, int32_t count) {
    const uint64_t start = call.Start();
    AwaitSignals(call, args.ChunkSignals(call, args.view.rank, src), src, known, count);
    if (threadIdx.x % 32 == 0) call.Done(EventKind::kWaitRows, start, src, count);
  }

 private:
  __device__ const int8_t* KindsOf(int32_t src) const {
    return attention::BlocksOfItem(args_, args_.arrays.blocks, item_, args_.query_blocks,
                                   args_.key_blocks) +
           src * args_.key_blocks_of_rank;
  }
  __device__ __forceinline__ void FindRows() {
    const KeyLayout& layout = args_.layout;
    const void* data = args_.arrays.k;
    int32_t sequence = item_.batch;
    v_ = static_cast<const char*>(args_.arrays.v) - static_cast<const char*>(args_.arrays.k);
    if (src_ != args_.view.rank) {  // own keys are in no slot
      data = args_.view.At(args_.view.rank, args_.workspace.DataOffset(call_.epoch));
      sequence = layout.SequenceOf(layout.SlotOf(args_.view.rank, src_), 0, item_.batch);
      v_ = layout.batch * layout.sequence_bytes;
    }
    k_ = attention::HeadRows80::Of(data, sequence, args_.keys, args_.groups, item_.group,
                                   args_.width);
  }

  const Args& args_;
  const CallContext& call_;
  const attention::Item& item_;
  int32_t& arrived_;
  int32_t src_;
  attention::HeadRows80 k_;
  int64_t v_;  // from a key to its value, in bytes
  attention::Parts80<Shape> parts_;
};

template <typename Shape_>
struct AllGatherAttentionSm80 {
  using Shape = Shape_;
  using Args = AllGatherAttentionArgs80;

  // All warps.
  static __device__ __forceinline__ void Send(const Args& args, const CallContext& call) {
    if (!CtaMaySend(args)) return;
    const KeyLayout& layout = args.layout;
    const int32_t chunks = layout.Chunks(), count = chunks * (args.view.world - 1);
    for (int32_t i = NextTransfer(args); i < count; i = NextTransfer(args)) {
      const int32_t peer = SendPeer(args.view.rank, 1 + i / chunks, args.view.world);
      const KeyLayout::Chunk c = layout.ChunkAt(i % chunks);
      const uint64_t start = call.Start();
      const char* from = static_cast<const char*>(c.tensor == 0 ? args.arrays.k : args.arrays.v) +
                         layout.TensorOffset(c);
      char* to = args.view.At(peer, args.workspace.DataOffset(call.epoch) +
                                        layout.DataOffset(layout.SlotOf(peer, args.view.rank), c));
      CopyVectors(
          static_cast<int>(c.bytes / kVectorBytes), [&](int e) { return from + e * kVectorBytes; },
          [&](int e) { return to + e * kVectorBytes; });
      SignalStored(args.ChunkSignals(call, peer, args.view.rank) + i % chunks, call.signal);
      if (threadIdx.x % 32 == 0) call.Done(EventKind::kSend, start, peer, i % chunks);
    }
  }

  // attention::OwnItems80 has what this is.
  class Work {
   public:
    __device__ Work(const Args& args, const CallContext& call) : args_(args), call_(call) {
      if (threadIdx.x == 0) next_ = TakeTile(args_);
    }
    // The next item is taken while this one is computed.
    __device__ __forceinline__ int32_t Next(int32_t) {
      JFLUX_SHARED(int32_t, taken);
      if (threadIdx.x == 0) taken = next_;
      __syncthreads();
      const int32_t number = taken;
      if (threadIdx.x == 0 && number < args_.items) next_ = TakeTile(args_);
      return number;
    }
    __device__ __forceinline__ GatheredKeys80<Shape> KeysOf(const attention::Item& item) {
      return GatheredKeys80<Shape>(args_, call_, item, arrived_);
    }

   private:
    const Args& args_;
    const CallContext& call_;
    int32_t next_ = 0;     // of the first thread
    int32_t arrived_ = 0;  // GatheredKeys80
  };

  static __device__ __forceinline__ void Run(const Args& args,
                                             const attention::ForwardSmem80<Shape>& smem) {
    const CallContext call = MakeContext(args);
    const bool leads = threadIdx.x == 0;
    __syncthreads();  // all have read the epoch, which the last CTA to leave the counters changes
    if (leads) {      // Send has a barrier
      if (call.delays) DelayCall(*args.state, call.epoch, args.view.rank);
      EnterWorkspace(args.view);
      TrapIfNotAlone(args.view, call.wait);
    }
    Send(args, call);
    Work work(args, call);
    attention::RunForward80<Shape>(args, smem, work);
    if (blockIdx.x == 0 && threadIdx.x < 32) {
      for (int step = 1; step < args.view.world; ++step) {
        const int src = (args.view.rank + step) % args.view.world;
        GatheredKeys80<Shape>::AwaitChunks(args, call, src, 0, args.layout.Chunks());
      }
    }
    __syncthreads();  // no warp of the CTA takes more work
    if (leads) {
      LeaveCounters<1>(args, [](WorkspaceHeader*) {});
      TrapIfFaulted(args.view, call.wait);
      LeaveWorkspace(args.view);
    }
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    AllGatherAttentionKernel80(const __grid_constant__ AllGatherAttentionArgs80 args) {
  JFLUX_DYNAMIC_SHARED(uint8_t, 128, storage);
  AllGatherAttentionSm80<Shape>::Run(args,
                                     attention::ForwardSmem80<Shape>{ptx::SmemAddress(storage)});
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_SM80_CUH_
