// What the roles of the GEMM main loop (gpu/gemm_sm90.cuh) hand to each other, in shared memory:
// where everything is, the stages of operands, and the slots that tiles are published in.
#ifndef JFLUX_GPU_GEMM_SMEM_CUH_
#define JFLUX_GPU_GEMM_SMEM_CUH_

#include <cstdint>

#include "core/platform.h"
#include "core/tile_order.h"
#include "gpu/gemm_config.h"
#include "gpu/ptx.cuh"

namespace jflux {

// Of a strip, 64 columns of a block of 64 rows in a 16-bit type.
inline constexpr int kStripBytes = 64 * 64 * 2;

// A cluster's CTAs are one below the other (kClusterM of them), or share the k of one tile, and
// each finishes a slice of its columns (kClusterK of them). kMayLend: see kLends.
template <typename T_, int kTileN_, int kClusterM_, bool kTransposeRhs_, bool kMayLend,
          int kClusterK_ = 1>
struct GemmConfig {
  using T = T_;
  static constexpr int kTileM = 128;
  static constexpr int kTileN = kTileN_;
  static constexpr int kTileK = 64;
  static constexpr int kClusterM = kClusterM_;
  static constexpr int kClusterK = kClusterK_;
  static constexpr int kCluster = kClusterM * kClusterK;
  static constexpr int kSliceN = kTileN / kClusterK;  // columns that a CTA finishes
  static_assert(kClusterK == 1 || (kClusterM == 1 && !IsShared(kTileN) && kSliceN % 32 == 0));
  static constexpr bool kTransposeRhs = kTransposeRhs_;  // w is [n, k], K-major

  static constexpr int kThreads = 384;
  // Registers per thread of the two kinds of warpgroups. A CTA can only redistribute what it was
  // launched with: 168 for each of 384 threads. One more would wait forever.
  static constexpr int kLoaderRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(kLoaderRegisters + 2 * kConsumerRegisters <= 3 * 168);
  static constexpr int kConsumers = 2;
  static constexpr int kBlocks = kTileM / 64;       // of a tile: the rows of one wgmma
  static constexpr int kAccumulators = kTileN / 2;  // of a thread, for a block
  static constexpr int kSliceAccumulators = kSliceN / 2;
  // Whether the consumers share each tile: consumer i has block i. Else each has all blocks of
  // every other tile.
  static constexpr bool kCooperative = IsShared(kTileN);
  static constexpr int kOwnBlocks = kCooperative ? kBlocks / kConsumers : kBlocks;
  static_assert(!kCooperative || kBlocks == kConsumers);
  // Whether a tile's last stage is lent to its consumers, who stage most of their results there. It
  // comes back when the storer has read them, which must not take long; meanwhile the next tile
  // begins with the others. So there is room for a fourth stage, which gains 4 to 10 % with 224
  // columns, where power is no limit, and nothing with 256 (docs/design/0009).
  static constexpr bool kLends = kMayLend && kCooperative && kTileN == 224;
  // Whether a tile can be half one w's columns and half another's.
  static constexpr bool kHalves = kTileN % 128 == 0 && kClusterK == 1;
  // Boxes of w stored [k, n] are 64 columns wide; some of the last one's may not be needed.
  static constexpr int kLoadN = kTransposeRhs ? kTileN : CeilDiv(kTileN, 64) * 64;
  static constexpr int kABytes = kTileM * kTileK * 2;
  static constexpr int kBBytes = kLoadN * kTileK * 2;
  // A block in a 16-bit type, on its way out.
  static constexpr int kStagingBytes = 64 * kSliceN * 2;
  // Where stages are lent, its first strip is staged beside the stages, the second in the
  // consumer's rows of A, and the rest in a half of B.
  static_assert(!kLends || (kABytes == kConsumers * kStripBytes &&
                            kStagingBytes - 2 * kStripBytes <= kBBytes / kConsumers));
  // A block's slice in float32, on its way to who finishes it (gpu/cluster_sum.cuh), and what a
  // consumer gets of the others.
  static constexpr int kSliceBytes = 64 * kSliceN * 4;
  static constexpr int kOthersBytes = (kClusterK - 1) * kSliceBytes;
  static constexpr int kSendBoxBytes = 4096;  // of what Op::Send moves
  static constexpr int kSendBoxes = 4;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kOwnStagingBytes = kLends ? kStripBytes : kStagingBytes;
  static constexpr int kStages = (232448 - kBarrierBytes - kSendBoxes * kSendBoxBytes -
                                  kConsumers * (kOwnStagingBytes + kOthersBytes)) /
                                 (kABytes + kBBytes);
  // How the CTAs of a cluster share the loading of w's tile, stored [k, n]: by rows.
  static constexpr int kBoxRows = kTileK / kClusterM;
  static constexpr int kSlots = 8;  // tiles handed out and not yet finished

