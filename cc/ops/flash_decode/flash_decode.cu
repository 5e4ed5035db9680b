// flash_decode on GPUs. The cache is read once, by teams of warps that know nothing of each other:
//
//   item    a warp's work: 8 N queries, N = 1, 2 or 4, that share a head of the cache, of all
//           tokens' heads, over one of `splits` consecutive parts of their sequence's range
//   team    the warps, up to 8, whose items differ in their queries alone. It is a CTA, or half of
//           one if it is one warp
//   tile    16 positions of keys and of values. Each team has a ring of kStages tiles in shared
//           memory, which it fills by cp.async, kStages - 1 tiles ahead
//   merge   where a sequence has several parts, a second kernel weighs them by their log-sum-exps
//
// Both products are by mma.sync, with keys and values as its 16 rows and queries as its 8 columns:
// 16 positions x 8 queries are scores, transposed in registers they are the weights, and 16 columns
// of values x 8 queries the result. Sums are in float32; probabilities are rounded to 16 bits
// before they multiply values. What a cache has, 16 bits or 8 with scales, is a class below:
// Halves, Bytes.
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

#include <cfloat>
#include <type_traits>

#include "core/platform.h"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/ptx.cuh"
#include "ops/flash_decode/flash_decode.cuh"
#include "ops/flash_decode/flash_decode.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

using namespace decode;

constexpr int kMostWarps = 8;  // of a CTA
constexpr int kTile = 16;      // positions

// A lane's part of its warp's 8 N queries: queries 8 n + 2 (lane % 4) + {0, 1}, at index [n][0, 1].
//
// What multiplies values, with 16 bits, is a weight: 2^(score - base) times the values' scale.
// `base` rises, and what is summed is multiplied anew, where a weight would pass 2^kMostBits, which
// is seldom after the first tile. So neither scores nor scales leave 16 bits' range. The largest
// weight that it rises for has kLeastBits, so that small ones are not rounded off.
constexpr float kMostBits = 15, kLeastBits = 8;

template <int D, int N>
struct Running {
  float out[D / 16][N][4];  // rows lane / 4 and 8 more of 16 columns, of both queries
  float base[N][2];         // a whole number
  float total[N][2];        // of this lane's probabilities times 2^-base
  Span inner;               // Span::OfAll

  __device__ void Start(const FlashDecodeArgs& args, const Item& item) {
    inner = Span::OfAll(args, args.arrays.bounds[item.sequence], item);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        base[n][e] = -FLT_MAX;
        total[n][e] = item.is_wrong ? NAN : 0.0f;
      }
    }
  }

  // Lets `base` be no less than any lane's exponents `s`, less kLeastBits.
  __device__ void Rise(const float (&s)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float most = fmaxf(s[n][e], s[n][2 + e]);
#pragma unroll
        for (int i = 4; i < 32; i *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, i));
        const float highest = fmaxf(base[n][e], ceilf(most) - kLeastBits);
        factor[e] = ptx::Exp2(base[n][e] - highest);
        base[n][e] = highest;
        total[n][e] *= factor[e];
      }
#pragma unroll
      for (int j = 0; j < D / 16; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) out[j][n][c] *= factor[c % 2];
      }
    }
  }
};

// ---- Caches ------------------------------------------------------------------------------------

// Rows of queries, and of a cache of 16 bits, are of 2 D bytes; their 16-byte vectors are swizzled
// by the row, so that ldmatrix meets no bank twice.
template <int D>
__device__ __forceinline__ uint32_t AtHalves(int row, int vector) {
  return row * 2 * D + ((vector ^ (row & 7)) * 16);
}
template <int D, int N>
constexpr int kQueryBytes = 8 * N * 2 * D;  // of a warp
// Whether a warp keeps its queries in registers.
template <int D, int N>
constexpr bool kKeepsQ = D / 8 * N <= 32;

