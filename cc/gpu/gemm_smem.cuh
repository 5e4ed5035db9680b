// Shared memory of the GEMM main loop (gpu/gemm_sm90.cuh): its layout, the stages of operands, and
// the tile queue through which the scheduler warp hands out tiles.
#ifndef JFLUX_GPU_GEMM_SMEM_CUH_
#define JFLUX_GPU_GEMM_SMEM_CUH_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "core/format.h"
#include "core/platform.h"
#include "core/tile_order.h"
#include "gpu/gemm_config.h"
#include "gpu/machine.h"
#include "gpu/ptx.cuh"
#include "gpu/ring.cuh"
#include "gpu/senders.h"

namespace jflux {

// A strip is 64 columns of an m64 block of results, in a 16-bit type.
inline constexpr int kStripBytes = 64 * kBlockBytes;

// A cluster has kClusterM CTAs on consecutive row blocks that share w's tile. Or it has kClusterK
// CTAs that split the k of one tile, and each finishes a slice of the tile's columns.
// kMayLendStage: the op allows kLendsStage. kTransposeLhs: x is stored [k, m]. kQuantizes: results
// leave the kernel with scales of kScaleBlock columns (gpu/quantize_epilogue_sm90.cuh).
template <typename T_, int kTileN_, int kClusterM_, bool kTransposeRhs_, bool kMayLendStage,
          int kClusterK_ = 1, bool kTransposeLhs_ = false, Scales kScales_ = Scales::kOfSums,
          bool kQuantizes_ = false>
struct GemmConfig {
  using T = T_;
  // Whether sums are whole numbers, and their type.
  static constexpr bool kWhole = std::is_same_v<T, int8_t>;
  using Sum = std::conditional_t<kWhole, int32_t, float>;
  static constexpr bool kNarrow = sizeof(T) == 1;  // operands of 8 bits
  // The 16-bit type in which results are staged; of operands of 8 bits, unless they are float16.
  using Result = std::conditional_t<kNarrow, __nv_bfloat16, T>;
  static_assert(!kNarrow || (kTransposeRhs_ && !kTransposeLhs_));  // the instruction's operands
  // Operands of 8 bits have scales: the main loop multiplies the sums of each k-block by theirs, or
  // the epilogue those of all k.
  static constexpr Scales kScales = kScales_;
  static constexpr bool kBlockScales = HasEntriesOfK(kScales);
  static constexpr bool kScaled = kNarrow && !kBlockScales;
  static constexpr bool kQuantizes = kQuantizes_;
  static constexpr int kTileM = 128;
  static constexpr int kTileN = kTileN_;
  static constexpr int kTileK = kBlockBytes / sizeof(T);
  static_assert(!kQuantizes || (kNarrow && CanQuantize(kScales, kTileN)));
  static_assert(!kBlockScales || (kTileK == kScaleBlock &&
                                  (kQuantizes || CanHave(kScales, kTileN, /*gates=*/true))));
  static constexpr int kClusterM = kClusterM_;
  static constexpr int kClusterK = kClusterK_;
  static constexpr int kCluster = kClusterM * kClusterK;
  static constexpr int kSliceN = kTileN / kClusterK;  // columns that a CTA finishes
  static_assert(kClusterK == 1 || (kClusterM == 1 && !IsShared(kTileN) && kSliceN % 32 == 0));
  static constexpr bool kTransposeRhs = kTransposeRhs_;  // w is stored [n, k]: K-major
  static constexpr bool kTransposeLhs = kTransposeLhs_;  // MN-major

