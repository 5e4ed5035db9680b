// all_gather_attention on Hopper: flash_attention's forward kernel, which sends, and waits for what
// it loads.
//
// Send warps (KeyCopies) copy this rank's keys and values to its peers. Meanwhile items
// meet the blocks of own keys, then those of the next ranks, which arrive in this order. The load
// warp waits for a block's rows before it loads them from the workspace. Consumers know nothing of
// ranks.
//
//   writes  send warps: the peers' workspaces and signals
//   waits   load warps, for the keys of their items' blocks; one send warp, for all keys, after
//           its last send
//   order   release and acquire at system scope; a proxy fence on either side, since bulk copies
//           write the workspace and TMA reads it
//   reset   never: core/signal.h
//
// Deadlock: items wait for sends only, and sends wait for nothing.
//
// A mask may need no key of some peer. But in each call a rank must receive what every peer sends
// (core/signal.h), so one send warp waits for that.
#ifndef JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_SM90_CUH_

#include "gpu/copy_sender.cuh"
#include "gpu/gemm_call.cuh"
#include "ops/all_gather_attention/all_gather_attention.h"
#include "ops/flash_attention/flash_attention_sm90.cuh"

namespace jflux {

// The consumers read attention::Args. Its padded_keys and key_blocks count the keys of all ranks;
// its maps k and v are of this rank's keys and values.
struct AllGatherAttentionArgs : attention::MapArgs {
  CUtensorMap workspace_maps[2];  // the halves' data as sequences (KeyLayout::SequenceOf)
  DeviceState* state;
  SymmetricView view;
  uint32_t signature, op;
  WorkspaceLayout workspace;
  KeyLayout layout;
  uint32_t senders;            // CTAs that may send
  int32_t key_blocks_of_rank;  // of each rank
};
static_assert(sizeof(AllGatherAttentionArgs) <= 4096);

// attention::ForwardShape, with memory for a chunk and registers for a send warp.
template <typename Base>
struct GatherShape : Base {
  // The send warp needs 64. Consumers of 256 elements would spill with 216.
  static constexpr attention::Registers kRegisters =
      Base::kWidth <= 128 ? attention::Registers{64, 216} : attention::Registers{56, 224};
  static_assert(attention::Registers::Fit(kRegisters));
  static constexpr int kBoxesFullOffset = Base::kSmemBytes;
  static constexpr int kBoxesOffset = RoundUp(kBoxesFullOffset + 8 * kKeyBoxes, 128);
  static constexpr int kSmemBytes = kBoxesOffset + kKeyBoxes * kKeyBoxBytes;
  static_assert(kSmemBytes <= kHopper.smem_bytes);
};

template <typename Shape>
struct GatherSmem : attention::ForwardSmem<Shape> {
  __device__ uint32_t SendBox(int i) const {
    return this->base + Shape::kBoxesOffset + i * kKeyBoxBytes;
  }
  // Filled by bulk copies.
  __device__ uint32_t SendBoxFull(int i) const {
    return this->base + Shape::kBoxesFullOffset + 8 * i;
  }
};

// The signals, on `rank`, of the chunks of `src`.
__device__ __forceinline__ Signal* ChunkSignals(const AllGatherAttentionArgs& args,
                                                const CallContext& call, int32_t rank,
                                                int32_t src) {
  const int64_t of_src = args.layout.SignalOffset(args.layout.SlotOf(rank, src), 0);
  return args.view.At<Signal>(rank, args.workspace.SignalOffset(call.epoch) + of_src);
}

// What the send warp of all_gather_attention's kernel copies: this rank's keys and values.
// The protocol is that of gpu/copy_sender.cuh.
template <typename Shape>
struct KeyCopies {
  using Args = AllGatherAttentionArgs;
  using Smem = GatherSmem<Shape>;
  static constexpr int32_t kBoxBytes = kKeyBoxBytes;

  static __device__ uint32_t BoxAt(const Smem& smem, int i) { return smem.SendBox(i); }
  static __device__ int32_t ChunksOf(const Args& args) { return args.layout.Chunks(); }
  static __device__ CopiedChunk ChunkOf(const Args& args, int32_t peer, int32_t chunk) {
    const KeyLayout& layout = args.layout;
    const KeyLayout::Chunk c = layout.ChunkAt(chunk);
    const void* tensor = c.tensor == 0 ? args.arrays.k : args.arrays.v;
    return CopiedChunk{peer, chunk, static_cast<int32_t>(c.bytes),
                       static_cast<const char*>(tensor) + layout.TensorOffset(c),
                       layout.DataOffset(layout.SlotOf(peer, args.view.rank), c)};
  }
  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int32_t peer,
                                     int32_t chunk) {
    return ChunkSignals(args, call, peer, args.view.rank) + chunk;
  }
};

template <typename Shape>
using KeySender = CopySender<KeyCopies<Shape>>;

// The keys of all ranks, as a load warp sees them. All functions are called by a full warp.
template <typename Shape>
class GatheredKeys {
 public:
  __device__ GatheredKeys(const AllGatherAttentionArgs& args, const CallContext& call)
      : args_(args), call_(call) {}