template <typename T, int D, int N>
__device__ void LoadQueries(const FlashDecodeArgs& args, const Item& item, uint32_t smem_q) {
  constexpr int kVectors = D / 8;
  const int lane = threadIdx.x % 32;
  const auto* q = static_cast<const T*>(args.arrays.q);
#pragma unroll
  for (int i = 0; i < 8 * N * kVectors / 32; ++i) {
    const int row = (32 * i + lane) / kVectors, vector = (32 * i + lane) % kVectors;
    const Query query = Query::Of<8 * N>(args, item, row);
    ptx::CopyAsync16(smem_q + AtHalves<D>(row, vector),
                     q + (query.is_there ? query.row * D + 8 * vector : 0),
                     query.is_there ? 16 : 0);
  }
}

// Copies this warp's share, the steps of which `share` has a bit, of a tile's rows to shared
// memory: `to(row, vector, of_values)` is where 16 bytes of a row of kBytes go. What is kNoRow is
// zeros there.
template <int kBytes, typename To>
__device__ __forceinline__ void CopyTile(const FlashDecodeArgs& args, uint32_t row_of_lane,
                                         uint32_t share, To to) {
  constexpr int kVectors = kBytes / 16;
  const int lane = threadIdx.x % 32;
  const auto* k = static_cast<const uint8_t*>(args.arrays.k);
  const auto* v = static_cast<const uint8_t*>(args.arrays.v);
#pragma unroll
  for (int i = 0; i < kTile * kVectors / 32; ++i) {
    const int row = (32 * i + lane) / kVectors, vector = (32 * i + lane) % kVectors;
    const uint32_t from = __shfl_sync(0xffffffff, row_of_lane, row);
    const uint64_t at = static_cast<uint64_t>(from) * kBytes + 16 * vector;
    if (share >> i & 1) {
      ptx::CopyAsync16Or0(to(row, vector, false), k + at, from == kNoRow);
      ptx::CopyAsync16Or0(to(row, vector, true), v + at, from == kNoRow);
    }
  }
}

// A cache of T, which the tensor cores multiply as it is.
template <typename T, int D, int N>
struct Halves {
  using Weight = T;
  static constexpr bool kIsScaled = false;
  static constexpr int kTileBytes = kTile * 2 * D;
  static constexpr int kStages = D <= 128 ? 512 / D : 3, kStageBytes = 2 * kTileBytes;
  uint32_t q[kKeepsQ<D, N> ? D / 32 : 1][N][4];  // each of two steps of 16 elements
  static constexpr float query_unit = 1;         // what `Scores` are multiplied by

  static __device__ void LoadTile(const FlashDecodeArgs& args, const Item& item, int32_t first,
                                  uint32_t share, uint32_t smem) {
    const uint32_t row = RowOf</*kReports=*/true>(args, item, first + threadIdx.x % kTile);
    CopyTile<2 * D>(args, row, share, [&](int row, int vector, bool of_values) {
      return smem + of_values * kTileBytes + AtHalves<D>(row, vector);
    });
  }

  __device__ void TakeQueries(uint32_t smem_q) {
    if constexpr (kKeepsQ<D, N>) {
#pragma unroll
      for (int i = 0; i < D / 32; ++i) TakeSteps(smem_q, i, q[i]);
    }
  }
  static __device__ void TakeSteps(uint32_t smem_q, int i, uint32_t (&b)[N][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      ptx::LoadMatrix4(b[n], smem_q + AtHalves<D>(8 * n + lane % 8, 4 * i + lane / 8));
    }
  }