  static constexpr int kThreads = 384;
  // Registers per thread of the producer warpgroup and of the consumer warpgroups. setmaxnreg can
  // only redistribute the registers of the launch, 168 for each of 384 threads. If the sum exceeded
  // them, a warpgroup would wait forever.
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168);
  static constexpr int kConsumers = 2;
  static constexpr int kM64Blocks = kTileM / 64;    // m64 blocks of a tile: the rows of one wgmma
  static constexpr int kAccumulators = kTileN / 2;  // of a thread, for an m64 block
  static constexpr int kSliceAccumulators = kSliceN / 2;
  // Whether both consumers share each tile: consumer i has m64 block i. Else consumers take tiles
  // alternately (ping-pong), and each has all m64 blocks of its tile.
  static constexpr bool kCooperative = IsShared(kTileN) || kBlockScales;
  static constexpr int kConsumerM64Blocks = kCooperative ? kM64Blocks / kConsumers : kM64Blocks;
  static_assert(!kCooperative || kM64Blocks == kConsumers);
  // Whether a tile lends its last stage to its consumers, which stage most of their results there.
  // The store warp returns the stage when it has been read; meanwhile the next tile uses the other
  // stages. The staging memory saved makes room for a fourth stage. With 224 columns that gains 4
  // to 10 % where power is not the limit; with 256 columns, nothing
  // (docs/internals/configurations.md). With 192 and scales of vectors it makes room for these.
  static constexpr bool kLendsStage =
      kMayLendStage && kCooperative && !kQuantizes &&
      (kTileN == 224 || (kScales == Scales::kOfVectors && kTileN == 192) ||
       (kScales == Scales::kOfBlocks && kTileN == 256));
  // Whether half of a tile's columns can belong to a second weight (a gate).
  static constexpr bool kTwoWeights = kTileN % 128 == 0 && kClusterK == 1;
  // Boxes of w stored [k, n] are kBlockBytes wide; the last one may exceed the tile.
  static constexpr int kBoxN = kBlockBytes / sizeof(T);
  static constexpr int kLoadN = kTransposeRhs ? kTileN : RoundUp(kTileN, kBoxN);
  static constexpr int kABytes = kTileM * kBlockBytes;
  static constexpr int kBBytes = kLoadN * kBlockBytes;
  // An m64 block's slice of results, in a 16-bit type. What is quantised is stored from registers.
  static constexpr int kStagingBytes = kQuantizes ? 0 : 64 * kSliceN * 2;
  // With a lent stage, the first strip is staged in the consumer's own staging, the second in the
  // consumer's rows of the stage's A, and the rest in the consumer's half of the stage's B.
  static_assert(!kLendsStage || (kABytes == kConsumers * kStripBytes &&
                                 kStagingBytes - 2 * kStripBytes <= kBBytes / kConsumers));
  // A slice of an m64 block in float32, sent to the CTA that finishes it (gpu/cluster_sum.cuh); and
  // the slices that a consumer receives from the other CTAs.
  static constexpr int kSliceBytes = 64 * kSliceN * 4;
  static constexpr int kRemoteSliceBytes = (kClusterK - 1) * kSliceBytes;
  static constexpr int kSendBoxBytes = 4096;  // for Exchange::Send
  static constexpr int kSendBoxes = 4;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kStagingBytesPerConsumer = kLendsStage ? kStripBytes : kStagingBytes;
  // A stage's scales (gpu/block_scales_sm90.cuh): of the tile's rows, and of groups of kScaleGroup
  // columns. A few of the latter lie beside the barriers.
  static constexpr int kScaleGroup = kScales == Scales::kOfVectors ? 1
                                     : kTileN % 256 == 0           ? 128
                                     : kTileN % 64 == 0            ? 64
                                                                   : 32;
  static constexpr int kScaleGroups = kTileN / kScaleGroup;
  static constexpr bool kFewScaleGroups = kBlockScales && kScaleGroups <= 8;
  static constexpr int kFewScaleBytes = kFewScaleGroups ? 32 : 0;
  static constexpr int kScaleBytes =
      kBlockScales ? 4 * (kTileM + (kFewScaleGroups ? 0 : kScaleGroups)) : 0;
  static constexpr int kStages = (kHopper.smem_bytes - kBarrierBytes - kSendBoxes * kSendBoxBytes -
                                  kConsumers * (kStagingBytesPerConsumer + kRemoteSliceBytes)) /
                                 (kABytes + kBBytes + kScaleBytes);
  // The send semaphore's freedom from deadlock (gpu/send_semaphore.cuh). In ops that have it,
  // consumers that share tiles have all of a tile's k: their CTAs do not split it.
  static_assert(kStages * kBlockBytes <= kMostStagedBytes && (!IsShared(kTileN) || kClusterK == 1));
  // Rows of w's tile, stored [k, n], that each CTA of the cluster loads and multicasts.
  static constexpr int kBoxRows = kTileK / kClusterM;
  static constexpr int kTileQueue = 8;  // entries: tiles handed out and not yet finished

