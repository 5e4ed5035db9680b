// The CPU back end of all_gather_grouped_matmul: one rank's part of the protocol, in host memory.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/tile_order.h"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "ops/grouped_matmul/group_rows_cpu.h"
#include "runtime/rank_call.h"

namespace jflux {
namespace {

constexpr int32_t kTileRows = 128;

struct Body : RankCall<AllGatherGroupedMatmulParams, AllGatherGroupedMatmulArrays, TokenLayout> {
  std::vector<int32_t> arrived;  // of each rank: chunks that are known to have arrived

  Signal* SignalOf(int rank, int src, int64_t chunk) const {
    return view.At<Signal>(rank, signals + layout.SignalOffset(src, chunk));
  }

  void Send() const {
    const auto* shard = static_cast<const char*>(arrays.x);
    for (int step = 1; step < view.world; ++step) {
      const int peer = SendPeer(view.rank, step, view.world);
      for (int64_t c = 0; c < layout.chunks; ++c) {
        std::memcpy(view.At(peer, data + layout.ChunkOffset(view.rank, c)),
                    shard + c * layout.chunk_bytes, layout.ChunkSize(c));
        StoreRelease(SignalOf(peer, view.rank, c), signal);
      }
    }
  }

  // Waits for the first `count` chunks of `src`.
  bool Await(int src, int32_t count) {
    for (int32_t& c = arrived[src]; c < count; ++c) {
      if (!WaitSignal(SignalOf(view.rank, src, c), signal, src, c, ctx)) return false;
    }
    return true;
  }

  // The token of a row; -1: a row of zeros.
  int64_t TokenOf(int64_t row) const {
    const int32_t slot = arrays.source[row];
    return 0 <= slot && slot < p.product.m ? slot / p.choices : -1;
  }

  // Copies the tokens of rows [first, end) to `rows`, when they have arrived.
  bool Gather(int64_t first, int64_t end, char* rows) {
    int64_t least = view.world * p.tokens, most = -1;
    for (int64_t r = first; r < end; ++r) {
      const int64_t token = TokenOf(r);
      if (token < 0) continue;
      least = std::min(least, token);
      most = std::max(most, token);
    }
    for (int64_t src = least / p.tokens; src * p.tokens <= most; ++src) {
      if (src == view.rank) continue;
      const int64_t tokens = std::min(p.tokens, most - src * p.tokens + 1);
      if (!Await(static_cast<int>(src), layout.ChunksOf(tokens))) return false;
    }
    const int64_t bytes = layout.row_bytes, own = view.rank * p.tokens;
    for (int64_t r = first; r < end; ++r, rows += bytes) {
      const int64_t token = TokenOf(r);
      if (token < 0) {
        std::memset(rows, 0, bytes);
        continue;
      }
      const bool is_own = own <= token && token < own + p.tokens;
      std::memcpy(rows,
                  is_own ? static_cast<const char*>(arrays.x) + (token - own) * bytes
                         : view.At(view.rank, data) + token * bytes,
                  bytes);
    }
    return true;
  }
};

}  // namespace

bool AllGatherGroupedMatmulCpu(const AllGatherGroupedMatmulParams& p, int64_t chunk_bytes,
                               const AllGatherGroupedMatmulArrays& arrays,
                               const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
  const TokenLayout layout = TokenLayout::Make(p, chunk_bytes);
  Body call{{p, arrays, layout, view, epoch, ctx}, std::vector<int32_t>(view.world)};
  call.Send();
  if (!OffsetsAreRight(p.product, arrays.offsets, ctx)) return false;

  const GatheredTiles order{
      {{kTileRows, /*tiles_n=*/1, /*group_m=*/1}, view.world, view.rank, p.parts}};
  std::vector<std::unique_ptr<GroupRowsCpu>> groups(p.product.groups);
  std::vector<char> rows(kTileRows * layout.row_bytes);
  for (int32_t c = 0; c < order.Classes(); ++c) {
    for (int64_t e = 0; e < p.product.groups; ++e) {
      const int32_t begin = arrays.offsets[e], end = arrays.offsets[e + 1];
      const auto before = [&](int32_t segment) {
        return RowsBefore(order, segment, begin, end, p.tokens, p.choices, arrays.source);
      };
      const TileRows tiles = order.RowsOfClass(c, before);
      for (int32_t t = tiles.begin; t < tiles.end; ++t) {
        const int32_t first = begin + t * kTileRows;
        const int32_t count = std::min(kTileRows, end - first);
        if (!call.Gather(first, first + count, rows.data())) return false;
        if (groups[e] == nullptr) {
          groups[e] = std::make_unique<GroupRowsCpu>(p.product, arrays.w, e);
        }
        groups[e]->Multiply(rows.data(), first, count, nullptr, arrays.y, arrays.sums);
      }
    }
  }
  FillRowsCpu(p.product, arrays.offsets[p.product.groups], arrays.y, arrays.sums);
  // A routing may need no token of some peer, but a rank receives what all send (core/signal.h).
  for (int src = 0; src < view.world; ++src) {
    if (src != view.rank && !call.Await(src, layout.chunks)) return false;
  }
  return true;
}

}  // namespace jflux