  // s: the scores of positions lane / 4 and 8 more with queries 8 n + 2 (lane % 4) + {0, 1}.
  __device__ void Scores(uint32_t smem_q, uint32_t smem, float (&s)[N][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      if constexpr (!kKeepsQ<D, N>) TakeSteps(smem_q, i, q[0]);
      const uint32_t (&b)[N][4] = q[kKeepsQ<D, N> ? i : 0];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t keys[4];
        ptx::LoadMatrix4(keys, smem + AtHalves<D>(lane % 16, 4 * i + 2 * half + lane / 16));
#pragma unroll
        for (int n = 0; n < N; ++n)
          ptx::Multiply16x8<T>(s[n], keys, b[n][2 * half], b[n][2 * half + 1]);
      }
    }
  }
  // The scale of a position's keys, or values.
  static __device__ float Scale(uint32_t, bool, int) { return 1.0f; }

  // Adds the product of values and weights: of queries 8 n + lane / 4, at positions
  // 2 (lane % 4) + {0, 1} and 8 more.
  static __device__ void AddValues(uint32_t smem, const uint32_t (&weights)[N][2],
                                   float (&out)[D / 16][N][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      uint32_t values[4];
      ptx::LoadMatrix4Transposed(
          values, smem + kTileBytes + AtHalves<D>(lane % 8 + lane / 16 * 8, 2 * j + lane / 8 % 2));
#pragma unroll
      for (int n = 0; n < N; ++n)
        ptx::Multiply16x8<T>(out[j][n], values, weights[n][0], weights[n][1]);
    }
  }

  // The column of out[j][n][2 h + e] of a lane.
  static __device__ int Column(int j, int h) { return 16 * j + 8 * h + threadIdx.x % 32 / 4; }
};

