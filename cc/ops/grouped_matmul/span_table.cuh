// Where the segments of tokens begin in each group (core/gathered_tiles.h), and the tiles of
// classes, in kernels of grouped products over ranks.
//
//   table of spans   Span (e, s) is the rows of group e whose tokens are of segment s. The table
//                    has the first row of each, and in the end the number of rows
//   writes           threads of the CTA, before its first tile, by a search in `source`
//   reads            the warp that finds tiles, and others that wait for the table
//   memory           shared memory, at an address that the op gives
//
// Offsets that make no sense cannot make a kernel read or write outside its arrays: they are cut
// off, and one warp reports them (CheckOffsets).
#ifndef JFLUX_OPS_GROUPED_MATMUL_SPAN_TABLE_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_SPAN_TABLE_CUH_

#include <cstdint>

#include "core/gathered_tiles.h"
#include "gpu/gemm_call.cuh"
#include "gpu/ptx.cuh"
#include "gpu/warp_scan.cuh"

namespace jflux {

class Spans {
 public:
  __device__ Spans(uint32_t at, int32_t segments) : at_(at), segments_(segments) {}

  // Called by threads 0 .. threads - 1, which share the work.
  template <typename Args>
  __device__ void Fill(const Args& args, int thread, int threads) const {
    const int32_t rows = args.groups.rows, groups = args.groups.groups;
    const auto offset = [&](int32_t e) { return Max(0, Min(rows, __ldg(args.offsets + e))); };
    for (int32_t i = thread; i <= groups * segments_; i += threads) {
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
  }

  // The first row of a span. (groups, 0) has the number of rows.
  __device__ int32_t First(int32_t group, int32_t segment) const {
    return ptx::LoadShared4(at_ + 4 * (group * segments_ + segment));
  }
  // How many rows of a group are of segments before one, as a function of that.
  __device__ auto BeforeOf(int32_t group) const {
    return [this, group](int32_t segment) {
      // The rows of the last span end where the next group begins.
      return Max(0, First(group, segment) - First(group, 0));
    };
  }
  // The address behind the table of so many groups.
  __device__ uint32_t End(int32_t groups) const { return at_ + 4 * (groups * segments_ + 1); }

 private:
  uint32_t at_;
  int32_t segments_;
};

// The tiles as the warp that finds them sees them: class after class, and in a class group after
// group. All functions are called by a full warp.
template <typename Order>
class ClassedGroups {
 public:
  __device__ ClassedGroups(const Order& order, const Spans& spans, int32_t groups)
      : order_(order), spans_(spans), groups_(groups) {}

  // Moves to the class and group that have tile t. False if there is no such tile. t does not
  // decrease.
  __device__ bool Find(int32_t t) {
    const int lane = threadIdx.x % 32;
    const int32_t all = groups_ * order_.Classes();
    for (; at_ < all; at_ += 32) {
      const int32_t at = at_ + lane;
      TileRows rows{0, 0};
      if (at < all) rows = order_.RowsOfClass(at / groups_, spans_.BeforeOf(at % groups_));
      const int32_t tiles = order_.Count(rows);
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
  // The group and the class of tiles that Find has moved to.
  __device__ int32_t group() const { return at_ % groups_; }
  __device__ int32_t tile_class() const { return at_ / groups_; }

 protected:
  // Tile t as the forward product passes tiles on (grouped_matmul_sm90.cuh), numbered among the
  // columns of `item`.
  __device__ Tile TileOf(int32_t t, int32_t item) const {
    const int32_t e = group();
    const Tile tile = order_.At(t - before_, rows_);
    return Tile{spans_.First(e, 0) + tile.m * order_.tiles.tile_rows,
                item * order_.tiles.tiles_n + tile.n, spans_.First(e + 1, 0)};
  }

 private:
  Order order_;
  Spans spans_;
  int32_t groups_, at_ = 0, before_ = 0;  // (class, group), and the tiles before it
  TileRows rows_{0, 0};
};

// Reports offsets that decrease, or exceed the rows that there are, and traps. Called by a full
// warp.
template <typename Args>
__device__ __forceinline__ void CheckOffsets(const Args& args) {
  const int lane = threadIdx.x % 32;
  const int32_t groups = args.groups.groups, rows = args.groups.rows;
  for (int32_t first = 0; first < groups; first += 32) {
    const int32_t e = first + lane;
    bool is_wrong = false;
    int64_t seen = 0;
    int32_t negative = -1;
    if (e < groups) {
      const int32_t begin = __ldg(args.offsets + e), end = __ldg(args.offsets + e + 1);
      is_wrong = end < begin || begin < 0 || end > rows;
      negative = end < begin ? e : -1;
      seen = end < begin ? int64_t{end} - begin : begin < 0 ? begin : end;
    }
    const uint32_t wrong = __ballot_sync(0xffffffff, is_wrong);
    if (wrong == 0) continue;
    if (lane != __ffs(wrong) - 1) return;
    Fault* fault = args.state->limits.fault;
    if (fault->kind != 0) PauseAndTrap();  // only the first one is recorded
    WaitContext context{};
    context.op = args.op;
    context.rank = args.view.rank;
    WriteRecord(fault, context, FaultKind::kGroupSizes, 0, negative, static_cast<uint64_t>(rows),
                static_cast<uint64_t>(seen));
    PauseAndTrap();
  }
}

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_SPAN_TABLE_CUH_
