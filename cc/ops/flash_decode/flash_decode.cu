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
// are in float32; probabilities are rounded to 16 bits before they multiply values. What a cache
// has, 16 bits or 8 with scales, is a class below: Halves, Bytes.
//
// A position outside of the range, or without a page, is loaded as zeros and its score is minus
// infinity, so that a NaN there reaches nothing.
//
// A length beyond the cache, and an entry of block_table that is no page, are faults: written to
// the device's record by the thread that meets them. The kernel goes on (flash_decode.h says with
// what).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

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
  bool has_rows;  // each row of the cache has a scale, else each of its heads
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

// A position's row of the cache, of its head; -1 if there is none.
template <bool kReports = false>
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
  return row * args.groups + item.group;
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

// ---- Caches ------------------------------------------------------------------------------------

// Shared memory of a warp: the queries, then a ring of tiles, keys before values. Rows of the
// queries, and of a cache of 16 bits, are of 2 D bytes; their 16-byte vectors are swizzled by the
// row, so that ldmatrix meets no bank twice.
template <int D>
__device__ __forceinline__ uint32_t AtHalves(int row, int vector) {
  return row * 2 * D + ((vector ^ (row & 7)) * 16);
}
template <int D>
constexpr int kQueryBytes = kTile * 2 * D;

template <typename T, int D>
__device__ void LoadQueries(const FlashDecodeArgs& args, const Item& item, uint32_t smem_q) {
  constexpr int kVectors = D / 8;
  const int lane = threadIdx.x % 32;
  const auto* q = static_cast<const T*>(args.arrays.q);
#pragma unroll
  for (int i = 0; i < kTile * kVectors / 32; ++i) {
    const int row = (32 * i + lane) / kVectors, vector = (32 * i + lane) % kVectors;
    const Query query = Query::Of(args, item, row);
    ptx::CopyAsync16(smem_q + AtHalves<D>(row, vector),
                     q + (query.is_there ? query.row * D + 8 * vector : 0),
                     query.is_there ? 16 : 0);
  }
}

// A cache of T, which the tensor cores multiply as it is.
template <typename T, int D>
struct Halves {
  static constexpr int kVectors = D / 8, kTileBytes = kTile * 2 * D;
  static constexpr int kStages = D <= 128 ? 512 / D : 3, kStageBytes = 2 * kTileBytes;
  static constexpr bool kKeepsQ = D <= 128;  // queries stay in registers
  uint32_t q[kKeepsQ ? D / 16 : 1][4];

  static __device__ void LoadTile(const FlashDecodeArgs& args, const Item& item, int32_t first,
                                  uint32_t smem) {
    const int lane = threadIdx.x % 32;
    const int64_t row_of_lane = RowOf</*kReports=*/true>(args, item, first + lane % kTile);
    const auto* k = static_cast<const T*>(args.arrays.k);
    const auto* v = static_cast<const T*>(args.arrays.v);
#pragma unroll
    for (int i = 0; i < kTile * kVectors / 32; ++i) {
      const int row = (32 * i + lane) / kVectors, vector = (32 * i + lane) % kVectors;
      const int64_t from = __shfl_sync(0xffffffff, row_of_lane, row);
      const bool is_there = from >= 0;
      const int64_t at = is_there ? from * D + 8 * vector : 0;
      const uint32_t to = smem + AtHalves<D>(row, vector);
      ptx::CopyAsync16(to, k + at, is_there ? 16 : 0);
      ptx::CopyAsync16(to + kTileBytes, v + at, is_there ? 16 : 0);
    }
  }