  // Shared memory, in this order.
  static constexpr int kBOffset = kStages * kABytes;
  static constexpr int kStagingOffset = kBOffset + kStages * kBBytes;
  static constexpr int kRemoteSliceOffset = kStagingOffset + kConsumers * kStagingBytesPerConsumer;
  static constexpr int kSendOffset = kRemoteSliceOffset + kConsumers * kRemoteSliceBytes;
  static constexpr int kScaleOffset = kSendOffset + kSendBoxes * kSendBoxBytes;
  static constexpr int kBarrierOffset = kScaleOffset + kStages * kScaleBytes;
  static constexpr int kSmemBytes = kBarrierOffset + kBarrierBytes;
  static_assert(kSmemBytes <= kHopper.smem_bytes);
};

// Addresses in shared memory.
template <typename Config>
struct GemmSmem {
  uint32_t base;

  __device__ uint32_t A(int stage) const { return base + stage * Config::kABytes; }
  __device__ uint32_t B(int stage) const {
    return base + Config::kBOffset + stage * Config::kBBytes;
  }
  __device__ uint32_t Staging(int consumer) const {
    return base + Config::kStagingOffset + consumer * Config::kStagingBytesPerConsumer;
  }
  // The slice that the i-th other CTA of the cluster sends to `consumer`.
  __device__ uint32_t RemoteSlice(int consumer, int i) const {
    return base + Config::kRemoteSliceOffset + consumer * Config::kRemoteSliceBytes +
           i * Config::kSliceBytes;
  }
  // A stage's scales: of rows, and of groups of columns.
  __device__ uint32_t RowScales(int stage) const {
    return base + Config::kScaleOffset + stage * Config::kScaleBytes;
  }
  __device__ uint32_t ColumnScales(int stage) const {
    return Config::kFewScaleGroups ? KBlocksArrived() + 16 + stage * Config::kFewScaleBytes
                                   : RowScales(stage) + 4 * Config::kTileM;
  }
  __device__ uint32_t SendBox(int i) const {
    return base + Config::kSendOffset + i * Config::kSendBoxBytes;
  }
  __device__ uint32_t Bar(int i) const { return base + Config::kBarrierOffset + 8 * i; }
  // Stages: filled by TMA, emptied by the consumers of all CTAs that share them (EmptyArrivals).
  __device__ uint32_t Full(int stage) const { return Bar(stage); }
  __device__ uint32_t Empty(int stage) const { return Bar(Config::kStages + stage); }
  // The tile queue. TileFull: an entry is published. TileEmpty: all roles are done with it.
  // PartialsReady: the peers' partial tiles have arrived.
  static constexpr int kTileBarriers = 2 * Config::kStages;
  __device__ uint32_t TileFull(int entry) const { return Bar(kTileBarriers + entry); }
  __device__ uint32_t TileEmpty(int entry) const {
    return Bar(kTileBarriers + Config::kTileQueue + entry);
  }
  __device__ uint32_t PartialsReady(int entry) const {
    return Bar(kTileBarriers + 2 * Config::kTileQueue + entry);
  }
  static constexpr int kMisc = kTileBarriers + 3 * Config::kTileQueue;
  // The load warp has started a tile, so the scheduler warp may take the next.
  __device__ uint32_t LoadBegun() const { return Bar(kMisc); }
  // Ping-pong order: the other consumer has issued its products, so the next full stages are this
  // consumer's.
  __device__ uint32_t MmaOrder(int consumer) const { return Bar(kMisc + 1 + consumer); }
  // A consumer's staging has been written; has been read by the store warp.
  __device__ uint32_t Staged(int consumer) const { return Bar(kMisc + 3 + consumer); }
  __device__ uint32_t Stored(int consumer) const { return Bar(kMisc + 5 + consumer); }
  // The remote slices have arrived; the other CTAs have read what this consumer sent.
  __device__ uint32_t RemoteSlicesArrived(int consumer) const { return Bar(kMisc + 7 + consumer); }
  __device__ uint32_t RemoteSlicesRead(int consumer) const { return Bar(kMisc + 9 + consumer); }
  __device__ uint32_t SendBoxFull(int i) const { return Bar(kMisc + 11 + i); }
  static constexpr int kBarriers = RoundUp(kMisc + 11 + Config::kSendBoxes, 2);
  static constexpr int kTileEntryBytes = 32;  // see PublishTile
  __device__ uint32_t TileEntry(int entry) const {
    return Bar(kBarriers) + kTileEntryBytes * entry;
  }
  // K-blocks of A that have arrived, over all tiles so far. Written by the scheduler warp, polled
  // by the load warp, and read by consumers of scales of rows that arrive with them.
  __device__ uint32_t KBlocksArrived() const { return TileEntry(Config::kTileQueue); }
  static_assert(kBarriers * 8 + Config::kTileQueue * kTileEntryBytes + 16 +
                    Config::kStages * Config::kFewScaleBytes <=
                Config::kBarrierBytes);
};

