// Atomic loads and stores, at system scope but for AddReleaseLocal. On a GPU they order memory
// across NVLink peers and the host; on a CPU across threads and across processes that share the
// page.
#ifndef JFLUX_CORE_ATOMIC_H_
#define JFLUX_CORE_ATOMIC_H_

#include <cstdint>

#include "platform.h"

namespace jflux {

JFLUX_HD uint64_t LoadAcquire(const uint64_t* p) {
#if defined(__CUDA_ARCH__)
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
#else
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
#endif
}

JFLUX_HD void StoreRelease(uint64_t* p, uint64_t v) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#else
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
#endif
}

JFLUX_HD uint64_t LoadRelaxed(const uint64_t* p) {
#if defined(__CUDA_ARCH__)
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
#else
  return __atomic_load_n(p, __ATOMIC_RELAXED);
#endif
}

// Two adjacent words, 16-byte aligned. Each word is stored atomically; the two are not ordered.
JFLUX_HD void StoreRelaxed2(uint64_t* p, uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
#else
  __atomic_store_n(p, a, __ATOMIC_RELAXED);
  __atomic_store_n(p + 1, b, __ATOMIC_RELAXED);
#endif
}

JFLUX_HD void LoadRelaxed2(const uint64_t* p, uint64_t* a, uint64_t* b) {
#if defined(__CUDA_ARCH__)
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(*a), "=l"(*b)
               : "l"(p)
               : "memory");
#else
  *a = __atomic_load_n(p, __ATOMIC_RELAXED);
  *b = __atomic_load_n(p + 1, __ATOMIC_RELAXED);
#endif
}

JFLUX_HD void StoreRelaxed(uint64_t* p, uint64_t v) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#else
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
#endif
}

// Release at GPU scope: for readers among this rank's own threads.
JFLUX_HD void AddReleaseLocal(uint64_t* p, uint64_t v) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#else
  __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
#endif
}

// Returns the value before the addition.
JFLUX_HD uint64_t AddRelaxed(uint64_t* p, uint64_t v) {
#if defined(__CUDA_ARCH__)
  uint64_t seen;
  asm volatile("atom.relaxed.sys.global.add.u64 %0, [%1], %2;"
               : "=l"(seen)
               : "l"(p), "l"(v)
               : "memory");
  return seen;
#else
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
#endif
}

// Sets bits of a word that one block's threads share and no other thread sees: shared memory on a
// GPU, where the block's next barrier orders it; plain memory of one thread on a host.
JFLUX_HD void OrInBlock(uint32_t* p, uint32_t bits) {
#if defined(__CUDA_ARCH__)
  atomicOr(p, bits);
#else
  *p |= bits;
#endif
}

// True for the one caller that changed `expected` to `desired`.
JFLUX_HD bool CompareExchange(uint64_t* p, uint64_t expected, uint64_t desired) {
#if defined(__CUDA_ARCH__)
  uint64_t seen;
  asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(seen)
               : "l"(p), "l"(expected), "l"(desired)
               : "memory");
  return seen == expected;
#else
  return __atomic_compare_exchange_n(p, &expected, desired, /*weak=*/false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE);
#endif
}

// Orders everything that this thread has stored, and every store of others that it has observed,
// before its later stores.
JFLUX_HD void FenceSystem() {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
#elif !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not model fences
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// Release fence: whoever acquires a later relaxed store of this thread sees its earlier stores. One
// fence for several signals costs less than a StoreRelease for each.
JFLUX_HD void FenceRelease() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#elif !defined(__SANITIZE_THREAD__)
  __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

// StoreRelease, unless `stop` is set. On a GPU the load of `stop` takes no time: it completes while
// the fence waits for this thread's earlier stores.
JFLUX_HD void StoreReleaseUnless(const uint64_t* stop, uint64_t* p, uint64_t v) {
  const bool stopped = LoadRelaxed(stop) != 0;
#if defined(__CUDA_ARCH__)
  FenceRelease();
  if (!stopped) StoreRelaxed(p, v);
#else
  if (!stopped) StoreRelease(p, v);
#endif
}

}  // namespace jflux

#endif  // JFLUX_CORE_ATOMIC_H_
