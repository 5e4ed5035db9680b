// flash_decode on GPUs. The cache is read once, by warps that know nothing of each other:
//
//   item    a warp's work: up to 16 queries that share a head of the cache, of all tokens' heads,
//           over one of `splits` consecutive parts of their sequence's range
//   tile    16 positions of keys and of values. Each warp has a ring of kStages tiles in shared
//           memory, which it fills by cp.async, kStages - 1 tiles ahead
//   merge   where a sequence has several parts, a second kernel weighs them by their log-sum-exps
//
// Scores are 16 queries x 16 positions by mma.sync, and so is their product with the values: fewer
// than 16 queries leave rows of zeros, which costs nothing where memory's rate is the limit. Sums
// are in float32; probabilities are rounded to the cache's type before they multiply values.
//
// A position outside of the range, or without a page, is loaded as zeros and its score is minus
// infinity, so that a NaN there reaches nothing.
//
// A length beyond the cache, and an entry of block_table that is no page, are faults: written to
// the device's record by the thread that meets them. The kernel goes on (flash_decode.h says with
// what).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/platform.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/ptx.cuh"
#include "ops/flash_decode/flash_decode.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

constexpr int kWarps = 2;  // of a CTA: three CTAs share a multiprocessor
constexpr int kTile = 16;  // positions, and queries
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct FlashDecodeArgs {
  FlashDecodeArrays arrays;
  DeviceState* state;
  int32_t batch, tokens, heads, groups, positions, capacity, page_size, pages, entries, splits;
  int32_t blocks;  // of 16 queries, of a head of the cache
  float scale, softcap;
};

// Shared memory of a warp: the queries, then the ring of tiles, keys before values. Rows are of
// kRowBytes; their 16-byte vectors are swizzled by the row, so that ldmatrix meets no bank twice.
template <int D>
struct Shape {
  static constexpr int kVectors = D / 8;
  static constexpr int kRowBytes = 2 * D;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kStages = D <= 128 ? 512 / D : 3;
  static constexpr int kWarpBytes = (1 + 2 * kStages) * kTileBytes;
  static constexpr int kSmemBytes = kWarps * kWarpBytes;
  static constexpr bool kKeepsQ = D <= 128;  // queries stay in registers
  static __device__ uint32_t At(int row, int vector) {
    return row * kRowBytes + ((vector ^ (row & 7)) * 16);
  }
};

// softcap tanh(x / softcap), off by 1e-7 softcap.
__device__ float Cap(float x, float softcap) {
  return softcap * (1.0f - 2.0f / (1.0f + __expf(2.0f * x / softcap)));
}

// A warp's work.
struct Item {
  int32_t sequence, group, block, split;
  int32_t begin, end;  // positions of this rank's part
  bool is_wrong;       // the sequence's length; then there are none