  __device__ void TakeQueries(uint32_t smem_q) {
    const int lane = threadIdx.x % 32;
    if constexpr (kKeepsQ) {
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        ptx::LoadMatrix4(q[i], smem_q + AtHalves<D>(lane % 16, 2 * i + lane / 16));
      }
    }
  }

  // s: lane's scores of queries lane / 4 and 8 more, at positions 8 n + 2 (lane % 4) + {0, 1}.
  __device__ void Scores(uint32_t smem_q, uint32_t smem, float (&s)[2][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      uint32_t keys[4];
      ptx::LoadMatrix4(keys, smem + AtHalves<D>(lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
      if constexpr (!kKeepsQ)
        ptx::LoadMatrix4(q[0], smem_q + AtHalves<D>(lane % 16, 2 * i + lane / 16));
      const uint32_t (&a)[4] = q[kKeepsQ ? i : 0];
      ptx::Multiply16x8<T>(s[0], a, keys[0], keys[1]);
      ptx::Multiply16x8<T>(s[1], a, keys[2], keys[3]);
    }
  }
  static constexpr float unit = 1;  // what `Scores` are multiplied by
  // What scores of a position are multiplied by.
  static __device__ float KeyScale(uint32_t, int) { return 1.0f; }

  // What sums of `AddValues` are multiplied by.
  static constexpr float kUnit = 1;
  // Adds the product of probabilities, as `Scores` has them, and values.
  static __device__ void AddValues(const FlashDecodeArgs&, uint32_t smem, const float (&p)[2][4],
                                   uint32_t, float (&out)[D / 8][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t weights[4] = {Pack<T>(p[0][0], p[0][1]), Pack<T>(p[0][2], p[0][3]),
                                 Pack<T>(p[1][0], p[1][1]), Pack<T>(p[1][2], p[1][3])};
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      uint32_t values[4];
      ptx::LoadMatrix4Transposed(values,
                                 smem + kTileBytes + AtHalves<D>(lane % 16, 2 * j + lane / 16));
      ptx::Multiply16x8<T>(out[2 * j], weights, values[0], values[1]);
      ptx::Multiply16x8<T>(out[2 * j + 1], weights, values[2], values[3]);
    }
  }

  // The column of out[j][2 h + e] of a lane.
  static __device__ int Column(int j, int e) { return 8 * j + 2 * (threadIdx.x % 4) + e; }
};

// A cache of e4m3, with a scale for each row or head. In what order a product's terms are added is
// free, so each lane reads 16 bytes at once, of what it multiplies:
//
//   keys     elements 64 s + 16 (lane % 4) + {0 .. 15} of positions lane / 4 and 8 more: four
//            steps of mma's 16 terms, of which a lane has four each
//   values   columns W (lane / 4) + {0 .. W - 1}, W = D / 8, of positions 2 (lane % 4) + {0, 1} and
//            8 more: a step's column of mma is one of W that lie W apart
//
// Keys are multiplied as float16, and so are queries. Those of bfloat16 are made so many powers of
// two larger that the item's largest has 15 bits: exact, less elements under 2^-28 of that. Values
// are bfloat16 of 2^-120 times their size, which is their bits, shifted; probabilities have their
// position's scale. Half of the 2^120 is theirs too, and the other half the sum's, so that neither
// a large scale nor a small sum leaves float32's range. NaN among values would be 480: where heads
// have scales it is looked for, and `quantize` makes the scale of such a row NaN.
template <typename T, int D>
struct Bytes {
  static constexpr int kVectors = D / 16, kTileBytes = kTile * D;
  static constexpr int kStages = D <= 128 ? 1024 / D : 5;
  static constexpr int kScaleBytes = 2 * kTile * 4, kStageBytes = 2 * kTileBytes + kScaleBytes;
  static constexpr bool kKeepsQ = D <= 128;
  static constexpr int kBytes = D / 8;  // W
  uint32_t q[kKeepsQ ? D / 16 : 4][4];
  float unit = 1;  // what `Scores` are multiplied by

  static __device__ uint32_t AtKeys(int row, int vector) {
    return row * D + (D == 64 ? vector : vector ^ ((row & 1) * 4)) * 16;
  }
  static __device__ uint32_t AtValues(int row, int vector) {
    // Rows that are read at once are all even or all odd.
    if (D == 64)
      return kTileBytes + row / 2 * 128 + ((row % 2 * 4 + vector) ^ (row / 2 % 4 * 2)) * 16;
    const int turn = D == 128 ? row & 7 : (row / 2 & 1) | (row & 4);
    return kTileBytes + row * D + (vector ^ turn) * 16;
  }
  static __device__ uint32_t AtScale(bool of_values, int position) {
    return 2 * kTileBytes + (of_values * kTile + position) * 4;
  }

  static __device__ void LoadTile(const FlashDecodeArgs& args, const Item& item, int32_t first,
                                  uint32_t smem) {
    const int lane = threadIdx.x % 32;
    const int64_t row_of_lane = RowOf</*kReports=*/true>(args, item, first + lane % kTile);
    const auto* k = static_cast<const uint8_t*>(args.arrays.k);
    const auto* v = static_cast<const uint8_t*>(args.arrays.v);
#pragma unroll
    for (int i = 0; i < kTile * kVectors / 32; ++i) {
      const int row = (32 * i + lane) / kVectors, vector = (32 * i + lane) % kVectors;
      const int64_t from = __shfl_sync(0xffffffff, row_of_lane, row);
      const bool is_there = from >= 0;
      const int64_t at = is_there ? from * D + 16 * vector : 0;
      ptx::CopyAsync16(smem + AtKeys(row, vector), k + at, is_there ? 16 : 0);
      ptx::CopyAsync16(smem + AtValues(row, vector), v + at, is_there ? 16 : 0);
    }
    const bool of_values = lane >= kTile;
    if (row_of_lane >= 0) {  // else nobody uses what is there
      const float* scale = of_values ? args.arrays.v_scale : args.arrays.k_scale;
      ptx::CopyAsync4(smem + AtScale(of_values, lane % kTile),
                      scale + (args.has_rows ? row_of_lane : item.group));
    }
  }

  // Queries are float16 from here on.
  __device__ void TakeQueries(uint32_t smem_q) {
    const int lane = threadIdx.x % 32;
    if constexpr (!std::is_same_v<T, __half>) {
      float largest = 0;  // less infinities and NaN
#pragma unroll
      for (int i = 0; i < kQueryBytes<D> / 128; ++i) {
        const float2 pair = Unpack<T>(ptx::LoadShared4(smem_q + (32 * i + lane) * 4));
        const float x = fabsf(pair.x), y = fabsf(pair.y);
        largest = fmaxf(largest, fmaxf(x < INFINITY ? x : 0.0f, y < INFINITY ? y : 0.0f));
      }
#pragma unroll
      for (int i = 16; i > 0; i /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, i));
      }
      // 2^14 and the power of two in `largest`: both quotients have exponents of float32.
      const uint32_t exponent = Max(__float_as_uint(largest) >> 23, 15u);
      unit = __uint_as_float((exponent - 14) << 23);
      const float factor = __uint_as_float((268 - exponent) << 23);
#pragma unroll
      for (int i = 0; i < kQueryBytes<D> / 128; ++i) {
        const uint32_t at = smem_q + (32 * i + lane) * 4;
        const float2 pair = Unpack<T>(ptx::LoadShared4(at));
        const uint32_t halves = Pack<__half>(factor * pair.x, factor * pair.y);
        ptx::StoreShared4(at, static_cast<int32_t>(halves));
      }
      __syncwarp();
    }
    if constexpr (kKeepsQ) {
#pragma unroll
      for (int i = 0; i < D / 16; ++i) TakeStep(smem_q, i, q[i]);
    }
  }
  static __device__ void TakeStep(uint32_t smem_q, int i, uint32_t (&a)[4]) {
    const int lane = threadIdx.x % 32;
    const int element = 64 * (i / 4) + 16 * (lane % 4) + 4 * (i % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint64_t pairs =
          ptx::LoadShared8(smem_q + AtHalves<D>(lane / 4 + 8 * h, element / 8) + element % 8 * 2);
      a[h] = static_cast<uint32_t>(pairs);
      a[2 + h] = static_cast<uint32_t>(pairs >> 32);
    }
  }

  static __device__ uint32_t Half(uint32_t two) {
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    return pair.x | static_cast<uint32_t>(pair.y) << 16;
  }

  __device__ void Scores(uint32_t smem_q, uint32_t smem, float (&s)[2][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int of64 = 0; of64 < D / 64; ++of64) {
      if constexpr (!kKeepsQ) {
#pragma unroll
        for (int i = 0; i < 4; ++i) TakeStep(smem_q, 4 * of64 + i, q[i]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint4 keys = ptx::LoadShared16(smem + AtKeys(8 * n + lane / 4, 4 * of64 + lane % 4));
        const uint32_t words[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ptx::Multiply16x8<__half>(s[n], q[kKeepsQ ? 4 * of64 + i : i], Half(words[i] & 0xffff),
                                    Half(words[i] >> 16));
        }
      }
    }
  }
  static __device__ float KeyScale(uint32_t smem, int position) {
    return ptx::LoadSharedFloat(smem + AtScale(false, position));
  }

  // Bytes `b` of both, numbers of e4m3, as bfloat16 of 2^-120 times their size.
  static __device__ uint32_t Shifted(uint32_t one, uint32_t other, int b) {
    const uint32_t twice = __byte_perm(one, other, b * 0x1111 + 0x4400);  // of each: its byte twice
    return (twice & 0x80008000) | (twice << 4 & 0x07f007f0);
  }

  // Whether one of four numbers of e4m3 is NaN.
  static __device__ bool HasNan(uint32_t four) {
    return ((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
  }

  static constexpr float kUnit = 0x1p60f;
  static __device__ void AddValues(const FlashDecodeArgs& args, uint32_t smem,
                                   const float (&p)[2][4], uint32_t there, float (&out)[D / 8][4]) {
    using B = __nv_bfloat16;
    const int lane = threadIdx.x % 32, first = 2 * (lane % 4);
    float w[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int position = 8 * n + first + c % 2;
        const float scale = ptx::LoadSharedFloat(smem + AtScale(true, position));
        // What no position has is not multiplied: its scale may be anything.
        w[n][c] = there >> position & 1 ? p[n][c] * scale * 0x1p60f : 0.0f;
      }
    }
    const uint32_t weights[4] = {Pack<B>(w[0][0], w[0][1]), Pack<B>(w[0][2], w[0][3]),
                                 Pack<B>(w[1][0], w[1][1]), Pack<B>(w[1][2], w[1][3])};
    constexpr int kWords = Min(kBytes, 16) / 4;
    bool has_nan = false;
#pragma unroll
    for (int chunk = 0; chunk < CeilDiv(kBytes, 16); ++chunk) {
      uint32_t words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first + i % 2 + i / 2 * 8, byte = lane / 4 * kBytes + 16 * chunk;
        const uint32_t at = smem + AtValues(row, byte / 16);
        if constexpr (kBytes < 16) {
          const uint64_t v = ptx::LoadShared8(at + byte % 16);
          words[i][0] = static_cast<uint32_t>(v);
          words[i][1] = static_cast<uint32_t>(v >> 32);
        } else {
          const uint4 v = ptx::LoadShared16(at);
          words[i][0] = v.x;
          words[i][1] = v.y;
          words[i][2] = v.z;
          words[i][3] = v.w;
        }
      }
      if (!args.has_rows) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int m = 0; m < kWords; ++m) has_nan |= HasNan(words[i][m]);
        }
      }
