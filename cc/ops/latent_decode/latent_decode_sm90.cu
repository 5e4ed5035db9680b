// latent_decode on Hopper. A CTA has an item: 64 queries that share a head of the cache, over a
// part of their sequence. It has three warpgroups:
//
//   0        loads: queries, then tiles of 64 positions into a ring of two stages, by cp.async,
//            since the rows of pages lie anywhere
//   1 and 2  consumers: wgmma. Each has 256 columns of the result. The first one also has the
//            scores: it writes a tile's probabilities to shared memory, from where both multiply
//            them with their columns of the values
//
// While the second consumer adds a tile's values, the first one computes the next tile's scores,
// which begin in the tensor cores behind its own values. A tile takes these 2,176 cycles. (Scores
// of half of the positions by each consumer read all queries twice: shared memory was the limit,
// and a tile took 4,800 cycles.)
//
// Rows lie in shared memory as nine boxes of 64 elements, [64 rows][128 bytes], in the swizzle that
// wgmma reads: operands of scores, over elements, and eight of them of the values, over positions.
// The ninth has rotary elements, which values have not. So when scores are done, probabilities are
// written in its place.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/epilogue_sm90.cuh"
#include "gpu/ptx.cuh"
#include "gpu/ring.cuh"
#include "gpu/wgmma.cuh"
#include "ops/flash_attention/attention_sm90.cuh"
#include "ops/flash_decode/flash_decode.cuh"
#include "ops/latent_decode/latent_decode.cuh"
#include "ops/latent_decode/latent_decode.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

using attention::FirstRow, attention::HalfOf, attention::WarpArrive;
using namespace decode;
using namespace latent;

constexpr int kQueries = kLatentQueries, kKeys = 64;
constexpr int kBoxes = kLatentWidth / 64, kValueBoxes = kLatentValues / 64;
constexpr int kBoxBytes = 64 * 128, kTileBytes = kBoxes * kBoxBytes;
constexpr int kStages = 2;
constexpr int kStagedColumns = kLatentValues / 2 + 8;  // of a row of results in shared memory
static_assert(kQueries * kStagedColumns * 4 <= kTileBytes);
constexpr int kLoadThreads = 128, kConsumerThreads = 256, kConsumerWarps = 8;
constexpr attention::Registers kRegisters{56, 224};
static_assert(attention::Registers::Fit(kRegisters));

// Named barriers. A stage's probabilities are there: one for each stage, which is not filled again
// before the second consumer has come to it.
__device__ int WeightsBarrier(int stage) { return 1 + stage; }
constexpr int kTotalsBarrier = 1 + kStages, kFirstBarrier = 2 + kStages;
constexpr int kTotals = kStages;  // place of the rows' totals, behind the stages' factors

struct Smem {
  static constexpr int kFactors = (1 + kStages) * kTileBytes;
  static constexpr int kRows = kFactors + (kStages + 1) * kQueries * 4,
                       kBarriers = kRows + kStages * 16;
  static constexpr int kBytes = kBarriers + 2 * kStages * 8;
  static_assert(kBytes <= kHopper.smem_bytes);
  uint32_t base;

  __device__ uint32_t Q() const { return base; }
  __device__ uint32_t K(int stage) const { return base + (1 + stage) * kTileBytes; }
  __device__ uint32_t Weights(int stage) const { return K(stage) + kValueBoxes * kBoxBytes; }
  // What a row's result is multiplied by before a stage's values are added; at kTotals its total.
  __device__ uint32_t Factor(int stage, int row) const {
    return base + kFactors + (stage * kQueries + row) * 4;
  }
  // Which of 16 rows of a stage are there: a bit of each.
  __device__ uint32_t Rows(int stage, int word) const {
    return base + kRows + 16 * stage + 4 * word;
  }
  // Full: the copies of each thread, and the bits of each warp.
  static constexpr int kFullArrivals = kLoadThreads + kLoadThreads / 32;
  __device__ uint32_t Full(int stage) const { return base + kBarriers + 8 * stage; }
  __device__ uint32_t Empty(int stage) const { return base + kBarriers + 8 * (kStages + stage); }
};

// ---- Loads --------------------------------------------------------------------------------------