  static __device__ Item Of(const FlashDecodeArgs& args, int64_t number) {
    Item item;  // heads of the cache that lie beside each other are read at the same time
    item.group = static_cast<int32_t>(number % args.groups);
    number /= args.groups;
    item.block = static_cast<int32_t>(number % args.blocks);
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

// A query of an item's 16, of all tokens' heads that share a head of the cache.
struct Query {
  int32_t token;
  bool is_there;
  int64_t row;  // of q, and of the result

  static __device__ Query Of(const FlashDecodeArgs& args, const Item& item, int number) {
    const int32_t shared = args.heads / args.groups, at = kTile * item.block + number;
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
__device__ void ReportLength(const FlashDecodeArgs& args, int32_t sequence) {
  const DecodeBounds bounds = args.arrays.bounds[sequence];
  ReportValue(args.state, static_cast<uint32_t>(kFlashDecodeId), bounds.Rank(args.positions),
              FaultKind::kLength, /*peer=*/0, sequence, args.capacity, bounds.end);
}
__device__ void ReportPage(const FlashDecodeArgs& args, int32_t sequence, int32_t entry,
                           int32_t page) {
  ReportValue(args.state, static_cast<uint32_t>(kFlashDecodeId),
              args.arrays.bounds[sequence].Rank(args.positions), FaultKind::kPage, entry, sequence,
              args.pages, page);
}

// The first element of a position's row in the cache; -1 if there is none.
template <int D, bool kReports = false>
__device__ int64_t RowOf(const FlashDecodeArgs& args, const Item& item, int32_t position) {
  if (position >= item.end) return -1;
  int64_t row = static_cast<int64_t>(item.sequence) * args.positions + position;
  if (args.arrays.block_table != nullptr) {
    const int32_t entry = position / args.page_size;
    const int32_t page =
        __ldg(args.arrays.block_table + static_cast<int64_t>(item.sequence) * args.entries + entry);
    if (page < 0 || page >= args.pages) {
      if (kReports && page != -1) ReportPage(args, item.sequence, entry, page);
      return -1;
    }
    row = static_cast<int64_t>(page) * args.page_size + (position - entry * args.page_size);
  }
  return (row * args.groups + item.group) * D;
}

template <typename T, int D>
__device__ void LoadTile(const FlashDecodeArgs& args, const Item& item, int32_t first,
                         uint32_t smem_k) {
  using S = Shape<D>;
  const int lane = threadIdx.x % 32;
  const int64_t row_of_lane = RowOf<D, /*kReports=*/true>(args, item, first + lane % kTile);
  const auto* k = static_cast<const T*>(args.arrays.k);
  const auto* v = static_cast<const T*>(args.arrays.v);
#pragma unroll
  for (int i = 0; i < kTile * S::kVectors / 32; ++i) {
    const int row = (32 * i + lane) / S::kVectors, vector = (32 * i + lane) % S::kVectors;
    const int64_t from = __shfl_sync(0xffffffff, row_of_lane, row);
    const bool is_there = from >= 0;
    const int64_t at = is_there ? from + 8 * vector : 0;
    ptx::CopyAsync16(smem_k + S::At(row, vector), k + at, is_there ? 16 : 0);
    ptx::CopyAsync16(smem_k + S::kTileBytes + S::At(row, vector), v + at, is_there ? 16 : 0);
  }
}

// A lane's part of 16 queries' results: rows lane / 4 and 8 more.
template <int D>
struct Running {
  float out[D / 8][4];       // columns 8 j + 2 (lane % 4) + {0, 1} of both rows
  float highest[2];          // score so far, times log2(e)
  float total[2];            // of this lane's probabilities
  int32_t begin[2], end[2];  // positions of this rank's part that they attend to

  __device__ void Start(const FlashDecodeArgs& args, const Item& item) {
    const DecodeBounds bounds = args.arrays.bounds[item.sequence];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t token = Query::Of(args, item, threadIdx.x % 32 / 4 + 8 * h).token;
      begin[h] = Max(bounds.first + token, 0) - bounds.origin;
      const int32_t last = bounds.own + token;
      end[h] = last <= bounds.end ? last - bounds.origin : begin[h];
      highest[h] = -INFINITY;
      total[h] = item.is_wrong ? NAN : 0.0f;
    }
  }
};

template <typename T, int D>
__device__ void AttendToTile(const FlashDecodeArgs& args, const Item& item, int32_t first,
                             uint32_t smem_q,
                             const uint32_t (&q)[Shape<D>::kKeepsQ ? D / 16 : 1][4],
                             uint32_t smem_k, Running<D>& run) {
  using S = Shape<D>;
  const int lane = threadIdx.x % 32;
  float s[2][4]{};
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    uint32_t keys[4], queries[4];
    ptx::LoadMatrix4(keys, smem_k + S::At(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
    if constexpr (!S::kKeepsQ)
      ptx::LoadMatrix4(queries, smem_q + S::At(lane % 16, 2 * i + lane / 16));
    const auto& a = [&]() -> const uint32_t (&)[4] {
      if constexpr (S::kKeepsQ) {
        return q[i];
      } else {
        return queries;
      }
    }();
    ptx::Multiply16x8<T>(s[0], a, keys[0], keys[1]);
    ptx::Multiply16x8<T>(s[1], a, keys[2], keys[3]);
  }
  const uint32_t there = __ballot_sync(0xffffffff, RowOf<D>(args, item, first + lane % kTile) >= 0);
  float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float x = s[n][c] * args.scale;
      if (args.softcap > 0) x = Cap(x, args.softcap);
      const int position = 8 * n + 2 * (lane % 4) + c % 2, at = first + position;
      const bool counts = (there >> position & 1) && run.begin[c / 2] <= at && at < run.end[c / 2];
      s[n][c] = counts ? x * kLog2e : -INFINITY;
      highest[c / 2] = fmaxf(highest[c / 2], s[n][c]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    highest[h] = fmaxf(highest[h], __shfl_xor_sync(0xffffffff, highest[h], 1));
    highest[h] = fmaxf(highest[h], __shfl_xor_sync(0xffffffff, highest[h], 2));
    highest[h] = fmaxf(highest[h], run.highest[h]);
  }
  if (__any_sync(0xffffffff, highest[0] > run.highest[0] || highest[1] > run.highest[1])) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Nothing has been summed yet if the last one is minus infinity.
      const float factor = run.highest[h] == -INFINITY ? 0.0f : exp2f(run.highest[h] - highest[h]);
      run.highest[h] = highest[h];
      run.total[h] *= factor;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        run.out[j][2 * h] *= factor;
        run.out[j][2 * h + 1] *= factor;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float base = run.highest[c / 2] == -INFINITY ? 0.0f : run.highest[c / 2];
      s[n][c] = exp2f(s[n][c] - base);
      run.total[c / 2] += s[n][c];
    }
  }
  const uint32_t weights[4] = {Pack<T>(s[0][0], s[0][1]), Pack<T>(s[0][2], s[0][3]),
                               Pack<T>(s[1][0], s[1][1]), Pack<T>(s[1][2], s[1][3])};
  const uint32_t smem_v = smem_k + S::kTileBytes;
#pragma unroll
  for (int j = 0; j < D / 16; ++j) {
    uint32_t values[4];
    ptx::LoadMatrix4Transposed(values, smem_v + S::At(lane % 16, 2 * j + lane / 16));
    ptx::Multiply16x8<T>(run.out[2 * j], weights, values[0], values[1]);
    ptx::Multiply16x8<T>(run.out[2 * j + 1], weights, values[2], values[3]);
  }
}

template <typename T, int D>
__device__ void LoadQueries(const FlashDecodeArgs& args, const Item& item, uint32_t smem_q) {
  using S = Shape<D>;
  const int lane = threadIdx.x % 32;
  const auto* q = static_cast<const T*>(args.arrays.q);
#pragma unroll
  for (int i = 0; i < kTile * S::kVectors / 32; ++i) {
    const int row = (32 * i + lane) / S::kVectors, vector = (32 * i + lane) % S::kVectors;
    const Query query = Query::Of(args, item, row);
    ptx::CopyAsync16(smem_q + S::At(row, vector),
                     q + (query.is_there ? query.row * D + 8 * vector : 0),
                     query.is_there ? 16 : 0);
  }
}

template <int D>
__device__ void Store(const FlashDecodeArgs& args, const Item& item, const Running<D>& run) {
  const int lane = threadIdx.x % 32;
  float* to = args.splits == 1 ? args.arrays.out : args.arrays.parts;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = run.total[h];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    const Query query = Query::Of(args, item, lane / 4 + 8 * h);
    if (!query.is_there) continue;
    const int64_t of_split = static_cast<int64_t>(args.batch) * args.tokens * args.heads;
    float* row = to + (item.split * of_split + query.row) * (D + 1);
    const bool any = run.highest[h] > -INFINITY || total != 0;  // NaN counts
    const float factor = any ? 1.0f / total : 0.0f;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      row[8 * j + 2 * (lane % 4)] = run.out[j][2 * h] * factor;
      row[8 * j + 2 * (lane % 4) + 1] = run.out[j][2 * h + 1] * factor;
    }
    if (lane % 4 == 0) row[D] = any ? kLn2 * (run.highest[h] + log2f(total)) : -INFINITY;
  }
}

