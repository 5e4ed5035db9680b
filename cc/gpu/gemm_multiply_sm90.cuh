// The product of a stage: wgmma over one k-block, by a consumer of a GEMM kernel.
#ifndef JFLUX_GPU_GEMM_MULTIPLY_SM90_CUH_
#define JFLUX_GPU_GEMM_MULTIPLY_SM90_CUH_

#include <cstdint>

#include "core/format.h"
#include "gpu/wgmma.cuh"

namespace jflux {

// A thread's accumulators of a tile.
template <typename Config>
using Accumulators = typename Config::Sum[Config::kConsumerM64Blocks][Config::kAccumulators];

// Sums as epilogues take them.
template <int kCount>
__device__ __forceinline__ void ToFloats(const int32_t (&sums)[kCount], float (&floats)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) floats[i] = static_cast<float>(sums[i]);
}

// Instructions that multiply a k-block.
inline constexpr int kMultiplySteps = kBlockBytes / kMultiplyBytes;

// acc += A @ B over one k-block if `adds`, else acc = A @ B. `a` is the address of the consumer's
// first m64 block. kFirst, kEnd: of the instructions. kCount: of a tile's accumulators, or of those
// of fewer columns.
template <typename Config, int kFirst = 0, int kEnd = kMultiplySteps, int kCount>
__device__ __forceinline__ void MultiplyStage(
    typename Config::Sum (&acc)[Config::kConsumerM64Blocks][kCount], uint32_t a, uint32_t b,
    bool adds) {
  constexpr int kTransA = Config::kTransposeLhs ? 1 : 0, kTransB = Config::kTransposeRhs ? 0 : 1;
  constexpr const typename Config::T* kType = nullptr;
#pragma unroll
  for (int k = kFirst; k < kEnd; ++k) {
    const uint64_t desc_b = kTransB ? wgmma::Descriptor(b + k * 2048, 8192, 1024)
                                    : wgmma::Descriptor(b + k * kMultiplyBytes, 16, 1024);
#pragma unroll
    for (int m64 = 0; m64 < Config::kConsumerM64Blocks; ++m64) {
      const uint64_t desc_a =
          kTransA ? wgmma::Descriptor(a + m64 * 8192 + k * 2048, 8192, 1024)
                  : wgmma::Descriptor(a + m64 * 8192 + k * kMultiplyBytes, 16, 1024);
      wgmma::Multiply<kTransA, kTransB>(kType, acc[m64], desc_a, desc_b, adds || k > 0);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void PinAll(Accumulators<Config>& acc) {
#pragma unroll
  for (int m64 = 0; m64 < Config::kConsumerM64Blocks; ++m64) wgmma::Pin(acc[m64]);
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_MULTIPLY_SM90_CUH_
