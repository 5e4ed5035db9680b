// grouped_matmul_reduce_scatter on Hopper: one kernel that multiplies, sums and sends.
//
// Tiles of h's rows are computed in the order of core/scattered_tiles.h, and stored to y, a result
// of the call. Whoever has stored an m64 block counts it: the store warp full ones, a consumer
// others. When the tiles of a class are stored, the rows of its tokens can be summed
// (token_sums_sm90.cuh): by the send warps, and by the consumers when there are no more tiles.
//
//   writes  send warps and consumers: the peers' workspaces and signals
//   waits   send warps and consumers, when they sum
//   order   token_sums_sm90.cuh
//   reset   LeaveCounters (gpu/gemm_call.cuh): the CTA's send warp calls it when the consumers are
//           done too
#ifndef JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM90_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM90_CUH_

#include "ops/grouped_matmul/grouped_matmul_sm90.cuh"
#include "ops/grouped_matmul_reduce_scatter/token_sums_sm90.cuh"

namespace jflux {

template <typename Config_>
struct GroupedMatmulReduceScatterSm90 : GroupedMatmulSm90<Config_> {
  using Config = Config_;
  using Args = GroupedMatmulReduceScatterArgs;
  using Base = GroupedMatmulSm90<Config>;
  using T = typename Config::T;
  using Coords = typename Base::Coords;
  using Table = ClassTable<Config>;

  // A tile is passed on as the forward product does, but for n: class * tiles_n + tile column.
  struct Schedule : ClassedGroups<Config, ScatteredTiles>, Counted {
    __device__ Schedule(const Args& args, const GemmSmem<Config>& smem, bool leads)
        : ClassedGroups<Config, ScatteredTiles>(args.order, Table(args, smem).spans(),
                                                args.groups.groups, leads) {}
    __device__ Tile At(const Args&, int32_t t) const { return this->TileOf(t, this->tile_class()); }
    static __device__ void MakeTable(const Args& args, const GemmSmem<Config>& smem, uint32_t cta) {
      Table(args, smem).Make(args, /*leads=*/cta == 0);
    }
  };
  static __device__ void CountStored(const Args& args, Tile tile, int blocks) {
    AddReleaseLocal(args.StoredOf(tile.n / args.tiles.tiles_n), blocks);
  }

  struct Epilogue : Base::Epilogue {
    template <typename AwaitPartials>
    static __device__ void Finish(const Args& args, const CallContext&,
                                  StagingWriter<Config>& staging, Slices<Config>& acc,
                                  int32_t row_block, Tile tile, AwaitPartials&&) {
      const int32_t n0 = Base::FirstColumnOf(args, tile);
#pragma unroll
      for (int i = 0; i < Config::kConsumerM64Blocks; ++i) {
        const int32_t row0 = Base::RowOf(row_block) + staging.M64At(i) * 64;
        const int32_t rows = Base::RowsOf(row0, tile);
        if (rows <= 0) continue;
        Base::Epilogue::template Write<Config::kTileN, 0>(args, staging, acc[i], args.y_data, row0,
                                                          rows, n0);
        if (rows == 64 && !args.out_f32) continue;    // the store warp counts it
        ptx::BarrierSync(1 + staging.consumer, 128);  // all threads' stores come before the count
        if (threadIdx.x % 128 == 0) CountStored(args, tile, 1);
      }
    }

    static __device__ void Store(const Args& args, const CallContext& call,
                                 StagingReader<Config>& staging, int32_t row_block, Tile tile) {
      if (args.out_f32) return;
      Base::Epilogue::Store(args, call, staging, row_block, tile);
      int stored = 0;
#pragma unroll
      for (int m64 = 0; m64 < Config::kM64Blocks; ++m64) {
        stored += Base::RowsOf(Base::RowOf(row_block) + m64 * 64, tile) >= 64;
      }
      if (stored == 0) return;
      ptx::BulkWait<0>();
      ptx::FenceProxyAsyncGlobal();  // the rows are read through the generic proxy
      CountStored(args, tile, stored);
    }
  };

  struct Exchange : PeerExchange {
    static __device__ void LeaveCounters(const Args& args) {
      jflux::LeaveCounters(args, [](WorkspaceHeader* header) {
        for (int32_t c = 0; c < kMostTileClasses; ++c) header->tiles_stored[c] = 0;
      });
    }
    static __device__ void Send(const Args& args, const CallContext& call,
                                const GemmSmem<Config>& smem) {
      if (blockIdx.x == 0) CheckOffsets(args);
      const int64_t rows = args.groups.rows;
      const int64_t end =
          Max<int64_t>(0, Min<int64_t>(rows, __ldg(args.offsets + args.groups.groups)));
      ZeroFill(args.y_data, end * args.layout.row_bytes, rows * args.layout.row_bytes);
      const Table table(args, smem);
      table.Await();
      Sums<1, 2>(args, call, table);  // more loads together would spill registers
      Table::SyncSums();
    }
    static __device__ void SumRows(const Args& args, const CallContext& call,
                                   const GemmSmem<Config>& smem) {
      Sums<2, 4>(args, call, Table(args, smem));
      Table::SyncSums();
    }
    template <int kVectors, int kBatch>
    static __device__ void Sums(const Args& args, const CallContext& call, const Table& table) {
      if (args.out_f32) {
        TokenSums<Config, float, kVectors, kBatch>::Run(args, call, table);
      } else {
        TokenSums<Config, T, kVectors, kBatch>::Run(args, call, table);
      }
      __syncwarp();
    }
  };
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    GroupedMatmulReduceScatterKernel(const __grid_constant__ GroupedMatmulReduceScatterArgs args) {
  RunGemm<GroupedMatmulReduceScatterSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM90_CUH_