#pragma unroll
      for (int m = 0; m < kWords; ++m) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          ptx::Multiply16x8<B>(out[16 * chunk + 4 * m + b], weights,
                               Shifted(words[0][m], words[1][m], b),
                               Shifted(words[2][m], words[3][m], b));
        }
      }
    }
    if (!args.has_rows && __any_sync(0xffffffff, has_nan)) {
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) out[j][c] = NAN;
      }
    }
  }

  static __device__ int Column(int j, int e) { return kBytes * (2 * (threadIdx.x % 4) + e) + j; }
};

// ---- A warp ------------------------------------------------------------------------------------

template <typename Cache, int D>
__device__ void AttendToTile(const FlashDecodeArgs& args, const Item& item, int32_t first,
                             uint32_t smem_q, Cache& cache, uint32_t smem, Running<D>& run) {
  const int lane = threadIdx.x % 32;
  float s[2][4]{};
  cache.Scores(smem_q, smem, s);
  const uint32_t there = __ballot_sync(0xffffffff, RowOf(args, item, first + lane % kTile) >= 0);
  float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int position = 8 * n + 2 * (lane % 4) + c % 2, at = first + position;
      float x = s[n][c] * cache.unit * (args.scale * Cache::KeyScale(smem, position));
      if (args.softcap > 0) x = Cap(x, args.softcap);
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
  Cache::AddValues(args, smem, s, there, run.out);
}