// A cache of e4m3, with a scale for each row or head, which is multiplied as float16: exact. In
// what order a product's terms are added is free, and so is that of its rows, so each lane reads 16
// bytes at once, of what it multiplies:
//
//   keys     elements 64 s + 16 (lane % 4) + {0 .. 15} of positions lane / 4 and 8 more: four
//            steps of mma's 16 terms, of which a lane has four each
//   values   columns W (lane / 4) + {0 .. W - 1}, W = D / 8, of positions 2 (lane % 4) + {0, 1} and
//            8 more: two columns are a lane's rows of a step of mma
//
// Queries of bfloat16 are made so many powers of two larger that the warp's largest has 15 bits:
// exact, less elements under 2^-28 of that.
template <typename T, int D, int N>
struct Bytes {
  using Weight = __half;
  static constexpr bool kIsScaled = true;
  static constexpr int kTileBytes = kTile * D;
  static constexpr int kStages = D <= 128 ? 512 / D : 4;
  static constexpr int kScaleBytes = 2 * kTile * 4, kStageBytes = 2 * kTileBytes + kScaleBytes;
  static constexpr int kColumns = D / 8;  // W
  uint32_t q[kKeepsQ<D, N> ? D / 16 : 4][N][2];
  float query_unit = 1;

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
                                  uint32_t share, uint32_t smem) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = RowOf</*kReports=*/true>(args, item, first + lane % kTile);
    CopyTile<D>(args, row, share, [&](int row, int vector, bool of_values) {
      return smem + (of_values ? AtValues(row, vector) : AtKeys(row, vector));
    });
    if ((share & 1) && row != kNoRow) {  // else nobody uses what is there
      const bool of_values = lane >= kTile;
      const float* scale = of_values ? args.arrays.v_scale : args.arrays.k_scale;
      ptx::CopyAsync4(smem + AtScale(of_values, lane % kTile),
                      scale + (args.has_rows ? row : item.group));
    }
  }

  // Queries are float16 from here on.
  __device__ void TakeQueries(uint32_t smem_q) {
    const int lane = threadIdx.x % 32;
    if constexpr (!std::is_same_v<T, __half>) {
      float largest = 0;  // less infinities and NaN
#pragma unroll
      for (int i = 0; i < kQueryBytes<D, N> / 128; ++i) {
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
      query_unit = __uint_as_float((exponent - 14) << 23);
      const float factor = __uint_as_float((268 - exponent) << 23);
#pragma unroll
      for (int i = 0; i < kQueryBytes<D, N> / 128; ++i) {
        const uint32_t at = smem_q + (32 * i + lane) * 4;
        const float2 pair = Unpack<T>(ptx::LoadShared4(at));
        const uint32_t halves = Pack<__half>(factor * pair.x, factor * pair.y);
        ptx::StoreShared4(at, static_cast<int32_t>(halves));
      }
      __syncwarp();
    }
    if constexpr (kKeepsQ<D, N>) {
#pragma unroll
      for (int i = 0; i < D / 16; ++i) TakeStep(smem_q, i, q[i]);
    }
  }
  static __device__ void TakeStep(uint32_t smem_q, int i, uint32_t (&b)[N][2]) {
    const int lane = threadIdx.x % 32;
    const int element = 64 * (i / 4) + 16 * (lane % 4) + 4 * (i % 4);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const uint64_t pairs =
          ptx::LoadShared8(smem_q + AtHalves<D>(8 * n + lane / 4, element / 8) + element % 8 * 2);
      b[n][0] = static_cast<uint32_t>(pairs);
      b[n][1] = static_cast<uint32_t>(pairs >> 32);
    }
  }

  static __device__ uint32_t Half(uint32_t two) {
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    return pair.x | static_cast<uint32_t>(pair.y) << 16;
  }

  __device__ void Scores(uint32_t smem_q, uint32_t smem, float (&s)[N][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int of64 = 0; of64 < D / 64; ++of64) {
      uint4 words[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        words[h] = ptx::LoadShared16(smem + AtKeys(8 * h + lane / 4, 4 * of64 + lane % 4));
      const uint32_t keys[2][4] = {{words[0].x, words[0].y, words[0].z, words[0].w},
                                   {words[1].x, words[1].y, words[1].z, words[1].w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (!kKeepsQ<D, N>) TakeStep(smem_q, 4 * of64 + i, q[i]);
        const uint32_t (&b)[N][2] = q[kKeepsQ<D, N> ? 4 * of64 + i : i];
        const uint32_t a[4] = {Half(keys[0][i] & 0xffff), Half(keys[1][i] & 0xffff),
                               Half(keys[0][i] >> 16), Half(keys[1][i] >> 16)};
#pragma unroll
        for (int n = 0; n < N; ++n) ptx::Multiply16x8<__half>(s[n], a, b[n][0], b[n][1]);
      }
    }
  }
  static __device__ float Scale(uint32_t smem, bool of_values, int position) {
    return ptx::LoadSharedFloat(smem + AtScale(of_values, position));
  }

  static __device__ void AddValues(uint32_t smem, const uint32_t (&weights)[N][2],
                                   float (&out)[D / 16][N][4]) {
    const int lane = threadIdx.x % 32;
    constexpr int kWords = Min(kColumns, 16) / 4;
#pragma unroll
    for (int chunk = 0; chunk < CeilDiv(kColumns, 16); ++chunk) {
      uint32_t words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 2 * (lane % 4) + i % 2 + i / 2 * 8;
        const int byte = lane / 4 * kColumns + 16 * chunk;
        const uint32_t at = smem + AtValues(row, byte / 16);
        if constexpr (kColumns < 16) {
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
#pragma unroll
      for (int m = 0; m < kWords; ++m) {
#pragma unroll
        for (int two = 0; two < 2; ++two) {  // columns of a word
          // Of both positions one column, then of both the next one.
          const uint32_t selectors = two == 0 ? 0x5140 : 0x7362;
          const uint32_t near = __byte_perm(words[0][m], words[1][m], selectors);
          const uint32_t far = __byte_perm(words[2][m], words[3][m], selectors);
          const uint32_t values[4] = {Half(near & 0xffff), Half(near >> 16), Half(far & 0xffff),
                                      Half(far >> 16)};
#pragma unroll
          for (int n = 0; n < N; ++n) {
            ptx::Multiply16x8<__half>(out[8 * chunk + 2 * m + two][n], values, weights[n][0],
                                      weights[n][1]);
          }
        }
      }
    }
  }

  static __device__ int Column(int j, int h) {
    return kColumns * (threadIdx.x % 32 / 4) + 2 * j + h;
  }
};

// ---- A warp ------------------------------------------------------------------------------------

// A value's scale is part of its exponent within these bounds. A weight of less than 2^-126 is
// zero, and so is then its part of the total: that of a scale of zero counts as one of kLeastScale.
constexpr float kLeastScale = 0x1p-64f, kMostScale = 0x1p100f;

// Minus infinity in place of scores that do not count, and zeros in place of scales that no
// position has.
template <int N>
__device__ void Mask(const FlashDecodeArgs& args, const Item& item, int32_t first, float (&s)[N][4],
                     float (&scales)[2]) {
  const int lane = threadIdx.x % 32;
  const DecodeBounds bounds = args.arrays.bounds[item.sequence];
  const uint32_t there =
      __ballot_sync(0xffffffff, RowOf(args, item, first + lane % kTile) != kNoRow);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int position = lane / 4 + 8 * h, at = first + position;
    const bool is_there = there >> position & 1;
    if (!is_there) scales[h] = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = 8 * n + 2 * (lane % 4) + e;
        const Span span = Span::Of(bounds, Query::Of<8 * N>(args, item, query).token);
        if (!is_there || at < span.begin || at >= span.end) s[n][2 * h + e] = -INFINITY;
      }
    }
  }
}

