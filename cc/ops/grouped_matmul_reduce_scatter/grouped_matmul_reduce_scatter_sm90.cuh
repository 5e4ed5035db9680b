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
#include "core/tile_counts.h"
#include "gpu/gemm_call.cuh"
#include "gpu/vector.cuh"
#include "ops/grouped_matmul/grouped_matmul_sm90.cuh"
#include "ops/grouped_matmul/span_table_sm90.cuh"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"

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

  // Blocks of a class that have been stored (core/tile_counts.h).
  __device__ __forceinline__ uint64_t* StoredOf(int32_t tile_class) const {
    return &view.At<WorkspaceHeader>(view.rank, 0)->tiles_stored[tile_class];
  }
};
static_assert(sizeof(GroupedMatmulReduceScatterArgs) <= 4096);

// The signal, on `dst`, of an item that `src` has summed.
__device__ __forceinline__ Signal* ItemSignal(const GroupedMatmulReduceScatterArgs& args,
                                              const CallContext& call, int dst, int src,
                                              int32_t item) {
  return args.view.At<Signal>(
      dst, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(dst, src, item));
}
// The sum, on `dst`, of a token that `src` has sent.
__device__ __forceinline__ char* SlotOf(const GroupedMatmulReduceScatterArgs& args,
                                        const CallContext& call, int dst, int src, int64_t token) {
  return args.view.At(
      dst, args.workspace.DataOffset(call.epoch) + args.layout.RowOffset(dst, src, token));
}

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
    const int32_t groups = args.groups.groups;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    for (int32_t c = warp; c < args.order.Classes(); c += 4 * Config::kConsumers) {
      int32_t blocks = 0;
      for (int32_t e = lane; e < groups; e += 32) {
        const auto before = spans_.BeforeOf(e);
        blocks +=
            args.order.BlocksOf(args.order.RowsOfClass(c, before), before(args.order.Segments()));
      }
      const int32_t sum = WarpInclusiveSum(blocks);
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

// The sums of grouped_matmul_reduce_scatter's kernel, as work items (core/scattered_tiles.h): send
// warps take them while tiles are computed, consumers when there are no more tiles.
//
//   writes  of a peer's item: slots in the peer's workspace, then the item's signal. Of an own
//           item: out
//   waits   for the tiles of this rank that have the item's rows (core/tile_counts.h). Of an own
//           item: for the same item of every peer
//   order   y's rows were written by TMA or by consumers, and counted with release at GPU scope;
//           the signal, with release at system scope, follows the stores of all lanes. Rows and
//           slots are read past L1
//   reset   never: core/signal.h
//
// Deadlock: a consumer comes here when there are no more tiles to take. So each tile is stored, or
// on its way through a CTA whose other warps wait for nobody. Items are taken in order. When an
// item waits for peers, the items that these peers wait for have therefore been taken, by warps
// that wait only for tiles.

// T: of y and the sums, a 16-bit type or float. Each lane has kVectors vectors of the item at a
// time, and loads kBatch rows of each together.
template <typename Config, typename T, int kVectors, int kBatch>
class TokenSums {
 public:
  using Args = GroupedMatmulReduceScatterArgs;

  // Takes items until none is left. Called by a full warp.
  static __device__ void Run(const Args& args, const CallContext& call,
                             const ClassTable<Config>& table) {
    const int lane = threadIdx.x % 32;
    const int32_t count = args.items.Count();
    int32_t complete = 0;  // classes whose tiles are known to be stored
    for (;;) {
      const int32_t i = __shfl_sync(0xffffffff, lane == 0 ? TakeCopy(args) : 0, 0);
      if (i >= count) return;
      const SumItems::Item item = args.items.At(i);
      if (item.count <= 0) continue;
      const uint64_t since = call.Start();
      for (; complete <= item.cls; ++complete) {
        if (lane == 0) {
          AwaitTiles(args.StoredOf(complete), table.BlocksOf(complete), complete, call.wait);
        }
        __syncwarp();
      }
      const bool is_own = item.owner == args.view.rank;
      if (is_own) {
        if (lane < args.view.world && lane != args.view.rank) {
          AwaitPeer(call, ItemSignal(args, call, item.owner, lane, item.place), lane, item.place);
        }
        __syncwarp();
      }
      if (lane == 0) call.Done(EventKind::kWaitPartials, since, item.owner, item.place);
      const uint64_t start = call.Start();
      for (int32_t v = lane; v < item.count * Columns(args); v += 32 * kVectors) {
        Sum(args, call, item, is_own, v);
      }
      __syncwarp();
      if (lane == 0) {
        if (!is_own) {
          // After a failed wait the sums may be wrong.
          StoreReleaseUnless(call.wait.stop,
                             ItemSignal(args, call, item.owner, args.view.rank, item.place),
                             call.signal);
        }
        call.Done(is_own ? EventKind::kCopy : EventKind::kSend, start, item.owner, item.place);
      }
    }
  }

 private:
  // Vectors of a row.
  static __device__ int32_t Columns(const Args& args) { return args.n / Vector<T>::kSize; }

  // Vectors v, v + 32, ... of the item.
  static __device__ void Sum(const Args& args, const CallContext& call, const SumItems::Item& item,
                             bool is_own, int32_t v) {
    const int32_t columns = Columns(args), all = item.count * columns;
    Vector<T> sums[kVectors]{};
#pragma unroll 1
    for (int32_t j0 = 0; j0 < args.choices; j0 += kBatch) {
      uint4 rows[kVectors][kBatch];
      float weights[kVectors][kBatch];
      bool is_there[kVectors][kBatch];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const int32_t at = v + 32 * u, token = at / columns, column = at - token * columns;
        const int32_t slot = (item.owner * args.tokens + item.first + token) * args.choices + j0;
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int32_t row =
              at < all && j0 + b < args.choices ? __ldg(args.destination + slot + b) : -1;
          is_there[u][b] = 0 <= row && row < RowsOf(args);
          if (!is_there[u][b]) continue;
          weights[u][b] = __ldg(args.weights + slot + b);
          rows[u][b] = ptx::LoadGlobal16(static_cast<const char*>(args.y_data) +
                                         (int64_t{row} * columns + column) * 16);
        }
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (is_there[u][b]) sums[u].AddTimes(weights[u][b], Vector<T>::Of(rows[u][b]));
        }
      }
    }
    if (is_own) AddPeers(args, call, item, v, sums);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int32_t at = v + 32 * u;
      if (at >= all) continue;
      char* to = is_own ? args.out + item.first * args.layout.row_bytes
                        : SlotOf(args, call, item.owner, args.view.rank, item.first);
      ptx::StoreGlobal16(to + int64_t{at} * 16, sums[u].Rounded());
    }
  }

  // The sums over ranks, in their order, each part rounded.
  static __device__ void AddPeers(const Args& args, const CallContext& call,
                                  const SumItems::Item& item, int32_t v,
                                  Vector<T> (&sums)[kVectors]) {
    const int32_t all = item.count * Columns(args);
    uint4 own[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      own[u] = sums[u].Rounded();
      sums[u] = Vector<T>{};
    }
#pragma unroll 1
    for (int src = 0; src < args.view.world; ++src) {
      uint4 parts[kVectors];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const int32_t at = v + 32 * u;
        parts[u] = own[u];
        if (src == args.view.rank || at >= all) continue;
        parts[u] = ptx::LoadGlobal16(SlotOf(args, call, args.view.rank, src, item.first) +
                                     int64_t{at} * 16);
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) sums[u].Add(Vector<T>::Of(parts[u]));
    }
  }

  // Rows that some group has.
  static __device__ int32_t RowsOf(const Args& args) {
    return Min(args.groups.rows, __ldg(args.offsets + args.groups.groups));
  }
};

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
        TokenSums<Config, float, kVectors, kBatch>::Run(args, call, table);
      } else {
        TokenSums<Config, T, kVectors, kBatch>::Run(args, call, table);
      }
      __syncwarp();
    }
  };
};

JFLUX_GEMM_KERNEL(GroupedMatmulReduceScatter);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_GROUPED_MATMUL_REDUCE_SCATTER_SM90_CUH_