template <typename T, int D>
__global__ void __launch_bounds__(32 * kWarps)
    FlashDecodeKernel(const __grid_constant__ FlashDecodeArgs args) {
  using S = Shape<D>;
  JFLUX_DYNAMIC_SHARED(uint8_t, 128, storage);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (number >= static_cast<int64_t>(args.splits) * args.batch * args.blocks * args.groups) return;
  const Item item = Item::Of(args, number);
  if (item.is_wrong && item.group + item.block + item.split + lane == 0)
    ReportLength(args, item.sequence);
  const auto smem_q =
      static_cast<uint32_t>(__cvta_generic_to_shared(storage + warp * S::kWarpBytes));
  const auto stage_at = [&](int stage) { return smem_q + (1 + 2 * stage) * S::kTileBytes; };
  const int32_t tiles = CeilDiv(item.end - item.begin, kTile);

  if (tiles > 0) LoadQueries<T, D>(args, item, smem_q);  // in the first tile's group of copies
#pragma unroll
  for (int stage = 0; stage < S::kStages - 1; ++stage) {
    if (stage < tiles) LoadTile<T, D>(args, item, item.begin + stage * kTile, stage_at(stage));
    ptx::CopyAsyncCommit();
  }
  Running<D> run{};
  run.Start(args, item);
  uint32_t q[S::kKeepsQ ? D / 16 : 1][4]{};
  int stage = 0, next = S::kStages - 1;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    ptx::CopyAsyncWait<S::kStages - 2>();
    __syncwarp();  // the other lanes' copies are there, and they have read the stage before
    if constexpr (S::kKeepsQ) {
      if (tile == 0) {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
          ptx::LoadMatrix4(q[i], smem_q + S::At(lane % 16, 2 * i + lane / 16));
        }
      }
    }
    const int32_t ahead = tile + S::kStages - 1;
    if (ahead < tiles) LoadTile<T, D>(args, item, item.begin + ahead * kTile, stage_at(next));
    ptx::CopyAsyncCommit();
    AttendToTile<T, D>(args, item, item.begin + tile * kTile, smem_q, q, stage_at(stage), run);
    stage = stage + 1 == S::kStages ? 0 : stage + 1;
    next = next + 1 == S::kStages ? 0 : next + 1;
  }
  Store<D>(args, item, run);
}

