// Device primitives for custom kernels: OpenSHMEM's operations within one call, by a thread, a warp
// or a block (CTA). Numbers in brackets are sections of the OpenSHMEM 1.5 specification.
// docs/guide/device_primitives.md has a table and an example.
//
//   call     A kernel works between begin_call and end_call (jflux/kernel.cuh), or is the body of a
//            CPU handler (jflux/ffi.h). All ranks of a group make the same calls in the same order.
//            A Context is one call as one rank sees it. It is the first argument of every function,
//            as contexts are in OpenSHMEM [9.5].
//   memory   Each call has `data_bytes` of data and `num_signals` signals in the symmetric heap, at
//            the same offsets on every rank. A *symmetric address* is the address of the local
//            copy. The initial contents are undefined. The memory is the call's alone: there are
//            two halves, for calls of even and odd epoch, and no rank is a whole call ahead of
//            another.
//   signal   One 64-bit word (core/signal.h). In a call it is set at most once, by one rank, to the
//            only value it can have in that call: (epoch << 24 | signature). So nothing is reset, a
//            captured CUDA graph can be replayed, and ranks that run different calls are detected.
//            A protocol with more steps uses more signals.
//   order    A signal is stored with release at system scope and read with acquire. The scope that
//            waited for it sees everything that the scope that set it had stored before, with put
//            or through ptr, on any rank. Other threads of the waiting rank do not: they need a
//            barrier of their block after the wait, or a signal of their own. No thread needs a
//            fence for this: the stores of a block's other threads are ordered before the release
//            by a barrier (bar.sync), and causality order is transitive in the PTX memory model, so
//            the release is cumulative over them.
//   time     Every wait has a timeout (jflux.init(deadline_seconds=...)). A function that waits
//            returns whether the wait succeeded. If not, the reason is recorded, this rank's other
//            waits fail too, and it sets no further signals. The kernel must go on to end_call,
//            which turns this into an error.
//   scopes   Suffix _warp or _block: all threads of the warp or block make the call, with the same
//            arguments. If other threads of the scope wrote `source`, a barrier must precede the
//            call. On a host a warp and a block are one thread.
#ifndef JFLUX_SHMEM_H_
#define JFLUX_SHMEM_H_

#include <cstdint>

#include "../core/layout.h"
#include "../core/signal.h"
#include "scope.h"

namespace jflux::shmem {

struct Context {
  const SymmetricView& view;
  WorkspaceLayout layout;
  uint64_t epoch;
  uint32_t signature;
  WaitContext wait;
  int32_t block, blocks;  // number of this block, in the order in which blocks start, and how many
                          // there are

  // Symmetric addresses: byte `offset` of the call's data, and its signal `index`.
  template <typename T = char>
  JFLUX_HD T* data(int64_t offset = 0) const {
    return view.template At<T>(view.rank, layout.DataOffset(epoch) + offset);
  }
  JFLUX_HD Signal* signal(int64_t index = 0) const { return Word(kMaxRanks + index); }

  // The hello of rank `pe`; hellos are the first words of the half.
  JFLUX_HD Signal* hello(int pe) const { return Word(pe); }

  JFLUX_HD Signal SignalValue() const { return MakeSignal(epoch, signature); }

