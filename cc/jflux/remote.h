// RemoteRef: a place in a peer's memory that a kernel reaches in one of two ways: by stores, where
// the memory is mapped, or by NVSHMEM, where it is on another node.
//
//   memory   In the workspaces of the symmetric heap (core/layout.h). NVSHMEM names a place of a
//            peer by this device's address with the same offset in NVSHMEM's heap, and by the
//            peer's number.
//   order    put_signal sets the signal after the bytes that it has put: whoever has waited for the
//            signal sees them. A later wait by NVSHMEM is not needed where memory is mapped; where
//            it is not, await_arrival makes bytes that a network card has written visible.
//   source   Where NVSHMEM reaches the peer, `source` must lie in NVSHMEM's heap too: a network
//            card reads it. It may be overwritten when the peer is known to have the signal.
//   opt-in   The functions use NVSHMEM's device API where JFLUX_WITH_NVSHMEM is defined before the
//            header is included; such code is compiled with -rdc=true and linked with
//            libnvshmem_device.a. Without it all references must be mapped.
#ifndef JFLUX_REMOTE_H_
#define JFLUX_REMOTE_H_

#include <cstdint>

#include "../core/atomic.h"
#include "../core/signal.h"
#include "scope.h"

#if defined(JFLUX_WITH_NVSHMEM)
#include <nvshmem.h>
#include <nvshmemx.h>

#include <type_traits>
#endif

namespace jflux::shmem {

struct RemoteRef {
  static constexpr int32_t kMapped = -1;

  char* address;         // of the peer's memory if it is mapped; else this device's symmetric one
  int32_t pe = kMapped;  // NVSHMEM's number of the peer

  JFLUX_HD bool is_mapped() const { return pe == kMapped; }
  JFLUX_HD RemoteRef At(int64_t offset) const { return RemoteRef{address + offset, pe}; }
};

namespace internal {

// A reference that this code was not compiled for.
JFLUX_HD void NoTransport() {
#if defined(__CUDA_ARCH__)
  __trap();
#else
  __builtin_trap();
#endif
}

}  // namespace internal

// Sets the signal at `to`, which announces no data. One thread calls it.
JFLUX_HD void signal_set(RemoteRef to, Signal value) {
  if (to.is_mapped()) {
    StoreRelease(reinterpret_cast<Signal*>(to.address), value);
    return;
  }
#if defined(JFLUX_WITH_NVSHMEM) && defined(__CUDA_ARCH__)
  nvshmemx_signal_op(reinterpret_cast<Signal*>(to.address), value, NVSHMEM_SIGNAL_SET, to.pe);
#else
  internal::NoTransport();
#endif
}

// Puts `bytes` bytes and then sets the signal, which is on the same peer. All threads of the scope
// call it; what they have written to `source` is sent. Returns before the bytes have arrived.
template <typename Scope>
JFLUX_HD void put_signal(RemoteRef dest, const char* source, int64_t bytes, RemoteRef signal,
                         Signal value) {
  if (dest.is_mapped()) {
    Scope::sync();
    internal::Copy<Scope>(dest.address, source, bytes);
    Scope::sync();
    if (Scope::rank() == 0) StoreRelease(reinterpret_cast<Signal*>(signal.address), value);
    return;
  }
#if defined(JFLUX_WITH_NVSHMEM) && defined(__CUDA_ARCH__)
  // A network card, or the thread of the host that drives it, reads what the threads have written.
  __threadfence_system();
  Scope::sync();
  auto* word = reinterpret_cast<Signal*>(signal.address);
  const auto size = static_cast<size_t>(bytes);
  if constexpr (std::is_same_v<Scope, Block>) {
    nvshmemx_putmem_signal_nbi_block(dest.address, source, size, word, value, NVSHMEM_SIGNAL_SET,
                                     dest.pe);
  } else if constexpr (std::is_same_v<Scope, Warp>) {
    nvshmemx_putmem_signal_nbi_warp(dest.address, source, size, word, value, NVSHMEM_SIGNAL_SET,
                                    dest.pe);
  } else {
    nvshmem_putmem_signal_nbi(dest.address, source, size, word, value, NVSHMEM_SIGNAL_SET, dest.pe);
  }
#else
  internal::NoTransport();
#endif
}

// After a wait for `word` has seen `value` there: makes the bytes that it announces visible to this
// thread. `from` is any reference to the peer that has sent them.
JFLUX_HD void await_arrival(RemoteRef from, Signal* word, Signal value) {
  if (from.is_mapped()) return;
#if defined(JFLUX_WITH_NVSHMEM) && defined(__CUDA_ARCH__)
  nvshmem_signal_wait_until(word, NVSHMEM_CMP_EQ, value);  // returns at once
#else
  (void)word;
  (void)value;
  internal::NoTransport();
#endif
}

}  // namespace jflux::shmem

#endif  // JFLUX_REMOTE_H_