// The load warp's view of that counter. It polls only when it has consumed every k-block that it
// knows of, so most k-blocks cost one comparison.
struct KBlocksReader {
  uint32_t counter;  // shared-memory address
  uint32_t consumed = 0, arrived = 0;

  __device__ bool Poll() {
    arrived = ptx::LoadSharedAcquire(counter);
    return arrived != consumed;
  }
  __device__ void AwaitNext() {
    while (arrived == consumed) Poll();
    ++consumed;
  }
};

// Arrivals that empty a stage: from each CTA that shares it, the warps of the consumers that read
// it. With a lent stage, also one for each consumer's results: by the store warp if results were
// published there, else by the consumer.
template <typename Config>
__device__ __forceinline__ int EmptyArrivals() {
  constexpr int kReaders = 4 * (Config::kCooperative ? Config::kConsumers : 1);
  return Config::kClusterM * (kReaders + (Config::kLendsStage ? Config::kConsumers : 0));
}

// Readers of a tile-queue entry of the leader CTA: in every CTA the consumers' warps, the store
// warp, the load warp and, if there are partial tiles, the warp that waits for them; and the
// scheduler warps of the other CTAs.
template <typename Config>
__device__ __forceinline__ int TileReaders(bool adds_partials) {
  return Config::kCluster * (4 * Config::kConsumers + 2 + (adds_partials ? 1 : 0)) +
         (Config::kCluster - 1);
}

// Published after the last tile.
inline constexpr Tile kNoTile{-1, 0};
__device__ __forceinline__ bool IsTile(Tile tile) { return tile.m >= 0; }

// One role's view of the tile queue. An entry is reused when all readers have left it.
template <typename Config>
struct TileReader {
  GemmSmem<Config> smem;
  Ring<Config::kTileQueue> ring;