// ALiBi, of scores in units of log2(e).
template <int N>
__device__ void AddSlopes(const FlashDecodeArgs& args, const Item& item, int32_t first,
                          float (&s)[N][4]) {
  const int lane = threadIdx.x % 32;
  const DecodeBounds bounds = args.arrays.bounds[item.sequence];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Query query = Query::Of<8 * N>(args, item, 8 * n + 2 * (lane % 4) + e);
      if (!query.is_there) continue;
      const auto head = static_cast<uint32_t>(query.row) % static_cast<uint32_t>(args.heads);
      const float slope = kLog2e * __ldg(args.arrays.slopes + head);
      const int32_t own = bounds.own - 1 + query.token - bounds.origin;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        s[n][2 * h + e] += slope * static_cast<float>(first + lane / 4 + 8 * h - own);
    }
  }
}

template <typename Cache, int D, int N>
__device__ __forceinline__ void AttendToTile(const FlashDecodeArgs& args, const Item& item,
                                             int32_t first, uint32_t smem_q, Cache& cache,
                                             uint32_t smem, Running<D, N>& run) {
  const int lane = threadIdx.x % 32;
  float s[N][4]{};
  cache.Scores(smem_q, smem, s);
  float scales[2];  // of values
  const bool has_cap = args.softcap > 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    scales[h] = Cache::Scale(smem, true, lane / 4 + 8 * h);
    const float of_keys = Cache::Scale(smem, false, lane / 4 + 8 * h);
    const float scale = cache.query_unit * (has_cap ? args.scale : kLog2e * args.scale) * of_keys;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) s[n][2 * h + e] *= scale;
    }
  }
  if (has_cap) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = kLog2e * Cap(s[n][c], args.softcap);
    }
  }
  if (args.arrays.slopes != nullptr) AddSlopes<N>(args, item, first, s);
  if (first < run.inner.begin || first + kTile > run.inner.end)
    Mask<N>(args, item, first, s, scales);

  // A scale is part of the exponent, less its sign, and what it is beyond these bounds.
  float inverse[2] = {1, 1}, left[2] = {1, 1};
  if constexpr (Cache::kIsScaled) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float size = fminf(fmaxf(fabsf(scales[h]), kLeastScale), kMostScale);
      inverse[h] = __fdividef(1, size);
      left[h] = scales[h] * inverse[h];
      const float bits = __log2f(size);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) s[n][2 * h + e] += bits;
      }
    }
  }
  bool rises = false;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) rises |= s[n][c] - run.base[n][c % 2] > kMostBits;
  }
  if (__any_sync(0xffffffff, rises)) run.Rise(s);

  using W = typename Cache::Weight;
  uint32_t weights[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float w[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        w[e] = ptx::Exp2(s[n][2 * h + e] - run.base[n][e]);
        run.total[n][e] += w[e] * inverse[h];
        w[e] *= left[h];
      }
      weights[n][h] = ptx::TransposeMatrix(Pack<W>(w[0], w[1]));
    }
  }
  Cache::AddValues(smem, weights, run.out);
}

