// What the send warp of all_gather_attention's kernel copies: this rank's keys and values.
// The protocol is that of gpu/copy_sender.cuh.
#ifndef JFLUX_OPS_ALL_GATHER_ATTENTION_KEY_SENDER_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_ATTENTION_KEY_SENDER_SM90_CUH_

#include "gpu/copy_sender.cuh"
#include "ops/all_gather_attention/all_gather_attention_args.cuh"

namespace jflux {

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

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_ATTENTION_KEY_SENDER_SM90_CUH_