// One CTA merges the parts of one query: [splits][B T H][D + 1] -> [B T H][D + 1].
constexpr int kMergeWarps = 4;
template <int D>
__global__ void __launch_bounds__(32 * kMergeWarps)
    MergePartsKernel(const __grid_constant__ FlashDecodeArgs args) {
  JFLUX_SHARED(float[kMergeWarps][D + 1], sums);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t queries = static_cast<int64_t>(args.batch) * args.tokens * args.heads;
  const auto part = [&](int split) {
    return args.arrays.parts + (split * queries + blockIdx.x) * (D + 1);
  };
  float highest = -INFINITY;
  bool has_nan = false;
  for (int split = lane; split < args.splits; split += 32) {
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
  for (int split = warp; split < args.splits; split += kMergeWarps) {
    const float* from = part(split);
    const float lse = from[D];
    if (lse == -INFINITY) continue;
    const float weight = __expf(lse - highest);
    total += weight;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) sum[i] += weight * from[lane + 32 * i];
  }
#pragma unroll
  for (int i = 0; i < D / 32; ++i) sums[warp][lane + 32 * i] = sum[i];
  if (lane == 0) sums[warp][D] = total;
  __syncthreads();
  float* out = args.arrays.out + static_cast<int64_t>(blockIdx.x) * (D + 1);
  total = 0;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) total += sums[w][D];
  const bool any = total != 0;  // NaN counts
  for (int column = threadIdx.x; column < D; column += 32 * kMergeWarps) {
    float value = 0;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) value += sums[w][column];
    out[column] = any ? value / total : 0.0f;
  }
  if (threadIdx.x == 0) out[D] = any ? highest + logf(total) : -INFINITY;
}

