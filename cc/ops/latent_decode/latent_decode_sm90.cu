// latent_decode on Hopper. A CTA has an item: 64 queries that share a head of the cache, over a
// part of their sequence. It has three warpgroups:
//
//   0        loads: queries, then tiles of 64 positions into a ring of two stages, by cp.async,
//            since the rows of pages lie anywhere
//   1 and 2  consumers: wgmma. Both have all 64 queries: of the scores of a tile each has 32 of its
//            positions, and of the result each has 256 columns
//
// A consumer computes its scores of a tile, and both exchange their rows' maxima. Then each writes
// its probabilities to shared memory, and multiplies all 64 with its columns of the values. While
// they compute with one stage, the other one is filled: with up to 64 queries of a sequence, memory
// is slower than that. (A consumer per tile, whose scores overlap with the other's values, needs
// both stages at once.)
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
#include "ops/latent_decode/latent_decode.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

using attention::FirstRow, attention::HalfOf, attention::WarpArrive;
using namespace decode;

constexpr int kQueries = 64, kKeys = 64, kOfConsumer = 32;  // keys whose scores a consumer has
constexpr int kBoxes = kLatentWidth / 64, kValueBoxes = kLatentValues / 64;
constexpr int kBoxBytes = 64 * 128, kTileBytes = kBoxes * kBoxBytes;
constexpr int kStages = 2;
constexpr int kLoadThreads = 128, kConsumerThreads = 256, kConsumerWarps = 8;
constexpr attention::Registers kRegisters{56, 224};
static_assert(attention::Registers::Fit(kRegisters));

// Named barriers of the consumers.
constexpr int kMaximaBarrier = 1, kWeightsBarrier = 2;

struct Smem {
  static constexpr int kMaxima = (1 + kStages) * kTileBytes, kRows = kMaxima + 2 * kQueries * 4;
  static constexpr int kBarriers = kRows + kStages * 16, kBytes = kBarriers + 2 * kStages * 8;
  static_assert(kBytes <= kHopper.smem_bytes);
  uint32_t base;

  __device__ uint32_t Q() const { return base; }
  __device__ uint32_t K(int stage) const { return base + (1 + stage) * kTileBytes; }
  __device__ uint32_t Weights(int stage) const { return K(stage) + kValueBoxes * kBoxBytes; }
  // Of each row, from each consumer.
  __device__ uint32_t Maximum(int consumer, int row) const {
    return base + kMaxima + (consumer * kQueries + row) * 4;
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

// The scores of all queries with this consumer's positions of a tile, less their scale.
template <typename T>
__device__ void Scores(const Smem& smem, int stage, int consumer, float (&s)[kOfConsumer / 2]) {
  const uint32_t keys = smem.K(stage) + consumer * kOfConsumer * 128;
  wgmma::Fence();
#pragma unroll
  for (int k = 0; k < kLatentWidth / 16; ++k) {
    const uint32_t at = k / 4 * kBoxBytes + k % 4 * 32;
    wgmma::Multiply<0, 0>(static_cast<const T*>(nullptr), s,
                          wgmma::Descriptor(smem.Q() + at, 16, 1024),
                          wgmma::Descriptor(keys + at, 16, 1024), k > 0);
  }
  wgmma::Commit();
  wgmma::Pin(s);
  wgmma::Wait<0>();
  wgmma::Pin(s);
}

// Adds the weighted values of a tile, of this consumer's columns.
template <typename T>
__device__ void AddValues(const Smem& smem, int stage, int consumer,
                          float (&out)[kLatentValues / 4]) {
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
  wgmma::Wait<0>();
  wgmma::Pin(out);
}

template <typename T>
__device__ void RunConsumer(const FlashDecodeArgs& args, const Item& item, const Smem& smem,
                            int consumer) {
  const int lane = threadIdx.x % 32, row = FirstRow();
  const int32_t tiles = CeilDiv(item.end - item.begin, kKeys);
  const DecodeBounds bounds = args.arrays.bounds[item.sequence];
  Query queries[2];
  Span spans[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    queries[h] = Query::Of<kQueries>(args, item, row + 8 * h);
    spans[h] = Span::Of(bounds, queries[h].token);
  }
  const Span inner = Span::OfAll(args, bounds, item);
  const bool has_cap = args.softcap > 0;
  float out[kLatentValues / 4], highest[2] = {-INFINITY, -INFINITY}, total[2];
#pragma unroll
  for (float& o : out) o = 0;
#pragma unroll
  for (float& t : total) t = item.is_wrong ? NAN : 0.0f;
  // The row's number from the other consumer, after both have written theirs.
  const auto exchange = [&](const float (&own)[2], float (&other)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0)
        ptx::StoreShared4(smem.Maximum(consumer, row + 8 * h), __float_as_int(own[h]));
    }
    ptx::BarrierSync(kMaximaBarrier, kConsumerThreads);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      other[h] = ptx::LoadSharedFloat(smem.Maximum(1 - consumer, row + 8 * h));
  };