  // Shared memory, in this order.
  static constexpr int kBOffset = kStages * kABytes;
  static constexpr int kStagingOffset = kBOffset + kStages * kBBytes;
  static constexpr int kOthersOffset = kStagingOffset + kConsumers * kOwnStagingBytes;
  static constexpr int kSendOffset = kOthersOffset + kConsumers * kOthersBytes;
  static constexpr int kBarrierOffset = kSendOffset + kSendBoxes * kSendBoxBytes;
  static constexpr int kSmemBytes = kBarrierOffset + kBarrierBytes;
  static_assert(kSmemBytes <= 232448);
};

// Barriers and small variables, by shared-memory address.
template <typename Config>
struct GemmSmem {
  uint32_t base;

  __device__ uint32_t A(int stage) const { return base + stage * Config::kABytes; }
  __device__ uint32_t B(int stage) const {
    return base + Config::kBOffset + stage * Config::kBBytes;
  }
  __device__ uint32_t Staging(int consumer) const {
    return base + Config::kStagingOffset + consumer * Config::kOwnStagingBytes;
  }
  // A consumer's slice as the cluster's `i`-th other CTA has summed it.
  __device__ uint32_t Other(int consumer, int i) const {
    return base + Config::kOthersOffset + consumer * Config::kOthersBytes + i * Config::kSliceBytes;
  }
  __device__ uint32_t SendBox(int i) const {
    return base + Config::kSendOffset + i * Config::kSendBoxBytes;
  }
  __device__ uint32_t Bar(int i) const { return base + Config::kBarrierOffset + 8 * i; }
  // Stages: filled by TMA, emptied by the consumers of all CTAs that share them (EmptyArrivals).
  __device__ uint32_t Full(int stage) const { return Bar(stage); }
  __device__ uint32_t Empty(int stage) const { return Bar(Config::kStages + stage); }
  // Slots: a tile is published; all are done with it; the others' parts of it are there.
  static constexpr int kSlot = 2 * Config::kStages;
  __device__ uint32_t SlotFull(int slot) const { return Bar(kSlot + slot); }
  __device__ uint32_t SlotEmpty(int slot) const { return Bar(kSlot + Config::kSlots + slot); }
  __device__ uint32_t PartsReady(int slot) const { return Bar(kSlot + 2 * Config::kSlots + slot); }
  static constexpr int kOther = kSlot + 3 * Config::kSlots;
  // The loader begins with a tile, so the scheduler may take the next.
  __device__ uint32_t Begun() const { return Bar(kOther); }
  // All of the other consumer's stages are full, so the next ones are this consumer's. (Not where
  // they share tiles.)
  __device__ uint32_t Turn(int consumer) const { return Bar(kOther + 1 + consumer); }
  // A consumer's staging: written by it; read by the storer.
  __device__ uint32_t Staged(int consumer) const { return Bar(kOther + 3 + consumer); }
  __device__ uint32_t Stored(int consumer) const { return Bar(kOther + 5 + consumer); }
  // The others' slices have come; the others have read what this consumer sent.
  __device__ uint32_t OthersCame(int consumer) const { return Bar(kOther + 7 + consumer); }
  __device__ uint32_t OthersRead(int consumer) const { return Bar(kOther + 9 + consumer); }
  __device__ uint32_t SendBoxFull(int i) const { return Bar(kOther + 11 + i); }
  static constexpr int kBarriers = RoundUp(kOther + 11 + Config::kSendBoxes, 2);
  static constexpr int kSlotBytes = 32;  // PublishTile
  __device__ uint32_t SlotTile(int slot) const { return Bar(kBarriers) + kSlotBytes * slot; }
  // How many k blocks of A have come, of all tiles so far: the scheduler counts, the loader looks.
  __device__ uint32_t RowsMark() const { return SlotTile(Config::kSlots); }
  static_assert(kBarriers * 8 + Config::kSlots * kSlotBytes + 4 <= Config::kBarrierBytes);
};

// The loader's side of the mark. What was known when it last looked is mostly enough, so that a k
// block costs one comparison.
struct RowsReader {
  uint32_t mark;  // its address
  uint32_t taken = 0, known = 0;

