// CUDA C++ for g++: keywords, built-in variables and functions, as the simulator has them. Included
// before a kernel's source, by the compiler's command line: it also replaces the functions of
// core/platform.h and core/atomic.h that wait or are atomic, and the scopes of jflux/scope.h.
#ifndef JFLUX_TESTS_CC_SIMT_KEYWORDS_H_
#define JFLUX_TESTS_CC_SIMT_KEYWORDS_H_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simt/collectives.h"
#include "simt/machine.h"

// ---- keywords and variables -------------------------------------------------------------------

#undef __device__
#undef __global__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__
#undef __align__
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ write_JFLUX_SHARED_instead
#define __align__(n) alignas(n)

// Set for each thread before it runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// ---- core/platform.h and core/atomic.h ----------------------------------------------------------

#define NowNs NowNsOfHost
#define Trap TrapOfHost
#define PollPause PollPauseOfHost
#include "core/platform.h"
#undef NowNs
#undef Trap
#undef PollPause

namespace jflux {
inline uint64_t NowNs() { return simt::ClockNs(); }
inline void Trap() { simt::Fail("the kernel traps"); }
inline void PollPause(uint32_t) { simt::Poll(); }
}  // namespace jflux

#define LoadAcquire LoadAcquireOfHost
#define LoadRelaxed LoadRelaxedOfHost
#define LoadRelaxed2 LoadRelaxed2OfHost
#define StoreRelease StoreReleaseOfHost
#define StoreRelaxed StoreRelaxedOfHost
#define StoreRelaxed2 StoreRelaxed2OfHost
#define StoreReleaseUnless StoreReleaseUnlessOfHost
#define AddRelaxed AddRelaxedOfHost
#define CompareExchange CompareExchangeOfHost
#include "core/atomic.h"
#undef LoadAcquire
#undef LoadRelaxed
#undef LoadRelaxed2
#undef StoreRelease
#undef StoreRelaxed
#undef StoreRelaxed2
#undef StoreReleaseUnless
#undef AddRelaxed
#undef CompareExchange

namespace jflux {

inline uint64_t LoadAcquire(const uint64_t* p) {
  simt::Look();
  return *p;
}
inline uint64_t LoadRelaxed(const uint64_t* p) {
  simt::Look();
  return *p;
}
inline void LoadRelaxed2(const uint64_t* p, uint64_t* a, uint64_t* b) {
  simt::Look();
  *a = p[0];
  *b = p[1];
}
inline void StoreRelaxed(uint64_t* p, uint64_t v) {
  simt::Point();
  *p = v;
}
inline void StoreRelease(uint64_t* p, uint64_t v) { StoreRelaxed(p, v); }
// Each word by itself, as the hardware may.
inline void StoreRelaxed2(uint64_t* p, uint64_t a, uint64_t b) {
  StoreRelaxed(p + 1, b);
  StoreRelaxed(p, a);
}
inline void StoreReleaseUnless(const uint64_t* stop, uint64_t* p, uint64_t v) {
  if (LoadRelaxed(stop) == 0) StoreRelaxed(p, v);
}
inline uint64_t AddRelaxed(uint64_t* p, uint64_t v) {
  simt::Point();
  const uint64_t seen = *p;
  *p = seen + v;
  return seen;
}
inline bool CompareExchange(uint64_t* p, uint64_t expected, uint64_t desired) {
  simt::Point();
  if (*p != expected) return false;
  *p = desired;
  return true;
}

}  // namespace jflux

// ---- jflux/scope.h ------------------------------------------------------------------------------

#define Warp WarpOfHost
#define Block BlockOfHost
#include "jflux/scope.h"
#undef Warp
#undef Block

namespace jflux::shmem {

struct Warp {
  static int rank() { return simt::current->lane; }
  static int size() { return 32; }
  static void sync() { __syncwarp(); }
  static bool all(bool ok) { return __all_sync(0xffffffff, ok) != 0; }
};

struct Block {
  static int rank() { return simt::current->index; }
  static int size() { return static_cast<int>(simt::current->cta->threads.size()); }
  static void sync() { simt::SyncThreads(); }
  static bool all(bool ok) { return simt::SyncThreads(simt::Combine::kAnd, ok) != 0; }
};

}  // namespace jflux::shmem

// A CTA's shared variable, and its dynamic shared memory (core/platform.h).
#define JFLUX_SHARED(Type, name)                                                             \
  static const char jflux_key_of_##name = 0;                                                 \
  auto& name = *static_cast<::jflux::SharedType<Type>*>(                                     \
      ::jflux::simt::SharedVariable(&jflux_key_of_##name, sizeof(::jflux::SharedType<Type>), \
                                    alignof(::jflux::SharedType<Type>)))
