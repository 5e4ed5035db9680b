// The load warp of the kernels of the backward pass, and the shared memory that it fills.
#ifndef JFLUX_OPS_FLASH_ATTENTION_BACKWARD_LOADS_SM90_CUH_
#define JFLUX_OPS_FLASH_ATTENTION_BACKWARD_LOADS_SM90_CUH_

#include "ops/flash_attention/attention_sm90.cuh"

namespace jflux::attention {

// kKept: rows of an item's own block, in two tiles. kMet: rows of the blocks that it meets, two
// tiles and `kVectors` vectors of 4-byte numbers to a stage.
//
// The second tile of wide heads is in a ring of its own, of kSecondStages: the first product begins
// before it has come, and dq, which has no room for two whole stages, is done with it early.
template <typename T_, int kWidth_, bool kSoftcap_, AttentionPass kPass>
struct BackwardShape {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr AttentionBlocks kBlocks = BlocksOf(kPass, kWidth);
  static constexpr bool kKeepsKeys = kPass == AttentionPass::kDkv, kIsWide = kWidth > 128;
  static constexpr int kKept = kKeepsKeys ? kBlocks.keys : kBlocks.queries;
  static constexpr int kMet = kKeepsKeys ? kBlocks.queries : kBlocks.keys;
  static_assert(kKept == (kIsWide && kKeepsKeys ? 64 : 64 * kConsumers) && kMet == 64);
  // Sums and two tiles of scores are 192. The load warp then spills a few, which costs nothing.
  static constexpr Registers kRegisters =
      kKeepsKeys && kWidth == 128 ? Registers{24, 240} : Registers{40, 232};
  static_assert(Registers::Fit(kRegisters));
  static constexpr int kVectors = kKeepsKeys ? 4 : 2;  // positions, segments; base, delta
  static constexpr int kStages = kIsWide ? 2 : 3;
  static constexpr int kSecondStages = !kIsWide ? kStages : kKeepsKeys ? 2 : 1;
  static constexpr int kBarriers = 2 + 2 * kStages + (kIsWide ? 2 * kSecondStages : 0);
  static constexpr int kKeptBytes = kKept * kWidth * 2, kMetBytes = kMet * kWidth * 2;
  // Shared memory, in this order.
  static constexpr int kMetOffset = 2 * kKeptBytes;
  static constexpr int kKeptNumbersOffset = kMetOffset + (kStages + kSecondStages) * kMetBytes;
  static constexpr int kMetNumbersOffset = kKeptNumbersOffset + kKept * 8;
  static constexpr int kKindsOffset = kMetNumbersOffset + kStages * kMet * 4 * kVectors;
  static constexpr int kBarriersOffset = kKindsOffset + 16;
  static constexpr int kSmemBytes = kBarriersOffset + 8 * kBarriers;
  static_assert(4 * kStages <= 16 && kSmemBytes <= kHopper.smem_bytes);
};

template <typename Shape>
struct BackwardSmem {
  uint32_t base;

