// The operands of a GEMM kernel (gpu/gemm_sm90.cuh): where a tile's A and B lie, and loads of B.
//
// Op::Operands derives from what loads A:
//
//   BoxesOfA         boxes of consecutive rows, by TMA (gpu/gemm_load_sm90.cuh)
//   RaggedBoxesOfA   the same, for a k that ends anywhere: what is loaded past its end counts as
//                    zeros. Both operands are MN-major
//   RowsOfA          rows that lie anywhere, by cp.async (gpu/gather_rows_sm90.cuh)
//
// and provides
//
//   Coords, CoordsOf(args, schedule, row_block, tile) -> Coords
//                                 16 bytes: the coordinates of the tile's operands. The scheduler
//                                 warp computes them for the load warp
//   Terms(args)                   a tile is the sum of so many products. Unless defined: 1
//   KOf(args, tile, coords, term) -> KRange
//                                 the k of a term; of the first one never empty, unless k is split.
//                                 With OrderedTiles, `coords` may be empty
//   RhsOf(args, coords, term)     -> Rhs, or StackedRhs
//   PrefetchMaps(args)            one lane
//   BoxesOfA:
//     SourceOf(args, call, coords, term) -> source
//                                 source.Load(smem, bar, k0) loads the tile's A of a k-block
//     ABytes(args, coords)        bytes that it loads. Unless defined: args.a_bytes
//   RowsOfA:
//     RowsOf(args, coords) -> RowExtent
//                                 how much is loaded of the rows whose addresses the row table has
//     AnyRow(args)                an address that may be read
#ifndef JFLUX_GPU_GEMM_OPERANDS_SM90_CUH_
#define JFLUX_GPU_GEMM_OPERANDS_SM90_CUH_

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "core/format.h"
#include "core/platform.h"
#include "core/tile_order.h"
#include "gpu/ptx.cuh"

namespace jflux {

// A range of k, in elements. `begin` is a multiple of kTileK, except with RaggedBoxesOfA.
struct KRange {
  int32_t begin, end;
};

// Split `split` of k, if the cluster's CTAs split it. The splits are equal up to rounding to
// k-blocks.
template <typename Config>
__device__ __forceinline__ KRange SplitOfK(int64_t k, int split) {
  constexpr int32_t kSplits = Config::kClusterK;
  const auto end = static_cast<int32_t>(k);
  if (kSplits == 1) return KRange{0, end};
  const int32_t k_blocks = CeilDiv(end, Config::kTileK);
  return KRange{split * k_blocks / kSplits * Config::kTileK,
                Min(end, (split + 1) * k_blocks / kSplits * Config::kTileK)};
}

// The k-blocks of a tile, over all its terms.
template <typename Op>
__device__ __forceinline__ int KBlocksOf(const typename Op::Args& args, Tile tile,
                                         const typename Op::Operands::Coords& coords) {
  int k_blocks = 0;
  for (int term = 0; term < Op::Operands::Terms(args); ++term) {
    const KRange k = Op::Operands::KOf(args, tile, coords, term);
    k_blocks += CeilDiv<int>(k.end - k.begin, Op::Config::kTileK);
  }
  return k_blocks;
}

// The base of what loads A.
struct OperandsBase {
  template <typename Args>
  static __device__ __forceinline__ int Terms(const Args&) {
    return 1;
  }
};

// The columns of w that a tile multiplies: a tensor map and the first column. With a second map,
// half of the tile's columns belong to that weight, from the same first column.
struct Rhs {
  const CUtensorMap* map;
  int32_t n0;
  const CUtensorMap* second = nullptr;
};
// Of a stack of matrices, with maps of three dimensions.
struct StackedRhs : Rhs {
  int32_t expert;
};

// Loads this CTA's share of w's tile for one k-block, for all CTAs of the cluster. Boxes are
// kBlockBytes wide: kTileK of k if w is stored [n, k], else kBoxN columns.
template <typename Config, typename R>
__device__ __forceinline__ void LoadB(uint32_t smem_b, const R& rhs, uint32_t bar, int k0,
                                      uint32_t cta) {
  constexpr bool kStacked = std::is_same_v<R, StackedRhs>;
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

#endif  // JFLUX_GPU_GEMM_OPERANDS_SM90_CUH_
