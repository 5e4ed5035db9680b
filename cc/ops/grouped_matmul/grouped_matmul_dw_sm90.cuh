// The weight gradient of grouped_matmul on Hopper: for each group, the product of its rows of x,
// transposed, and its rows of dy. The contraction is over the group's rows, so each tile of a group
// has as many k-blocks as the group has 64 rows, begun. What the last one holds of other groups'
// rows is zeroed in shared memory, in both operands (ZeroTail). A group without rows has no tiles:
// the send warps write its zeros. Tiles of groups with more rows cost more; they come first, and
// clusters take them back and forth (BackAndForth).
//
// A tile is passed on as {m: cluster tile row of k, n: group * tiles_n + tile column}.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_DW_SM90_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_DW_SM90_CUH_

#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_sm90.cuh"
#include "ops/grouped_matmul/grouped_matmul_sm90.cuh"

namespace jflux {

template <typename Config_, typename Args_ = GroupedMatmulDwArgs>
struct GroupedMatmulDwSm90 {
  using Config = Config_;
  using Args = Args_;

  static __device__ int32_t FirstColumnOf(const Args& args, Tile tile) {
    return tile.n % args.tiles_n * Config::kTileN;
  }
  static __device__ int32_t FirstRowOf(int32_t row_block, int m64) {
    return row_block * Config::kTileM + m64 * 64;
  }

  // kBlock: as in GroupTable.
  template <int kBlock>
  struct ScheduleOf : BackAndForth {
    GroupTable<Config, /*kSorted=*/true, kBlock> table;
    __device__ ScheduleOf(const Args& args, const GemmSmem<Config>& smem, bool leads)
        : table(smem, args.groups.group_sizes, args.groups.groups, args.groups.rows, leads,
                [&](int32_t rows) { return rows > 0 ? args.tiles_k * args.tiles_n : 0; }) {}
    __device__ bool Find(int32_t t) { return table.Find(t); }
    __device__ Tile At(const Args& args, int32_t t) const {
      const Tile tile =
          GroupedTile(t - table.FirstTile(), args.tiles_k, args.tiles_n, args.group_m);
      return Tile{tile.m, table.group() * args.tiles_n + tile.n};
    }
  };
  struct alignas(16) Coords {
    int32_t n0, k0;      // columns of dy and of x
    int32_t begin, end;  // rows
  };
  template <typename LoadsOfA>
  struct OperandsOf : LoadsOfA {
    using Coords = typename GroupedMatmulDwSm90::Coords;
    template <typename Schedule>
    static __device__ Coords CoordsOf(const Args& args, const Schedule& schedule, int32_t row_block,
                                      Tile tile) {
      return Coords{FirstColumnOf(args, tile), FirstRowOf(row_block, 0), schedule.table.FirstRow(),
                    schedule.table.EndRow()};
    }
    static __device__ KRange KOf(const Args&, Tile, const Coords& coords, int) {
      return KRange{coords.begin, coords.end};
    }
    static __device__ Rhs RhsOf(const Args& args, const Coords& coords, int) {
      return Rhs{&args.dy, coords.n0};
    }
    static __device__ void PrefetchMaps(const Args& args) {
      ptx::PrefetchTensorMap(&args.x);
      ptx::PrefetchTensorMap(&args.dy);
    }
  };
  using Schedule = ScheduleOf<1>;
  struct Operands : OperandsOf<RaggedBoxesOfA> {
    static_assert(Config::kTransposeLhs && !Config::kTransposeRhs && !Config::kLendsStage);
    struct Source {
      const CUtensorMap* map;
      int32_t column;
      // Two atoms of 64 rows and 64 columns.
      __device__ void Load(uint32_t smem, uint32_t bar, int row) const {
#pragma unroll
        for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
          ptx::TmaLoad2d(smem + m64 * 8192, map, bar, column + m64 * 64, row);
        }
      }
    };
    static __device__ Source SourceOf(const Args& args, const CallContext&, const Coords& coords,
                                      int) {
      return Source{&args.x, coords.k0};
    }
    static __device__ int32_t ABytes(const Args&, const Coords&) { return Config::kABytes; }
  };

  struct Epilogue : EveryM64 {
    template <typename AwaitPartials>
    static __device__ void Finish(const Args& args, const CallContext&,
                                  StagingWriter<Config>& staging, Slices<Config>& acc,
                                  int32_t row_block, Tile tile, AwaitPartials&&) {
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        const int32_t row0 = FirstRowOf(row_block, staging.M64At(i));
        if (row0 >= args.k) continue;
        if (args.out_f32) {
          const int64_t n = args.n, first = int64_t{tile.n / args.tiles_n} * args.k;
          StoreM64F32<Config::kTileN>(
              acc[i], args.dw_data, FirstColumnOf(args, tile), n,
              [&](int r) { return row0 + r < args.k ? (first + row0 + r) * n : -1; });
          continue;
        }
        StageM64<typename Config::Result, Config::kTileN>(acc[i], staging.Acquire());
        staging.Publish();
      }
    }

    static __device__ void Store(const Args& args, const CallContext&,
                                 StagingReader<Config>& staging, int32_t row_block, Tile tile) {
      if (args.out_f32) return;
      using S = Staged<Config::kTileN>;
      const int32_t n0 = FirstColumnOf(args, tile);
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        const int32_t row0 = FirstRowOf(row_block, m64);
        if (row0 >= args.k) continue;
        const StagedM64 staged = staging.Acquire(m64);
#pragma unroll
        for (int box = 0; box < Config::kTileN / S::kColumns; ++box) {
          const int32_t column = n0 + box * S::kColumns;
          if (column < args.n) {
            ptx::TmaStore3d(&args.dw, S::Box(staged, box), column, row0, tile.n / args.tiles_n);
          }
        }
        ptx::BulkCommit();
        staging.Release(m64);
      }
    }
  };

  struct Exchange : NoExchange {
    // Zeros for groups without rows.
    static __device__ void Send(const Args& args, const CallContext&, const GemmSmem<Config>&) {
      const GroupedRows& groups = args.groups;
      const int64_t bytes = int64_t{args.k} * args.n * (args.out_f32 ? 4 : 2);
      CheckSizes(groups, FillEmptyGroups(groups, args.dw_data, bytes));
    }
  };
};

JFLUX_GEMM_KERNEL(GroupedMatmulDw);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_DW_SM90_CUH_