template <int D>
const void* KernelOf(DType dtype) {
  return WithFormat<kFlashDecodeFormats.operands>(dtype, [](auto format) {
    return reinterpret_cast<const void*>(&FlashDecodeKernel<CudaType<format>, D>);
  });
}

template <int D>
bool LoadFor(std::string* error) {
  return ForFormats(kFlashDecodeFormats.operands,
                    [&](DType dtype) {
                      return LoadKernel(KernelOf<D>(dtype), Shape<D>::kSmemBytes, error);
                    }) &&
         LoadKernel(reinterpret_cast<const void*>(&MergePartsKernel<D>), 0, error);
}

template <int D>
bool LaunchFor(const FlashDecodeParams& p, FlashDecodeArgs& args, cudaStream_t stream,
               std::string* error) {
  const int64_t items = static_cast<int64_t>(args.splits) * args.batch * args.blocks * args.groups;
  return LaunchKernel(KernelOf<D>(p.dtype), &args,
                      static_cast<int>(CeilDiv<int64_t>(items, kWarps)), 1, 32 * kWarps,
                      Shape<D>::kSmemBytes, stream, error) &&
         (args.splits == 1 || LaunchKernel(reinterpret_cast<const void*>(&MergePartsKernel<D>),
                                           &args, args.batch * args.tokens * args.heads, 1,
                                           32 * kMergeWarps, 0, stream, error));
}

}  // namespace

bool LoadFlashDecodeKernels(std::string* error) {
  return LoadFor<64>(error) && LoadFor<128>(error) && LoadFor<256>(error);
}

bool LaunchFlashDecode(const FlashDecodeParams& p, const FlashDecodeArrays& arrays,
                       DeviceState* state, cudaStream_t stream, std::string* error) {
  *error = WhyNotFormats(kFlashDecodeFormats, kMmaFormats, p.dtype, p.dtype);
  if (!error->empty()) return false;
  if (p.splits * p.batch * p.tokens * p.heads > INT32_MAX) {
    *error = "too many parts of heads";
    return false;
  }
  if (!LoadOnce(LoadFlashDecodeKernels, error)) return false;
  FlashDecodeArgs args{};
  args.arrays = arrays;
  args.state = state;
  args.batch = static_cast<int32_t>(p.batch);
  args.tokens = static_cast<int32_t>(p.tokens);
  args.heads = static_cast<int32_t>(p.heads);
  args.groups = static_cast<int32_t>(p.groups);
  args.positions = static_cast<int32_t>(p.positions);
  args.capacity = static_cast<int32_t>(p.capacity);
  args.page_size = static_cast<int32_t>(p.page_size);
  args.pages = static_cast<int32_t>(p.pages);
  args.entries = p.page_size == 0 ? 0 : static_cast<int32_t>(p.positions / p.page_size);
  args.splits = static_cast<int32_t>(p.splits);
  args.blocks = static_cast<int32_t>(CeilDiv<int64_t>(p.heads / p.groups * p.tokens, kTile));
  args.scale = static_cast<float>(p.scale);
  args.softcap = static_cast<float>(p.softcap);
  switch (p.width) {
    case 64:
      return LaunchFor<64>(p, args, stream, error);
    case 128:
      return LaunchFor<128>(p, args, stream, error);
    case 256:
      return LaunchFor<256>(p, args, stream, error);
    default:
      *error = "the kernel takes heads of 64, 128 or 256 elements";
      return false;
  }
}

}  // namespace jflux
