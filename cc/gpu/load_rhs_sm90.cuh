// Loads of w in the GEMM main loop (gpu/gemm_sm90.cuh).
#ifndef JFLUX_GPU_LOAD_RHS_SM90_CUH_
#define JFLUX_GPU_LOAD_RHS_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "core/format.h"
#include "gpu/ptx.cuh"

namespace jflux {

// The columns of w that a tile multiplies: a tensor map and the first column. With a second map,
// half of the tile's columns belong to that weight, from the same first column. `expert`: which
// matrix of a stack (Op::kStackedRhs).
struct Rhs {
  const CUtensorMap* map;
  int32_t n0;
  const CUtensorMap* second = nullptr;
  int32_t expert = 0;
};

// Loads this CTA's share of w's tile for one k-block, for all CTAs of the cluster. Boxes are
// kBlockBytes wide: kTileK of k if w is stored [n, k], else kBoxN columns.
template <typename Config, bool kStacked>
__device__ __forceinline__ void LoadB(uint32_t smem_b, const Rhs& rhs, uint32_t bar, int k0,
                                      uint32_t cta) {
  constexpr int kHalf = Config::kTileN / 2;
  const int i = Config::kClusterM == 1 ? 0 : static_cast<int>(cta);
  const auto load = [&](int at, const CUtensorMap* map, int inner, int outer) {
    constexpr auto kAll = static_cast<uint16_t>((1 << Config::kClusterM) - 1);
    if constexpr (Config::kClusterM == 1) {
      if constexpr (kStacked) {
        ptx::TmaLoad3d(smem_b + at, map, bar, inner, outer, rhs.expert);
      } else {
        ptx::TmaLoad2d(smem_b + at, map, bar, inner, outer);
      }
    } else if constexpr (kStacked) {
      ptx::TmaLoad3dMulticast(smem_b + at, map, bar, inner, outer, rhs.expert, kAll);
    } else {
      ptx::TmaLoad2dMulticast(smem_b + at, map, bar, inner, outer, kAll);
    }
  };
  if constexpr (Config::kTransposeRhs) {
    constexpr int kShare = Config::kTileN / Config::kClusterM;
    if constexpr (Config::kTwoWeights) {
      if (rhs.second != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (Config::kClusterM == 2 && half != i) continue;
          load(half * kHalf * kBlockBytes, half == 0 ? rhs.map : rhs.second, k0, rhs.n0);
        }
        return;
      }
    }
    load(i * kShare * kBlockBytes, rhs.map, k0, rhs.n0 + i * kShare);
  } else {
    const int row = i * Config::kBoxRows;
#pragma unroll
    for (int box = 0; box < Config::kLoadN / Config::kBoxN; ++box) {
      const int n = box * Config::kBoxN;
      const bool second = Config::kTwoWeights && n >= kHalf && rhs.second != nullptr;
      load(box * Config::kTileK * kBlockBytes + row * kBlockBytes, second ? rhs.second : rhs.map,
           rhs.n0 + n - (second ? kHalf : 0), k0 + row);
    }
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_LOAD_RHS_SM90_CUH_
