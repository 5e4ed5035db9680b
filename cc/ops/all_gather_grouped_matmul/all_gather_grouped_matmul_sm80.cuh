// all_gather_grouped_matmul in portable code (gpu/gemm_sm80.cuh): one kernel that sends, waits,
// gathers and multiplies, in the workspace and the order of Hopper's.
//
// The first CTAs to ask send before they multiply: a warp takes a chunk of tokens from a counter,
// copies it to a peer's workspace, and stores its signal. Every CTA then makes the table of spans,
// and takes tiles from a counter: those whose rows are all own ones first. A thread reads source
// for the rows that it copies. A row of no slot is multiplied as any other, and its sums are
// replaced by zeros.
//
//   writes  sending warps: the peers' workspaces and signals
//   waits   the first warp of a CTA, for the tokens of its tile; of the first CTA, after its last
//           tile, for all tokens
//   order   stores of a chunk, __syncwarp, release fence and the chunk's signal. A reader acquires
//           the signal at system scope; a barrier of the CTA stands before the copies that read
//   reset   never: core/signal.h; the counters: LeaveCounters (gpu/gemm_call.cuh)
//
// Deadlock: tiles wait for sends only, and sends wait for nothing. A CTA sends all that it has
// taken before it takes a tile, and the CTAs that may send are those that run first.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_SM80_CUH_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_SM80_CUH_

#include "core/gathered_tiles.h"
#include "gpu/copy_vectors.cuh"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "ops/all_gather_grouped_matmul/token_rows.cuh"
#include "ops/grouped_matmul/grouped_matmul_sm80.cuh"
#include "ops/grouped_matmul/span_table.cuh"

namespace jflux {

// Of the base's groups there are no group_sizes; its x is not used.
struct AllGatherGroupedMatmulArgs80 : GroupedMatmulArgs80 {
  DeviceState* state;
  SymmetricView view;
  uint32_t signature, op;
  WorkspaceLayout workspace;
  TokenLayout layout;
  GatheredTiles order;
  uint32_t senders;  // CTAs that may send
  int32_t tokens;    // of each rank
  int32_t choices;
  const int32_t* offsets;
  const int32_t* source;
  const char* x_data;
};

template <typename Config_>
struct AllGatherGroupedMatmulSm80 : GroupedMatmulSm80<Config_> {
  using Config = Config_;
  using Args = AllGatherGroupedMatmulArgs80;
  using Base = GroupedMatmulSm80<Config>;

  // Behind the stages.
  static __device__ Spans SpansOf(const Args& args, uint32_t smem) {
    return Spans(smem + Config::kSmemBytes, args.order.Segments());
  }

  struct Schedule : ClassedGroups<GatheredTiles>, Counted {
    using Groups = ClassedGroups<GatheredTiles>;
    __device__ Schedule(const Args& args, uint32_t smem)
        : Groups(args.order, SpansOf(args, smem), args.groups.groups) {}
    __device__ Tile Find(const Args&, int32_t t) {
      return Groups::Find(t) ? this->TileOf(t, this->group()) : kNoTile80;
    }
  };

  struct Operands : Base::Operands {
    static constexpr int kMostTerms = 1;
    static __device__ RowsToCopy<Config> LhsOf(const Args& args, const CallContext& call, Tile tile,
                                               int) {
      const char* gathered = GatheredOf(args, call);
      RowsToCopy<Config> a;
      a.skip = 0;
#pragma unroll
      for (int i = 0; i < a.kRows; ++i) {
        const int32_t slot = __ldg(args.source + Min(tile.m + a.RowOf(i), tile.split - 1));
        a.row[i] =
            IsSlot(args, slot) ? AddressOf(args, gathered, TokenOf(args, slot)) : args.x_data;
      }
      return a;
    }
  };

  struct Epilogue : Base::Epilogue {
    static __device__ __forceinline__ void Finish(const Args& args, const CallContext&,
                                                  uint32_t smem, Sums80<Config>& sums, Tile tile) {
      Base::Epilogue::FinishRows(args, smem, sums, tile, [&](int64_t row) {
        return IsSlot(args, __ldg(args.source + row));
      });
    }
  };

  struct Exchange : PeerExchange80 {
    // Chunks of each rank that are known to have arrived: of the first warp's lanes.
    static __device__ int32_t& Arrived() {
      JFLUX_SHARED(int32_t[32], arrived);
      return arrived[threadIdx.x % 32];
    }
    struct Rows {
      __device__ Rows(const Args& args, const CallContext& call, Tile tile) {
        if (threadIdx.x >= 32) return;
        const uint64_t start = call.Start();
        TokenRange range;
#pragma unroll
        for (int i = 0; i < Config::kTileM; i += 32) {
          const int32_t row = tile.m + i + static_cast<int>(threadIdx.x);
          const int32_t slot = row < tile.split ? __ldg(args.source + row) : -1;
          if (IsSlot(args, slot)) range.Add(TokenOf(args, slot));
        }
        AwaitTokens(args, call, range, Arrived());
        if (threadIdx.x == 0) call.Done(EventKind::kWaitRows, start, tile.m, tile.n);
      }
      __device__ __forceinline__ void Await(int) {}  // all k-blocks arrive together
    };

    static __device__ void Send(const Args& args, const CallContext& call, uint32_t smem) {
      if (threadIdx.x < 32) Arrived() = 0;
      if (args.view.world > 1 && CtaMaySend(args)) SendTokens(args, call);
      SpansOf(args, smem).Fill(args, threadIdx.x, Config::kThreads);
      __syncthreads();
    }
    static __device__ void SendTokens(const Args& args, const CallContext& call) {
      const int rank = args.view.rank, chunks = args.layout.chunks;
      const int count = chunks * (args.view.world - 1);
      for (int i = NextTransfer(args); i < count; i = NextTransfer(args)) {
        const uint64_t start = call.Start();
        const int chunk = i % chunks, peer = SendPeer(rank, 1 + i / chunks, args.view.world);
        const char* from = args.x_data + chunk * args.layout.chunk_bytes;
        char* to = args.view.At(
            peer, args.workspace.DataOffset(call.epoch) + args.layout.ChunkOffset(rank, chunk));
        CopyVectors(
            static_cast<int>(args.layout.ChunkSize(chunk) / kVectorBytes),
            [&](int e) { return from + e * kVectorBytes; },
            [&](int e) { return to + e * kVectorBytes; });
        SignalStored(ChunkSignal(args, call, peer, rank, chunk), call.signal);
        if (threadIdx.x % 32 == 0) call.Done(EventKind::kSend, start, peer, chunk);
      }
    }
    static __device__ void Finally(const Args& args, const CallContext& call, uint32_t) {
      if (threadIdx.x >= 32) return;
      if (blockIdx.x == 0) CheckOffsets(args);
      Base::Epilogue::FillPast(args, __ldg(args.offsets + args.groups.groups));
      if (blockIdx.x == 0) AwaitAllTokens(args, call);
    }
  };
};

JFLUX_GEMM_KERNEL_80(AllGatherGroupedMatmul);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_SM80_CUH_
