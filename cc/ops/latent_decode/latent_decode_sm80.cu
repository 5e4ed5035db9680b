// latent_decode in portable code: mma.sync, ldmatrix and cp.async. A CTA has an item: up to 64
// queries that share a head of the cache, over a part of their sequence, all of which read a
// position's row once. Eight warps stand in rows of 16 queries, and columns:
//
//   scores   16 queries x 16 positions. Each warp of a row multiplies its share of the 576
//            elements, of queries that stay in its registers. The row's warps add each other's sums
//            in one order, by way of shared memory, so that all have the same probabilities, as an
//            operand
//   values   each warp of a row adds its columns of the 512
//
//   queries   rows x columns   registers of a thread for queries and results
//   33 to 64  4 x 2            72 + 128
//   up to 32  2 x 4            36 + 64
//
// Tiles of 16 positions lie in a ring of five stages: one whose values are added, the next one,
// whose scores are computed before that, and three on their way. All fits into 99 KiB.
//
// Rows lie in nine boxes of 64 elements, [16 rows][128 bytes], whose vectors are swizzled by the
// row, so that ldmatrix meets no bank twice. A position that is not there is zeros, and its score
// minus infinity.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/machine.h"
#include "gpu/ptx.cuh"
#include "gpu/types.cuh"
#include "ops/flash_decode/flash_decode.cuh"
#include "ops/latent_decode/latent_decode.cuh"
#include "ops/latent_decode/latent_decode.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

using namespace latent;

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kKeys = 16;  // of a tile
constexpr int kBoxes = kLatentWidth / 64, kBoxBytes = kKeys * 128;
constexpr int kTileBytes = kBoxes * kBoxBytes, kStages = 5;
constexpr int kScoresBytes = 16 * kKeys * 4;  // of a warp
constexpr int kSmemBytes = kStages * kTileBytes + kWarps * kScoresBytes;
static_assert(kSmemBytes <= kPortable.smem_bytes);

// A warp's share of a tile: 4 of its rows, and every second box. Eight lanes copy 128 bytes.
__device__ __forceinline__ void CopyTile(const FlashDecodeArgs& args, const Item& item,
                                         int32_t first, uint32_t stage) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, vector = lane % 8;
  const int row = warp % 4 * 4 + lane / 8;
  const uint32_t from = RowOf</*kReports=*/true>(args, item, first + row);
  const bool is_zero = from == kNoRow;
  const auto* k = static_cast<const uint8_t*>(args.arrays.k) + 16 * vector;
  if (!is_zero) k += static_cast<uint64_t>(from) * (2 * kLatentWidth);
  const uint32_t to = stage + row * 128 + ((vector ^ (row & 7)) << 4);
#pragma unroll
  for (int i = 0; i < CeilDiv(kBoxes, 2); ++i) {
    const int box = 2 * i + warp / 4;
    if (box < kBoxes) {
      ptx::CopyAsync16Or0(to + box * kBoxBytes, k + (is_zero ? 0 : 128 * box), is_zero);
    }
  }
}

// A warp of kColumns in a row.
template <typename T, int kColumns>
struct Warp {
  static constexpr int kQueries = kWarps / kColumns * 16;
  static constexpr int kSteps = kLatentWidth / 16 / kColumns;   // of scores: every kColumns-th one
  static constexpr int kPairs = kLatentValues / 16 / kColumns;  // of 8 columns of the result
  static constexpr int kBarrier = 1;                            // the first row's
  using Softmax = latent::Softmax<kQueries, kKeys>;
  using Scores = typename Softmax::Scores;

  int row, column;        // of warps
  uint32_t keys, values;  // where this lane reads a stage
  uint32_t scores;        // of the row's first warp
  uint32_t q[kSteps][4];
  float out[2 * kPairs][4];

  __device__ explicit Warp(uint32_t scores_of_all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    row = warp / kColumns, column = warp % kColumns;
    scores = scores_of_all + row * kColumns * kScoresBytes + lane * 16;
    const int key = lane / 16 * 8 + lane % 8;
    keys = key * 128 + (((2 * column + lane / 8 % 2) ^ (key & 7)) << 4);
    values = column * (kPairs / 4) * kBoxBytes + lane % 16 * 128 + ((lane / 16 ^ (lane & 7)) << 4);
#pragma unroll
    for (auto& four : out) four[0] = four[1] = four[2] = four[3] = 0;
  }
  // The first of this thread's two rows of queries.
  __device__ int FirstRow() const { return 16 * row + static_cast<int>(threadIdx.x) % 32 / 4; }

