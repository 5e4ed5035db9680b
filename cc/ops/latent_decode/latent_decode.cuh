// What latent_decode's kernels share, on Hopper (latent_decode_sm90.cu) and in portable code
// (latent_decode_sm80.cu): the running softmax of a thread's two rows of queries, 8 apart, and
// where results go.
#ifndef JFLUX_OPS_LATENT_DECODE_LATENT_DECODE_CUH_
#define JFLUX_OPS_LATENT_DECODE_LATENT_DECODE_CUH_

#include <cstdint>
#include <string>

#include "gpu/ptx.cuh"
#include "ops/flash_decode/flash_decode.cuh"
#include "ops/latent_decode/latent_decode.h"

namespace jflux {

// Launches a portable kernel for items of kLatentQueries queries, of so many that share a head of
// the cache.
bool LaunchLatentDecode80(DType dtype, int64_t queries, int64_t items,
                          decode::FlashDecodeArgs& args, cudaStream_t stream, std::string* error);
bool LoadLatentDecodeKernels80(std::string* error);
// Merges the parts of both. It is portable code, and compiled once.
bool MergeLatentParts(decode::FlashDecodeArgs& args, cudaStream_t stream, std::string* error);

namespace latent {

using namespace decode;

// Where the result of an item's query goes; null: there is no such query.
template <int kQueries>
__device__ __forceinline__ float* RowOfResult(const FlashDecodeArgs& args, const Item& item,
                                              int number) {
  const Query query = Query::Of<kQueries>(args, item, number);
  const int64_t of_split = static_cast<int64_t>(args.batch) * args.tokens * args.heads;
  float* to = args.splits == 1 ? args.arrays.out : args.arrays.parts;
  if (!query.is_there) return nullptr;
  return to + (item.split * of_split + query.row) * (kLatentValues + 1);
}

// Writes the log-sum-exps of a thread's two rows.
template <int kQueries>
__device__ __forceinline__ void StoreLogSumExps(const FlashDecodeArgs& args, const Item& item,
                                                int first_row, const float (&highest)[2],
                                                const float (&total)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* to = RowOfResult<kQueries>(args, item, first_row + 8 * h);
    if (to == nullptr || threadIdx.x % 4 != 0) continue;
    to[kLatentValues] = total[h] == 0 ? -INFINITY : kLn2 * (highest[h] + log2f(total[h]));
  }
}

// The running softmax of a thread's two rows: 2^(score - highest), scores in units of log2(e).
template <int kQueries, int kKeys>
struct Softmax {
  // A thread's part of a tile's scores: at 4 j + 2 h + e of positions 8 j + 2 (lane % 4) + e, e = 0
  // or 1, with the h-th of its rows.
  using Scores = float[kKeys / 2];
  static __device__ constexpr int HalfOf(int i) { return i / 2 % 2; }

  float highest[2], total[2];  // of this thread's columns
  Span spans[2], inner;
  bool has_cap;

  __device__ Softmax(const FlashDecodeArgs& args, const Item& item, int first_row) {
    const DecodeBounds bounds = args.arrays.bounds[item.sequence];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Query query = Query::Of<kQueries>(args, item, first_row + 8 * h);
      spans[h] = Span::Of(bounds, query.token);
      highest[h] = -INFINITY;
      total[h] = item.is_wrong ? NAN : 0.0f;
    }
    inner = Span::OfAll(args, bounds, item);
    has_cap = args.softcap > 0;
  }

  // Turns the scores of a tile from position `first` on into probabilities. is_there(i): whether
  // the tile's i-th position has a row. `factor`: what the results of earlier tiles are to be
  // multiplied by.
  template <typename IsThere>
  __device__ __forceinline__ void Take(const FlashDecodeArgs& args, int32_t first,
                                       IsThere&& is_there, Scores& s, float (&factor)[2]) {
    const float scale = has_cap ? args.scale : kLog2e * args.scale;
#pragma unroll
    for (float& x : s) x *= scale;
    if (has_cap) {
#pragma unroll
      for (float& x : s) x = kLog2e * Cap(x, args.softcap);
    }
    if (first < inner.begin || first + kKeys > inner.end) Mask(first, is_there, s);
    float base[2], now[2] = {highest[0], highest[1]};
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) now[HalfOf(i)] = fmaxf(now[HalfOf(i)], s[i]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffff, now[h], 1));
      now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffff, now[h], 2));
      base[h] = now[h] == -INFINITY ? 0.0f : now[h];
      factor[h] = ptx::Exp2(highest[h] - base[h]);
      highest[h] = now[h];
      total[h] *= factor[h];
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      s[i] = ptx::Exp2(s[i] - base[HalfOf(i)]);
      total[HalfOf(i)] += s[i];
    }
  }

  // Minus infinity for what a row's token does not attend to, and for positions without a page.
  template <typename IsThere>
  __device__ __forceinline__ void Mask(int32_t first, IsThere&& is_there, Scores& s) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const int at = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      const Span& span = spans[HalfOf(i)];
      if (!is_there(at) || first + at < span.begin || first + at >= span.end) s[i] = -INFINITY;
    }
  }
};

}  // namespace latent
}  // namespace jflux

#endif  // JFLUX_OPS_LATENT_DECODE_LATENT_DECODE_CUH_