template <typename Cache, int D, int N>
__device__ void Store(const FlashDecodeArgs& args, const Item& item, const Running<D, N>& run) {
  const int lane = threadIdx.x % 32;
  float* to = args.splits == 1 ? args.arrays.out : args.arrays.parts;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float total = run.total[n][e];
#pragma unroll
      for (int i = 4; i < 32; i *= 2) total += __shfl_xor_sync(0xffffffff, total, i);
      const Query query = Query::Of<8 * N>(args, item, 8 * n + 2 * (lane % 4) + e);
      if (!query.is_there) continue;
      const int64_t of_split = static_cast<int64_t>(args.batch) * args.tokens * args.heads;
      float* row = to + (item.split * of_split + query.row) * (D + 1);
      const bool any = total != 0;  // NaN counts
      const float factor = any ? 1 / total : 0.0f;
#pragma unroll
      for (int j = 0; j < D / 16; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) row[Cache::Column(j, h)] = run.out[j][n][2 * h + e] * factor;
      }
      if (lane / 4 == 0) row[D] = any ? kLn2 * (run.base[n][e] + log2f(total)) : -INFINITY;
    }
  }
}

// A team's shared memory is each warp's queries, then a ring of tiles, keys before values.
template <typename Cache>
constexpr int kRingBytes = Cache::kStages * Cache::kStageBytes;

template <typename T, typename Cache, int D, int N>
__global__ void __launch_bounds__(32 * kMostWarps)
    FlashDecodeKernel(const __grid_constant__ FlashDecodeArgs args) {
  constexpr int kStages = Cache::kStages;
  JFLUX_DYNAMIC_SHARED(uint8_t, 128, storage);
  const int warp = threadIdx.x / 32, team = warp / args.team, member = warp % args.team;
  const int lane = threadIdx.x % 32, teams = blockDim.x / 32 / args.team;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * teams + team;
  if (number >= static_cast<int64_t>(args.splits) * args.batch * args.blocks * args.groups) return;
  const Item item = Item::Of<kTile>(args, number, member);
  if (item.is_wrong && item.group + item.block + item.split + lane == 0)
    ReportLength(args, item.sequence);
  const auto smem = static_cast<uint32_t>(__cvta_generic_to_shared(storage)) +
                    team * (args.team * kQueryBytes<D, N> + kRingBytes<Cache>);
  const uint32_t smem_q = smem + member * kQueryBytes<D, N>;
  const uint32_t ring = smem + args.team * kQueryBytes<D, N>;
  const auto stage_at = [&](int stage) { return ring + stage * Cache::kStageBytes; };
  const auto sync = [&] {
    if (args.team == 1) {
      __syncwarp();
    } else {
      __syncthreads();  // the team is the CTA
    }
  };
  uint32_t share = 0;  // the steps of a tile's copies that are this warp's
  for (int step = member; step < 32; step += args.team) share |= 1u << step;
  const int32_t tiles = CeilDiv(item.end - item.begin, kTile);

  if (tiles > 0) LoadQueries<T, D, N>(args, item, smem_q);  // in the first tile's group of copies
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < tiles)
      Cache::LoadTile(args, item, item.begin + stage * kTile, share, stage_at(stage));
    ptx::CopyAsyncCommit();
  }
  Running<D, N> run{};
  run.Start(args, item);
  Cache cache{};
  if (tiles > 0) {
    ptx::CopyAsyncWait<kStages - 2>();
    __syncwarp();
    cache.TakeQueries(smem_q);
  }
  int stage = 0, next = kStages - 1;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    ptx::CopyAsyncWait<kStages - 2>();
    sync();  // the others' copies are there, and they have read the stage before
    const int32_t ahead = tile + kStages - 1;
    if (ahead < tiles)
      Cache::LoadTile(args, item, item.begin + ahead * kTile, share, stage_at(next));
    ptx::CopyAsyncCommit();
    AttendToTile(args, item, item.begin + tile * kTile, smem_q, cache, stage_at(stage), run);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next = next + 1 == kStages ? 0 : next + 1;
  }
  Store<Cache>(args, item, run);
}