 private:
  JFLUX_HD Signal* Word(int64_t index) const {
    return view.template At<Signal>(view.rank, layout.SignalOffset(epoch)) + index;
  }
};

// The workspace of a call.
JFLUX_HD WorkspaceLayout WorkspaceFor(int64_t data_bytes, int64_t num_signals) {
  return WorkspaceLayout::For((kMaxRanks + num_signals) * static_cast<int64_t>(sizeof(Signal)),
                              data_bytes);
}

// ---- Who and where ------------------------------------------------------------------------------

// [9.1.2, 9.1.3] This rank's number in its group, and the number of ranks.
JFLUX_HD int my_pe(const Context& ctx) { return ctx.view.rank; }
JFLUX_HD int n_pes(const Context& ctx) { return ctx.view.world; }

// [9.1.8] The address, on rank `pe`, of the symmetric address `dest`, for loads and stores. Never
// null: every rank of a group is reachable. Stores through it are ordered like put: before a signal
// that this thread, or its warp or block, sets later; before other later stores only with a fence.
template <typename T>
JFLUX_HD T* ptr(const Context& ctx, T* dest, int pe) {
  const auto offset = reinterpret_cast<const char*>(dest) - ctx.view.base[ctx.view.rank];
  return reinterpret_cast<T*>(ctx.view.base[pe] + offset);
}

// ---- Order --------------------------------------------------------------------------------------

// [9.11.1] Orders this thread's earlier stores, with put or through ptr, before its later stores,
// on any rank. Needed for hand-made flags only: signals and barriers come after all earlier stores
// of their scope. For other threads' stores, put a barrier of the warp or block before the fence.
JFLUX_HD void fence(const Context&) { FenceSystem(); }

// [9.11.2] This thread's stores have arrived. Between peers' memories the same as a fence.
JFLUX_HD void quiet(const Context&) { FenceSystem(); }

// ---- Signals ------------------------------------------------------------------------------------

namespace internal {

template <typename Scope>
JFLUX_HD void SignalSet(const Context& ctx, Signal* sig_addr, int pe) {
  Scope::sync();
  if (Scope::rank() == 0) {
    StoreReleaseUnless(ctx.wait.stop, ptr(ctx, sig_addr, pe), ctx.SignalValue());
  }
}

}  // namespace internal

// [9.8.2 SHMEM_SIGNAL_SET; a function of its own in OpenSHMEM 1.6] Sets the signal on `pe`, after
// everything that the threads of this scope have stored anywhere, and everything they know others
// to have stored. After a failed wait of this rank it sets nothing: what the rank has computed
// since may be wrong, and a peer must not take it for right.
JFLUX_HD void signal_set(const Context& ctx, Signal* sig_addr, int pe) {
  internal::SignalSet<Thread>(ctx, sig_addr, pe);
}
JFLUX_HD void signal_set_warp(const Context& ctx, Signal* sig_addr, int pe) {
  internal::SignalSet<Warp>(ctx, sig_addr, pe);
}
JFLUX_HD void signal_set_block(const Context& ctx, Signal* sig_addr, int pe) {
  internal::SignalSet<Block>(ctx, sig_addr, pe);
}

namespace internal {

// Waits for `word`, which is in this rank's memory and set by `pe`. `item` names it in a fault
// record.
JFLUX_HD bool Await(const Context& ctx, const Signal* word, int pe, int64_t item) {
  const Signal expected = ctx.SignalValue();
  if (Classify(LoadAcquire(word), expected) == SignalState::kReady) return true;
  return WaitSignal(word, expected, pe, item, ctx.wait);
}

JFLUX_HD bool AwaitSignal(const Context& ctx, const Signal* sig_addr, int pe) {
  return Await(ctx, sig_addr, pe, sig_addr - ctx.signal());
}

template <typename Scope>
JFLUX_HD bool SignalWait(const Context& ctx, const Signal* sig_addr, int pe) {
  return Scope::all(Scope::rank() != 0 || AwaitSignal(ctx, sig_addr, pe));
}

}  // namespace internal

// [9.10.15] Waits until `pe` has set this rank's signal in this call. There is one value to wait
// for, so OpenSHMEM's comparison is left out. `pe` is for the message if the wait fails.
JFLUX_HD bool signal_wait_until(const Context& ctx, const Signal* sig_addr, int pe) {
  return internal::SignalWait<Thread>(ctx, sig_addr, pe);
}
JFLUX_HD bool signal_wait_until_warp(const Context& ctx, const Signal* sig_addr, int pe) {
  return internal::SignalWait<Warp>(ctx, sig_addr, pe);
}
JFLUX_HD bool signal_wait_until_block(const Context& ctx, const Signal* sig_addr, int pe) {
  return internal::SignalWait<Block>(ctx, sig_addr, pe);
}

// ---- Data ---------------------------------------------------------------------------------------

namespace internal {

template <typename Scope>
JFLUX_HD void Put(const Context& ctx, void* dest, const void* source, int64_t bytes, int pe) {
  Copy<Scope>(ptr(ctx, static_cast<char*>(dest), pe), source, bytes);
  Scope::sync();  // `source` may be reused, and a signal of any thread comes after the data
}

template <typename Scope>
JFLUX_HD void Get(const Context& ctx, void* dest, const void* source, int64_t bytes, int pe) {
  Copy<Scope>(dest, ptr(ctx, static_cast<const char*>(source), pe), bytes);
  Scope::sync();
}

template <typename Scope>
JFLUX_HD void PutSignal(const Context& ctx, void* dest, const void* source, int64_t bytes,
                        Signal* sig_addr, int pe) {
  Put<Scope>(ctx, dest, source, bytes, pe);
  if (Scope::rank() == 0) signal_set(ctx, sig_addr, pe);
}

}  // namespace internal

// [9.6.1.1] Copies `source`, anywhere in this rank's memory, to the symmetric address `dest` on
// `pe`. Returns when `source` may be reused. `pe` learns of it through a signal.
JFLUX_HD void putmem(const Context& ctx, void* dest, const void* source, int64_t bytes, int pe) {
  internal::Put<Thread>(ctx, dest, source, bytes, pe);
}
JFLUX_HD void putmem_warp(const Context& ctx, void* dest, const void* source, int64_t bytes,
                          int pe) {
  internal::Put<Warp>(ctx, dest, source, bytes, pe);
}
JFLUX_HD void putmem_block(const Context& ctx, void* dest, const void* source, int64_t bytes,
                           int pe) {
  internal::Put<Block>(ctx, dest, source, bytes, pe);
}
template <typename T>
JFLUX_HD void put(const Context& ctx, T* dest, const T* source, int64_t nelems, int pe) {
  putmem(ctx, dest, source, nelems * sizeof(T), pe);
}
template <typename T>
JFLUX_HD void put_warp(const Context& ctx, T* dest, const T* source, int64_t nelems, int pe) {
  putmem_warp(ctx, dest, source, nelems * sizeof(T), pe);
}
template <typename T>
JFLUX_HD void put_block(const Context& ctx, T* dest, const T* source, int64_t nelems, int pe) {
  putmem_block(ctx, dest, source, nelems * sizeof(T), pe);
}

// [9.6.1.4] Copies the symmetric address `source` on `pe` to `dest`, anywhere in this rank's
// memory. Returns when the data is in `dest`. A signal must have announced that `pe` has written
// it.
JFLUX_HD void getmem(const Context& ctx, void* dest, const void* source, int64_t bytes, int pe) {
  internal::Get<Thread>(ctx, dest, source, bytes, pe);
}
JFLUX_HD void getmem_warp(const Context& ctx, void* dest, const void* source, int64_t bytes,
                          int pe) {
  internal::Get<Warp>(ctx, dest, source, bytes, pe);
}
JFLUX_HD void getmem_block(const Context& ctx, void* dest, const void* source, int64_t bytes,
                           int pe) {
  internal::Get<Block>(ctx, dest, source, bytes, pe);
}
template <typename T>
JFLUX_HD void get(const Context& ctx, T* dest, const T* source, int64_t nelems, int pe) {
  getmem(ctx, dest, source, nelems * sizeof(T), pe);
}
template <typename T>
JFLUX_HD void get_warp(const Context& ctx, T* dest, const T* source, int64_t nelems, int pe) {
  getmem_warp(ctx, dest, source, nelems * sizeof(T), pe);
}
template <typename T>
JFLUX_HD void get_block(const Context& ctx, T* dest, const T* source, int64_t nelems, int pe) {
  getmem_block(ctx, dest, source, nelems * sizeof(T), pe);
}

// [9.8.3] putmem or put, then signal_set: a scope that has waited for the signal sees the data, and
// also everything that this scope has put before, which OpenSHMEM does not promise.
JFLUX_HD void putmem_signal(const Context& ctx, void* dest, const void* source, int64_t bytes,
                            Signal* sig_addr, int pe) {
  internal::PutSignal<Thread>(ctx, dest, source, bytes, sig_addr, pe);
}
JFLUX_HD void putmem_signal_warp(const Context& ctx, void* dest, const void* source, int64_t bytes,
                                 Signal* sig_addr, int pe) {
  internal::PutSignal<Warp>(ctx, dest, source, bytes, sig_addr, pe);
}
JFLUX_HD void putmem_signal_block(const Context& ctx, void* dest, const void* source, int64_t bytes,
                                  Signal* sig_addr, int pe) {
  internal::PutSignal<Block>(ctx, dest, source, bytes, sig_addr, pe);
}
template <typename T>
JFLUX_HD void put_signal(const Context& ctx, T* dest, const T* source, int64_t nelems,
                         Signal* sig_addr, int pe) {
  putmem_signal(ctx, dest, source, nelems * sizeof(T), sig_addr, pe);
}
template <typename T>
JFLUX_HD void put_signal_warp(const Context& ctx, T* dest, const T* source, int64_t nelems,
                              Signal* sig_addr, int pe) {
  putmem_signal_warp(ctx, dest, source, nelems * sizeof(T), sig_addr, pe);
}
template <typename T>
JFLUX_HD void put_signal_block(const Context& ctx, T* dest, const T* source, int64_t nelems,
                               Signal* sig_addr, int pe) {
  putmem_signal_block(ctx, dest, source, nelems * sizeof(T), sig_addr, pe);
}

// Copies between two addresses in this rank's memory that do not overlap. Not in OpenSHMEM.
JFLUX_HD void copymem_block(const Context&, void* dest, const void* source, int64_t bytes) {
  internal::Copy<Block>(dest, source, bytes);
  Block::sync();
}

// ---- All ranks ----------------------------------------------------------------------------------

namespace internal {

template <typename Scope>
JFLUX_HD bool BarrierAll(const Context& ctx, Signal* sync) {
  const int me = my_pe(ctx), n = n_pes(ctx);
  Scope::sync();  // the puts of all threads come before the signals
  for (int d = 1 + Scope::rank(); d < n; d += Scope::size()) {
    signal_set(ctx, sync + me, (me + d) % n);
  }
  bool ok = true;
  for (int d = 1 + Scope::rank(); d < n; d += Scope::size()) {
    ok &= AwaitSignal(ctx, sync + (me + d) % n, (me + d) % n);
  }
  return Scope::all(ok);
}

template <typename Scope>
JFLUX_HD bool Broadcast(const Context& ctx, void* dest, const void* source, int64_t bytes,
                        Signal* sig_addr, int root) {
  const int me = my_pe(ctx), n = n_pes(ctx);
  if (me != root) return SignalWait<Scope>(ctx, sig_addr, root);
  for (int d = 1; d < n; ++d) {
    Copy<Scope>(ptr(ctx, static_cast<char*>(dest), (me + d) % n), source, bytes);
  }
  if (dest != source) Copy<Scope>(dest, source, bytes);
  Scope::sync();
  for (int d = 1 + Scope::rank(); d < n; d += Scope::size()) {
    signal_set(ctx, sig_addr, (me + d) % n);
  }
  return true;
}

}  // namespace internal

// [9.9.1] Barrier of one scope of every rank: the thread, warp or block that calls it with this
// `sync`. Stores of these threads before it are visible to these threads of all ranks after it. It
// says nothing about a rank's other threads.
//
// `sync` is n_pes() signals that nothing else in this call uses, like the pSync of OpenSHMEM's
// collectives before teams. So several scopes of a rank can each have a barrier with their
// counterparts.
JFLUX_HD bool barrier_all(const Context& ctx, Signal* sync) {
  return internal::BarrierAll<Thread>(ctx, sync);
}
JFLUX_HD bool barrier_all_warp(const Context& ctx, Signal* sync) {
  return internal::BarrierAll<Warp>(ctx, sync);
}
JFLUX_HD bool barrier_all_block(const Context& ctx, Signal* sync) {
  return internal::BarrierAll<Block>(ctx, sync);
}

// [9.9.7] Copies `source` of rank `root`, anywhere in its memory, to the symmetric address `dest`
// on all ranks. Returns when the data is in this rank's `dest`, visible to the threads of this
// scope; other ranks may be later. Uses one signal. Ranks other than `root` ignore `source`.
JFLUX_HD bool broadcastmem(const Context& ctx, void* dest, const void* source, int64_t bytes,
                           Signal* sig_addr, int root) {
  return internal::Broadcast<Thread>(ctx, dest, source, bytes, sig_addr, root);
}
JFLUX_HD bool broadcastmem_warp(const Context& ctx, void* dest, const void* source, int64_t bytes,
                                Signal* sig_addr, int root) {
  return internal::Broadcast<Warp>(ctx, dest, source, bytes, sig_addr, root);
}
JFLUX_HD bool broadcastmem_block(const Context& ctx, void* dest, const void* source, int64_t bytes,
                                 Signal* sig_addr, int root) {
  return internal::Broadcast<Block>(ctx, dest, source, bytes, sig_addr, root);
}
template <typename T>
JFLUX_HD bool broadcast(const Context& ctx, T* dest, const T* source, int64_t nelems,
                        Signal* sig_addr, int root) {
  return broadcastmem(ctx, dest, source, nelems * sizeof(T), sig_addr, root);
}
template <typename T>
JFLUX_HD bool broadcast_warp(const Context& ctx, T* dest, const T* source, int64_t nelems,
                             Signal* sig_addr, int root) {
  return broadcastmem_warp(ctx, dest, source, nelems * sizeof(T), sig_addr, root);
}
template <typename T>
JFLUX_HD bool broadcast_block(const Context& ctx, T* dest, const T* source, int64_t nelems,
                              Signal* sig_addr, int root) {
  return broadcastmem_block(ctx, dest, source, nelems * sizeof(T), sig_addr, root);
}

// ---- What begins and ends every call ------------------------------------------------------------

namespace internal {

// Two halves suffice because in every call every rank hears from every peer
// (docs/internals/signals.md). So each rank sends each peer a hello when it starts,
// whatever else the kernel sends, and waits for the peers' hellos before it ends. One block per
// rank does this.
template <typename Scope>
JFLUX_HD void SendHellos(const Context& ctx) {
  const int me = my_pe(ctx), n = n_pes(ctx);
  for (int d = 1 + Scope::rank(); d < n; d += Scope::size()) {
    const int pe = (me + d) % n;
    StoreHello(ptr(ctx, ctx.hello(me), pe), ctx.SignalValue());
  }
}

// False if a hello that this thread waits for did not arrive.
template <typename Scope>
JFLUX_HD bool AwaitHellos(const Context& ctx) {
  const int me = my_pe(ctx), n = n_pes(ctx);
  bool ok = true;
  for (int d = 1 + Scope::rank(); d < n; d += Scope::size()) {
    ok &= Await(ctx, ctx.hello((me + d) % n), (me + d) % n, -1);
  }
  return ok;
}

// A call of a single thread, as on a host. False if a wait failed.
template <typename Body>
bool RunCall(const Context& ctx, Body&& body) {
  SendHellos<Thread>(ctx);
  return body(ctx) && AwaitHellos<Thread>(ctx);
}
template <typename Body>
bool RunCall(const SymmetricView& view, const WorkspaceLayout& layout, uint64_t epoch,
             uint32_t signature, const WaitContext& wait, Body&& body) {
  return RunCall(Context{view, layout, epoch, signature, wait, /*block=*/0,
                         /*blocks=*/1},
                 body);
}

}  // namespace internal
}  // namespace jflux::shmem

#endif  // JFLUX_SHMEM_H_
