// The arguments of all_gather_matmul's kernel, and its send warp, which copies local rows to the
// peers' workspaces and, if asked for, all rows to `gathered`; with the scales of the rows, if they
// have any.
//
//   writes  the peers' workspaces and signals
//   waits   for peers only while it copies to `gathered`, after the CTA's last send
//   order   bulk copies complete, proxy fence, StoreRelease of the chunk's signal; stores
//           of scales, __syncwarp, the same StoreRelease
//   reset   the counters: LeaveCounters (gpu/gemm_call.cuh)
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_GATHER_SENDER_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_GATHER_SENDER_SM90_CUH_

#include "core/activation.h"
#include "core/k_panel_layout.h"
#include "core/tile_order.h"
#include "gpu/chunk_sender.cuh"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_config.h"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"
#include "ops/all_gather_matmul/all_gather_matmul.h"

namespace jflux {

// The fields that every tile needs come first: a line of constant memory is fetched when it is
// first read.
struct AllGatherMatmulArgs {
  DeviceState* state;
  SymmetricView view;
  Rows rows;
  GatherOrder order;  // of cluster tiles
  int64_t k;
  int32_t num_tiles;
  int32_t weights;
  int32_t a_bytes;  // bytes of a box of A
  uint32_t signature, op;
  // Whether y is the product, row for row: no bias, activation, gate or saved sums.
  bool no_epilogue;
  bool gated;                       // half of a tile's columns belong to each weight
  bool out_f32, out_f16;            // out_f16: of operands of 8 bits
  int32_t first_tile[kMaxWeights];  // tile column at which each weight starts
  int64_t n[kMaxWeights];
  WorkspaceLayout workspace;
  KPanelLayout layout;
  int32_t send_group;      // row blocks of a raster group (SendOrder)
  int32_t send_box_bytes;  // of a full box
  uint32_t senders;        // CTAs that may send
  void* y_data[kMaxWeights];
  void* sums_data[kMaxWeights];    // or null
  const float* bias[kMaxWeights];  // or null
  Activation activation;
  void* gathered;  // or null
  CUtensorMap x;   // local rows, as the main loop reads them
  CUtensorMap w[kMaxWeights];
  CUtensorMap y[kMaxWeights];     // 16-bit types
  CUtensorMap sums[kMaxWeights];  // 16-bit types
  CUtensorMap send_boxes;         // local rows, as the send warp reads them
  CUtensorMap workspace_maps[2];  // the halves' data as rows of kBlockBytes
  CUtensorMap gathered_rows;      // `gathered`, to store boxes
  struct {
    int32_t m, n;
  } first[kMostSms];  // order.At(i), the static first tile of cluster i
  // Of operands of 8 bits: of local rows and all columns; or with an entry for each k-block, and of
  // blocks of columns (Scales). Null: they have none.
  const float* x_scale;
  const float* w_scale[kMaxWeights];
  float* gathered_scale;  // of `gathered`, if x has a scale
  // Of y that is quantised (Config::kQuantizes): [rows, blocks of n].
  float* y_scale[kMaxWeights];
  bool power_of_two;
};
static_assert(sizeof(AllGatherMatmulArgs) <= 4096);  // the limit for kernel arguments

// The signal, on `rank`, of chunk `chunk` of the rows that `src` sends of a row block.
__device__ __forceinline__ Signal* ChunkSignal(const AllGatherMatmulArgs& args,
                                               const CallContext& call, int rank, int src,
                                               int32_t row_block, int32_t chunk) {
  return args.view.At<Signal>(rank, args.workspace.SignalOffset(call.epoch) +
                                        args.layout.SignalOffset(src, row_block, chunk));
}
// Row `row` of a k-panel of a row block, in the workspace of `rank`.
__device__ __forceinline__ char* KPanelRow(const AllGatherMatmulArgs& args, const CallContext& call,
                                           int rank, int32_t row_block, int32_t k_panel,
                                           int32_t row) {
  return args.view.At(rank, args.workspace.DataOffset(call.epoch) +
                                (args.layout.RowOf(row_block, k_panel) + row) * kBlockBytes);
}
// The scales of a k-panel's rows, there.
__device__ __forceinline__ float* KPanelScales(const AllGatherMatmulArgs& args, uint32_t epoch,
                                               int rank, int32_t row_block, int32_t k_panel) {
  return args.view.At<float>(
      rank, args.workspace.DataOffset(epoch) + args.layout.ScaleOffset(row_block, k_panel));
}
// Entries of x's scale for each row.
template <typename Config>
__device__ __forceinline__ int32_t ScaleEntries(const AllGatherMatmulArgs& args) {
  return Config::kBlockScales ? args.layout.k_panels : 1;
}

template <typename Config>
struct GatherSender {
  using Args = AllGatherMatmulArgs;
  using Layout = KPanelLayout;
  using Buffers = SendBuffers<GemmSmem<Config>>;

