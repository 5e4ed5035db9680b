// The groups of an all_gather_grouped_matmul, and where the segments of tokens begin in each, as a
// cluster's leading scheduler warp sees them; and the addresses of a tile's rows.
//
//   table of spans   grouped_matmul/span_table_sm90.cuh. It lies behind a chunk.
//   row tables       The scheduler warp of each CTA writes them, the load warp reads them
//                    (gpu/gather_rows_sm90.cuh). They lie behind all else.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_GATHERED_TABLE_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_GATHERED_TABLE_SM90_CUH_

#include "gpu/gather_rows_sm90.cuh"
#include "gpu/gemm_schedule.cuh"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_args.cuh"
#include "ops/grouped_matmul/span_table_sm90.cuh"

namespace jflux {

// A configuration with shared memory for row tables.
template <typename Base>
struct GatherConfig : Base {
  static constexpr int kRowTables = 2;
  static constexpr int kSmemBytes = Base::kSmemBytes + kRowTables * kRowTableBytes<Base>;
  static_assert(kSmemBytes <= 232448);
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
class GatheredGroups : public ClassedGroups<Config, GatheredTiles>, public Counted {
 public:
  using Args = AllGatherGroupedMatmulArgs;

  __device__ GatheredGroups(const Args& args, const GemmSmem<Config>& smem, bool leads)
      : ClassedGroups<Config, GatheredTiles>(args.order, SpansOf(args, smem), args.groups.groups,
                                             leads) {}
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
  // Writes the addresses of rows [row, end) of a CTA's tile, and waits for the tokens. Each chunk
  // is looked at once: those before `arrived_` have arrived.
  __device__ void WaitForTokens(const Args& args, const CallContext& call, int32_t row,
                                int32_t end) {
    const int lane = threadIdx.x % 32;
    const uint32_t table = RowTableAt(smem_, table_);
    table_ ^= 1;
    const int64_t row_bytes = args.layout.row_bytes;
    const int32_t own = args.view.rank * args.tokens;
    const char* gathered = args.view.At(args.view.rank, args.workspace.DataOffset(call.epoch));
    uint32_t least = 0xffffffff, most = 0;  // of the tile's tokens
    bool any = false;
#pragma unroll
    for (int i = 0; i < Config::kTileM; i += 32) {
      const int32_t at = row + i + lane;
      const int32_t slot = at < end ? __ldg(args.source + at) : -1;
      const char* address = nullptr;
      if (0 <= slot && slot < args.groups.rows) {
        const auto token = static_cast<uint32_t>(slot) / static_cast<uint32_t>(args.choices);
        least = Min(least, token);
        most = Max(most, token);
        any = true;
        const auto of_own = static_cast<int32_t>(token) - own;
        address = 0 <= of_own && of_own < args.tokens ? args.x_data + of_own * row_bytes
                                                      : gathered + token * row_bytes;
      }
      ptx::StoreShared8(table + 8 * (i + lane), reinterpret_cast<uint64_t>(address));
    }
    if (!__any_sync(0xffffffff, any)) return;
    least = __reduce_min_sync(0xffffffff, least);
    most = __reduce_max_sync(0xffffffff, most);
    const auto per_rank = static_cast<uint32_t>(args.tokens);
    const auto last_src = static_cast<int32_t>(most / per_rank);
    for (auto src = static_cast<int32_t>(least / per_rank); src <= last_src; ++src) {
      if (src == args.view.rank) continue;
      const int32_t tokens = src == last_src ? most - src * per_rank + 1 : per_rank;
      const int32_t count = args.layout.ChunksOf(tokens);
      AwaitSignals(call, ChunkSignal(args, call, args.view.rank, src, 0), src,
                   __shfl_sync(0xffffffff, arrived_, src), count);
      if (lane == src) arrived_ = Max(arrived_, count);
    }
  }

  GemmSmem<Config> smem_;
  int table_ = 0;
  int32_t arrived_ = 0;  // lane i: chunks of rank i that are known to have arrived
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_GATHERED_TABLE_SM90_CUH_
