// The exchange of a GEMM kernel (gpu/gemm_sm90.cuh): what passes between this rank and its peers,
// and what the workspace needs at the beginning and the end of a call.
//
// Op::Exchange derives from NoExchange in a local op, which has no peers and no workspace, else
// from PeerExchange. What it does not define is theirs: nothing.
//
//   Send(args, call, smem)      the send warp: sends to peers, or receives from them; zeroes what
//                               no tile writes. What peers wait for must not wait for peers
//   Rows                        rows of A that peers send, as the scheduler warp waits for them
//     Rows(args, smem)
//     Await(args, call, row_block, tile, coords, k_blocks, set_arrived)
//                               all lanes. Calls set_arrived(number of the tile's k-blocks that
//                               have arrived) until all k_blocks have
//   Receiver                    tiles of peers that the scheduler warp copies to y in its idle time
//     Receiver(smem)
//     ReceiveUntil(args, call, is_over)
//                               all lanes. Stops at once when is_over()
//     ReceiveRest(args, call)   all lanes, after the last tile
//   Partials                    partial tiles of peers that this rank's tiles add
//     Await(args, call, row_block, tile)
//                               all lanes of the send warp, after Send, tile after tile
//   SumRows(args, call, smem)   all consumer threads, after their last tile, while the send warp
//                               does the same in Send. Send returns after all of them, so what
//                               follows it counts for them
//   LeaveCounters(args)         one lane, after Send and after the last tile; defined by an op with
//                               counters of its own to reset (gpu/gemm_call.cuh)
//
// A type that derives from Nothing does nothing (kDoes).
#ifndef JFLUX_GPU_GEMM_EXCHANGE_CUH_
#define JFLUX_GPU_GEMM_EXCHANGE_CUH_

#include <cstdint>
#include <type_traits>

#include "gpu/call.cuh"
#include "gpu/gemm_call.cuh"

namespace jflux {

struct Nothing {};
template <typename Policy>
inline constexpr bool kDoes = !std::is_base_of_v<Nothing, Policy>;

struct NoReceiver : Nothing {
  template <typename... Any>
  __device__ explicit NoReceiver(const Any&...) {}
  template <typename... Any>
  __device__ __forceinline__ void ReceiveUntil(const Any&...) {}
  template <typename... Any>
  __device__ __forceinline__ void ReceiveRest(const Any&...) {}
};
struct LocalRows : Nothing {
  template <typename... Any>
  __device__ explicit LocalRows(const Any&...) {}
};
struct NoPartials : Nothing {};

struct ExchangeBase {
  using Rows = LocalRows;
  using Receiver = NoReceiver;
  using Partials = NoPartials;
  template <typename... Any>
  static __device__ __forceinline__ void Send(const Any&...) {}
  template <typename... Any>
  static __device__ __forceinline__ void SumRows(const Any&...) {}
};

struct NoExchange : ExchangeBase, Nothing {
  template <typename... Any>
  static __device__ __forceinline__ CallContext Begin(const Any&...) {
    return CallContext{};
  }
  template <typename... Any>
  static __device__ __forceinline__ void Delay(const Any&...) {}
  template <typename... Any>
  static __device__ __forceinline__ void Enter(const Any&...) {}
  template <typename... Any>
  static __device__ __forceinline__ void CheckAlone(const Any&...) {}
  template <typename... Any>
  static __device__ __forceinline__ void LeaveCounters(const Any&...) {}
  template <typename... Any>
  static __device__ __forceinline__ void Leave(const Any&...) {}
};

struct PeerExchange : ExchangeBase {
  template <typename Args>
  static __device__ __forceinline__ CallContext Begin(const Args& args) {
    return MakeContext(args);
  }
  template <typename Args>
  static __device__ __forceinline__ void Delay(const Args& args, const CallContext& call) {
    if (call.delays) DelayCall(*args.state, call.epoch, args.view.rank);
  }
  // One lane of the send warp and one of the scheduler warp enter, leave the counters, and leave
  // (gpu/call.cuh).
  template <typename Args>
  static __device__ __forceinline__ void Enter(const Args& args) {
    EnterWorkspace(args.view);
  }
  // One lane of the store warp: before the first tile is staged there is time.
  template <typename Args>
  static __device__ __forceinline__ void CheckAlone(const Args& args, const CallContext& call) {
    TrapIfNotAlone(args.view, call.wait);
  }
  template <typename Args>
  static __device__ __forceinline__ void LeaveCounters(const Args& args) {
    jflux::LeaveCounters(args);
  }
  template <typename Args>
  static __device__ __forceinline__ void Leave(const Args& args, const CallContext& call) {
    TrapIfFaulted(args.view, call.wait);
    LeaveWorkspace(args.view);
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_GEMM_EXCHANGE_CUH_
