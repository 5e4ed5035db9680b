// all_gather_grouped_matmul on Hopper: one kernel that sends, waits, gathers and multiplies.
//
// Send warps (TokenCopies) copy this rank's tokens to its peers. Meanwhile tiles begin
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

#include "core/gathered_tiles.h"
#include "gpu/copy_sender.cuh"
#include "gpu/gather_rows_sm90.cuh"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_smem.cuh"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "ops/all_gather_grouped_matmul/token_rows.cuh"
#include "ops/grouped_matmul/grouped_matmul_sm90.cuh"
#include "ops/grouped_matmul/span_table_sm90.cuh"

namespace jflux {

// GroupedMatmulArgs has what the epilogue needs. Of its groups, there are no group_sizes; its map
// of x is not used.
struct AllGatherGroupedMatmulArgs : GroupedMatmulArgs {
  DeviceState* state;
  SymmetricView view;
  uint32_t signature, op;
  WorkspaceLayout workspace;
  TokenLayout layout;
  GatheredTiles order;  // of cluster tiles
  uint32_t senders;     // CTAs that may send
  int32_t tokens;       // of each rank
  int32_t choices;
  const int32_t* offsets;
  const int32_t* source;
  const char* x_data;
};
static_assert(sizeof(AllGatherGroupedMatmulArgs) <= 4096);

// The groups of an all_gather_grouped_matmul, and where the segments of tokens begin in each, as a
// cluster's leading scheduler warp sees them; and the addresses of a tile's rows.
//
//   table of spans   grouped_matmul/span_table_sm90.cuh. It lies behind a chunk.
//   row tables       The scheduler warp of each CTA writes them, the load warp reads them
//                    (gpu/gather_rows_sm90.cuh). They lie behind all else.

// A configuration with shared memory for row tables.
template <typename Base>
struct GatherConfig : Base {
  static constexpr int kRowTables = 2;
  static constexpr int kSmemBytes = Base::kSmemBytes + kRowTables * kRowTableBytes<Base>;
  static_assert(kSmemBytes <= kHopper.smem_bytes);
  static_assert(kTokenBoxes == Base::kSendBoxes && TokenChunkBytes(kMostSpans) > 0 &&
                kTokenSendBytes == Base::kSendBoxes * Base::kSendBoxBytes);
};

template <typename Config>
__device__ __forceinline__ SpanTable<Config> SpansOf(const AllGatherGroupedMatmulArgs& args,
                                                     const GemmSmem<Config>& smem) {
  return SpanTable<Config>(smem.SendBox(0) + static_cast<uint32_t>(args.layout.chunk_bytes),
                           args.order.Segments());
}

// What a scheduler warp knows of the tiles. All functions are called by a full warp.
template <typename Config>
class GatheredGroups : public ClassedGroups<GatheredTiles>, public Counted {
 public:
  using Args = AllGatherGroupedMatmulArgs;

  __device__ GatheredGroups(const Args& args, const GemmSmem<Config>& smem, bool leads)
      : ClassedGroups<GatheredTiles>(args.order, SpansOf(args, smem), args.groups.groups) {
    if (leads) SpansOf(args, smem).Await();
  }
  __device__ Tile At(const Args&, int32_t t) const { return this->TileOf(t, this->group()); }
  static __device__ void MakeTable(const Args& args, const GemmSmem<Config>& smem, uint32_t cta) {
    if (cta == 0) SpansOf(args, smem).Make(args, /*leads=*/true);
  }
};

// A tile's rows, as a scheduler warp waits for them.
template <typename Config, typename Coords>
class GatheredRows {
 public:
  using Args = AllGatherGroupedMatmulArgs;

  __device__ GatheredRows(const Args&, const GemmSmem<Config>& smem) : smem_(smem) {}

  template <typename Arrived>
  __device__ void Await(const Args& args, const CallContext& call, int32_t, Tile,
                        const Coords& coords, int k_blocks, Arrived&& set_arrived) {
    WaitForTokens(args, call, coords.row, coords.end);
    set_arrived(k_blocks);
  }

 private:
  // Writes the addresses of rows [row, end) of a CTA's tile, and waits for the tokens.
  __device__ void WaitForTokens(const Args& args, const CallContext& call, int32_t row,
                                int32_t end) {
    const int lane = threadIdx.x % 32;
    const uint32_t table = RowTableAt(smem_, table_);
    table_ ^= 1;
    const char* gathered = GatheredOf(args, call);
    TokenRange range;
#pragma unroll
    for (int i = 0; i < Config::kTileM; i += 32) {
      const int32_t at = row + i + lane;
      const int32_t slot = at < end ? __ldg(args.source + at) : -1;
      const char* address = nullptr;
      if (IsSlot(args, slot)) {
        const uint32_t token = TokenOf(args, slot);
        range.Add(token);
        address = AddressOf(args, gathered, token);
      }
      ptx::StoreShared8(table + 8 * (i + lane), reinterpret_cast<uint64_t>(address));
    }
    AwaitTokens(args, call, range, arrived_);
  }

  GemmSmem<Config> smem_;
  int table_ = 0;
  int32_t arrived_ = 0;  // lane i: chunks of rank i that are known to have arrived
};

// What the send warp of all_gather_grouped_matmul's kernel copies: this rank's tokens, in their
// order. The protocol is that of gpu/copy_sender.cuh.
template <typename Config>
struct TokenCopies {
  using Args = AllGatherGroupedMatmulArgs;
  using Smem = GemmSmem<Config>;
  static constexpr int32_t kBoxBytes = kTokenBoxBytes;

  // Boxes are smaller than what the main loop sets aside for them, and lie close together.
  static __device__ uint32_t BoxAt(const Smem& smem, int i) {
    return smem.SendBox(0) + i * kBoxBytes;
  }
  static __device__ int32_t ChunksOf(const Args& args) { return args.layout.chunks; }
  static __device__ CopiedChunk ChunkOf(const Args& args, int32_t peer, int32_t chunk) {
    return CopiedChunk{peer, chunk, static_cast<int32_t>(args.layout.ChunkSize(chunk)),
                       args.x_data + chunk * args.layout.chunk_bytes,
                       args.layout.ChunkOffset(args.view.rank, chunk)};
  }
  static __device__ Signal* SignalOf(const Args& args, const CallContext& call, int32_t peer,
                                     int32_t chunk) {
    return ChunkSignal(args, call, peer, args.view.rank, chunk);
  }
};

template <typename Config>
using TokenSender = CopySender<TokenCopies<Config>>;

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
      if (blockIdx.x == 0) AwaitAllTokens(args, call);
    }
  };
};

JFLUX_GEMM_KERNEL(AllGatherGroupedMatmul);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_ALL_GATHER_GROUPED_MATMUL_SM90_CUH_
