// The tokens of a tile's rows in kernels of all_gather_grouped_matmul: where they lie, and waits
// for them. Args are those of either main loop's kernel.
#ifndef JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_TOKEN_ROWS_CUH_
#define JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_TOKEN_ROWS_CUH_

#include <cstdint>

#include "gpu/gemm_call.cuh"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"

namespace jflux {

// The signal, on `rank`, of a chunk of the tokens of `src`.
template <typename Args>
__device__ __forceinline__ Signal* ChunkSignal(const Args& args, const CallContext& call, int rank,
                                               int src, int32_t chunk) {
  return args.view.template At<Signal>(
      rank, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(src, chunk));
}

// Whether an element of source is a slot, and so a token's; others stand for rows of zeros.
template <typename Args>
__device__ __forceinline__ bool IsSlot(const Args& args, int32_t slot) {
  return 0 <= slot && slot < args.groups.rows;
}
template <typename Args>
__device__ __forceinline__ uint32_t TokenOf(const Args& args, int32_t slot) {
  return static_cast<uint32_t>(slot) / static_cast<uint32_t>(args.choices);
}
// Where a token lies: own ones in x, others in the workspace, whose tokens begin at `gathered`.
template <typename Args>
__device__ __forceinline__ const char* AddressOf(const Args& args, const char* gathered,
                                                 uint32_t token) {
  const int64_t row_bytes = args.layout.row_bytes;
  const auto of_own = static_cast<int32_t>(token) - args.view.rank * args.tokens;
  return 0 <= of_own && of_own < args.tokens ? args.x_data + of_own * row_bytes
                                             : gathered + token * row_bytes;
}
template <typename Args>
__device__ __forceinline__ const char* GatheredOf(const Args& args, const CallContext& call) {
  return args.view.At(args.view.rank, args.workspace.DataOffset(call.epoch));
}

// The tokens that a lane has seen, from `least` to `most`.
struct TokenRange {
  uint32_t least = 0xffffffff, most = 0;
  bool any = false;

  __device__ __forceinline__ void Add(uint32_t token) {
    least = Min(least, token);
    most = Max(most, token);
    any = true;
  }
};

// Waits for the tokens that the lanes of a full warp have seen. Lane i's `arrived`: chunks of rank
// i that are known to have arrived. Each chunk is looked at once.
template <typename Args>
__device__ __forceinline__ void AwaitTokens(const Args& args, const CallContext& call,
                                            TokenRange range, int32_t& arrived) {
  const int lane = threadIdx.x % 32;
  if (!__any_sync(0xffffffff, range.any)) return;
  const uint32_t least = __reduce_min_sync(0xffffffff, range.least);
  const uint32_t most = __reduce_max_sync(0xffffffff, range.most);
  const auto per_rank = static_cast<uint32_t>(args.tokens);
  const auto last_src = static_cast<int32_t>(most / per_rank);
  for (auto src = static_cast<int32_t>(least / per_rank); src <= last_src; ++src) {
    if (src == args.view.rank) continue;
    const int32_t tokens = src == last_src ? most - src * per_rank + 1 : per_rank;
    const int32_t count = args.layout.ChunksOf(tokens);
    AwaitSignals(call, ChunkSignal(args, call, args.view.rank, src, 0), src,
                 __shfl_sync(0xffffffff, arrived, src), count);
    if (lane == src) arrived = Max(arrived, count);
  }
}

// Waits for all tokens: in each call a rank must receive what every peer sends (core/signal.h), and
// a routing may need none of some peer. Called by a full warp of one CTA.
template <typename Args>
__device__ __forceinline__ void AwaitAllTokens(const Args& args, const CallContext& call) {
  for (int step = 1; step < args.view.world; ++step) {
    const int src = (args.view.rank + step) % args.view.world;
    AwaitSignals(call, ChunkSignal(args, call, args.view.rank, src, 0), src, 0, args.layout.chunks);
  }
}

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_GROUPED_MATMUL_TOKEN_ROWS_CUH_
