// What the kernels of decoding share: flash_decode's (flash_decode.cu) and latent_decode's
// (ops/latent_decode). Which queries and positions a piece of work has, where a position lies in
// the cache, and the second kernel, which merges the results of a sequence's parts.
#ifndef JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_CUH_
#define JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_CUH_

#include <cstdint>
#include <string>

#include "core/platform.h"
#include "gpu/ptx.cuh"
#include "ops/flash_decode/flash_decode.h"
#include "runtime/kernels_cuda.h"

namespace jflux::decode {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct FlashDecodeArgs {
  FlashDecodeArrays arrays;
  DeviceState* state;
  int32_t batch, tokens, heads, groups, positions, capacity, page_size, pages, entries, splits;
  int32_t team;         // items that share tiles
  int32_t blocks;       // of a team's queries, of a head of the cache
  int32_t merge_warps;  // that share a query's parts
  float scale, softcap;
  bool has_rows;  // each row of the cache has a scale, else each of its heads
};

// softcap tanh(x / softcap): off by 3e-7 of softcap, or of x, if that is less than a sixteenth of
// it.
__device__ inline float Cap(float x, float softcap) {
  const float y = __fdividef(x, softcap), square = y * y;
  const float power = __expf(2.0f * y);
  const float by_power = softcap * (1.0f - __fdividef(2.0f, 1.0f + power));
  const float by_terms = x * (1.0f + square * (2.0f / 15.0f * square - 1.0f / 3.0f));
  return square < 1.0f / 256 ? by_terms : by_power;
}

// What is attended to together: a block of queries that share a head of the cache, over one of
// `splits` consecutive parts of their sequence's range.
struct Item {
  int32_t sequence, group, split;
  int32_t block;       // of queries
  int32_t begin, end;  // positions of this rank's part
  bool is_wrong;       // the sequence's length; then there are none

  // Parts are multiples of kTile positions.
  template <int kTile>
  static __device__ Item Of(const FlashDecodeArgs& args, int64_t number, int member) {
    Item item;  // heads of the cache that lie beside each other are read at the same time
    item.group = static_cast<int32_t>(number % args.groups);
    number /= args.groups;
    item.block = static_cast<int32_t>(number % args.blocks) * args.team + member;
    number /= args.blocks;
    item.sequence = static_cast<int32_t>(number % args.batch);
    item.split = static_cast<int32_t>(number / args.batch);
    const DecodeBounds bounds = args.arrays.bounds[item.sequence];
    item.is_wrong = !bounds.HasLength(args.capacity);
    const int32_t first = Max(Max(bounds.first, 0), bounds.origin) - bounds.origin;
    // Any number may be a wrong length: unsigned, since the difference may not fit.
    const uint32_t to_end = Min(bounds.end, bounds.origin + args.positions);
    const int32_t last = static_cast<int32_t>(to_end - static_cast<uint32_t>(bounds.origin));
    const int32_t end = item.is_wrong ? first : Max(last, first);
    const int32_t each = CeilDiv(CeilDiv(end - first, args.splits), kTile) * kTile;
    item.begin = first + Min(item.split * each, end - first);
    item.end = Min(item.begin + each, end);
    return item;
  }
};

// A query of an item's kQueries, of all tokens' heads that share a head of the cache.
struct Query {
  int32_t token;
  bool is_there;
  int64_t row;  // of q, and of the result