  __device__ __forceinline__ void TakeQueries(const FlashDecodeArgs& args, const Item& item) {
    const int first = 16 * column + threadIdx.x % 4 * 2;  // element
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Query query = Query::Of<kQueries>(args, item, FirstRow() + 8 * h);
      const auto* from = static_cast<const T*>(args.arrays.q);
      if (query.is_there) from += query.row * kLatentWidth + first;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = 16 * kColumns * i + 8 * half;
          q[i][2 * half + h] =
              query.is_there ? __ldg(reinterpret_cast<const uint32_t*>(from + at)) : 0;
        }
      }
    }
  }

  // Writes this warp's part of a tile's scores, less their scale, for the row's others.
  __device__ __forceinline__ void BeginScores(uint32_t stage) const {
    float s[kKeys / 8][4]{};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = i * kColumns;  // and `column` more, of four in a box
      uint32_t four[4];
      ptx::LoadMatrix4(four, ((stage + keys) ^ step % 4 * 32) + step / 4 * kBoxBytes);
      ptx::Multiply16x8<T>(s[0], q[i], four[0], four[1]);
      ptx::Multiply16x8<T>(s[1], q[i], four[2], four[3]);
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
      ptx::StoreShared16(scores + column * kScoresBytes + j * 512,
                         make_uint4(__float_as_uint(s[j][0]), __float_as_uint(s[j][1]),
                                    __float_as_uint(s[j][2]), __float_as_uint(s[j][3])));
    }
  }
  // Sums of all parts. No part is written again before all warps of the CTA have met.
  __device__ __forceinline__ void FinishScores(Scores& s) const {
    ptx::BarrierSync(kBarrier + row, 32 * kColumns);
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int w = 0; w < kColumns; ++w) {
        const uint4 part = ptx::LoadShared16(scores + w * kScoresBytes + j * 512);
        const float of[4] = {__uint_as_float(part.x), __uint_as_float(part.y),
                             __uint_as_float(part.z), __uint_as_float(part.w)};
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * j + e] = w == 0 ? of[e] : s[4 * j + e] + of[e];
      }
    }
  }

  __device__ __forceinline__ void AddValues(uint32_t stage, const uint32_t (&weights)[4]) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      uint32_t four[4];
      ptx::LoadMatrix4Transposed(four, ((stage + values) ^ j % 4 * 32) + j / 4 * kBoxBytes);
      ptx::Multiply16x8<T>(out[2 * j], weights, four[0], four[1]);
      ptx::Multiply16x8<T>(out[2 * j + 1], weights, four[2], four[3]);
    }
  }
  // Multiplies the result by its rows' factors, if one of the warp's is not 1.
  __device__ __forceinline__ void Rescale(const float (&factor)[2]) {
    if (!__any_sync(0xffffffff, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (auto& four : out) {
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] *= factor[Softmax::HalfOf(i)];
    }
  }

  __device__ __forceinline__ void Store(const FlashDecodeArgs& args, const Item& item,
                                        const Softmax& softmax) const {
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      total[h] = softmax.total[h];
      total[h] += __shfl_xor_sync(0xffffffff, total[h], 1);
      total[h] += __shfl_xor_sync(0xffffffff, total[h], 2);
    }
    if (column == 0) {
      StoreLogSumExps<kQueries>(args, item, FirstRow(), softmax.highest, total);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float* to = RowOfResult<kQueries>(args, item, FirstRow() + 8 * h);
      if (to == nullptr) continue;
      const float factor = total[h] == 0 ? 0.0f : 1 / total[h];  // NaN is not 0
      to += 16 * kPairs * column + threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < 2 * kPairs; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) to[8 * j + e] = out[j][2 * h + e] * factor;
      }
    }
  }
};

