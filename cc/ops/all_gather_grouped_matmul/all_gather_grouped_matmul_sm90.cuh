// all_gather_grouped_matmul on Hopper: one kernel that sends, waits, gathers and multiplies.
//
// Send warps (token_sender_sm90.cuh) copy this rank's tokens to its peers. Meanwhile tiles begin
// whose rows are all own ones, then those whose tokens arrive next (core/gathered_tiles.h):
// clusters take them from a counter. Load warps gather a tile's rows by address, own ones from x
// and others from the workspace (gpu/gather_rows_sm90.cuh). What follows the product is
// grouped_matmul's.
//
//   writes  send warps: the peers' workspaces and signals
//   waits   scheduler warps, for the tokens of their tiles; one send warp, after its last send, for
//           all tokens
//   order   release and acquire at system scope; a proxy fence between bulk copies and the signal.
//           What has arrived is read by cp.async, through the generic proxy
//   reset   never: core/signal.h
//
// Deadlock: tiles wait for sends only, and sends wait for nothing.
//
// A routing may need no token of some peer. But in each call a rank must receive what every peer
// sends (core/signal.h), so one send warp waits for that.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_SM90_CUH_

#include "ops/all_gather_grouped_matmul/gathered_table_sm90.cuh"
#include "ops/all_gather_grouped_matmul/token_sender_sm90.cuh"
#include "ops/grouped_matmul/grouped_matmul_sm90.cuh"

namespace jflux {

template <typename Config_>
struct AllGatherGroupedMatmulSm90 : GroupedMatmulSm90<Config_> {
  using Config = Config_;
  using Args = AllGatherGroupedMatmulArgs;
  using Base = GroupedMatmulSm90<Config>;
  using Coords = typename Base::Coords;

  using Schedule = GatheredGroups<Config>;

  struct Operands : Base::template StackOperands<RowsOfA> {
    // The rows of an m64 block past the group's end are not stored, whatever they are.
    static __device__ RowExtent RowsOf(const Args& args, const Coords& coords) {
      return RowExtent{coords.end - coords.row > 64 ? 128 : 64, args.layout.row_bytes};
    }
    static __device__ const char* AnyRow(const Args& args) { return args.x_data; }
    static __device__ void PrefetchMaps(const Args& args) { ptx::PrefetchTensorMap(&args.w[0]); }
  };

  struct Exchange : PeerExchange {
    using Rows = GatheredRows<Config, Coords>;
    static __device__ void Send(const Args& args, const CallContext& call,
                                const GemmSmem<Config>& smem) {
      SendBuffers<GemmSmem<Config>> buffers{smem};
      if (args.view.world > 1 && MaySend(args)) {
        SendChunks<TokenSender<Config>>(args, call, buffers);
      }
      if (blockIdx.x == 0) CheckOffsets(args);
      const int64_t rows = args.groups.rows;
      const int64_t end =
          Max<int64_t>(0, Min<int64_t>(rows, __ldg(args.offsets + args.groups.groups)));
      const int64_t row_bytes = int64_t{args.n} * (args.out_f32 ? 4 : 2);
      const auto fill = [&](void* data) {
        if (data != nullptr) ZeroFill(data, end * row_bytes, rows * row_bytes);
      };
      fill(args.y_data);
      fill(args.sums_data[0]);
      fill(args.sums_data[1]);
      for (int step = 1; blockIdx.x == 0 && step < args.view.world; ++step) {
        const int src = (args.view.rank + step) % args.view.world;
        AwaitSignals(call, ChunkSignal(args, call, args.view.rank, src, 0), src, 0,
                     args.layout.chunks);
      }
    }
  };
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    AllGatherGroupedMatmulKernel(const __grid_constant__ AllGatherGroupedMatmulArgs args) {
  RunGemm<AllGatherGroupedMatmulSm90<Config>>(args);
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_SM90_CUH_
