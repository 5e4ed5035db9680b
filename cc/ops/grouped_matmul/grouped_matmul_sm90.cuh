// grouped_matmul on Hopper: the GEMM main loop, over the tiles of all groups.
//
// The leading scheduler warp of each cluster reads group_sizes and makes a table of where groups
// begin (gpu/group_table.cuh). Clusters take every gridDim-th tile: all cost the same, and no
// counter has to be reset. A tile belongs to one group; its rows past the group's end are
// not stored, and an m64 block that has no others is not multiplied if a consumer has it alone. The
// send warps write zeros to the rows past the last group, if anybody reads these.
//
//   waits   for nobody
//   order   a launch after what wrote the operands; the rows of y are disjoint
//
// A tile is passed on as {m: first row of the cluster's tile, n: group * tiles_n + tile column,
// split: end of the group's rows}.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_SM90_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_SM90_CUH_

#include <cuda.h>

#include "core/activation.h"
#include "core/group_tiles.h"
#include "gpu/call.cuh"
#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_sm90.cuh"
#include "gpu/group_table.cuh"
#include "ops/grouped_matmul/grouped_rows.cuh"

namespace jflux {

// y [M, n] = x [M, k] @ w[group of the row] [k, n], or [n, k]
struct GroupedMatmulArgs {
  GroupedRows groups;
  GroupTiles tiles;
  int32_t k, n;
  int32_t box_rows, box_bytes;  // of a box of A
  int32_t terms;                // of the sum that a tile is; each has an x and a weight
  bool gated;                   // half of a tile's columns belong to each weight
  bool fill;                    // rows past the last group are zeros
  bool out_f32;
  Activation activation;
  const float* row_scale;  // [M], or null
  void* y_data;
  void* sums_data[2];  // of what the activation is applied to; or null
  CUtensorMap x[2], w[2];
  CUtensorMap y, sums[2];  // 16-bit types
};
static_assert(sizeof(GroupedMatmulArgs) <= 4096);

// The same, of operands with scales (GroupedMatmulArrays).
struct GroupedMatmulScaledArgs : GroupedMatmulArgs {
  const float *x_scale, *w_scale[2];
  float* y_scale;  // of y that is quantised (Config::kQuantizes): [M, blocks of n]
  bool out_f16, power_of_two;
};
static_assert(sizeof(GroupedMatmulScaledArgs) <= 4096);

// dw[e] [k, n] = x[rows of e]^T [k, rows] @ dy[rows of e] [rows, n]
struct GroupedMatmulDwArgs {
  GroupedRows groups;
  int32_t tiles_k, tiles_n, group_m;  // cluster tiles of an expert; tile rows of a raster group
  int32_t k, n;
  bool out_f32;
  void* dw_data;
  CUtensorMap x, dy;
  CUtensorMap dw;  // 16-bit types
};
static_assert(sizeof(GroupedMatmulDwArgs) <= 4096);

// The same, of operands with scales: x and dy are transposes in which each group begins a block
// (GroupedMatmulDwArrays).
struct GroupedMatmulDwScaledArgs : GroupedMatmulDwArgs {
  const float *x_scale, *dy_scale;
  int32_t k_blocks;  // of both transposes
  int32_t a_bytes;
};
static_assert(sizeof(GroupedMatmulDwScaledArgs) <= 4096);

template <typename Config_, typename Args_ = GroupedMatmulArgs>
struct GroupedMatmulSm90 {
  using Config = Config_;
  using Args = Args_;
  using T = typename Config::T;
  static constexpr int kHalf = Config::kTileN / 2;

  // The first row of a CTA's tile. A row block is the cluster tile's first row, and the CTA.
  static __device__ int32_t RowOf(int32_t row_block) {
    static_assert(Config::kClusterM <= 2);
    if constexpr (Config::kClusterM == 1) return row_block;
    return (row_block >> 1) + (row_block & 1) * Config::kTileM;
  }
  static __device__ int32_t FirstColumnOf(const Args& args, Tile tile) {
    return tile.n % args.tiles.tiles_n * (args.gated ? kHalf : Config::kTileN);
  }
  static __device__ int32_t GroupOf(const Args& args, Tile tile) {
    return tile.n / args.tiles.tiles_n;
  }
  // The rows of an m64 block that belong to the tile's group: none if not positive.
  static __device__ int32_t RowsOf(int32_t row0, Tile tile) { return Min(64, tile.split - row0); }