  // attention::OwnKeys has what this is.
  template <typename Load>
  __device__ __forceinline__ void ForEachBlock(const attention::MapArgs&,
                                               const attention::Item& item, Load&& load) {
    const int32_t blocks = args_.key_blocks_of_rank, world = args_.view.world;
    const int8_t* kinds = attention::BlocksOfItem(args_, args_.arrays.blocks, item,
                                                  args_.query_blocks, args_.key_blocks);
    JFLUX_NO_UNROLL
    for (int step = 0; step < world; ++step) {
      const int32_t src = (args_.view.rank + step) % world;
      const bool own = step == 0;
      // Own keys are in no slot.
      const int32_t slot = own ? 0 : args_.layout.SlotOf(args_.view.rank, src);
      const CUtensorMap* workspace = &args_.workspace_maps[call_.epoch & 1];
      const attention::KeyRows rows{own ? &args_.k : workspace,
                                    own ? &args_.v : workspace,
                                    own ? item.batch : args_.layout.SequenceOf(slot, 0, item.batch),
                                    own ? item.batch : args_.layout.SequenceOf(slot, 1, item.batch),
                                    0,
                                    0};
      attention::ForEachBlock(kinds + src * blocks, blocks, [&](int32_t block, int kind) {
        attention::KeyRows of_block = rows;
        of_block.first = block * Shape::kKeys;
        of_block.number = (src * blocks + block) * Shape::kKeys;
        if (!own) Await(src, item.batch, Min(args_.keys, of_block.first + Shape::kKeys));
        load(of_block, kind);
      });
    }
  }

 private:
  // Waits for the first `rows` keys of a sequence of `src`. In a timeline this is a wait for rows,
  // of a rank and its first chunks.
  __device__ __forceinline__ void Await(int32_t src, int32_t sequence, int32_t rows) {
    const int32_t known = __shfl_sync(0xffffffff, arrived_, src);
    const int32_t count = args_.layout.ChunksOf(sequence, rows);
    if (count <= known) return;
    const uint64_t start = call_.Start();
    AwaitSignals(call_, ChunkSignals(args_, call_, args_.view.rank, src), src, known, count);
    if (threadIdx.x % 32 == 0) call_.Done(EventKind::kWaitRows, start, src, count);
    if (static_cast<int32_t>(threadIdx.x % 32) == src) arrived_ = count;
    ptx::FenceProxyAsyncGlobal();  // TMA reads what has arrived
    __syncwarp();
  }

  const AllGatherAttentionArgs& args_;
  const CallContext& call_;
  int32_t arrived_ = 0;  // lane i: chunks of rank i that are known to have arrived
};

template <typename Shape_>
struct AllGatherAttentionSm90 {
  using Shape = Shape_;
  using Args = AllGatherAttentionArgs;

  static __device__ __forceinline__ void Send(const Args& args, const CallContext& call,
                                              const GatherSmem<Shape>& smem) {
    if (MaySend(args)) {
      SendBuffers<GatherSmem<Shape>> buffers{smem};
      SendChunks<KeySender<Shape>>(args, call, buffers);
    }
    for (int step = 1; blockIdx.x == 0 && step < args.view.world; ++step) {
      const int src = (args.view.rank + step) % args.view.world;
      AwaitSignals(call, ChunkSignals(args, call, args.view.rank, src), src, 0,
                   args.layout.Chunks());
    }
  }

  // The warps of warpgroup 0: a load warp, a send warp, and one that looks for other kernels.
  static __device__ __forceinline__ void RunProducer(const Args& args,
                                                     const GatherSmem<Shape>& smem, int warp) {
    if (warp > 2) return;
    const CallContext call = MakeContext(args);
    const bool leads = threadIdx.x % 32 == 0;
    if (warp == 2) {
      if (leads) TrapIfNotAlone(args.view, call.wait);
      return;
    }
    if (call.delays) DelayCall(*args.state, call.epoch, args.view.rank);
    if (leads) EnterWorkspace(args.view);
    if (warp == 0) {
      GatheredKeys<Shape> keys(args, call);
      attention::RunForwardLoads<Shape>(args, smem, keys);
    } else {
      Send(args, call, smem);
    }
    __syncwarp();
    if (leads) {
      LeaveCounters(args);
      TrapIfFaulted(args.view, call.wait);
      LeaveWorkspace(args.view);
    }
  }
};

template <typename Shape>
__global__ void __launch_bounds__(attention::kThreads, 1)
    AllGatherAttentionKernel(const __grid_constant__ AllGatherAttentionArgs args) {
  JFLUX_DYNAMIC_SHARED(uint8_t, 1024, storage);
  const GatherSmem<Shape> smem{ptx::SmemAddress(storage)};
  if (threadIdx.x == 0) {  // RunForward has the fence
    for (int i = 0; i < kKeyBoxes; ++i) ptx::MbarrierInit(smem.SendBoxFull(i), 1);
  }
  attention::RunForward<Shape>(
      args, smem, [&](int warp) { AllGatherAttentionSm90<Shape>::RunProducer(args, smem, warp); });
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_SM90_CUH_