#define JFLUX_DYNAMIC_SHARED(Type, kAlign, name) \
  Type* name = static_cast<Type*>(::jflux::simt::DynamicShared(kAlign))

// ---- built-in functions -------------------------------------------------------------------------

inline void __syncthreads() { jflux::simt::SyncThreads(); }
inline int __syncthreads_and(int v) {
  return jflux::simt::SyncThreads(jflux::simt::Combine::kAnd, v);
}
inline int __syncthreads_or(int v) {
  return jflux::simt::SyncThreads(jflux::simt::Combine::kOr, v);
}
inline int __syncthreads_count(int v) {
  return jflux::simt::SyncThreads(jflux::simt::Combine::kCount, v);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { jflux::simt::Poll(); }
[[noreturn]] inline void __trap() { jflux::simt::Fail("the kernel traps"); }
inline uint32_t __cvta_generic_to_shared(const void* p) { return jflux::simt::AddressOf(p); }

inline unsigned __clusterRelativeBlockRank() {
  jflux::simt::Point();
  return jflux::simt::current->cta->rank;
}
inline unsigned __clusterSizeInBlocks() {
  return static_cast<unsigned>(jflux::simt::current->cta->cluster->ctas.size());
}
// A cluster's barrier: all of it happens in the wait.
inline void __cluster_barrier_arrive() { jflux::simt::Point(); }
inline void __cluster_barrier_wait() { jflux::simt::SyncCluster(); }
inline void* __cluster_map_shared_rank(const void* p, unsigned rank) {
  const auto* own = jflux::simt::current->cta;
  const auto* cta = own->cluster->ctas[rank].get();
  if (cta->ended) {
    jflux::simt::Fail("CTA %u, whose shared memory is read, has ended", cta->block.x);
  }
  return cta->smem + (static_cast<const char*>(p) - own->smem);
}
inline long long clock64() { return static_cast<long long>(jflux::simt::ClockNs()); }

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}

// One thread at a time runs, so these are atomic.
template <typename T, typename U>
T atomicAdd(T* p, U v) {
  jflux::simt::Point();
  const T seen = *p;
  *p = seen + static_cast<T>(v);
  return seen;
}
template <typename T, typename U>
T atomicExch(T* p, U v) {
  jflux::simt::Point();
  const T seen = *p;
  *p = static_cast<T>(v);
  return seen;
}
template <typename T, typename U, typename V>
T atomicCAS(T* p, U expected, V desired) {
  jflux::simt::Point();
  const T seen = *p;
  if (seen == static_cast<T>(expected)) *p = static_cast<T>(desired);
  return seen;
}
template <typename T, typename U>
T atomicMax(T* p, U v) {
  jflux::simt::Point();
  const T seen = *p;
  *p = std::max(seen, static_cast<T>(v));
  return seen;
}
template <typename T, typename U>
T atomicMin(T* p, U v) {
  jflux::simt::Point();
  const T seen = *p;
  *p = std::min(seen, static_cast<T>(v));
  return seen;
}
template <typename T, typename U>
T atomicOr(T* p, U v) {
  jflux::simt::Point();
  const T seen = *p;
  *p = seen | static_cast<T>(v);
  return seen;
}

inline int __popc(uint32_t v) { return __builtin_popcount(v); }
// Selectors without a sign.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<uint32_t>(bytes >> 8 * (selectors >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return out;
}
inline int __popcll(uint64_t v) { return __builtin_popcountll(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __clz(uint32_t v) { return v == 0 ? 32 : __builtin_clz(v); }
inline uint32_t __float_as_uint(float v) { return jflux::simt::BitsAs<uint32_t>(v); }
inline int __float_as_int(float v) { return jflux::simt::BitsAs<int>(v); }
inline float __uint_as_float(uint32_t v) { return jflux::simt::BitsAs<float>(v); }
inline float __int_as_float(int v) { return jflux::simt::BitsAs<float>(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float2int_rn(float v) {
  constexpr float kMost = 2147483520;  // the largest float that is an int
  return std::isnan(v) ? 0
                       : static_cast<int>(std::nearbyint(std::min(std::max(v, -0x1p31f), kMost)));
}
inline float __frcp_rn(float v) { return 1 / v; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float v) { return std::min(std::max(v, 0.0f), 1.0f); }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
#define __expf expf
#define __exp2f exp2f
#define __logf logf
#define __log2f log2f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
using std::isinf;
using std::isnan;
using std::max;
using std::min;

#endif  // JFLUX_TESTS_CC_SIMT_KEYWORDS_H_
