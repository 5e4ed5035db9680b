// Scales with entries of k (kBlockScales): the sums of each k-block are multiplied by the scale of
// x's row and that of w's column, or of its block of kScaleBlock columns, and added to a tile's
// sums in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). So sums keep the bits that the
// tensor cores' own sums of 8-bit floats do not have.
//
// Scales are part of a stage: the load warp copies those of the tile's rows, and of its groups of
// columns (Config::kScaleGroup), by cp.async, whose completions arrive at the stage's barrier too.
// Loads by the consumers themselves took 7 % of a product's time (docs/experiments/0056).
//
// Consumers share each tile. While one scales and adds a k-block's sums, the tensor cores have the
// other's to multiply. In tiles of 160 and 192 columns they take turns at issuing a k-block's
// instructions: else those of both mix, both wait for all of them, and nothing is multiplied while
// both scale. A tile of two blocks of columns has registers for the sums of one at a time.
//
//   waits   a consumer for the other one to have issued its last product. The first one begins a
//           tile when the second one has finished the tile before; within a tile neither waits for
//           the other's results to be sent or stored
//
// An op with such kernels provides
//
//   ScalesOf(args, call, row_block, tile) -> ScaleSource<Config, ..>     for the load warp
#ifndef JFLUX_GPU_BLOCK_SCALES_SM90_CUH_
#define JFLUX_GPU_BLOCK_SCALES_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "core/platform.h"
#include "core/tile_order.h"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_multiply_sm90.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "gpu/ring.cuh"
#include "gpu/wgmma.cuh"

namespace jflux {

// ---- The load warp --------------------------------------------------------------------------

// Arrivals that fill a stage beside those of its operands: of each lane's copies.
template <typename Config>
inline constexpr int kScaleArrivals = Config::kBlockScales ? 32 : 0;

// What a lane copies of a tile's scales for each k-block. kArrives: x's scales may come from peers,
// or lie as these do (SetPanel).
template <typename Config, bool kArrives = false>
struct ScaleSource {
  static constexpr int kRows = Config::kTileM / 32;
  static constexpr int kVector = kVectorBytes / sizeof(float);

  const float* row[kRows];  // of rows lane + 32 i, an entry for each k-block
  // If not 0, row[0] has the entries of four rows in each of so many entries.
  int32_t panel = 0;
  const float* column = nullptr;  // of a group of columns; null: the lane has none
  int64_t column_step = 1;        // entries from one k-block to the next
  int32_t columns = 0;            // kOfVectors: of the tile and the array, from the lane's first on

  // Of a tile that begins at virtual row `row0`: `scale` [rows, k_blocks]. A row past the last has
  // its scale; nobody stores what it multiplies.
  template <typename Rows>
  __device__ __forceinline__ void SetRows(const float* scale, const Rows& rows, int64_t row0,
                                          int64_t k_blocks) {
    const int64_t last = rows.Total() - 1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t at = Min<int64_t>(row0 + threadIdx.x % 32 + 32 * i, last);
      row[i] = scale + rows.Actual(at) * k_blocks;
    }
  }
  // `scale` [k_blocks, of_all], of which a tile has the first `rows`; both are multiples of four.
  // With kArrives.
  __device__ __forceinline__ void SetPanel(const float* scale, int32_t rows, int32_t of_all) {
    const auto at = static_cast<int32_t>(threadIdx.x % 32 * kVector);
    row[0] = at < rows ? scale + at : nullptr;
    panel = of_all;
  }
  // Of a tile's columns from n0 on, of a w whose scale is [blocks of n, k_blocks]; with two
  // weights, half of its columns are the second's, from n0 on.
  __device__ __forceinline__ void SetColumns(const float* scale, int64_t n0, int64_t n,
                                             int64_t k_blocks, const float* second = nullptr) {
    const int group = threadIdx.x % 32;
    if (group >= Config::kScaleGroups) return;
    const bool is_second = second != nullptr && group >= Config::kScaleGroups / 2;
    const int64_t first =
        n0 + (group - (is_second ? Config::kScaleGroups / 2 : 0)) * Config::kScaleGroup;
    column = (is_second ? second : scale) + Quotient(Min(first, n - 1), kScaleBlock) * k_blocks;
  }
  // The same of columns that have scales of their own, [k_blocks, n].
  __device__ __forceinline__ void SetVectors(const float* scale, int64_t n0, int64_t n) {
    const auto at = static_cast<int32_t>(threadIdx.x % 32 * kVector);
    column = scale + n0 + at;
    column_step = n;
    columns = static_cast<int32_t>(Min<int64_t>(Config::kTileN, n - n0)) - at;
  }

