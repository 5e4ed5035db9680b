// The groups of an all_gather_grouped_matmul, and where the segments of tokens begin in each, as a
// cluster's leading scheduler warp sees them; and the addresses of a tile's rows.
//
//   table of spans   Span (e, s) is the rows of group e whose tokens are of segment s
//                    (core/gathered_tiles.h). The table has the first row of each, and in the end
//                    the number of rows. The consumers write it before their first tile, by a
//                    search in `source`; the leading scheduler warp reads it.
//   row tables       The scheduler warp of each CTA writes them, the load warp reads them
//                    (gpu/gather_rows_sm90.cuh).
//   memory           The table of spans lies behind the send boxes, the row tables behind all else.
//
// Offsets that make no sense cannot make a kernel read or write outside its arrays: they are cut
// off, and the send warp reports them.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_GATHERED_TABLE_SM90_CUH_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_GATHERED_TABLE_SM90_CUH_

#include "gpu/gather_rows_sm90.cuh"
#include "gpu/warp_scan.cuh"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_args.cuh"

namespace jflux {

// A configuration with shared memory for row tables.
template <typename Base>
struct GatherConfig : Base {
  static constexpr int kRowTables = 2;
  static constexpr int kSmemBytes = Base::kSmemBytes + kRowTables * kRowTableBytes<Base>;
  static_assert(kSmemBytes <= 232448);
  static_assert(kTokenBoxes == Base::kSendBoxes &&
                kTokenChunkBytes + 4 * (kMostSpans + 1) <= Base::kSendBoxes * Base::kSendBoxBytes);
};

template <typename Config>
class SpanTable {
 public:
  __device__ SpanTable(const AllGatherGroupedMatmulArgs& args, const GemmSmem<Config>& smem)
      : at_(smem.SendBox(0) + static_cast<uint32_t>(kTokenChunkBytes)),
        segments_(args.order.Segments()) {}

  // Called by all consumers of the CTA.
  __device__ void Make(const AllGatherGroupedMatmulArgs& args) const {
    const int32_t rows = args.groups.rows, groups = args.groups.groups;
    const auto offset = [&](int32_t e) { return Max(0, Min(rows, __ldg(args.offsets + e))); };
    const int thread = threadIdx.x - 128;
    for (int32_t i = thread; i <= groups * segments_; i += kThreads) {
      const int32_t e = i / segments_, segment = i % segments_;
      const int32_t begin = offset(e);
      int32_t first = begin;
      if (segment != 0) {
        const int64_t slot = args.order.FirstToken(segment, args.tokens) * args.choices;
        first = LowerBound(begin, Max(begin, offset(e + 1)), slot,
                           [&](int32_t row) { return __ldg(args.source + row); });
      }
      ptx::StoreShared4(at_ + 4 * i, first);
    }
    __syncwarp();  // searches take different times
    Sync();
  }
  // Called by the scheduler warp that reads it.
  __device__ void Await() const { Sync(); }

  // The first row of a span. (groups, 0) has the number of rows.
  __device__ int32_t First(int32_t group, int32_t segment) const {
    return ptx::LoadShared4(at_ + 4 * (group * segments_ + segment));
  }

 private:
  static constexpr int kThreads = 128 * Config::kConsumers;
  // The consumers' other barriers have lower numbers (gpu/gemm_sm90.cuh).
  static __device__ void Sync() { ptx::BarrierSync(2 + Config::kConsumers, kThreads + 32); }

  uint32_t at_;
  int32_t segments_;
};

template <typename Config>
__device__ __forceinline__ uint32_t RowTableAt(const GemmSmem<Config>& smem, int i) {
  return smem.base + Config::kSmemBytes - (Config::kRowTables - i) * kRowTableBytes<Config>;
}

// What a scheduler warp knows of the tiles. All functions are called by a full warp.
template <typename Config>
class GatheredGroups {
 public:
  using Args = AllGatherGroupedMatmulArgs;

  __device__ GatheredGroups(const Args& args, const GemmSmem<Config>& smem, bool leads)
      : order_(args.order), spans_(args, smem), smem_(smem), groups_(args.groups.groups) {
    if (leads) spans_.Await();
  }

  // Moves to the class and group that have tile t. False if there is no such tile. t does not
  // decrease.
  __device__ bool Find(int32_t t) {
    const int lane = threadIdx.x % 32;
    const int32_t all = groups_ * order_.Classes();
    for (; at_ < all; at_ += 32) {
      const int32_t at = at_ + lane;
      TileRows rows{0, 0};
      if (at < all) rows = order_.RowsOfClass(at / groups_, BeforeOf(at % groups_));
      const int32_t tiles = (rows.end - rows.begin) * order_.tiles.tiles_n;
      const int32_t sum = WarpInclusiveSum(tiles);
      const uint32_t after = __ballot_sync(0xffffffff, t < before_ + sum);
      if (after == 0) {
        before_ += __shfl_sync(0xffffffff, sum, 31);
        continue;
      }
      const int found = __ffs(after) - 1;
      rows_ = TileRows{__shfl_sync(0xffffffff, rows.begin, found),
                       __shfl_sync(0xffffffff, rows.end, found)};
      before_ += __shfl_sync(0xffffffff, sum - tiles, found);
      at_ += found;
      return true;
    }
    return false;
  }
  // Of what Find has moved to.
  __device__ int32_t group() const { return at_ % groups_; }
  __device__ Tile At(const Args& args, int32_t t) const {
    const int32_t e = group();
    const Tile tile = order_.At(t - before_, rows_);
    return Tile{spans_.First(e, 0) + tile.m * order_.tiles.tile_rows,
                e * order_.tiles.tiles_n + tile.n, spans_.First(e + 1, 0)};
  }

  // Writes the addresses of rows [row, end) of a CTA's tile, and waits for the tokens. Each chunk
  // is looked at once: those before `arrived_` have arrived.
  __device__ void WaitForRows(const Args& args, const CallContext& call, int32_t row, int32_t end) {
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
      AwaitChunks(args, call, src, __shfl_sync(0xffffffff, arrived_, src), count);
      if (lane == src) arrived_ = Max(arrived_, count);
    }
  }

 private:
  __device__ auto BeforeOf(int32_t group) const {
    return [this, group](int32_t segment) {
      // The rows of the last span end where the next group begins.
      return Max(0, spans_.First(group, segment) - spans_.First(group, 0));
    };
  }

  GatheredTiles order_;
  SpanTable<Config> spans_;
  GemmSmem<Config> smem_;
  int32_t groups_, at_ = 0, before_ = 0;  // (class, group), and the tiles before it
  TileRows rows_{0, 0};
  int table_ = 0;
  int32_t arrived_ = 0;  // lane i: chunks of rank i that are known to have arrived
};

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_GATHERED_TABLE_SM90_CUH_