  template <int kQueries>
  static __device__ Query Of(const FlashDecodeArgs& args, const Item& item, int number) {
    const int32_t shared = args.heads / args.groups, at = kQueries * item.block + number;
    Query query;
    query.token = at / shared;
    query.is_there = query.token < args.tokens;
    const int64_t token = static_cast<int64_t>(item.sequence) * args.tokens + query.token;
    query.row = token * args.heads + item.group * shared + (at - query.token * shared);
    return query;
  }
};

// Reports a length, or below a page, that a sequence was given and that is out of range. Called by
// one thread.
__device__ inline void ReportLength(const FlashDecodeArgs& args, int32_t sequence) {
  const DecodeBounds bounds = args.arrays.bounds[sequence];
  ReportValue(args.state, static_cast<uint32_t>(kFlashDecodeId), bounds.Rank(args.positions),
              FaultKind::kLength, /*peer=*/0, sequence, args.capacity, bounds.end);
}
__device__ inline void ReportPage(const FlashDecodeArgs& args, int32_t sequence, int32_t entry,
                                  int32_t page) {
  ReportValue(args.state, static_cast<uint32_t>(kFlashDecodeId),
              args.arrays.bounds[sequence].Rank(args.positions), FaultKind::kPage, entry, sequence,
              args.pages, page);
}

// A position's row of the cache, of its head.
inline constexpr uint32_t kNoRow = UINT32_MAX;
template <bool kReports = false>
__device__ inline uint32_t RowOf(const FlashDecodeArgs& args, const Item& item, int32_t position) {
  if (position >= item.end) return kNoRow;
  const auto of = [&](int32_t sequence, int32_t positions, int32_t at) {
    const uint32_t row = static_cast<uint32_t>(sequence) * positions + at;
    return row * args.groups + item.group;
  };
  if (args.arrays.block_table == nullptr) return of(item.sequence, args.positions, position);
  const int32_t entry = position / args.page_size;
  const int32_t page =
      __ldg(args.arrays.block_table + static_cast<int64_t>(item.sequence) * args.entries + entry);
  if (page >= 0 && page < args.pages)
    return of(page, args.page_size, position - entry * args.page_size);
  if (kReports && page != -1) ReportPage(args, item.sequence, entry, page);
  return kNoRow;
}

// Positions of this rank's part that a token attends to.
struct Span {
  int32_t begin, end;

  static __device__ Span Of(const DecodeBounds& bounds, int32_t token) {
    const int32_t begin = Max(bounds.first + token, 0) - bounds.origin, last = bounds.own + token;
    return {begin, last <= bounds.end ? last - bounds.origin : begin};
  }
  // Those of an item's that all tokens attend to, where no position needs a look.
  static __device__ Span OfAll(const FlashDecodeArgs& args, const DecodeBounds& bounds,
                               const Item& item) {
    const int32_t last = args.tokens - 1, begin = Of(bounds, last).begin;
    const bool looks = bounds.own + last > bounds.end || args.arrays.block_table != nullptr;
    return {begin, looks ? begin : Min(Of(bounds, 0).end, item.end)};
  }
};

// Merges the parts of queries: [splits][B T H][D + 1] -> [B T H][D + 1]. Warps share a query's
// parts, and a CTA has several queries if these are few.
inline constexpr int kMergeWarps = 8;
inline int MergeWarpsOf(int splits) {
  int warps = 1;
  while (warps < kMergeWarps && splits > 4 * warps) warps *= 2;
  return warps;
}
template <int D>
__global__ void __launch_bounds__(32 * kMergeWarps)
    MergePartsKernel(const __grid_constant__ FlashDecodeArgs args) {
  JFLUX_SHARED(float[kMergeWarps][D + 1], sums);
  constexpr int kInFlight = 4;  // parts that a warp loads together
  const int warps = args.merge_warps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = warp % warps;
  const int64_t queries = static_cast<int64_t>(args.batch) * args.tokens * args.heads;
  const int64_t query = static_cast<int64_t>(blockIdx.x) * (kMergeWarps / warps) + warp / warps;
  const bool is_there = query < queries;
  const auto part = [&](int split) {
    return args.arrays.parts + (split * queries + query) * (D + 1);
  };
  const int splits = is_there ? args.splits : 0;
  float highest = -INFINITY;
  bool has_nan = false;
  for (int split = lane; split < splits; split += 32) {
    const float lse = part(split)[D];
    has_nan |= isnan(lse);
    highest = fmaxf(highest, lse);
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, i));
  }
  if (__any_sync(0xffffffff, has_nan)) highest = NAN;
  float sum[D / 32]{}, total = 0;
  for (int first = own; first < splits; first += kInFlight * warps) {
    float values[kInFlight][D / 32], weights[kInFlight];
#pragma unroll
    for (int b = 0; b < kInFlight; ++b) {
      const int split = first + b * warps;
      const float* from = part(split < splits ? split : first);
      const float lse = split < splits ? from[D] : -INFINITY;
      weights[b] = lse == -INFINITY ? 0.0f : __expf(lse - highest);
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        values[b][i] = lse == -INFINITY ? 0.0f : from[lane + 32 * i];
      }
    }
