// mma.sync of operands of 8 bits, in the simulator.
#ifndef JFLUX_TESTS_CC_SIMT_SHADOW_GPU_MULTIPLY_8_BITS_CUH_
#define JFLUX_TESTS_CC_SIMT_SHADOW_GPU_MULTIPLY_8_BITS_CUH_

#include "simt/warp_matrix.h"

namespace jflux::ptx {

template <typename T>
void Multiply16x8Of8Bits(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  simt::Multiply16x8Of8Bits<T>(c, a, b0, b1);
}

}  // namespace jflux::ptx

#endif  // JFLUX_TESTS_CC_SIMT_SHADOW_GPU_MULTIPLY_8_BITS_CUH_
