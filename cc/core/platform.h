// The differences between the compilers that build cc/core: g++ and clang++ for the CPU back end
// and the tests, nvcc for host and device code. Only this header and atomic.h test which compiler
// runs.
//
// This header, atomic.h, signal.h and layout.h are installed below the headers for kernel authors
// (jflux/shmem.h). They include each other by relative path, so that the user's include path cannot
// shadow them.
#ifndef JFLUX_CORE_PLATFORM_H_
#define JFLUX_CORE_PLATFORM_H_

#include <cstdint>

#if defined(__CUDACC__)
#define JFLUX_HD __host__ __device__ __forceinline__
#else
#define JFLUX_HD inline
#endif

// JFLUX_UNROLL: before a loop over an array that a GPU should keep in registers. JFLUX_NO_UNROLL:
// before a loop that nvcc should not unroll.
#if defined(__CUDA_ARCH__)
#define JFLUX_UNROLL _Pragma("unroll")
#define JFLUX_NO_UNROLL _Pragma("unroll 1")
#else
#define JFLUX_UNROLL
#define JFLUX_NO_UNROLL
#endif

// A variable in a CTA's shared memory, and a kernel's dynamic shared memory as an array of T. They
// are macros so that tests/cc/simt, which compiles kernels for a CPU, can define them.
// clang-format off
#if defined(__CUDACC__)
#define JFLUX_SHARED(T, name) __shared__ ::jflux::SharedType<T> name
#define JFLUX_DYNAMIC_SHARED(T, kAlign, name) extern __shared__ __align__(kAlign) T name[]
#endif
// clang-format on

#if !defined(__CUDA_ARCH__)
#include <chrono>
#include <thread>
#endif

namespace jflux {

inline constexpr int kMaxRanks = 8;

// Names a type such as float[4] by one word, as a macro's argument needs it.
template <typename T>
using SharedType = T;

// Monotonic nanoseconds. Host and device clocks are never compared.
JFLUX_HD uint64_t NowNs() {
#if defined(__CUDA_ARCH__)
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
#else
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
#endif
}

// Ends the process or the kernel: for what cannot be, where going on would corrupt memory.
JFLUX_HD void Trap() {
#if defined(__CUDA_ARCH__)
  __trap();
#else
  __builtin_trap();
#endif
}

// Back-off of a polling loop after its attempt number `attempt`.
JFLUX_HD void PollPause(uint32_t attempt) {
#if defined(__CUDA_ARCH__)
  if (attempt > 64) __nanosleep(attempt > 4096 ? 500 : 40);
#else
  if (attempt < 16) return;
  if (attempt < 1024) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
#endif
}

// a / b and a % b for counts of rows and tiles: non-negative, and on a GPU below 2^31. GPUs have no
// 64-bit division instruction; the call that emulates it needs more registers than the producer
// warps have.
JFLUX_HD constexpr int64_t Quotient(int64_t a, int64_t b) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
#else
  return a / b;
#endif
}
JFLUX_HD constexpr int64_t Remainder(int64_t a, int64_t b) { return a - Quotient(a, b) * b; }

// How many bits are set.
JFLUX_HD int32_t PopCount(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

template <typename T>
JFLUX_HD constexpr T CeilDiv(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
JFLUX_HD constexpr T RoundUp(T a, T b) {
  return CeilDiv(a, b) * b;
}

template <typename T>
JFLUX_HD constexpr T Min(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
JFLUX_HD constexpr T Max(T a, T b) {
  return a > b ? a : b;
}

}  // namespace jflux

#endif  // JFLUX_CORE_PLATFORM_H_