  __device__ bool Look() {
    known = ptx::LoadSharedAcquire(mark);
    return known != taken;
  }
  __device__ void Take() {
    while (known == taken) Look();
    ++taken;
  }
};

// A ring index with the parity that mbarriers want.
template <int kSize>
struct Ring {
  int index = 0;
  uint32_t parity = 0;
  __device__ void Advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
  __device__ void Skip(int count) {
    index += count;
    parity ^= index / kSize & 1;
    index %= kSize;
  }
};

// Who says that a stage is empty: of each CTA that shares it, the warps of the consumers that read
// it; and, where stages are lent, somebody for each consumer's results: the storer, if any have
// been published there, else the consumer.
template <typename Config>
__device__ __forceinline__ int EmptyArrivals() {
  constexpr int kReaders = 4 * (Config::kCooperative ? Config::kConsumers : 1);
  return Config::kClusterM * (kReaders + (Config::kLends ? Config::kConsumers : 0));
}

// Readers of the slots in which the leader CTA's scheduler publishes tiles: of every CTA the
// consumers' warps, the storer, the loader and, if there are parts, who waits for them; and the
// scheduler warps of the other CTAs.
template <typename Config>
__device__ __forceinline__ int SlotReaders(bool has_parts) {
  return Config::kCluster * (4 * Config::kConsumers + 2 + (has_parts ? 1 : 0)) +
         (Config::kCluster - 1);
}

// What is published when there are no more tiles.
inline constexpr Tile kNoTile{-1, 0};
__device__ __forceinline__ bool IsTile(Tile tile) { return tile.m >= 0; }

// One reader's view of the published tiles. A slot is used again when all have left it.
template <typename Config>
struct TileReader {
  GemmSmem<Config> smem;
  Ring<Config::kSlots> ring;

  // For a whole warp. The shuffles also tell the compiler that all lanes hold the same.
  __device__ Tile Enter() const {
    const Tile tile = Peek();
    return Tile{__shfl_sync(0xffffffff, tile.m, 0), __shfl_sync(0xffffffff, tile.n, 0),
                __shfl_sync(0xffffffff, tile.split, 0)};
  }
  // Between Enter and Leave: the tile's k blocks, and where this CTA's operands are.
  __device__ int Blocks() const { return __shfl_sync(0xffffffff, Words(0).w, 0); }
  template <typename W>
  __device__ W Where() const {
    const int4 words = Words(16);
    return reinterpret_cast<const W&>(words);
  }
  __device__ void Leave() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive();
    ring.Advance();
  }
  // For a single lane.
  struct Alone {
    Tile tile;
    int k_blocks;
  };
  __device__ Alone NextAlone() {
    const Tile tile = Peek();
    const int k_blocks = Words(0).w;
    Arrive();
    ring.Advance();
    return Alone{tile, k_blocks};
  }

 private:
  __device__ Tile Peek() const {
    ptx::MbarrierWait(smem.SlotFull(ring.index), ring.parity);
    const int4 v = Words(0);
    return Tile{v.x, v.y, v.z};
  }
  // Of the slot, from this byte on.
  __device__ int4 Words(int at) const {
    const uint4 v = ptx::LoadShared16(smem.SlotTile(ring.index) + at);
    return make_int4(v.x, v.y, v.z, v.w);
  }
  __device__ void Arrive() const {
    ptx::MbarrierArriveRemote(ptx::MapToCta(smem.SlotEmpty(ring.index), 0));
  }
};

// A CTA's share of its cluster's tile.
template <typename Config>
__device__ __forceinline__ Tile ShareOf(Tile tile, int cta) {
  return Config::kClusterK == 1 ? tile : Tile{tile.m, tile.n, cta};
}

// The slice of its cluster's tile that a CTA finishes, and its first column.
template <typename Config>
__device__ __forceinline__ int32_t SliceOf(Tile tile) {
  return Config::kClusterK == 1 ? tile.n : tile.n * Config::kClusterK + tile.split;
}
template <typename Config>
__device__ __forceinline__ int64_t FirstColumn(Tile tile) {
  return static_cast<int64_t>(SliceOf<Config>(tile)) * Config::kSliceN;
}

// As PublishTile writes one, to this CTA's shared memory.
template <typename Where>
__device__ __forceinline__ void WriteSlot(uint32_t at, Tile share, int blocks, const Where& where) {
  ptx::StoreShared16(at, make_uint4(share.m, share.n, share.split, blocks));
  ptx::StoreShared16(at + 16, reinterpret_cast<const uint4&>(where));
}

// What the scheduler has found out, so that nobody else has to: for each CTA its share of the tile,
// how many k blocks that has, and where the operands are that it loads.
template <typename Config, typename Where>
__device__ __forceinline__ void PublishTile(const GemmSmem<Config>& smem,
                                            const Ring<Config::kSlots>& ring, Tile tile,
                                            const int (&blocks)[Config::kCluster],
                                            const Where (&where)[Config::kCluster]) {
  static_assert(sizeof(Where) == sizeof(int4));
  ptx::MbarrierWait(smem.SlotEmpty(ring.index), ring.parity ^ 1);
#pragma unroll
  for (int cta = 0; cta < Config::kCluster; ++cta) {
    const uint32_t at = ptx::MapToCta(smem.SlotTile(ring.index), cta);
    const uint32_t bar = ptx::MapToCta(smem.SlotFull(ring.index), cta);
    ptx::MbarrierArriveExpectTxRemote(bar, GemmSmem<Config>::kSlotBytes);
    const Tile share = ShareOf<Config>(tile, cta);
    ptx::SendRemote(at, make_int4(share.m, share.n, share.split, blocks[cta]), bar);
    ptx::SendRemote(at + 16, reinterpret_cast<const int4&>(where[cta]), bar);
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_SMEM_CUH_
