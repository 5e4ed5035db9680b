// A place in a ring of buffers that are announced by mbarriers.
#ifndef JFLUX_GPU_RING_CUH_
#define JFLUX_GPU_RING_CUH_

#include <cstdint>

namespace jflux {

// A ring index and the mbarrier parity of its current round.
template <int kSize>
struct Ring {
  int index = 0;
  uint32_t parity = 0;
  __device__ void Advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
  __device__ void Skip(int count) {
    index += count;
    parity ^= index / kSize & 1;
    index %= kSize;
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_RING_CUH_