  // kDkv keeps k and v and meets q and do; kDq the other way round.
  __device__ uint32_t Kept(int tile) const { return base + tile * Shape::kKeptBytes; }
  __device__ uint32_t Met(int stage, int tile) const {
    const int at = Shape::kIsWide ? tile * Shape::kStages + stage : 2 * stage + tile;
    return base + Shape::kMetOffset + at * Shape::kMetBytes;
  }
  __device__ uint32_t KeptNumbers() const { return base + Shape::kKeptNumbersOffset; }
  // Positions, segments, base, delta.
  __device__ uint32_t MetNumbers(int stage, int vector = 0) const {
    return base + Shape::kMetNumbersOffset + (stage * Shape::kVectors + vector) * Shape::kMet * 4;
  }
  __device__ uint32_t Kind(int stage) const { return base + Shape::kKindsOffset + 4 * stage; }
  __device__ uint32_t Bar(int i) const { return base + Shape::kBarriersOffset + 8 * i; }
  __device__ uint32_t KeptFull() const { return Bar(0); }
  __device__ uint32_t KeptEmpty() const { return Bar(1); }
  __device__ uint32_t Full(int stage) const { return Bar(2 + stage); }
  __device__ uint32_t Empty(int stage) const { return Bar(2 + Shape::kStages + stage); }
  // The barriers of the second tile's ring, if it has one.
  __device__ uint32_t SecondFull(int stage) const { return Bar(2 + 2 * Shape::kStages + stage); }
  __device__ uint32_t SecondEmpty(int stage) const {
    return SecondFull(Shape::kSecondStages + stage);
  }
};

template <typename Shape>
__device__ __forceinline__ void RunBackwardLoads(const MapArgs& args,
                                                 const BackwardSmem<Shape>& smem) {
  constexpr bool kKeepsKeys = Shape::kKeepsKeys;
  Ring<Shape::kStages> stages;
  Ring<Shape::kSecondStages> seconds;  // of wide heads
  uint32_t parity = 1;                 // of KeptEmpty
  const bool leads = ptx::ElectOne();
  const FlashAttentionArrays& arrays = args.arrays;
  const CUtensorMap* kept[2] = {kKeepsKeys ? &args.k : &args.q, kKeepsKeys ? &args.v : &args.d_out};
  const CUtensorMap* met[2] = {kKeepsKeys ? &args.q : &args.k, kKeepsKeys ? &args.d_out : &args.v};
  const int32_t* const kept_numbers[2] = {kKeepsKeys ? arrays.k_positions : arrays.q_positions,
                                          kKeepsKeys ? arrays.k_segments : arrays.q_segments};
  const int32_t* const met_numbers[2] = {kKeepsKeys ? arrays.q_positions : arrays.k_positions,
                                         kKeepsKeys ? arrays.q_segments : arrays.k_segments};
  const int32_t kept_padded = kKeepsKeys ? args.padded_keys : args.padded_queries;
  const int32_t met_padded = kKeepsKeys ? args.padded_queries : args.padded_keys;
  const int32_t rows = kKeepsKeys ? args.key_blocks : args.query_blocks;
  const int32_t columns = kKeepsKeys ? args.query_blocks : args.key_blocks;
  const int8_t* blocks = kKeepsKeys ? arrays.blocks_by_keys : arrays.blocks;
  const int32_t shared = args.heads / args.groups;

  for (int32_t number = blockIdx.x; number < args.items; number = NextItem(number)) {
    const Item item = kKeepsKeys ? Item::OfKeys(args, number) : Item::OfQueries(args, number);
    if (leads) {
      ptx::MbarrierWait(smem.KeptEmpty(), parity);
      const uint32_t bar = smem.KeptFull();
      const int32_t first = item.block * Shape::kKept;
      ptx::MbarrierArriveExpectTx(bar, 2 * Shape::kKeptBytes + BytesOfNumbers<Shape::kKept>(args));
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        LoadRows<Shape::kKept, Shape::kWidth>(smem.Kept(tile), kept[tile], bar, item.batch, first,
                                              kKeepsKeys ? item.group : item.head);
      }
      LoadNumbers<Shape::kKept>(args, smem.KeptNumbers(), bar, kept_numbers[0], kept_numbers[1],
                                kept_padded, item.batch, first);
    }
    parity ^= 1;
    // The heads of queries that share these keys, one after the other.
    for (int32_t i = 0; i < (kKeepsKeys ? shared : 1); ++i) {
      const int32_t head = kKeepsKeys ? item.group * shared + i : item.group;
      const auto load = [&](int32_t block, int kind) {
        if (leads) {
          const int stage = stages.index;
          const uint32_t bar = smem.Full(stage);
          const int32_t first = block * Shape::kMet;
          ptx::MbarrierWait(smem.Empty(stage), stages.parity ^ 1);
          ptx::StoreShared4(smem.Kind(stage), kind);
          constexpr int kTiles = Shape::kIsWide ? 1 : 2;
          constexpr uint32_t kBytes =
              kTiles * Shape::kMetBytes + (kKeepsKeys ? 2 * Shape::kMet * 4 : 0);
          ptx::MbarrierArriveExpectTx(bar, kBytes + BytesOfNumbers<Shape::kMet>(args));
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            LoadRows<Shape::kMet, Shape::kWidth>(smem.Met(stage, tile), met[tile], bar, item.batch,
                                                 first, head);
          }
          LoadNumbers<Shape::kMet>(args, smem.MetNumbers(stage), bar, met_numbers[0],
                                   met_numbers[1], met_padded, item.batch, first);
          if constexpr (kKeepsKeys) {
            const int64_t at =
                (static_cast<int64_t>(item.batch) * args.heads + head) * args.padded_queries +
                first;
            ptx::BulkLoad(smem.MetNumbers(stage, 2), arrays.base + at, Shape::kMet * 4, bar);
            ptx::BulkLoad(smem.MetNumbers(stage, 3), arrays.delta + at, Shape::kMet * 4, bar);
          }
          if constexpr (Shape::kIsWide) {
            const uint32_t second_bar = smem.SecondFull(seconds.index);
            ptx::MbarrierWait(smem.SecondEmpty(seconds.index), seconds.parity ^ 1);
            ptx::MbarrierArriveExpectTx(second_bar, Shape::kMetBytes);
            LoadRows<Shape::kMet, Shape::kWidth>(smem.Met(seconds.index, 1), met[1], second_bar,
                                                 item.batch, first, head);
          }
        }
        stages.Advance();
        seconds.Advance();
      };
      ForEachBlock(BlocksOfItem(args, blocks, item, rows, columns), columns, load);
    }
    if (leads) {
      ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
      ptx::StoreShared4(smem.Kind(stages.index), static_cast<int>(BlockKind::kEnd));
      ptx::MbarrierArrive(smem.Full(stages.index));
    }
    stages.Advance();
  }
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_BACKWARD_LOADS_SM90_CUH_