  // Called by a full warp. The shuffles also tell the compiler that the values are uniform.
  __device__ Tile Enter() const {
    const Tile tile = Peek();
    return Tile{__shfl_sync(0xffffffff, tile.m, 0), __shfl_sync(0xffffffff, tile.n, 0),
                __shfl_sync(0xffffffff, tile.split, 0)};
  }
  // Between Enter and Leave: the tile's number of k-blocks, and the coordinates of this CTA's
  // operands.
  __device__ int KBlocks() const { return __shfl_sync(0xffffffff, Words(0).w, 0); }
  template <typename C>
  __device__ C Coords() const {
    const int4 words = Words(16);
    return reinterpret_cast<const C&>(words);
  }
  __device__ void Leave() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive();
    ring.Advance();
  }
  // The next tile for a role of a single lane.
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
    ptx::MbarrierWait(smem.TileFull(ring.index), ring.parity);
    const int4 v = Words(0);
    return Tile{v.x, v.y, v.z};
  }
  // 16 bytes of the entry, from byte `at` on.
  __device__ int4 Words(int at) const {
    const uint4 v = ptx::LoadShared16(smem.TileEntry(ring.index) + at);
    return make_int4(v.x, v.y, v.z, v.w);
  }
  __device__ void Arrive() const {
    ptx::MbarrierArriveRemote(ptx::MapToCta(smem.TileEmpty(ring.index), 0));
  }
};

// The part of its cluster's tile that a CTA computes.
template <typename Config>
__device__ __forceinline__ Tile CtaTile(Tile tile, int cta) {
  return Config::kClusterK == 1 ? tile : Tile{tile.m, tile.n, cta};
}

// The slice of its cluster's tile that a CTA finishes, and the slice's first column.
template <typename Config>
__device__ __forceinline__ int32_t SliceOf(Tile tile) {
  return Config::kClusterK == 1 ? tile.n : tile.n * Config::kClusterK + tile.split;
}
template <typename Config>
__device__ __forceinline__ int64_t FirstColumn(Tile tile) {
  return static_cast<int64_t>(SliceOf<Config>(tile)) * Config::kSliceN;
}

// Writes an entry in this CTA's shared memory, as PublishTile does.
template <typename Coords>
__device__ __forceinline__ void WriteTileEntry(uint32_t at, Tile tile_of_cta, int k_blocks,
                                               const Coords& coords) {
  ptx::StoreShared16(at, make_uint4(tile_of_cta.m, tile_of_cta.n, tile_of_cta.split, k_blocks));
  ptx::StoreShared16(at + 16, reinterpret_cast<const uint4&>(coords));
}

// Publishes a tile to all CTAs of the cluster. Each gets its part of the tile, the number of
// k-blocks and the coordinates of its operands, so that only the scheduler warp computes them.
template <typename Config, typename Coords>
__device__ __forceinline__ void PublishTile(const GemmSmem<Config>& smem,
                                            const Ring<Config::kTileQueue>& ring, Tile tile,
                                            const int (&k_blocks)[Config::kCluster],
                                            const Coords (&coords)[Config::kCluster]) {
  static_assert(sizeof(Coords) == sizeof(int4));
  ptx::MbarrierWait(smem.TileEmpty(ring.index), ring.parity ^ 1);
  if constexpr (Config::kCluster == 1) {
    WriteTileEntry(smem.TileEntry(ring.index), tile, k_blocks[0], coords[0]);
    ptx::MbarrierArrive(smem.TileFull(ring.index));
  } else {
#pragma unroll
    for (int cta = 0; cta < Config::kCluster; ++cta) {
      const uint32_t at = ptx::MapToCta(smem.TileEntry(ring.index), cta);
      const uint32_t bar = ptx::MapToCta(smem.TileFull(ring.index), cta);
      ptx::MbarrierArriveExpectTxRemote(bar, GemmSmem<Config>::kTileEntryBytes);
      const Tile tile_of_cta = CtaTile<Config>(tile, cta);
      ptx::SendRemote(at, make_int4(tile_of_cta.m, tile_of_cta.n, tile_of_cta.split, k_blocks[cta]),
                      bar);
      ptx::SendRemote(at + 16, reinterpret_cast<const int4&>(coords[cta]), bar);
    }
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_SMEM_CUH_