template <typename Cache, int D>
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
    const float factor = any ? Cache::kUnit / total : 0.0f;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      row[Cache::Column(j, 0)] = run.out[j][2 * h] * factor;
      row[Cache::Column(j, 1)] = run.out[j][2 * h + 1] * factor;
    }
    if (lane % 4 == 0) row[D] = any ? kLn2 * (run.highest[h] + log2f(total)) : -INFINITY;
  }
}

template <typename Cache, int D>
constexpr int kWarpBytes = kQueryBytes<D> + Cache::kStages * Cache::kStageBytes;

template <typename T, typename Cache, int D>
__global__ void __launch_bounds__(32 * kWarps)
    FlashDecodeKernel(const __grid_constant__ FlashDecodeArgs args) {
  constexpr int kStages = Cache::kStages;
  JFLUX_DYNAMIC_SHARED(uint8_t, 128, storage);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (number >= static_cast<int64_t>(args.splits) * args.batch * args.blocks * args.groups) return;
  const Item item = Item::Of(args, number);
  if (item.is_wrong && item.group + item.block + item.split + lane == 0)
    ReportLength(args, item.sequence);
  const auto smem_q =
      static_cast<uint32_t>(__cvta_generic_to_shared(storage + warp * kWarpBytes<Cache, D>));
  const auto stage_at = [&](int stage) {
    return smem_q + kQueryBytes<D> + stage * Cache::kStageBytes;
  };
  const int32_t tiles = CeilDiv(item.end - item.begin, kTile);

  if (tiles > 0) LoadQueries<T, D>(args, item, smem_q);  // in the first tile's group of copies
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < tiles) Cache::LoadTile(args, item, item.begin + stage * kTile, stage_at(stage));
    ptx::CopyAsyncCommit();
  }
  Running<D> run{};
  run.Start(args, item);
  Cache cache{};
  int stage = 0, next = kStages - 1;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    ptx::CopyAsyncWait<kStages - 2>();
    __syncwarp();  // the other lanes' copies are there, and they have read the stage before
    if (tile == 0) cache.TakeQueries(smem_q);
    const int32_t ahead = tile + kStages - 1;
    if (ahead < tiles) Cache::LoadTile(args, item, item.begin + ahead * kTile, stage_at(next));
    ptx::CopyAsyncCommit();
    AttendToTile(args, item, item.begin + tile * kTile, smem_q, cache, stage_at(stage), run);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next = next + 1 == kStages ? 0 : next + 1;
  }
  Store<Cache>(args, item, run);
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