  // Called by all lanes when the stage is empty, and x's rows have arrived.
  __device__ __forceinline__ void Copy(const GemmSmem<Config>& smem, int stage, int k_block) const {
    const int lane = threadIdx.x % 32;
    const uint32_t rows = smem.RowScales(stage), groups = smem.ColumnScales(stage);
    if (kArrives && panel != 0) {
      // Past L1, of which a line may be older than what has arrived.
      if (row[0] != nullptr) {
        ptx::CopyAsync16(rows + kVectorBytes * lane, row[0] + static_cast<int64_t>(k_block) * panel,
                         kVectorBytes);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) ptx::CopyAsync4(rows + 4 * (lane + 32 * i), row[i] + k_block);
    }
    if constexpr (Config::kScales == Scales::kOfVectors) {
      const float* from = column + k_block * column_step;
#pragma unroll
      for (int at = 0; at < Config::kTileN; at += 32 * kVector) {
        if (kVector * lane + at < Config::kTileN && at < columns) {
          ptx::CopyAsync16(groups + kVectorBytes * lane + 4 * at, from + at, kVectorBytes);
        }
      }
    } else if (column != nullptr) {
      ptx::CopyAsync4(groups + 4 * lane, column + k_block);
    }
    ptx::CopyAsyncArrive(smem.Full(stage));
  }
};

// Of other kernels.
struct NoScales {
  template <typename Smem>
  __device__ __forceinline__ void Copy(const Smem&, int, int) const {}
};
template <typename Op>
__device__ __forceinline__ auto ScalesOfTile(const typename Op::Args& args, const CallContext& call,
                                             int32_t row_block, Tile tile) {
  if constexpr (Op::Config::kBlockScales) {
    return Op::ScalesOf(args, call, row_block, tile);
  } else {
    return NoScales{};
  }
}

// ---- The consumers --------------------------------------------------------------------------

// What a thread has of a stage's scales (fragments: gpu/wgmma.cuh).
template <typename Config>
struct StageScales {
  static constexpr bool kVectors = Config::kScales == Scales::kOfVectors;
  static constexpr int kGroups = kVectors ? 1 : Config::kScaleGroups;
  static constexpr int kOfGroup = Config::kScaleGroup / 2;  // accumulators

  float low[kGroups], high[kGroups];  // of its two rows, times those of a group of columns
  uint32_t columns;                   // address of all columns' scales

  // Of a consumer's m64 block.
  __device__ __forceinline__ void Read(const GemmSmem<Config>& smem, int stage, int m64) {
    const int thread = threadIdx.x % 128;
    const uint32_t rows =
        smem.RowScales(stage) + 4 * (m64 * 64 + 16 * (thread / 32) + thread % 32 / 4);
    const float first = ptx::LoadSharedFloat(rows), second = ptx::LoadSharedFloat(rows + 4 * 8);
    columns = smem.ColumnScales(stage);
    if constexpr (kVectors) {
      low[0] = first;
      high[0] = second;
    } else {
#pragma unroll
      for (int g = 0; g < kGroups; g += 4) {
        const uint4 word = ptx::LoadShared16(columns + 4 * g);
        const float of[4] = {__uint_as_float(word.x), __uint_as_float(word.y),
                             __uint_as_float(word.z), __uint_as_float(word.w)};
#pragma unroll
        for (int i = 0; i < 4 && g + i < kGroups; ++i) {
          low[g + i] = first * of[i];
          high[g + i] = second * of[i];
        }
      }
    }
  }
  // total += sums, scaled, of kCount accumulators from kFirst on. Two neighbours are columns of a
  // row.
  template <int kFirst = 0, int kCount, int kTotal>
  __device__ __forceinline__ void Add(float (&total)[kTotal], const float (&sums)[kCount]) const {
    if constexpr (kVectors) {
      const uint32_t from = columns + 8 * (threadIdx.x % 4);
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const uint64_t pair = ptx::LoadShared8(from + 8 * i);
        const float2 of = reinterpret_cast<const float2&>(pair);
        total[i] += sums[i] * (low[0] * of.x);
        total[i + 1] += sums[i + 1] * (low[0] * of.y);
        total[i + 2] += sums[i + 2] * (high[0] * of.x);
        total[i + 3] += sums[i + 3] * (high[0] * of.y);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int g = (kFirst + i) / kOfGroup;
        total[kFirst + i] += sums[i] * (i % 4 < 2 ? low[g] : high[g]);
      }
    }
  }
};

