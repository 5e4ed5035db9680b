// Results that leave a kernel quantised: from a consumer's accumulators (layout: gpu/wgmma.cuh) to
// values of e4m3 [.., n] and their scales of blocks of 1 x kScaleBlock, [.., blocks of n].
//
// The four lanes that have a row find its largest magnitude. Each has two columns of every eight:
// they exchange values, so that each stores vectors, which for a row are adjacent.
#ifndef JFLUX_GPU_QUANTIZE_EPILOGUE_SM90_CUH_
#define JFLUX_GPU_QUANTIZE_EPILOGUE_SM90_CUH_

#include <cstdint>
#include <type_traits>

#include "core/format.h"
#include "core/platform.h"
#include "gpu/gemm_config.h"
#include "gpu/ptx.cuh"
#include "gpu/quantize.cuh"

namespace jflux {

// Lanes whose numbers differ by `distance`, a power of two, exchange one of two words each: one
// gets both `first`, and the other one, whose number has that bit, both `second`. Its own are the
// last ones.
__device__ __forceinline__ uint2 ExchangeWords(uint32_t first, uint32_t second, int distance) {
  const bool is_second = (threadIdx.x & distance) != 0;
  const uint32_t own = is_second ? second : first;
  const uint32_t other = __shfl_xor_sync(0xffffffff, is_second ? first : second, distance);
  return is_second ? make_uint2(other, own) : make_uint2(own, other);
}

// The values of a row of a block: groups[j] are two of columns 8 j .. 8 j + 7, those of the lane.
// Gives the vectors of columns 16 * lane, and of those 64 columns on.
__device__ __forceinline__ void ToVectors(const uint32_t (&groups)[kScaleBlock / 8],
                                          uint4 (&vectors)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // A vector has groups of an even number, and the next one: a word has two columns of both.
    const auto word = [&](int vector) {
      const int j = 8 * i + 2 * vector;
      return groups[j] | groups[j + 1] << 16;
    };
    const uint2 of_pair[2] = {ExchangeWords(word(0), word(1), 1),
                              ExchangeWords(word(2), word(3), 1)};
    // Four columns of each group.
    uint32_t low[2], high[2];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint2 of = of_pair[pair];
      low[pair] = (of.x & 0xffff) | of.y << 16;
      high[pair] = of.x >> 16 | (of.y & 0xffff0000);
    }
    const uint2 first = ExchangeWords(low[0], low[1], 2);
    const uint2 second = ExchangeWords(high[0], high[1], 2);
    vectors[i] = make_uint4(first.x, first.y, second.x, second.y);
  }
}

// Quantises kScaleBlock columns of an m64 block, from column kFirst on, which are y's from n0 on.
// row_of(r, n): the element of an array [.., n] at which row r begins; negative: nowhere. Columns
// past n are zeros, or numbers if the others are: none changes a scale.
template <int kFirst, int kCount, typename RowOf>
__device__ __forceinline__ void QuantizeM64(const float (&acc)[kCount], uint8_t* values,
                                            float* scale, bool power_of_two, int64_t n0, int64_t n,
                                            RowOf&& row_of) {
  constexpr DType kValues = DType::kF8E4M3FN;
  constexpr int kGroups = kScaleBlock / 8;
  if (n0 >= n) return;
  const int thread = threadIdx.x % 128, lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* a = &acc[kFirst / 2 + 2 * half];  // of a group: a[4 j] and the next
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      most = quantize::MaxWord(most, __float_as_uint(a[i / 2 * 4 + i % 2]) & 0x7fffffff);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      most = quantize::MaxWord(most, __shfl_xor_sync(0xffffffff, most, step));
    }
    const auto by = quantize::ScaleOf<kValues>(most, power_of_two, /*given=*/nullptr);
    uint32_t groups[kGroups];
    const auto round = [&](auto usual) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        groups[j] = quantize::Rounded<kValues>(quantize::Ratio<usual, 2>(a[4 * j], by),
                                               quantize::Ratio<usual, 2>(a[4 * j + 1], by));
      }
    };
    if (by.IsUsual(most)) {
      round(std::true_type{});
    } else {
      round(std::false_type{});
    }
    uint4 vectors[2];
    ToVectors(groups, vectors);
    const int r = 16 * (thread / 32) + 8 * half + lane / 4;
    const int64_t row = row_of(r, n);
    if (row < 0) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // n is a multiple of a vector.
      const int64_t column = n0 + 64 * i + kVectorBytes * (lane % 4);
      if (column < n) ptx::StoreGlobal16(values + row + column, vectors[i]);
    }
    if (lane % 4 == 0) {
      scale[row_of(r, CeilDiv<int64_t>(n, kScaleBlock)) + n0 / kScaleBlock] = by.scale;
    }
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_QUANTIZE_EPILOGUE_SM90_CUH_