  // Takes chunks from counters: first chunks to send, in as many CTAs as may send (gpu/senders.h),
  // then chunks to copy to `gathered`. Nothing that a peer waits for comes after a wait.
  static __device__ void Run(const Args& args, const CallContext& call,
                             const GemmSmem<Config>& smem) {
    static_assert(Config::kSendBoxes == KPanelLayout::kBoxes &&
                  Config::kSendBoxBytes == KPanelLayout::kBoxRows * kBlockBytes);
    Buffers buffers{smem};
    if (MaySend(args)) SendChunks<GatherSender>(args, call, buffers);
    if constexpr (Config::kNarrow) {
      if (args.gathered != nullptr) CopyWithScales(args, call, buffers);
    } else {
      if (args.gathered != nullptr) CopyChunks(args, call, buffers);
    }
  }

  // A chunk of a rank's rows of a row block. An empty range means nothing to do.
  struct Chunk {
    int32_t peer, row_block, chunk;
    typename KPanelLayout::RowRange range;
    int32_t row;  // in the shard
  };
  static __device__ SendOrder OrderOf(const Args& args) {
    return SendOrder(args.layout, args.view.rank, args.send_group);
  }
  static __device__ Chunk ChunkOf(const Args& args, const ChunkSend& send) {
    return ChunkOf(args, args.view.rank, SendPeer(args.view.rank, send.step, args.view.world),
                   send.row_block, send.chunk);
  }

  // Loads box i of a local chunk from x.
  static __device__ void LoadBox(const Args& args, Buffers& buffers, const Chunk& c, int i) {
    const auto box = args.layout.BoxOf(c.range, c.chunk, i);
    if (box.rows <= 0) return;
    const uint32_t bar = buffers.smem.SendBoxFull(i);
    ptx::MbarrierArriveExpectTx(bar, args.send_box_bytes);
    ptx::TmaLoad2d(buffers.smem.SendBox(i), &args.send_boxes, bar, box.k_panel * Config::kTileK,
                   c.row + box.row);
  }
  static __device__ void StoreBox(const Args& args, const CallContext& call, Buffers& buffers,
                                  const Chunk& c, int i) {
    const auto box = args.layout.BoxOf(c.range, c.chunk, i);
    if (box.rows > 0) {
      ptx::BulkStore(
          KPanelRow(args, call, c.peer, c.row_block, box.k_panel, c.range.begin + box.row),
          buffers.Await(i), box.rows * kBlockBytes);
    }
    ptx::BulkCommit();  // even if empty: BulkWait counts groups
  }
  static __device__ void SignalChunk(const Args& args, const CallContext& call, const Chunk& c,
                                     uint64_t since) {
    if (c.range.end == 0) return;
    ptx::FenceProxyAsyncGlobal();
    StoreRelease(ChunkSignal(args, call, c.peer, args.view.rank, c.row_block, c.chunk),
                 call.signal);
    call.Done(EventKind::kSend, since, c.peer, c.chunk);
  }
  // The scales of a chunk's rows: a lane has a row of each box.
  struct Beside {
    float scales[Layout::kBoxes];
  };
  static __device__ Beside LoadBeside(const Args& args, const Chunk& c) {
    Beside beside{};
    ForScales(args, c, [&](int i, const typename Layout::Box& box, int32_t row) {
      beside.scales[i] = *LocalScale(args, c, box, row);
    });
    return beside;
  }
  static __device__ void StoreBeside(const Args& args, const CallContext& call, const Chunk& c,
                                     const Beside& beside) {
    ForScales(args, c, [&](int i, const typename Layout::Box& box, int32_t row) {
      KPanelScales(args, call.epoch, c.peer, c.row_block, box.k_panel)[c.range.begin + row] =
          beside.scales[i];
    });
  }

 private:
  // f(i, box, row of the range) for each box i in which this lane has a row with a scale.
  template <typename F>
  static __device__ __forceinline__ void ForScales(const Args& args, const Chunk& c, F&& f) {
    if constexpr (Config::kNarrow) {
      if (args.x_scale == nullptr) return;
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < Layout::kBoxes; ++i) {
        const auto box = args.layout.BoxOf(c.range, c.chunk, i);
        if (lane < box.rows && box.k_panel < ScaleEntries<Config>(args)) f(i, box, box.row + lane);
      }
    }
  }
  static __device__ const float* LocalScale(const Args& args, const Chunk& c,
                                            const typename Layout::Box& box, int32_t row) {
    return args.x_scale + static_cast<int64_t>(c.row + row) * ScaleEntries<Config>(args) +
           box.k_panel;
  }

