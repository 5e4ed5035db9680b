// The kernel's arguments, its shared memory, and the addresses of what peers send.
#ifndef JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_ARGS_CUH_
#define JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_ARGS_CUH_

#include "gpu/gemm_call.cuh"
#include "ops/all_gather_attention/all_gather_attention_config.h"
#include "ops/flash_attention/flash_attention_sm90.cuh"

namespace jflux {

// The consumers read attention::Args. Its padded_keys and key_blocks count the keys of all ranks;
// its maps k and v are of this rank's keys and values.
struct AllGatherAttentionArgs : attention::Args {
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
  static_assert(kSmemBytes <= 232448);
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

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_ATTENTION_ALL_GATHER_ATTENTION_ARGS_CUH_