  struct Schedule : Rounds {
    GroupTable<Config> table;
    __device__ Schedule(const Args& args, const GemmSmem<Config>& smem, bool leads)
        : table(smem, args.groups.group_sizes, args.groups.groups, args.groups.rows, leads,
                [&](int32_t rows) { return args.tiles.Count(rows); }) {}
    __device__ int32_t group() const { return table.group(); }
    __device__ bool Find(int32_t t) { return table.Find(t); }
    __device__ Tile At(const Args& args, int32_t t) const {
      const int32_t first = table.FirstRow(), end = table.EndRow();
      const Tile tile = args.tiles.At(t - table.FirstTile(), end - first);
      return Tile{first + tile.m * args.tiles.tile_rows,
                  table.group() * args.tiles.tiles_n + tile.n, end};
    }
  };
  struct alignas(16) Coords {
    int32_t n0, group, row, end;
  };
  template <typename LoadsOfA>
  struct StackOperands : LoadsOfA {
    using Coords = typename GroupedMatmulSm90::Coords;
    template <typename Schedule>
    static __device__ Coords CoordsOf(const Args& args, const Schedule& schedule, int32_t row_block,
                                      Tile tile) {
      return Coords{FirstColumnOf(args, tile), schedule.group(), RowOf(row_block), tile.split};
    }
    static __device__ KRange KOf(const Args& args, Tile, const Coords&, int) {
      return KRange{0, args.k};
    }

    static __device__ StackedRhs RhsOf(const Args& args, const Coords& coords, int term) {
      return StackedRhs{
          {&args.w[term], coords.n0, Config::kTwoWeights && args.gated ? &args.w[1] : nullptr},
          coords.group};
    }
  };
  struct Operands : StackOperands<BoxesOfA> {
    static __device__ int Terms(const Args& args) {
      return Config::kNarrow && !Config::kBlockScales ? 1 : args.terms;
    }
    // Boxes of A that have rows of the group; one if none has.
    static __device__ int32_t BoxesOf(const Args& args, const Coords& coords) {
      return args.box_rows == 64 && coords.end - coords.row > 64 ? 2 : 1;
    }
    static __device__ int32_t ABytes(const Args& args, const Coords& coords) {
      return BoxesOf(args, coords) * args.box_bytes;
    }
    struct Source {
      const CUtensorMap* map;
      int32_t row, boxes;
      __device__ void Load(uint32_t smem, uint32_t bar, int k0) const {
        ptx::TmaLoad2d(smem, map, bar, k0, row);
        if (boxes == 2) ptx::TmaLoad2d(smem + 8192, map, bar, k0, row + 64);
      }
    };
    static __device__ Source SourceOf(const Args& args, const CallContext&, const Coords& coords,
                                      int term) {
      return Source{&args.x[term], coords.row, BoxesOf(args, coords)};
    }
    static __device__ void PrefetchMaps(const Args& args) {
      ptx::PrefetchTensorMap(&args.x[0]);
      ptx::PrefetchTensorMap(&args.w[0]);
    }
  };

  struct Epilogue {
    static __device__ bool Needs(const Args&, int32_t row_block, Tile tile, int m64) {
      return RowsOf(RowOf(row_block) + m64 * 64, tile) > 0;
    }
    template <typename AwaitPartials>
    static __device__ void Finish(const Args& args, const CallContext&,
                                  StagingWriter<Config>& staging, Slices<Config>& acc,
                                  int32_t row_block, Tile tile, AwaitPartials&&) {
      const int32_t n0 = FirstColumnOf(args, tile);
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        const int32_t row0 = RowOf(row_block) + staging.M64At(i) * 64;
        const int32_t rows = RowsOf(row0, tile);
        if (rows > 0) FinishM64(args, staging, acc[i], row0, rows, n0, tile);
      }
    }

    // TMA stores 64 rows, so it cannot store the last ones of a group.
    struct Place {
      const Args& args;
      int32_t row0, rows, n0;
      __device__ int64_t Columns() const { return args.n; }
      __device__ int64_t RowAt(int r, int64_t n) const { return r < rows ? (row0 + r) * n : -1; }
      __device__ const Place& Path() const { return *this; }
      __device__ bool IsFloat32() const { return args.out_f32; }
      __device__ bool IsFloat16() const {
        if constexpr (Config::kNarrow) return args.out_f16;
        return false;
      }
      __device__ bool IsStoredByTma() const { return rows == 64; }
    };
    // By the scales of x's rows, and of the columns of a weight of the tile's group.
    template <int kColumns, int kFirst = 0, typename Block>
    static __device__ void ScaleSums(const Args& args, const Block& block, Tile tile, int weight) {
      if constexpr (Config::kScaled) {
        const float* columns = args.w_scale[weight] + int64_t{GroupOf(args, tile)} * args.n;
        step::Scale<kColumns, kFirst>{args.x_scale, columns}(block);
      }
    }
    template <int kColumns, typename Block>
    static __device__ void WriteY(const Args& args, const Block& block) {
      if constexpr (Config::kQuantizes) {
        step::WriteResults<kColumns>{args.y_data, args.y_scale, args.power_of_two}(block);
      } else {
        step::Write<kColumns>{args.y_data}(block);
      }
    }
    static __device__ void FinishM64(const Args& args, StagingWriter<Config>& staging,
                                     float (&acc)[Config::kSliceAccumulators], int32_t row0,
                                     int32_t rows, int32_t n0, Tile tile) {
      constexpr int kN = Config::kTileN;
      const Place place{args, row0, rows, n0};
      const M64Block<Config, Place> block{staging, acc, place};
      if constexpr (Config::kTwoWeights) {
        if (args.gated) {
          ScaleSums<kHalf>(args, block, tile, 0);
          ScaleSums<kHalf, kHalf>(args, block, tile, 1);
          Apply(block, step::SaveHalves<kHalf>{args.sums_data[0], args.sums_data[1]},
                step::Activate<kHalf>{args.activation}, step::Gate<kHalf>{},
                step::ScaleRows<kHalf>{args.row_scale, row0, rows});
          WriteY<kHalf>(args, block);
          return;
        }
      }
      ScaleSums<kN>(args, block, tile, 0);
      Apply(block, step::Save<kN>{args.sums_data[0]}, step::Activate<kN>{args.activation},
            step::ScaleRows<kN>{args.row_scale, row0, rows});
      WriteY<kN>(args, block);
    }

