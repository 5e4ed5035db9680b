// Device primitives for kernels of one's own: OpenSHMEM's operations within one call, from one
// thread, a warp or a block. Numbers in brackets are sections of the OpenSHMEM 1.5 specification.
// docs/device_primitives.md has a table of them and an example.
//
//   call     A kernel works inside a call, between begin_call and end_call (jflux/kernel.cuh),
//            or is the body of a CPU handler (jflux/ffi.h). All ranks of a group make the same
//            calls in the same order. A Context is one call as one rank sees it, and the first
//            argument of every function here, as contexts are in OpenSHMEM [9.5].
//   memory   Each call has `data_bytes` of data and `num_signals` signal words in the symmetric
//            heap, at the same offsets on every rank: a *symmetric address* is the address of one's
//            own copy. What they hold at first is of no meaning. They are the call's alone: there
//            are two halves of everything, for calls of even and of odd epoch, and nobody is a
//            whole call ahead of anybody.
//   signal   One 64-bit word (core/signal.h). In a call it is set once or not at all, by one rank,
//            to the only value that it can have in this call: (epoch << 32 | signature). So nothing
//            is reset, a captured CUDA graph can be replayed as it is, and ranks that run different
//            calls find out. Who needs more steps takes more words.
//   order    A signal is stored with release at system scope and read with acquire. Whoever has
//            waited for it sees what the scope that set it had stored before, there and elsewhere,
//            with put or through ptr. That is the scope that waited, and no other thread of its
//            rank: others need a barrier of their block after it, or a signal of their own.
//            Stores of a block's other threads come before the release of the one that sets the
//            signal because a barrier (bar.sync) lies between: in the PTX memory model barriers
//            synchronise, and causality order is transitive, so that the release is cumulative over
//            them. No fence of their own is needed, on neither side.
//   time     Every wait has a deadline (jflux.init). Functions that wait return whether all came;
//            if not, the reason is recorded, this rank's other waits fail too, and the kernel has
//            to go to its end_call, which makes an error of it.
//   scopes   The suffix _warp or _block: all threads of the warp or block make the call, with the
//            same arguments. What the others of them have written to `source` needs a barrier
//            before. On a host a warp and a block are one thread.
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
  uint32_t epoch, signature;
  WaitContext wait;
  uint64_t timeout_ns;    // of a wait, from when it begins; 0: wait.deadline_ns is set already
  int32_t block, blocks;  // a kernel's block, in the order in which they begin, of so many

  // Symmetric addresses: byte `offset` of the call's data, and its signal `index`.
  template <typename T = char>
  JFLUX_HD T* data(int64_t offset = 0) const {
    return view.template At<T>(view.rank, layout.DataOffset(epoch) + offset);
  }
  JFLUX_HD Signal* signal(int64_t index = 0) const { return Word(kMaxRanks + index); }

  // What peers greet this rank with: the first words of the half.
  JFLUX_HD Signal* greeting(int pe) const { return Word(pe); }

  JFLUX_HD Signal SignalValue() const { return MakeSignal(epoch, signature); }

 private:
  JFLUX_HD Signal* Word(int64_t index) const {
    return view.template At<Signal>(view.rank, layout.SignalOffset(epoch)) + index;
  }
};

// The workspace that a call takes.
JFLUX_HD WorkspaceLayout WorkspaceFor(int64_t data_bytes, int64_t num_signals) {
  return WorkspaceLayout::For((kMaxRanks + num_signals) * static_cast<int64_t>(sizeof(Signal)),
                              data_bytes);
}

// ---- Who and where ------------------------------------------------------------------------------

// [9.1.2, 9.1.3] This rank's number in its group, and how many there are.
JFLUX_HD int my_pe(const Context& ctx) { return ctx.view.rank; }
JFLUX_HD int n_pes(const Context& ctx) { return ctx.view.world; }

// [9.1.8] Where rank `pe` has what this rank has at the symmetric address `dest`: for loads and
// stores, which are ordered as those of put are: a signal that this thread sets comes after them,
// so does one that its warp or block sets, and what else it stores only after a fence. Never null:
// every rank of a group can be reached.
template <typename T>
JFLUX_HD T* ptr(const Context& ctx, T* dest, int pe) {
  const auto offset = reinterpret_cast<const char*>(dest) - ctx.view.base[ctx.view.rank];
  return reinterpret_cast<T*>(ctx.view.base[pe] + offset);
}

// ---- Order --------------------------------------------------------------------------------------

// [9.11.1] What this thread has stored, with put or through ptr, comes before what it stores later,
// wherever that is: for flags of one's own. Signals and barriers need none: they come after all
// that the scope that calls them has stored. Other threads' stores are not this thread's: that
// takes a barrier of the warp or block between them and the fence.
JFLUX_HD void fence(const Context&) { FenceSystem(); }

// [9.11.2] What this thread has stored has arrived. Between peers' memories the same as a fence.
JFLUX_HD void quiet(const Context&) { FenceSystem(); }

// ---- Signals ------------------------------------------------------------------------------------

namespace internal {

template <typename Scope>
JFLUX_HD void SignalSet(const Context& ctx, Signal* sig_addr, int pe) {
  Scope::sync();
  if (Scope::rank() == 0) StoreRelease(ptr(ctx, sig_addr, pe), ctx.SignalValue());
}

}  // namespace internal

