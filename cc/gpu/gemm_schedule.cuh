// The schedule of a GEMM kernel (gpu/gemm_sm90.cuh): which tile a cluster computes next.
//
// Op::Schedule is an object of the scheduler warp. Its base says where the numbers of tiles come
// from:
//
//   Counted          a counter in the workspace
//   StaticFirst      the same, but cluster i begins with tile i, which is known before the counter
//                    answers. A late cluster still has to compute its tile, so no CTA may wait for
//                    another's tile
//   Rounds           without a workspace: each cluster takes one tile of each round of as many
//                    tiles as there are clusters
//   BackAndForth     the same, for costs that fall from tile to tile: the cluster with the first
//                    tile of one round takes the last tile of the next
//
// and it provides
//
//   Schedule(args, smem, leads)     `leads`: in the first CTA of a cluster, which calls Find and At
//   Find(t) -> bool                 whether there is a t-th tile; t only grows
//   At(args, t) -> Tile             the tile that Find has found; m counts cluster tiles, unless
//                                   the op's other policies take the tile's words otherwise
//   FirstTile(args, cluster)        StaticFirst only: At(cluster), precomputed by the host
//   MakeTable(args, smem, cta)      all consumer threads, before their first tile: the table that
//                                   the constructor waits for. The bases make none
//
// OrderedTiles is the schedule of args.num_tiles tiles whose order is known: it needs no Find.
// Tiles of groups whose sizes are on the device take a table: gpu/group_table.cuh,
// ops/grouped_matmul/span_table_sm90.cuh.
#ifndef JFLUX_GPU_GEMM_SCHEDULE_CUH_
#define JFLUX_GPU_GEMM_SCHEDULE_CUH_

#include <cstdint>
#include <type_traits>

#include "core/tile_order.h"
#include "gpu/gemm_call.cuh"

namespace jflux {

// Next<kCluster>(args, last): the number of a cluster's tile after `last`; after -1, of its first.
struct Counted {
  template <int kCluster, typename Args>
  static __device__ __forceinline__ int32_t Next(const Args& args, int32_t) {
    return TakeTile(args);
  }
  template <typename Args, typename Smem>
  static __device__ __forceinline__ void MakeTable(const Args&, const Smem&, uint32_t) {}
};

struct StaticFirst : Counted {
  template <int kCluster, typename Args>
  static __device__ __forceinline__ int32_t Next(const Args& args, int32_t) {
    const uint32_t static_tiles = gridDim.x / kCluster;
    return TakeTile(args) + static_cast<int32_t>(static_tiles);
  }
};
template <typename Schedule>
inline constexpr bool kStartsStatic = std::is_base_of_v<StaticFirst, Schedule>;

struct Rounds : Counted {
  template <int kCluster, typename Args>
  static __device__ __forceinline__ int32_t Next(const Args&, int32_t last) {
    const auto clusters = static_cast<int32_t>(gridDim.x / kCluster);
    return last < 0 ? static_cast<int32_t>(blockIdx.x / kCluster) : last + clusters;
  }
};

struct BackAndForth : Counted {
  template <int kCluster, typename Args>
  static __device__ __forceinline__ int32_t Next(const Args&, int32_t last) {
    const auto clusters = static_cast<int32_t>(gridDim.x / kCluster);
    if (last < 0) return static_cast<int32_t>(blockIdx.x / kCluster);
    return last + 2 * (clusters - last % clusters) - 1;
  }
};

struct Ordered {};
template <typename Numbers>
struct OrderedTiles : Numbers, Ordered {
  OrderedTiles() = default;
  template <typename Args, typename Smem>
  __device__ OrderedTiles(const Args&, const Smem&, bool) {}
  template <typename Args>
  __device__ __forceinline__ Tile At(const Args& args, int32_t t) const {
    return args.order.At(t);
  }
};
template <typename Schedule>
inline constexpr bool kIsOrdered = std::is_base_of_v<Ordered, Schedule>;

// A CTA's row block in a cluster's tile.
template <typename Config>
__device__ __forceinline__ int32_t RowBlockOf(Tile tile, uint32_t cta) {
  return tile.m * Config::kClusterM + (Config::kClusterM == 1 ? 0 : static_cast<int32_t>(cta));
}

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_SCHEDULE_CUH_