template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    LatentDecodeKernel80(const __grid_constant__ FlashDecodeArgs args) {
  using OwnWarp = Warp<T, kColumns>;
  JFLUX_DYNAMIC_SHARED(uint8_t, 128, storage);
  const uint32_t smem = ptx::SmemAddress(storage);
  const Item item = Item::Of<kKeys>(args, blockIdx.x, 0);
  if (item.is_wrong && item.group + item.block + item.split + threadIdx.x == 0) {
    ReportLength(args, item.sequence);
  }
  const int32_t tiles = CeilDiv(item.end - item.begin, kKeys);
  // Tile t, to its stage; a group of copies, even of nothing.
  const auto copy = [&](int32_t tile, uint32_t stage) {
    if (tile < tiles) CopyTile(args, item, item.begin + tile * kKeys, stage);
    ptx::CopyAsyncCommit();
  };
  for (int t = 0; t < kStages - 1; ++t) copy(t, smem + t * kTileBytes);
  const auto after = [&](uint32_t stage) {
    stage += kTileBytes;
    return stage == smem + kStages * kTileBytes ? smem : stage;
  };

  OwnWarp warp(smem + kStages * kTileBytes);
  typename OwnWarp::Softmax softmax(args, item, warp.FirstRow());
  uint32_t weights[4];
  // The parts of a tile's scores have been written: makes weights of them.
  const auto finish_scores = [&](int32_t tile) {
    const int32_t first = item.begin + tile * kKeys;
    typename OwnWarp::Scores s;
    warp.FinishScores(s);
    float factor[2];
    uint32_t there = 0;
    const bool looks = first < softmax.inner.begin || first + kKeys > softmax.inner.end;
    if (looks) {
      const int lane = threadIdx.x % 32;
      there = __ballot_sync(0xffffffff, RowOf(args, item, first + lane % kKeys) != kNoRow);
    }
    softmax.Take(args, first, [&](int at) { return (there >> at & 1) != 0; }, s, factor);
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = Pack<T>(s[2 * i], s[2 * i + 1]);
    warp.Rescale(factor);
  };
  if (tiles > 0) {
    warp.TakeQueries(args, item);
    ptx::CopyAsyncWait<kStages - 2>();
    __syncthreads();
    warp.BeginScores(smem);
    finish_scores(0);
  }
  uint32_t now = smem, last = smem + (kStages - 1) * kTileBytes;
#pragma unroll 1
  for (int32_t tile = 0; tile < tiles; ++tile) {
    ptx::CopyAsyncWait<kStages - 3>();
    __syncthreads();  // the next tile is there, and all have left the one before
    copy(tile + kStages - 1, last);
    const uint32_t next = after(now);
    if (tile + 1 < tiles) warp.BeginScores(next);
    warp.AddValues(now, weights);
    if (tile + 1 < tiles) finish_scores(tile + 1);
    now = next;
    last = after(last);
  }
  warp.Store(args, item, softmax);
}

// That of up to so many queries.
const void* KernelOf(DType dtype, int64_t queries) {
  return WithFormat<kLatentDecodeFormats.operands>(dtype, [&](auto format) {
    using T = CudaType<format>;
    return queries <= kLatentQueries / 2
               ? reinterpret_cast<const void*>(&LatentDecodeKernel80<T, 4>)
               : reinterpret_cast<const void*>(&LatentDecodeKernel80<T, 2>);
  });
}

}  // namespace

bool LoadLatentDecodeKernels80(std::string* error) {
  return ForFormats(kLatentDecodeFormats.operands,
                    [&](DType dtype) {
                      return LoadKernel(KernelOf(dtype, 1), kSmemBytes, error) &&
                             LoadKernel(KernelOf(dtype, kLatentQueries), kSmemBytes, error);
                    }) &&
         LoadMergeParts<kLatentValues>(error);
}

bool LaunchLatentDecode80(DType dtype, int64_t queries, int64_t items, FlashDecodeArgs& args,
                          cudaStream_t stream, std::string* error) {
  return LaunchKernel(KernelOf(dtype, queries), &args, static_cast<int>(items), 1, kThreads,
                      kSmemBytes, stream, error);
}

bool MergeLatentParts(FlashDecodeArgs& args, cudaStream_t stream, std::string* error) {
  return MergeParts<kLatentValues>(args, stream, error);
}

}  // namespace jflux
