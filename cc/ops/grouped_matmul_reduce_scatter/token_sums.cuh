// What kernels of grouped_matmul_reduce_scatter do with rows of y: sums of tokens, sent to their
// owners. Args are those of either main loop's kernel.
#ifndef JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_TOKEN_SUMS_CUH_
#define JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_TOKEN_SUMS_CUH_

#include <cstdint>

#include "core/scattered_tiles.h"
#include "core/tile_counts.h"
#include "gpu/gemm_call.cuh"
#include "gpu/ptx.cuh"
#include "gpu/vector.cuh"
#include "gpu/warp_scan.cuh"
#include "gpu/wire.cuh"
#include "ops/grouped_matmul/span_table.cuh"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"

namespace jflux {

// The signal, on `dst`, of an item that `src` has summed.
template <typename Args>
__device__ __forceinline__ Signal* ItemSignal(const Args& args, const CallContext& call, int dst,
                                              int src, int32_t item) {
  return args.view.template At<Signal>(
      dst, args.workspace.SignalOffset(call.epoch) + args.layout.SignalOffset(dst, src, item));
}
// The sum, on `dst`, of a token that `src` has sent.
template <typename Args>
__device__ __forceinline__ char* SlotOf(const Args& args, const CallContext& call, int dst, int src,
                                        int64_t token) {
  return args.view.At(
      dst, args.workspace.DataOffset(call.epoch) + args.layout.RowOffset(dst, src, token));
}

// The scales of its blocks, with a wire.
template <typename Args>
__device__ __forceinline__ char* ScalesOf(const Args& args, const CallContext& call, int dst,
                                          int src, int64_t token) {
  return args.view.At(
      dst, args.workspace.DataOffset(call.epoch) + args.layout.ScaleOffset(dst, src, token));
}

// The m64 blocks of a class, of all groups: in the last lane of a full warp.
template <typename Args>
__device__ __forceinline__ int32_t BlocksOfClass(const Args& args, const Spans& spans, int32_t c) {
  int32_t blocks = 0;
  for (int32_t e = threadIdx.x % 32; e < args.groups.groups; e += 32) {
    const auto before = spans.BeforeOf(e);
    blocks += args.order.BlocksOf(args.order.RowsOfClass(c, before), before(args.order.Segments()));
  }
  return WarpInclusiveSum(blocks);
}

// The sums of grouped_matmul_reduce_scatter's kernel, as work items (core/scattered_tiles.h): send
// warps take them while tiles are computed, consumers when there are no more tiles.
//
//   writes  of a peer's item: slots in the peer's workspace, with a wire scales too, then the
//           item's signal. Of an own item: out
//   waits   for the tiles of this rank that have the item's rows (core/tile_counts.h). Of an own
//           item: for the same item of every peer
//   order   y's rows were written by TMA or by consumers, and counted with release at GPU scope;
//           the signal, with release at system scope, follows the stores of all lanes. Rows and
//           slots are read past L1
//   reset   never: core/signal.h
//
// Deadlock (Run, on Hopper): a consumer comes here when there are no more tiles to take. So each
// tile is stored, or on its way through a CTA whose other warps wait for nobody. Items are taken in
// order. When an item waits for peers, the items that these peers wait for have therefore been
// taken, by warps that wait only for tiles.

// T: of y and the sums, a 16-bit type or float. Each lane has kVectors vectors of the item at a
// time, and loads kBatch rows of each together. kWire: sums are quantised when they are sent.
// kSetsAll: in a loop with a main loop, through which registers would be held that are not always
// set.
template <typename Args, typename T, int kVectors, int kBatch, bool kWire, bool kSetsAll = false>
class TokenSums {
 public:
  // Takes items until none is left. Called by a full warp.
  template <typename Table>
  static __device__ void Run(const Args& args, const CallContext& call, const Table& table) {
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
      SumItem(args, call, item);
    }
  }
  // Sums an item whose rows, and whose sums by peers, are there. Called by a full warp.
  static __device__ __forceinline__ void SumItem(const Args& args, const CallContext& call,
                                                 const SumItems::Item& item) {
    const int lane = threadIdx.x % 32;
    const bool is_own = item.owner == args.view.rank;
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

 private:
  // Lanes with a vector each have a block of a wire.
  using Codec = quantize::LanesOfAny<static_cast<int>(kWireBlock) / Vector<T>::kSize>;
  using Sent = quantize::WireVector<Vector<T>::kSize>;

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
          if constexpr (kSetsAll) weights[u][b] = 0, rows[u][b] = make_uint4(0, 0, 0, 0);
          if (!is_there[u][b]) continue;
          weights[u][b] = __ldg(args.weights + slot + b);
          rows[u][b] = ptx::LoadGlobal16(static_cast<const char*>(args.Y()) +
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
    if constexpr (kWire) {
      if (!is_own) {
        SendQuantized(args, call, item, v, sums);
        return;
      }
      AddQuantized(args, call, item, v, sums);
    } else {
      if (is_own) AddPeers(args, call, item, v, sums);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int32_t at = v + 32 * u;
      if (at >= all) continue;
      char* to = is_own ? args.out + item.first * args.layout.row_bytes
                        : SlotOf(args, call, item.owner, args.view.rank, item.first);
      ptx::StoreGlobal16(to + int64_t{at} * 16, sums[u].Rounded());
    }
  }

  // Stores them, quantised, to the owner's slots.
  static __device__ void SendQuantized(const Args& args, const CallContext& call,
                                       const SumItems::Item& item, int32_t v,
                                       const Vector<T> (&sums)[kVectors]) {
    const int32_t all = item.count * Columns(args);
    char* const slot = SlotOf(args, call, item.owner, args.view.rank, item.first);
    char* const scales = ScalesOf(args, call, item.owner, args.view.rank, item.first);
    float mine = 0;  // the scale of the block of vector v + 32 lane()
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int32_t at = v + 32 * u;
      if (at >= all) continue;  // so have all lanes of the block
      Sent sent;
      sent.scale = QuantizeForWire<Codec, false>(sums[u].v, args.wire, sent.words);
      sent.StoreWords(slot + int64_t{at} * Vector<T>::kSize);
      if (Codec::lane() == u) mine = sent.scale;
    }
    // Those of the warp are stored together.
    const int32_t at = v + 32 * Codec::lane();
    if (Codec::lane() < kVectors && at < all) {
      reinterpret_cast<float*>(scales)[at / Codec::kLanes] = mine;
    }
  }
  // The sums over ranks, in their order: peers' parts as they have come, and the own one as it is.
  static __device__ void AddQuantized(const Args& args, const CallContext& call,
                                      const SumItems::Item& item, int32_t v,
                                      Vector<T> (&sums)[kVectors]) {
    const int32_t all = item.count * Columns(args);
    Vector<T> own[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      own[u] = sums[u];
      sums[u] = Vector<T>{};
    }
#pragma unroll 1
    for (int src = 0; src < args.view.world; ++src) {
      Sent parts[kVectors];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const int32_t at = v + 32 * u;
        if (src == args.view.rank || at >= all) continue;
        parts[u] = Sent::Load(
            SlotOf(args, call, args.view.rank, src, item.first) + int64_t{at} * Vector<T>::kSize,
            ScalesOf(args, call, args.view.rank, src, item.first) + at / Codec::kLanes * 4);
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        Vector<T> part = own[u];
        if (src != args.view.rank) parts[u].Dequantize(args.wire, part.v);
        sums[u].Add(part);
      }
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

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_REDUCE_SCATTER_TOKEN_SUMS_CUH_
