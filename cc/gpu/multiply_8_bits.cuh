// mma.sync of operands of 8 bits. tests/cc/simt/shadow has the simulator's.
#ifndef JFLUX_GPU_MULTIPLY_8_BITS_CUH_
#define JFLUX_GPU_MULTIPLY_8_BITS_CUH_

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace jflux::ptx {

// ptx::Multiply16x8 of 32 bytes of k. Sums of int8 are int32, in the registers of floats. float8
// takes code for kFloat8Arch; what an x of either type is multiplied by is e4m3.
#define JFLUX_MULTIPLY_16X8(C, TYPES, SUM)                                        \
  asm volatile("mma.sync.aligned.m16n8k32.row.col." TYPES                         \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : SUM(C[0]), SUM(C[1]), SUM(C[2]), SUM(C[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <typename T>
__device__ __forceinline__ void Multiply16x8Of8Bits(float (&c)[4], const uint32_t (&a)[4],
                                                    uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, int8_t>) {
    int32_t sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = __float_as_int(c[i]);
    JFLUX_MULTIPLY_16X8(sums, "s32.s8.s8.s32", "+r");
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = __int_as_float(sums[i]);
  } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
    JFLUX_MULTIPLY_16X8(c, "f32.e4m3.e4m3.f32", "+f");
  } else {
    static_assert(std::is_same_v<T, __nv_fp8_e5m2>);
    JFLUX_MULTIPLY_16X8(c, "f32.e5m2.e4m3.f32", "+f");
  }
}
#undef JFLUX_MULTIPLY_16X8

}  // namespace jflux::ptx

#endif  // JFLUX_GPU_MULTIPLY_8_BITS_CUH_