struct Kernel {
  const void* kernel;
  int smem_bytes;
};
template <typename T, typename Cache, int D>
Kernel KernelWith() {
  return {reinterpret_cast<const void*>(&FlashDecodeKernel<T, Cache, D>),
          kWarps * kWarpBytes<Cache, D>};
}
template <int D>
Kernel KernelOf(DType dtype, bool is_bytes) {
  return WithFormat<kFlashDecodeFormats.operands>(dtype, [&](auto format) {
    using T = CudaType<format>;
    return is_bytes ? KernelWith<T, Bytes<T, D>, D>() : KernelWith<T, Halves<T, D>, D>();
  });
}

template <int D>
bool LoadFor(std::string* error) {
  const auto load = [&](const Kernel& one) {
    return LoadKernel(one.kernel, one.smem_bytes, error);
  };
  return ForFormats(kFlashDecodeFormats.operands,
                    [&](DType dtype) {
                      return load(KernelOf<D>(dtype, false)) && load(KernelOf<D>(dtype, true));
                    }) &&
         LoadKernel(reinterpret_cast<const void*>(&MergePartsKernel<D>), 0, error);
}

template <int D>
bool LaunchFor(const FlashDecodeParams& p, FlashDecodeArgs& args, cudaStream_t stream,
               std::string* error) {
  const int64_t items = static_cast<int64_t>(args.splits) * args.batch * args.blocks * args.groups;
  const Kernel one = KernelOf<D>(p.dtype, p.scales != CacheScales::kNone);
  return LaunchKernel(one.kernel, &args, static_cast<int>(CeilDiv<int64_t>(items, kWarps)), 1,
                      32 * kWarps, one.smem_bytes, stream, error) &&
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
  args.has_rows = p.scales == CacheScales::kOfRows;
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