  static __device__ void CopyChunks(const Args& args, const CallContext& call, Buffers& buffers) {
    const int chunks_per_rank = args.layout.rank_row_blocks * args.layout.Chunks();
    if (!ptx::ElectOne()) return;
    for (int i = TakeCopy(args); i < args.view.world * chunks_per_rank; i = TakeCopy(args)) {
      CopyGathered(args, call, buffers, i / chunks_per_rank, i % chunks_per_rank);
    }
    ptx::BulkWait<0>();
  }
  // The same with scales, which all lanes copy.
  static __device__ void CopyWithScales(const Args& args, const CallContext& call,
                                        Buffers& buffers) {
    const int chunks_per_rank = args.layout.rank_row_blocks * args.layout.Chunks();
    for (;;) {
      const int i = __shfl_sync(0xffffffff, threadIdx.x % 32 == 0 ? TakeCopy(args) : 0, 0);
      if (i >= args.view.world * chunks_per_rank) break;
      const int step = i / chunks_per_rank;
      if (ptx::ElectOne()) CopyGathered(args, call, buffers, step, i % chunks_per_rank);
      __syncwarp();  // the chunk has arrived
      int src;
      Chunk c;
      if (!FindCopied(args, step, i % chunks_per_rank, &src, &c)) continue;
      ForScales(args, c, [&](int, const typename Layout::Box& box, int32_t row) {
        const float scale =
            step == 0
                ? *LocalScale(args, c, box, row)
                : __ldcg(KPanelScales(args, call.epoch, args.view.rank, c.row_block, box.k_panel) +
                         c.range.begin + row);
        const int64_t to = args.rows.Actual(src * args.rows.PerRank() + c.row + row);
        args.gathered_scale[to * ScaleEntries<Config>(args) + box.k_panel] = scale;
      });
    }
    if (ptx::ElectOne()) ptx::BulkWait<0>();
  }

  static __device__ Chunk ChunkOf(const Args& args, int src, int peer, int32_t row_block,
                                  int32_t chunk) {
    Chunk c{peer, row_block, chunk, args.layout.RangeOf(src, row_block), 0};
    c.row = static_cast<int32_t>(static_cast<int64_t>(row_block) * KPanelLayout::kPanelRows +
                                 c.range.begin - src * args.rows.PerRank());
    return c;
  }

  // Copies start with the local chunks and continue in the order in which the peers' chunks arrive.
  // `i` numbers the chunks of a rank. False: it has fewer.
  static __device__ __forceinline__ bool FindCopied(const Args& args, int step, int i, int* src,
                                                    Chunk* c) {
    *src = (args.view.rank + step) % args.view.world;
    const int chunks = args.layout.Chunks();
    if (i / chunks >= args.layout.RowBlocksOf(*src)) return false;
    *c = ChunkOf(args, *src, args.view.rank, args.layout.FirstRowBlock(*src) + i / chunks,
                 i % chunks);
    return true;
  }
  static __device__ void CopyGathered(const Args& args, const CallContext& call, Buffers& buffers,
                                      int step, int i) {
    int src;
    Chunk c;
    if (!FindCopied(args, step, i, &src, &c)) return;
    const bool is_local = src == args.view.rank;
    if (!is_local) {
      AwaitPeer(call, ChunkSignal(args, call, args.view.rank, src, c.row_block, c.chunk), src,
                c.chunk);
      ptx::FenceProxyAsyncGlobal();
    }
    ptx::BulkWaitRead<0>();
    for (int p = 0; p < Config::kSendBoxes; ++p) {
      if (is_local) {
        LoadBox(args, buffers, c, p);
        continue;
      }
      const auto box = args.layout.BoxOf(c.range, c.chunk, p);
      if (box.rows <= 0) continue;
      const uint32_t bar = buffers.smem.SendBoxFull(p);
      ptx::MbarrierArriveExpectTx(bar, box.rows * kBlockBytes);
      ptx::BulkLoad(
          buffers.smem.SendBox(p),
          KPanelRow(args, call, args.view.rank, c.row_block, box.k_panel, c.range.begin + box.row),
          box.rows * kBlockBytes, bar);
    }
    for (int p = 0; p < Config::kSendBoxes; ++p) {
      const auto box = args.layout.BoxOf(c.range, c.chunk, p);
      if (box.rows <= 0) continue;
      StoreGathered(args, buffers.Await(p), src * args.rows.PerRank() + c.row + box.row, box);
      ptx::BulkCommit();
    }
  }

  // Stores a box that starts at virtual row `row0` to its actual rows: with one TMA store if the
  // box is full and the actual rows are consecutive, else row by row.
  static __device__ void StoreGathered(const Args& args, uint32_t smem, int64_t row0,
                                       const KPanelLayout::Box& box) {
    const int64_t k0 = static_cast<int64_t>(box.k_panel) * Config::kTileK;
    const int64_t actual = args.rows.Actual(row0);
    if (box.rows == KPanelLayout::kBoxRows &&
        args.rows.Actual(row0 + box.rows - 1) == actual + box.rows - 1) {
      ptx::TmaStore2d(&args.gathered_rows, smem, static_cast<int32_t>(k0),
                      static_cast<int32_t>(actual));
      return;
    }
    constexpr int kSize = sizeof(typename Config::T);
    const auto bytes = static_cast<uint32_t>(kSize * Min<int64_t>(Config::kTileK, args.k - k0));
    for (int r = 0; r < box.rows; ++r) {
      ptx::BulkStore(
          static_cast<char*>(args.gathered) + kSize * (args.rows.Actual(row0 + r) * args.k + k0),
          smem + r * kBlockBytes, bytes);
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_GATHER_SENDER_SM90_CUH_