// Copies 16 rows of this warp. `at`: of each four of them, this lane's row in global memory, or
// null for zeros; `any`: what may be read. Eight lanes copy 128 bytes of a row.
__device__ void CopyRowsOfWarp(uint32_t to, const uint8_t* const (&at)[4], const void* any) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, vector = lane % 8;
#pragma unroll
  for (int four = 0; four < 4; ++four) {
    const int row = 16 * warp + 4 * four + lane / 8;
    const uint32_t place = to + row * 128 + ((vector ^ (row & 7)) * 16);
    const bool is_zero = at[four] == nullptr;
    const uint8_t* from = is_zero ? static_cast<const uint8_t*>(any) : at[four] + 16 * vector;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      ptx::CopyAsync16Or0(place + box * kBoxBytes, from + (is_zero ? 0 : 128 * box), is_zero);
  }
}

__device__ void RunLoads(const FlashDecodeArgs& args, const Item& item, const Smem& smem) {
  constexpr int kRowBytes = 2 * kLatentWidth;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t tiles = CeilDiv(item.end - item.begin, kKeys);
  const uint8_t* rows[4];
  if (tiles > 0) {  // queries arrive with the first tile
    const auto* q = static_cast<const uint8_t*>(args.arrays.q);
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const Query query = Query::Of<kQueries>(args, item, 16 * warp + 4 * four + lane / 8);
      rows[four] = query.is_there ? q + query.row * kRowBytes : nullptr;
    }
    CopyRowsOfWarp(smem.Q(), rows, q);
  }
  const auto* k = static_cast<const uint8_t*>(args.arrays.k);
  Ring<kStages> stages;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int32_t first = item.begin + tile * kKeys + 16 * warp;
    const uint32_t own = RowOf</*kReports=*/true>(args, item, first + lane % 16);
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const uint32_t row = __shfl_sync(0xffffffff, own, 4 * four + lane / 8);
      rows[four] = row == kNoRow ? nullptr : k + static_cast<uint64_t>(row) * kRowBytes;
    }
    const uint32_t there = __ballot_sync(0xffffffff, own != kNoRow) & 0xffff;
    ptx::MbarrierWait(smem.Empty(stages.index), stages.parity ^ 1);
    CopyRowsOfWarp(smem.K(stages.index), rows, k);
    ptx::CopyAsyncArrive(smem.Full(stages.index));
    if (lane == 0) {
      ptx::StoreShared4(smem.Rows(stages.index, warp), static_cast<int32_t>(there));
      ptx::MbarrierArrive(smem.Full(stages.index));
    }
    stages.Advance();
  }
}

// ---- Consumers ----------------------------------------------------------------------------------

using Out = float[kLatentValues / 4];  // a thread's: two rows of a consumer's 256 columns
using Tile = float[kKeys / 2];         // and of a tile's scores

// Begins the scores of all queries with a tile's positions, less their scale.
template <typename T>
__device__ void BeginScores(const Smem& smem, int stage, Tile& s) {
  wgmma::Fence();
#pragma unroll
  for (int k = 0; k < kLatentWidth / 16; ++k) {
    const uint32_t at = k / 4 * kBoxBytes + k % 4 * 32;
    wgmma::Multiply<0, 0>(static_cast<const T*>(nullptr), s,
                          wgmma::Descriptor(smem.Q() + at, 16, 1024),
                          wgmma::Descriptor(smem.K(stage) + at, 16, 1024), k > 0);
  }
  wgmma::Commit();
  wgmma::Pin(s);
}

// Begins to add a tile's weighted values, of a consumer's columns.
template <typename T>
__device__ void BeginValues(const Smem& smem, int stage, int consumer, Out& out) {
  const uint32_t values = smem.K(stage) + consumer * (kValueBoxes / 2) * kBoxBytes;
  wgmma::Pin(out);
  wgmma::Fence();
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    wgmma::Multiply<0, 1>(static_cast<const T*>(nullptr), out,
                          wgmma::Descriptor(smem.Weights(stage) + k * 32, 16, 1024),
                          wgmma::Descriptor(values + k * 2048, kBoxBytes, 1024), true);
  }
  wgmma::Commit();
}