// The columns whose sums a thread has room for beside a tile's.
template <typename Config>
inline constexpr int kSummedColumns =
    Config::kTileN == 2 * kScaleBlock ? kScaleBlock : Config::kTileN;
// Whether consumers take turns. Scales of vectors are read for so long that they would lose.
template <typename Config>
inline constexpr bool kTakesTurns =
    Config::kScales == Scales::kOfBlocks && kSummedColumns<Config> > kScaleBlock;

// A consumer's turns in a tile; each barrier has as many arrivals as waits in it.
template <typename Config>
struct Turns {
  int consumer;

  static constexpr bool kTakes = kTakesTurns<Config>;
  __device__ __forceinline__ void Begin() const {
    if (kTakes && consumer == 1) ptx::BarrierArrive(Barrier(0), kThreads);
  }
  // Before a k-block's instructions, and after them.
  __device__ __forceinline__ void Await() const {
    if (kTakes) ptx::BarrierSync(Barrier(consumer), kThreads);
  }
  __device__ __forceinline__ void Pass(bool is_last) const {
    if (kTakes && (consumer == 0 || !is_last)) {
      ptx::BarrierArrive(Barrier(1 - consumer), kThreads);
    }
  }

 private:
  static_assert(Config::kConsumers == 2);
  static constexpr int kThreads = 128 * Config::kConsumers;
  static __device__ __forceinline__ int Barrier(int of) { return 2 + Config::kConsumers + of; }
};

// total += a tile's scaled k-blocks. release(stage) is called when a stage has been read, but not
// for a lent one. Returns the last stage.
template <typename Config, typename Release>
__device__ __forceinline__ int MultiplyBlocks(Accumulators<Config>& total,
                                              const GemmSmem<Config>& smem, int consumer,
                                              Ring<Config::kStages>& stages, int k_blocks,
                                              Release&& release) {
  static_assert(Config::kConsumerM64Blocks == 1);
  constexpr int kColumns = kSummedColumns<Config>, kCount = kColumns / 2;
  constexpr int kHalf = kMultiplySteps / 2;
  constexpr bool kReadsLate = Config::kScales == Scales::kOfVectors;
  const Turns<Config> turns{consumer};
  turns.Begin();
  int last = -1;
  for (int kb = 0; kb < k_blocks; ++kb) {
    ptx::MbarrierWait(smem.Full(stages.index), stages.parity);
    StageScales<Config> scales;
    const auto multiply = [&](auto first) {
      constexpr int kFirst = decltype(first)::value;
      constexpr bool kIsLast = kFirst + kColumns == Config::kTileN;
      const uint32_t a = smem.A(stages.index) + consumer * 8192;
      const uint32_t b = smem.B(stages.index) + kFirst * kBlockBytes;
      const bool releases = kIsLast && (!Config::kLendsStage || kb + 1 < k_blocks);
      float sums[1][kCount];
      turns.Await();
      wgmma::Pin(sums[0]);
      wgmma::Fence();
      // In one group, a product of 8192 x 7168 x 8192 has been seen to take 13 % longer.
      MultiplyStage<Config, 0, kHalf>(sums, a, b, /*adds=*/false);
      wgmma::Commit();
      MultiplyStage<Config, kHalf>(sums, a, b, /*adds=*/true);
      wgmma::Commit();
      turns.Pass(kb + 1 == k_blocks);
      if constexpr (kFirst == 0) scales.Read(smem, stages.index, consumer);
      wgmma::Wait<0>();
      wgmma::Pin(sums[0]);
      if (!kReadsLate && releases) release(stages.index);
      scales.template Add<kFirst / 2>(total[0], sums[0]);
      if (kReadsLate && releases) release(stages.index);
    };
    multiply(std::integral_constant<int, 0>{});
    if constexpr (kColumns < Config::kTileN) multiply(std::integral_constant<int, kColumns>{});
    last = stages.index;
    stages.Advance();
  }
  return last;
}

}  // namespace jflux

#endif  // JFLUX_GPU_BLOCK_SCALES_SM90_CUH_
