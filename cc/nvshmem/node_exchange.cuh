// The kernel of an exchange between nodes. nvshmem/node_exchange.h describes the
// protocol.
#ifndef JFLUX_NVSHMEM_NODE_EXCHANGE_CUH_
#define JFLUX_NVSHMEM_NODE_EXCHANGE_CUH_

#include <cuda_runtime.h>

#include "gpu/call.cuh"
#include "jflux/remote.h"
#include "nvshmem/node_exchange.h"

namespace jflux {

inline constexpr int kNodeExchangeThreads = 512;

// One rank's part of a call: the blocks, by all threads of a CTA, of slice `slice`.
class NodeExchangeCall {
 public:
  __device__ NodeExchangeCall(const NodeExchangeArgs& args, uint64_t epoch, int32_t slice)
      : args_(args),
        e_(args.exchange),
        rank_(args.view.rank),
        slice_(slice),
        bytes_(args.exchange.BytesOf(slice)),
        data_(args.layout.DataOffset(epoch)),
        signals_(args.layout.SignalOffset(epoch)),
        value_(MakeSignal(epoch, args.signature)) {}

  __device__ void Send() const {
    for (int32_t d = 1; d < e_.world; ++d) {
      const int32_t to = (rank_ + d) % e_.world;
      const shmem::RemoteRef peer = args_.copies[to];
      if (e_.Sends(rank_, to)) {
        char* staged = args_.view.At(rank_, data_ + e_.InStaging(to, slice_));
        if (d == 1 || e_.kind != NodeExchangeKind::kGather)  // which sends one block to all
          Copy(staged, args_.x + e_.InX(to) + e_.SliceBegin(slice_));
        shmem::put_signal<shmem::Block>(peer.At(data_ + e_.InSlots(rank_, slice_)), staged, bytes_,
                                        peer.At(Word(e_.SignalOf(rank_, slice_))), value_);
      } else if (slice_ == 0 && shmem::Block::rank() == 0) {
        shmem::signal_set(peer.At(Word(rank_)), value_);
      }
    }
  }

  __device__ void Keep() const {
    if (!e_.KeepsOne()) return;
    Copy(args_.y + e_.InY(rank_) + e_.SliceBegin(slice_),
         args_.x + e_.InX(rank_) + e_.SliceBegin(slice_));
  }

  // False, on all threads, if a wait failed.
  __device__ bool Receive(const WaitContext& wait) const {
    bool ok = true;
    for (int32_t d = 1; d < e_.world; ++d) {
      const int32_t from = (rank_ + e_.world - d) % e_.world;
      if (e_.Sends(from, rank_)) {
        if (!Await(e_.SignalOf(from, slice_), from, wait)) {
          ok = false;
          continue;
        }
        Copy(args_.y + e_.InY(from) + e_.SliceBegin(slice_),
             args_.view.At(rank_, data_ + e_.InSlots(from, slice_)));
      } else if (slice_ == 0) {
        ok &= Await(from, from, wait);
      }
    }
    return ok;
  }

 private:
  __device__ int64_t Word(int64_t index) const {
    return signals_ + index * static_cast<int64_t>(sizeof(Signal));
  }
  __device__ void Copy(char* to, const char* from) const {
    shmem::internal::Copy<shmem::Block>(to, from, bytes_);
  }
  // True, on all threads, if the signal has come.
  __device__ bool Await(int64_t index, int32_t from, const WaitContext& wait) const {
    bool ok = true;
    if (shmem::Block::rank() == 0) {
      auto* word = args_.view.At<Signal>(rank_, Word(index));
      ok = WaitSignal(word, value_, from, index, wait);
      if (ok && !wait.skip) shmem::await_arrival(args_.copies[from], word, value_);
    }
    return shmem::Block::all(ok);
  }

  const NodeExchangeArgs& args_;
  const NodeExchange& e_;
  const int32_t rank_, slice_;
  const int64_t bytes_, data_, signals_;
  const Signal value_;
};

__global__ void __launch_bounds__(kNodeExchangeThreads)
    NodeExchangeKernel(const __grid_constant__ NodeExchangeArgs args) {
  const DeviceState state = *args.state;
  auto* header = args.view.At<WorkspaceHeader>(args.view.rank, 0);
  const DynamicId taken = TakeDynamicId(args.view);
  const WaitContext wait = WaitOf(args.state, &header->stop, args.op, args.view.rank, state.hooks);
  if (taken.overlaps) TrapOnOverlap(args.view, wait);
  DelayCall(state, taken.epoch, args.view.rank);
  const NodeExchangeCall call(args, taken.epoch, static_cast<int32_t>(taken.id));
  call.Send();
  call.Keep();
  const bool ok = call.Receive(wait);
  if (!ok && shmem::Block::rank() == 0) TrapIfFaulted(args.view, wait);
  LeaveAfterDynamicId(args.view);
}

}  // namespace jflux

#endif  // JFLUX_NVSHMEM_NODE_EXCHANGE_CUH_