// Multiplies a result by its rows' factors, if one of the warp's is not 1.
__device__ void Rescale(Out& out, const float (&factor)[2]) {
  if (!__any_sync(0xffffffff, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
  for (int i = 0; i < kLatentValues / 4; ++i) out[i] *= factor[HalfOf(i)];
}

// Writes a consumer's columns: each warp its 16 rows, by way of shared memory at `staged`, since 32
// lanes have pieces of eight rows. `total`: of the probabilities of a thread's two rows.
__device__ void StoreColumns(const FlashDecodeArgs& args, const Item& item, int consumer,
                             uint32_t staged, const Out& out, const float (&total)[2]) {
  constexpr int kColumns = kLatentValues / 2;
  const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16;
  const auto at = [&](int row, int column) { return staged + (row * kStagedColumns + column) * 4; };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = total[h] == 0 ? 0.0f : 1 / total[h];  // NaN is not 0
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 pair = {out[4 * j + 2 * h] * factor, out[4 * j + 2 * h + 1] * factor};
      ptx::StoreShared8(at(FirstRow() + 8 * h, 8 * j + 2 * (lane % 4)),
                        reinterpret_cast<const uint64_t&>(pair));
    }
  }
  __syncwarp();
  for (int row = first; row < first + 16; ++row) {
    float* to = RowOfResult<kQueries>(args, item, row);
    if (to == nullptr) continue;
#pragma unroll
    for (int column = lane; column < kColumns; column += 32)
      to[kColumns * consumer + column] = ptx::LoadSharedFloat(at(row, column));
  }
}

// Writes a tile's probabilities, as an operand over positions.
template <typename T>
__device__ void StoreWeights(const Smem& smem, int stage, const Tile& s) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int pair = 0; pair < kKeys / 16; ++pair) {
    const int vector = 2 * pair + lane / 16;
    const float* a = &s[8 * pair];
    ptx::StoreMatrix4(smem.Weights(stage) + row * 128 + ((vector ^ (row & 7)) * 16),
                      Pack<T>(a[0], a[1]), Pack<T>(a[2], a[3]), Pack<T>(a[4], a[5]),
                      Pack<T>(a[6], a[7]));
  }
}

// Scores, and the first 256 columns.
template <typename T>
__device__ void RunFirstConsumer(const FlashDecodeArgs& args, const Item& item, const Smem& smem) {
  const int lane = threadIdx.x % 32, row = FirstRow();
  const int32_t tiles = CeilDiv(item.end - item.begin, kKeys);
  Softmax<kQueries, kKeys> softmax(args, item, row);
  Out out;
#pragma unroll
  for (float& o : out) o = 0;
  Tile s;
  Ring<kStages> stages;
  const auto begin_scores = [&](int stage, uint32_t parity) {
    ptx::MbarrierWait(smem.Full(stage), parity);
    ptx::FenceProxyAsyncShared();  // rows came by cp.async
    BeginScores<T>(smem, stage, s);
  };
  // The scores of a tile have been computed: gives both consumers its probabilities.
  const auto finish_scores = [&](int stage, int32_t tile) {
    float factor[2];
    softmax.Take(
        args, item.begin + tile * kKeys,
        [&](int at) { return (ptx::LoadShared4(smem.Rows(stage, at / 16)) >> at % 16 & 1) != 0; },
        s, factor);
    StoreWeights<T>(smem, stage, s);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0)
        ptx::StoreShared4(smem.Factor(stage, row + 8 * h), __float_as_int(factor[h]));
    }
    ptx::FenceProxyAsyncShared();
    ptx::BarrierArrive(WeightsBarrier(stage), kConsumerThreads);
    ptx::BarrierSync(kFirstBarrier, kConsumerThreads / 2);
    Rescale(out, factor);
  };
  if (tiles > 0) {
    begin_scores(stages.index, stages.parity);
    wgmma::Wait<0>();
    wgmma::Pin(s);
    finish_scores(stages.index, 0);
  }
  for (int32_t tile = 1; tile < tiles; ++tile) {
    const int stage = stages.index;
    BeginValues<T>(smem, stage, 0, out);
    stages.Advance();
    begin_scores(stages.index, stages.parity);
    wgmma::Wait<1>();
    WarpArrive(smem.Empty(stage));
    wgmma::Wait<0>();
    wgmma::Pin(out);
    wgmma::Pin(s);
    finish_scores(stages.index, tile);
  }
  if (tiles > 0) {
    BeginValues<T>(smem, stages.index, 0, out);
    wgmma::Wait<0>();
    wgmma::Pin(out);
  }
  float total[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] = softmax.total[h];
    total[h] += __shfl_xor_sync(0xffffffff, total[h], 1);
    total[h] += __shfl_xor_sync(0xffffffff, total[h], 2);
    if (lane % 4 == 0)
      ptx::StoreShared4(smem.Factor(kTotals, row + 8 * h), __float_as_int(total[h]));
  }
  ptx::BarrierArrive(kTotalsBarrier, kConsumerThreads);
  StoreLogSumExps<kQueries>(args, item, row, softmax.highest, total);
  StoreColumns(args, item, 0, smem.Q(), out, total);
}

