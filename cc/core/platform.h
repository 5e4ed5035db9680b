// What differs between the compilers that build cc/core: g++ and clang++ for the CPU back end and
// the tests, nvcc for host and device code. Only this header and atomic.h may ask which it is.
//
// This, atomic.h, signal.h and layout.h are also installed, under the headers for kernel authors
// (jflux/shmem.h). They name each other by their place, so that no path of the user's comes first.
#ifndef JFLUX_CORE_PLATFORM_H_
#define JFLUX_CORE_PLATFORM_H_

#include <cstdint>

#if defined(__CUDACC__)
#define JFLUX_HD __host__ __device__ __forceinline__
#else
#define JFLUX_HD inline
#endif

// Before a loop over an array that a GPU should keep in registers; before one that it should not
// copy.
#if defined(__CUDA_ARCH__)
#define JFLUX_UNROLL _Pragma("unroll")
#define JFLUX_NO_UNROLL _Pragma("unroll 1")
#else
#define JFLUX_UNROLL
#define JFLUX_NO_UNROLL
#endif

#if !defined(__CUDA_ARCH__)
#include <chrono>
#include <thread>
#endif

namespace jflux {

inline constexpr int kMaxRanks = 8;

// Nanoseconds of a clock that only moves forward; the two sides' clocks are never compared.
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

// One idle turn of a polling loop.
JFLUX_HD void PollPause(uint32_t turn) {
#if defined(__CUDA_ARCH__)
  if (turn > 64) __nanosleep(turn > 4096 ? 500 : 40);
#else
  if (turn < 16) return;
  if (turn < 1024) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
#endif
}

// a / b and a % b for numbers of rows and tiles: not negative, and below 2^31 on a GPU, which has
// no 64-bit division (it would be a call, with more registers than some roles of a kernel have).
JFLUX_HD constexpr int64_t Quotient(int64_t a, int64_t b) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
#else
  return a / b;
#endif
}
JFLUX_HD constexpr int64_t Remainder(int64_t a, int64_t b) { return a - Quotient(a, b) * b; }

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
