// grouped_matmul_reduce_scatter on Hopper: one kernel that multiplies, sums and sends.
//
// Tiles of h's rows are computed in the order of core/scattered_tiles.h, and stored to y, a result
// of the call. Whoever has stored an m64 block counts it: the store warp full ones, a consumer
// others. When the tiles of a class are stored, the rows of its tokens can be summed
// (TokenSums): by the send warps, and by the consumers when there are no more tiles.
//
//   writes  send warps and consumers: the peers' workspaces and signals
//   waits   send warps and consumers, when they sum
//   order   TokenSums
//   reset   LeaveCounters (gpu/gemm_call.cuh): the CTA's send warp calls it when the consumers are
//           done too
#ifndef JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM90_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM90_CUH_

#include "core/scattered_tiles.h"
#include "gpu/gemm_call.cuh"
#include "ops/grouped_matmul/grouped_matmul_sm90.cuh"
#include "ops/grouped_matmul/span_table_sm90.cuh"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"
#include "ops/grouped_matmul_reduce_scatter/token_sums.cuh"

namespace jflux {

// GroupedMatmulArgs has what the product needs. Of its groups, there are no group_sizes.
struct GroupedMatmulReduceScatterArgs : GroupedMatmulArgs {
  DeviceState* state;
  SymmetricView view;
  uint32_t signature, op;
  WorkspaceLayout workspace;
  SumLayout layout;
  ScatteredTiles order;  // of cluster tiles
  SumItems items;
  int32_t tokens;  // of each rank
  int32_t choices;
  const int32_t* offsets;
  const int32_t* destination;
  const int32_t* source;
  const float* weights;
  char* out;
  DType wire;  // with kWire

  __device__ __forceinline__ const void* Y() const { return y_data; }
  // Blocks of a class that have been stored (core/tile_counts.h).
  __device__ __forceinline__ uint64_t* StoredOf(int32_t tile_class) const {
    return &view.At<WorkspaceHeader>(view.rank, 0)->tiles_stored[tile_class];
  }
};
static_assert(sizeof(GroupedMatmulReduceScatterArgs) <= 4096);

// The table of spans, and behind it the number of blocks of each class. Both lie in the shared
// memory of the send boxes, which this op does not need: its sums pass through registers.
template <typename Config>
class ClassTable {
 public:
  using Args = GroupedMatmulReduceScatterArgs;
  static_assert(4 * (kMostSpans + 1 + kMostTileClasses) <=
                Config::kSendBoxes * Config::kSendBoxBytes);

  __device__ ClassTable(const Args& args, const GemmSmem<Config>& smem)
      : spans_(smem.SendBox(0), args.order.Segments()), blocks_(spans_.End(args.groups.groups)) {}

  __device__ const SpanTable<Config>& spans() const { return spans_; }
  // Called by all consumers of the CTA.
  __device__ void Make(const Args& args, bool leads) const {
    spans_.Make(args, leads);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    for (int32_t c = warp; c < args.order.Classes(); c += 4 * Config::kConsumers) {
      const int32_t sum = BlocksOfClass(args, spans_, c);
      if (lane == 31) ptx::StoreShared4(blocks_ + 4 * c, sum);
    }
    __syncwarp();
    SyncSums();
  }
  // Called by the send warp before it reads the blocks.
  __device__ void Await() const { SyncSums(); }
  __device__ int32_t BlocksOf(int32_t tile_class) const {
    return ptx::LoadShared4(blocks_ + 4 * tile_class);
  }

  // A barrier of the CTA's warps that sum: all consumers, and the send warp.
  static __device__ void SyncSums() {
    ptx::BarrierSync(3 + Config::kConsumers, 128 * Config::kConsumers + 32);
  }

 private:
  SpanTable<Config> spans_;
  uint32_t blocks_;
};

// kWire: sums travel quantised.
template <typename Config_, bool kWire = false>
struct GroupedMatmulReduceScatterSm90 : GroupedMatmulSm90<Config_> {
  using Config = Config_;
  using Args = GroupedMatmulReduceScatterArgs;
  using Base = GroupedMatmulSm90<Config>;
  using T = typename Config::T;
  using Coords = typename Base::Coords;
  using Table = ClassTable<Config>;

  // A tile is passed on as the forward product does, but for n: class * tiles_n + tile column.
  struct Schedule : ClassedGroups<ScatteredTiles>, Counted {
    __device__ Schedule(const Args& args, const GemmSmem<Config>& smem, bool leads)
        : ClassedGroups<ScatteredTiles>(args.order, Table(args, smem).spans(), args.groups.groups) {
      if (leads) Table(args, smem).spans().Await();
    }
    __device__ Tile At(const Args&, int32_t t) const { return this->TileOf(t, this->tile_class()); }
    static __device__ void MakeTable(const Args& args, const GemmSmem<Config>& smem, uint32_t cta) {
      Table(args, smem).Make(args, /*leads=*/cta == 0);
    }
  };
  static __device__ void CountStored(const Args& args, Tile tile, int blocks) {
    AddReleaseLocal(args.StoredOf(tile.n / args.tiles.tiles_n), blocks);
  }

  struct Epilogue : Base::Epilogue {
    using Place = typename Base::Epilogue::Place;
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
        const Place place{args, row0, rows, n0};
        const M64Block<Config, Place> block{staging, acc[i], place};
        Apply(block, step::Write<Config::kTileN>{args.y_data});
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
        TokenSums<Args, float, kVectors, kBatch, kWire>::Run(args, call, table);
      } else {
        TokenSums<Args, T, kVectors, kBatch, kWire>::Run(args, call, table);
      }
      __syncwarp();
    }
  };
};

JFLUX_GEMM_KERNEL(GroupedMatmulReduceScatter);

// The kernels with a wire (grouped_matmul_reduce_scatter_wire_sm90.cu), of ForWire's choices.
bool LoadGroupedMatmulReduceScatterWireKernels(std::string* error);
bool LaunchGroupedMatmulReduceScatterWire(const GroupedMatmulParams& product,
                                          const GemmChoice& choice,
                                          GroupedMatmulReduceScatterArgs* args, int sms,
                                          cudaStream_t stream, std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM90_CUH_