// Teams of a CTA.
int TeamsOf(int warps) { return warps == 1 ? 2 : 1; }

// A kernel, and the shared memory of its CTAs.
struct Kernel {
  const void* kernel;
  int query_bytes, ring_bytes;  // of a warp, of a team

  int Bytes(int warps) const { return TeamsOf(warps) * (warps * query_bytes + ring_bytes); }
};
template <typename T, typename Cache, int D, int N>
Kernel KernelWith() {
  return {reinterpret_cast<const void*>(&FlashDecodeKernel<T, Cache, D, N>), kQueryBytes<D, N>,
          kRingBytes<Cache>};
}

template <int D>
constexpr int kMostN = D <= 128 ? 4 : 2;

// The kernel whose warps have 8 n queries each, n = 1, 2 or 4.
template <int D>
Kernel KernelOf(DType dtype, bool is_bytes, int n) {
  return WithFormat<kFlashDecodeFormats.operands>(dtype, [&](auto format) {
    using T = CudaType<format>;
    const auto of = [&](auto constant) {
      constexpr int N = decltype(constant)::value;
      return is_bytes ? KernelWith<T, Bytes<T, D, N>, D, N>()
                      : KernelWith<T, Halves<T, D, N>, D, N>();
    };
    if (n == 1) return of(std::integral_constant<int, 1>());
    if (n == 2) return of(std::integral_constant<int, 2>());
    return of(std::integral_constant<int, kMostN<D>>());
  });
}

template <int D>
bool LoadFor(std::string* error) {
  return ForFormats(
             kFlashDecodeFormats.operands,
             [&](DType dtype) {
               for (int n = 1; n <= kMostN<D>; n *= 2) {
                 for (const bool is_bytes : {false, true}) {
                   const Kernel one = KernelOf<D>(dtype, is_bytes, n);
                   if (!LoadKernel(one.kernel, Max(one.Bytes(1), one.Bytes(kMostWarps)), error))
                     return false;
                 }
               }
               return true;
             }) &&
         LoadMergeParts<D>(error);
}

template <int D>
bool LaunchFor(const FlashDecodeParams& p, FlashDecodeArgs& args, cudaStream_t stream,
               std::string* error) {
  const auto queries = static_cast<int>(p.heads / p.groups * p.tokens);
  // Many warps hide latency; a warp of more queries converts a cache of 8 bits less often.
  const int few = p.scales == CacheScales::kNone ? 4 : 2;
  int n = 1;
  while (n < kMostN<D> && 8 * n * few < queries) n *= 2;
  const int warps = CeilDiv(queries, 8 * n);
  args.blocks = CeilDiv(warps, kMostWarps);
  args.team = CeilDiv(warps, args.blocks);
  const int teams = TeamsOf(args.team);
  const int64_t items = static_cast<int64_t>(args.splits) * args.batch * args.blocks * args.groups;
  const Kernel one = KernelOf<D>(p.dtype, p.scales != CacheScales::kNone, n);
  return LaunchKernel(one.kernel, &args, static_cast<int>(CeilDiv<int64_t>(items, teams)), 1,
                      32 * teams * args.team, one.Bytes(args.team), stream, error) &&
         (args.splits == 1 || MergeParts<D>(args, stream, error));
}

}  // namespace

bool LoadFlashDecodeKernels(std::string* error) {
  return LoadFor<64>(error) && LoadFor<128>(error) && LoadFor<256>(error);
}

bool LaunchFlashDecode(const FlashDecodeParams& p, const FlashDecodeArrays& arrays,
                       DeviceState* state, cudaStream_t stream, std::string* error) {
  *error = WhyNotFormats(kFlashDecodeFormats, kMmaFormats, p.dtype, p.dtype);
  if (!error->empty()) return false;
  FlashDecodeArgs args;
  if (!decode::ArgsOf(p, arrays, state, &args, error)) return false;
  if (!LoadOnce(LoadFlashDecodeKernels, error)) return false;
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
