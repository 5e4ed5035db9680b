// Tiles that peers send in portable kernels (gpu/gemm_sm80.cuh), on their way from the workspace to
// an array: peers cannot write to it, since XLA owns it.
//
// A slot of a tile has rows of kTileN elements. After each tile of its own, a CTA's warps copy what
// has arrived: the other CTA of the SM multiplies meanwhile. After the last tile they wait for the
// rest. Items are kItemRows rows of a tile, taken from a counter in about the order of arrival.
//
//   waits   a warp, after its CTA's last tile, for a peer's tile. No tile may wait for such a warp
//   order   one lane acquires the tile's signal at system scope, then the warp's lanes follow
//   reset   the counter: LeaveCounters (gpu/gemm_call.cuh)
#ifndef JFLUX_GPU_TILE_RECEIVER_SM80_CUH_
#define JFLUX_GPU_TILE_RECEIVER_SM80_CUH_

#include <cstdint>

#include "gpu/copy_vectors.cuh"
#include "gpu/gemm_call.cuh"
#include "gpu/gemm_sm80.cuh"

namespace jflux {

// A peer's tile of elements T: where it comes from, and where its first row goes.
template <typename T>
struct PeerTile {
  int src;
  int64_t slot;  // names it in a fault record
  const Signal* signal;
  const T* from;
  T* to;
  int64_t stride;  // of rows of `to`
  int rows, columns;
};

// Op provides
//
//   Args, Config, T
//   PeerTiles(args)                 how many there are
//   PeerTileAt(args, call, i)       -> PeerTile<T>
template <typename Op>
struct TileReceiver80 {
  using Config = typename Op::Config;
  using T = typename Op::T;
  using Args = typename Op::Args;
  static constexpr int kItemRows = 32, kItemsOfTile = Config::kTileM / kItemRows;
  static constexpr int kPerVector = kVectorBytes / sizeof(T);

  // The item that this warp holds; -1: none. Its first lane alone uses it.
  static __device__ int32_t& Held() {
    JFLUX_SHARED(int32_t[Config::kThreads / 32], held);
    return held[threadIdx.x / 32];
  }
  // Called by a full warp. Copies one item if it has arrived; with kWaits, waits for it. False if
  // it has not arrived or if there are no more.
  template <bool kWaits>
  static __device__ __forceinline__ bool Receive(const Args& args, const CallContext& call) {
    const bool leads = threadIdx.x % 32 == 0;
    int32_t item = 0;
    if (leads) {
      if (Held() < 0) Held() = TakeTransfer(args);
      item = Held();
    }
    item = __shfl_sync(0xffffffff, item, 0);
    if (item >= Op::PeerTiles(args) * kItemsOfTile) return false;
    const PeerTile<T> tile = Op::PeerTileAt(args, call, item / kItemsOfTile);
    bool has_arrived = true;
    if (leads) {
      if constexpr (kWaits) {
        AwaitPeer(call, tile.signal, tile.src, tile.slot);
      } else {
        has_arrived = HasArrived(call, tile.signal);
      }
    }
    if (!__shfl_sync(0xffffffff, has_arrived, 0)) return false;
    __syncwarp();
    const uint64_t start = call.Start();
    const int row0 = item % kItemsOfTile * kItemRows;
    const int rows = Max(0, Min(kItemRows, tile.rows - row0));
    const int vectors = Min(tile.columns, Config::kTileN) / kPerVector;
    const T* from = tile.from + row0 * Config::kTileN;
    T* to = tile.to + row0 * tile.stride;
    CopyVectors(
        rows * vectors,
        [&](int e) { return from + e / vectors * Config::kTileN + e % vectors * kPerVector; },
        [&](int e) { return to + e / vectors * tile.stride + e % vectors * kPerVector; });
    if (leads) {
      Held() = -1;
      call.Done(EventKind::kCopy, start, tile.src, static_cast<int32_t>(tile.slot));
    }
    return true;
  }
  // The same of up to `most` items, as far as they have arrived.
  static __device__ __forceinline__ void ReceiveArrived(const Args& args, const CallContext& call,
                                                        int most) {
#pragma unroll 1
    for (int i = 0; i < most && Receive<false>(args, call); ++i) {
    }
  }
};

// The Exchange of such an Op.
template <typename Op>
struct ReceivingExchange80 : PeerExchange80 {
  using Receiver = TileReceiver80<Op>;
  template <typename Args>
  static __device__ __forceinline__ void Send(const Args&, const CallContext&, uint32_t) {
    if (threadIdx.x % 32 == 0) Receiver::Held() = -1;
  }
  template <typename Args>
  static __device__ __forceinline__ void Finally(const Args& args, const CallContext& call,
                                                 uint32_t) {
    while (Receiver::template Receive<true>(args, call)) {
    }
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_TILE_RECEIVER_SM80_CUH_