    static __device__ void Store(const Args& args, const CallContext&,
                                 StagingReader<Config>& staging, int32_t row_block, Tile tile) {
      if (args.out_f32) return;
      const int32_t n0 = FirstColumnOf(args, tile);
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        const int32_t row0 = RowOf(row_block) + m64 * 64;
        if (RowsOf(row0, tile) != 64) continue;
        const auto store = [&](const CUtensorMap* map) {
          const StagedM64 staged = staging.Acquire(m64);
          if (Config::kTwoWeights && args.gated) {
            StoreStagedM64<kHalf>(staged, map, row0, n0, args.n);
          } else {
            StoreStagedM64<Config::kTileN>(staged, map, row0, n0, args.n);
          }
          ptx::BulkCommit();
          staging.Release(m64);
        };
        if (args.sums_data[0] != nullptr) {
          store(&args.sums[0]);
          if (Config::kTwoWeights && args.gated) store(&args.sums[1]);
        }
        store(&args.y);
      }
    }
  };

  struct Exchange : NoExchange {
    // Zeros past the last group, if they are wanted.
    static __device__ void Send(const Args& args, const CallContext&, const GemmSmem<Config>&) {
      const GroupedRows& groups = args.groups;
      const int64_t sum = ForEachGroup(groups.group_sizes, groups.groups, groups.rows,
                                       [](int32_t, bool, GroupRows) {});
      CheckSizes(groups, sum);
      if (!args.fill) return;
      const int64_t row_bytes = int64_t{args.n} * (args.out_f32 ? 4 : 2);
      const int64_t first = Min<int64_t>(sum, groups.rows);
      if constexpr (Config::kQuantizes) {  // the scale of zeros is 1
        ZeroFill(args.y_data, first * args.n, int64_t{groups.rows} * args.n);
        const int64_t blocks = CeilDiv(args.n, kScaleBlock), step = int64_t{32} * gridDim.x;
        int64_t at = first * blocks + int64_t{32} * blockIdx.x + threadIdx.x % 32;
        for (; at < groups.rows * blocks; at += step) args.y_scale[at] = 1;
        return;
      }
      const auto fill = [&](void* data) {
        if (data != nullptr) ZeroFill(data, first * row_bytes, groups.rows * row_bytes);
      };
      fill(args.y_data);
      fill(args.sums_data[0]);
      fill(args.sums_data[1]);
    }
  };
};

JFLUX_GEMM_KERNEL(GroupedMatmul);

template <typename Config_>
struct GroupedMatmulScaledSm90 : GroupedMatmulSm90<Config_, GroupedMatmulScaledArgs> {
  using Config = Config_;
  using Args = GroupedMatmulScaledArgs;
  using Base = GroupedMatmulSm90<Config, Args>;

  // The rows up to the end of the tile's group.
  struct RowsOfGroup {
    int32_t end;
    __device__ int32_t Total() const { return end; }
    __device__ int64_t Actual(int64_t row) const { return row; }
  };
  // With kBlockScales.
  static __device__ ScaleSource<Config> ScalesOf(const Args& args, const CallContext&,
                                                 int32_t row_block, Tile tile) {
    const int64_t k_blocks = int64_t{args.terms} * CeilDiv(args.k, Config::kTileK);
    const int32_t n_blocks = CeilDiv(args.n, kScaleBlock), n0 = Base::FirstColumnOf(args, tile);
    const int64_t group = Base::GroupOf(args, tile) * n_blocks * k_blocks;
    ScaleSource<Config> scales;
    scales.SetRows(args.x_scale, RowsOfGroup{tile.split}, Base::RowOf(row_block), k_blocks);
    const bool gated = Config::kTwoWeights && args.gated;
    scales.SetColumns(args.w_scale[0] + group, n0, args.n, k_blocks,
                      gated ? args.w_scale[1] + group : nullptr);
    return scales;
  }
};

JFLUX_GEMM_KERNEL(GroupedMatmulScaled);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_SM90_CUH_
