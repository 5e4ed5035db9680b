// gpu/wgmma.cuh, in the simulator.
#ifndef JFLUX_GPU_WGMMA_CUH_
#define JFLUX_GPU_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "simt/wgmma_unit.h"

namespace jflux::wgmma {

inline uint64_t Descriptor(uint32_t smem, uint32_t leading_bytes, uint32_t stride_bytes) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) |
         (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
         (static_cast<uint64_t>(stride_bytes >> 4) << 32) | (1ull << 62);
}

inline void Fence() { simt::WgmmaFence(); }
inline void Commit() { simt::WgmmaCommit(); }
template <int kGroups>
void Wait() {
  simt::WgmmaWait(kGroups);
}
template <typename Sum, int kCount>
void Pin(Sum (&)[kCount]) {}

template <typename T>
constexpr simt::WgmmaType TypeOf() {
  return std::is_same_v<T, __half>          ? simt::WgmmaType::kHalf
         : std::is_same_v<T, __nv_bfloat16> ? simt::WgmmaType::kBfloat16
         : std::is_same_v<T, __nv_fp8_e5m2> ? simt::WgmmaType::kE5m2
         : std::is_same_v<T, int8_t>        ? simt::WgmmaType::kS8
                                            : simt::WgmmaType::kE4m3;
}

// A by descriptor.
template <int kTransA, int kTransB, typename T, typename Sum, int kCount>
void Multiply(const T*, Sum (&d)[kCount], uint64_t a, uint64_t b, bool adds) {
  static_assert(sizeof(T) > 1 || (kTransA == 0 && kTransB == 0));
  static_assert(std::is_same_v<T, int8_t> == std::is_same_v<Sum, int32_t>);
  simt::WgmmaIssue({2 * kCount, TypeOf<T>(), kTransA != 0, kTransB != 0,
                    /*a_in_registers=*/false, adds, a, b},
                   d, nullptr);
}
// A from registers.
template <int kTransB, typename T, int kCount>
void Multiply(const T*, float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool adds) {
  simt::WgmmaIssue({2 * kCount, TypeOf<T>(), false, kTransB != 0,
                    /*a_in_registers=*/true, adds, 0, b},
                   d, a);
}

}  // namespace jflux::wgmma

#endif  // JFLUX_GPU_WGMMA_CUH_