// The other 256 columns.
template <typename T>
__device__ void RunSecondConsumer(const FlashDecodeArgs& args, const Item& item, const Smem& smem) {
  const int row = FirstRow();
  const int32_t tiles = CeilDiv(item.end - item.begin, kKeys);
  const auto rows_of = [&](int place, float (&numbers)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) numbers[h] = ptx::LoadSharedFloat(smem.Factor(place, row + 8 * h));
  };
  Out out;
#pragma unroll
  for (float& o : out) o = 0;
  float numbers[2];
  Ring<kStages> stages;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int stage = stages.index;
    ptx::MbarrierWait(smem.Full(stage), stages.parity);
    ptx::FenceProxyAsyncShared();
    ptx::BarrierSync(WeightsBarrier(stage), kConsumerThreads);
    rows_of(stage, numbers);
    Rescale(out, numbers);
    BeginValues<T>(smem, stage, 1, out);
    wgmma::Wait<0>();
    wgmma::Pin(out);
    WarpArrive(smem.Empty(stage));
    stages.Advance();
  }
  ptx::BarrierSync(kTotalsBarrier, kConsumerThreads);  // all stages are free then
  rows_of(kTotals, numbers);
  StoreColumns(args, item, 1, smem.K(0), out, numbers);
}

template <typename T>
__global__ void __launch_bounds__(kLoadThreads + kConsumerThreads, 1)
    LatentDecodeKernel(const __grid_constant__ FlashDecodeArgs args) {
  JFLUX_DYNAMIC_SHARED(uint8_t, 1024, storage);
  const Smem smem{ptx::SmemAddress(storage)};
  const Item item = Item::Of<kKeys>(args, blockIdx.x, 0);
  if (threadIdx.x == 0) {
    if (item.is_wrong && item.group + item.block + item.split == 0)
      ReportLength(args, item.sequence);
    for (int i = 0; i < kStages; ++i) {
      ptx::MbarrierInit(smem.Full(i), Smem::kFullArrivals);
      ptx::MbarrierInit(smem.Empty(i), kConsumerWarps);
    }
    ptx::FenceMbarrierInit();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    ptx::RegistersDown<kRegisters.producer>();
    RunLoads(args, item, smem);
  } else {
    ptx::RegistersUp<kRegisters.consumer>();
    if (warpgroup == 1) {
      RunFirstConsumer<T>(args, item, smem);
    } else {
      RunSecondConsumer<T>(args, item, smem);
    }
  }
}

const void* KernelOf(DType dtype) {
  return WithFormat<kLatentDecodeFormats.operands>(dtype, [](auto format) {
    return reinterpret_cast<const void*>(&LatentDecodeKernel<CudaType<format>>);
  });
}

bool LoadHopper(std::string* error) {
  return ForFormats(kLatentDecodeFormats.operands,
                    [&](DType dtype) { return LoadKernel(KernelOf(dtype), Smem::kBytes, error); });
}

}  // namespace

bool LoadLatentDecodeKernels(std::string* error) {
  return LoadBothLoops(LoadHopper, LoadLatentDecodeKernels80, error);
}

bool LaunchLatentDecode(const FlashDecodeParams& p, const FlashDecodeArrays& arrays,
                        DeviceState* state, cudaStream_t stream, std::string* error) {
  *error = WhyNotFormats(kLatentDecodeFormats, kWgmmaFormats, p.dtype, p.dtype);
  if (!error->empty()) return false;
  if (p.width != kLatentWidth || p.scales != CacheScales::kNone) {
    *error = "the kernel takes keys of 576 elements, without scales";
    return false;
  }
  FlashDecodeArgs args;
  if (!ArgsOf(p, arrays, state, &args, error)) return false;
  if (!LoadOnce(LoadLatentDecodeKernels, error)) return false;
  args.team = 1;
  const int64_t queries = p.heads / p.groups * p.tokens;
  args.blocks = static_cast<int32_t>(CeilDiv<int64_t>(queries, kQueries));
  const int64_t items = static_cast<int64_t>(args.splits) * args.batch * args.blocks * args.groups;
  if (p.portable) {
    if (!LaunchLatentDecode80(p.dtype, queries, items, args, stream, error)) return false;
  } else if (!LaunchKernel(KernelOf(p.dtype), &args, static_cast<int>(items), 1,
                           kLoadThreads + kConsumerThreads, Smem::kBytes, stream, error)) {
    return false;
  }
  return args.splits == 1 || MergeLatentParts(args, stream, error);
}

}  // namespace jflux