// [9.8.2, SHMEM_SIGNAL_SET; a function of its own in OpenSHMEM 1.6] Sets the signal of `pe`, after
// all that the threads of this scope have stored, anywhere, and what they know others to have
// stored.
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

// `word` is this rank's and `pe` sets it; `unit` is what a message calls it.
JFLUX_HD bool Await(const Context& ctx, const Signal* word, int pe, int64_t unit) {
  const Signal expected = ctx.SignalValue();
  if (Classify(LoadAcquire(word), expected) == SignalState::kReady) return true;
  WaitContext wait = ctx.wait;  // reading the clock takes long: only if it has not come yet
  if (ctx.timeout_ns != 0) wait.deadline_ns = NowNs() + ctx.timeout_ns;
  return WaitSignal(word, expected, pe, unit, wait);
}

JFLUX_HD bool AwaitSignal(const Context& ctx, const Signal* sig_addr, int pe) {
  return Await(ctx, sig_addr, pe, sig_addr - ctx.signal());
}

template <typename Scope>
JFLUX_HD bool SignalWait(const Context& ctx, const Signal* sig_addr, int pe) {
  return Scope::all(Scope::rank() != 0 || AwaitSignal(ctx, sig_addr, pe));
}

}  // namespace internal

// [9.10.15] Waits until `pe` has set this rank's signal in this call. OpenSHMEM's comparison is
// left out, since there is one value to wait for; `pe` is for the message if it does not come.
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
  Scope::sync();  // `source` may be used again, and a signal of any thread comes after the data
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

// [9.6.1.1] Copies `source`, anywhere in this rank's memory, to the symmetric address `dest` of
// `pe`, and returns when `source` may be used again. Says nothing to `pe`: that takes a signal.
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

// [9.6.1.4] Copies the symmetric address `source` of `pe` to `dest`, anywhere in this rank's
// memory, and returns when it is there. That `pe` has written it is for a signal to say, before.
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

// [9.8.3] putmem or put, then signal_set: whoever has waited for the signal sees the data. (And
// what the scope has put before, which OpenSHMEM does not promise.)
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

// Between any two places in this rank's memory that do not overlap; not of OpenSHMEM.
JFLUX_HD void copymem_block(const Context&, void* dest, const void* source, int64_t bytes) {
  internal::Copy<Block>(dest, source, bytes);
  Block::sync();
}

// ---- All ranks ----------------------------------------------------------------------------------

namespace internal {

template <typename Scope>
JFLUX_HD bool BarrierAll(const Context& ctx, Signal* sync) {
  const int me = my_pe(ctx), n = n_pes(ctx);
  Scope::sync();  // what other threads have put comes before the signal of whoever sets it
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

// [9.9.1] Waits until this scope of every rank is here: the thread, warp or block that calls with
// this `sync`. What these threads have stored before is then seen by these threads of all ranks. It
// says nothing of a rank's other threads: neither whether they are here, nor what they have stored
// or will see. `sync` are n_pes() signals that nothing else in this call uses, as OpenSHMEM's
// collectives had a pSync before there were teams: several scopes of a rank can each have a barrier
// with those of its peers.
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
// of all ranks, and returns when it is in this rank's, for the threads of this scope to see. That
// it is in another's, only that one knows. One signal; the others read no `source`.
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

// Two halves are enough because in every call every rank hears from every peer
// (docs/design/0002-signals-and-epochs.md). So each rank greets each peer when it begins, whatever
// the kernel sends and to whom, and waits for their greetings before it ends, when they have long
// come. Of a rank, one block does it.
template <typename Scope>
JFLUX_HD void Greet(const Context& ctx) {
  const int me = my_pe(ctx), n = n_pes(ctx);
  for (int d = 1 + Scope::rank(); d < n; d += Scope::size()) {
    const int pe = (me + d) % n;
    StoreGreeting(ptr(ctx, ctx.greeting(me), pe), ctx.SignalValue());
  }
}

// False if one did not come to this thread.
template <typename Scope>
JFLUX_HD bool AwaitGreetings(const Context& ctx) {
  const int me = my_pe(ctx), n = n_pes(ctx);
  bool ok = true;
  for (int d = 1 + Scope::rank(); d < n; d += Scope::size()) {
    ok &= Await(ctx, ctx.greeting((me + d) % n), (me + d) % n, -1);
  }
  return ok;
}

// A call of one thread, as a host has it. False if a wait failed.
template <typename Body>
bool RunCall(const Context& ctx, Body&& body) {
  Greet<Thread>(ctx);
  return body(ctx) && AwaitGreetings<Thread>(ctx);
}
template <typename Body>
bool RunCall(const SymmetricView& view, const WorkspaceLayout& layout, uint32_t epoch,
             uint32_t signature, const WaitContext& wait, Body&& body) {
  return RunCall(Context{view, layout, epoch, signature, wait, /*timeout_ns=*/0, /*block=*/0,
                         /*blocks=*/1},
                 body);
}

}  // namespace internal
}  // namespace jflux::shmem

#endif  // JFLUX_SHMEM_H_