#pragma unroll
    for (int b = 0; b < kInFlight; ++b) {
      total += weights[b];
#pragma unroll
      for (int i = 0; i < D / 32; ++i) sum[i] += weights[b] * values[b][i];
    }
  }
#pragma unroll
  for (int i = 0; i < D / 32; ++i) sums[warp][lane + 32 * i] = sum[i];
  if (lane == 0) sums[warp][D] = total;
  __syncthreads();
  if (own != 0 || !is_there) return;
  float* out = args.arrays.out + query * (D + 1);
  total = 0;
  for (int w = warp; w < warp + warps; ++w) total += sums[w][D];
  const bool any = total != 0;  // NaN counts
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    float value = 0;
    for (int w = warp; w < warp + warps; ++w) value += sums[w][lane + 32 * i];
    out[lane + 32 * i] = any ? value / total : 0.0f;
  }
  if (lane == 0) out[D] = any ? highest + logf(total) : -INFINITY;
}

template <int D>
bool LoadMergeParts(std::string* error) {
  return LoadKernel(reinterpret_cast<const void*>(&MergePartsKernel<D>), 0, error);
}

template <int D>
bool MergeParts(FlashDecodeArgs& args, cudaStream_t stream, std::string* error) {
  args.merge_warps = MergeWarpsOf(args.splits);
  const int64_t queries = static_cast<int64_t>(args.batch) * args.tokens * args.heads;
  const int64_t ctas = CeilDiv<int64_t>(queries, kMergeWarps / args.merge_warps);
  return LaunchKernel(reinterpret_cast<const void*>(&MergePartsKernel<D>), &args,
                      static_cast<int>(ctas), 1, 32 * kMergeWarps, 0, stream, error);
}

// The arguments of a call; false and *error if it is too large.
inline bool ArgsOf(const FlashDecodeParams& p, const FlashDecodeArrays& arrays, DeviceState* state,
                   FlashDecodeArgs* args, std::string* error) {
  if (p.splits * p.batch * p.tokens * p.heads > INT32_MAX) {
    *error = "too many parts of heads";
    return false;
  }
  if ((p.page_size == 0 ? p.batch * p.positions : p.pages * p.page_size) * p.groups >= kNoRow) {
    *error = "too many rows of the cache";
    return false;
  }
  *args = {};
  args->arrays = arrays;
  args->state = state;
  args->batch = static_cast<int32_t>(p.batch);
  args->tokens = static_cast<int32_t>(p.tokens);
  args->heads = static_cast<int32_t>(p.heads);
  args->groups = static_cast<int32_t>(p.groups);
  args->positions = static_cast<int32_t>(p.positions);
  args->capacity = static_cast<int32_t>(p.capacity);
  args->page_size = static_cast<int32_t>(p.page_size);
  args->pages = static_cast<int32_t>(p.pages);
  args->entries = p.page_size == 0 ? 0 : static_cast<int32_t>(p.positions / p.page_size);
  args->splits = static_cast<int32_t>(p.splits);
  args->scale = static_cast<float>(p.scale);
  args->softcap = static_cast<float>(p.softcap);
  args->has_rows = p.scales == CacheScales::kOfRows;
  return true;
}

}  // namespace jflux::decode

#endif  // JFLUX_OPS_FLASH_DECODE_FLASH_DECODE_CUH_