  Ring<kStages> stages;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    const int stage = stages.index;
    const int32_t first = item.begin + tile * kKeys + kOfConsumer * consumer;
    ptx::MbarrierWait(smem.Full(stage), stages.parity);
    ptx::FenceProxyAsyncShared();  // rows came by cp.async
    float s[kOfConsumer / 2];
    Scores<T>(smem, stage, consumer, s);
#pragma unroll
    for (float& x : s)
      x = has_cap ? kLog2e * Cap(args.scale * x, args.softcap) : kLog2e * args.scale * x;
    if (first < inner.begin || first + kOfConsumer > inner.end) {
#pragma unroll
      for (int i = 0; i < kOfConsumer / 2; ++i) {
        const int at = 8 * (i / 4) + 2 * (lane % 4) + i % 2, in_tile = kOfConsumer * consumer + at;
        const uint32_t there = ptx::LoadShared4(smem.Rows(stage, in_tile / 16));
        const Span& span = spans[HalfOf(i)];
        if ((there >> in_tile % 16 & 1) == 0 || first + at < span.begin || first + at >= span.end)
          s[i] = -INFINITY;
      }
    }
    float own[2] = {highest[0], highest[1]}, other[2], before[2], base[2];
#pragma unroll
    for (int i = 0; i < kOfConsumer / 2; ++i) own[HalfOf(i)] = fmaxf(own[HalfOf(i)], s[i]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      own[h] = fmaxf(own[h], __shfl_xor_sync(0xffffffff, own[h], 1));
      own[h] = fmaxf(own[h], __shfl_xor_sync(0xffffffff, own[h], 2));
    }
    exchange(own, other);  // both have multiplied with the ninth box
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float now = fmaxf(own[h], other[h]);
      base[h] = now == -INFINITY ? 0.0f : now;
      before[h] = ptx::Exp2(highest[h] - base[h]);
      highest[h] = now;
      total[h] *= before[h];
    }
#pragma unroll
    for (int i = 0; i < kOfConsumer / 2; ++i) {
      s[i] = ptx::Exp2(s[i] - base[HalfOf(i)]);
      total[HalfOf(i)] += s[i];
    }
#pragma unroll
    for (int pair = 0; pair < kOfConsumer / 16; ++pair) {
      const int to = threadIdx.x % 128 / 32 * 16 + lane % 16;
      const int vector = kOfConsumer / 8 * consumer + 2 * pair + lane / 16;
      const float* a = &s[8 * pair];
      ptx::StoreMatrix4(smem.Weights(stage) + to * 128 + ((vector ^ (to & 7)) * 16),
                        Pack<T>(a[0], a[1]), Pack<T>(a[2], a[3]), Pack<T>(a[4], a[5]),
                        Pack<T>(a[6], a[7]));
    }
    ptx::FenceProxyAsyncShared();
    if (__any_sync(0xffffffff, before[0] != 1 || before[1] != 1)) {
#pragma unroll
      for (int i = 0; i < kLatentValues / 4; ++i) out[i] *= before[HalfOf(i)];
    }
    ptx::BarrierSync(kWeightsBarrier, kConsumerThreads);
    AddValues<T>(smem, stage, consumer, out);
    WarpArrive(smem.Empty(stage));
    stages.Advance();
  }

  float others[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] += __shfl_xor_sync(0xffffffff, total[h], 1);
    total[h] += __shfl_xor_sync(0xffffffff, total[h], 2);
  }
  exchange(total, others);
  float* to = args.splits == 1 ? args.arrays.out : args.arrays.parts;
  const int64_t of_split = static_cast<int64_t>(args.batch) * args.tokens * args.heads;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!queries[h].is_there) continue;
    float* result = to + (item.split * of_split + queries[h].row) * (kLatentValues + 1);
    // In the order of the consumers, so that both have the same sum.
    const float sum = consumer == 0 ? total[h] + others[h] : others[h] + total[h];
    const bool any = sum != 0;  // NaN counts
    const float factor = any ? 1 / sum : 0.0f;
#pragma unroll
    for (int j = 0; j < kLatentValues / 16; ++j) {
      float* pair = result + kLatentValues / 2 * consumer + 8 * j + 2 * (lane % 4);
      pair[0] = out[4 * j + 2 * h] * factor;
      pair[1] = out[4 * j + 2 * h + 1] * factor;
    }
    if (consumer == 0 && lane % 4 == 0)
      result[kLatentValues] = any ? kLn2 * (highest[h] + log2f(sum)) : -INFINITY;
  }
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
    RunConsumer<T>(args, item, smem, warpgroup - 1);
  }
}

const void* KernelOf(DType dtype) {
  return WithFormat<kLatentDecodeFormats.operands>(dtype, [](auto format) {
    return reinterpret_cast<const void*>(&LatentDecodeKernel<CudaType<format>>);
  });
}

}  // namespace

bool LoadLatentDecodeKernels(std::string* error) {
  return ForFormats(
             kLatentDecodeFormats.operands,
             [&](DType dtype) { return LoadKernel(KernelOf(dtype), Smem::kBytes, error); }) &&
         LoadMergeParts<kLatentValues>(error);
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
  args.blocks = static_cast<int32_t>(CeilDiv<int64_t>(p.heads / p.groups * p.tokens, kQueries));
  const int64_t items = static_cast<int64_t>(args.splits) * args.batch * args.blocks * args.groups;
  return LaunchKernel(KernelOf(p.dtype), &args, static_cast<int>(items), 1,
                      kLoadThreads + kConsumerThreads, Smem::kBytes, stream, error) &&
         (args.splits == 1 || MergeParts<kLatentValues>(args, stream, error));
}

}  // namespace jflux
