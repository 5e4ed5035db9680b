// Copies of vectors of 16 bytes by a warp, through registers: in portable kernels, between arrays
// and workspaces.
#ifndef JFLUX_GPU_COPY_VECTORS_CUH_
#define JFLUX_GPU_COPY_VECTORS_CUH_

#include <cstdint>

#include "gpu/chunk_sender.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// Copies vectors 0 .. count - 1, a few of each lane at a time: from(e) -> address, or null for
// zeros; to(e) -> address, or null. Called by a full warp. All of `v` is set: what is not would
// hold its registers through a main loop that the copies follow.
template <typename From, typename To>
__device__ __forceinline__ void CopyVectors(int count, From&& from, To&& to) {
  constexpr int kBatch = 8;
  const int lane = threadIdx.x % 32;
  for (int at = lane; at < count; at += 32 * kBatch) {
    uint4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int e = at + 32 * i;
      const void* p = e < count ? static_cast<const void*>(from(e)) : nullptr;
      v[i] = p != nullptr ? ptx::LoadGlobal16(p) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int e = at + 32 * i;
      void* p = e < count ? static_cast<void*>(to(e)) : nullptr;
      if (p != nullptr) ptx::StoreGlobal16(p, v[i]);
    }
  }
}

// Whether this CTA is among the first to ask for sending. Called by all threads.
template <typename Args>
__device__ bool CtaMaySend(const Args& args) {
  JFLUX_SHARED(bool, sends);
  if (threadIdx.x < 32) sends = MaySend(args);
  __syncthreads();
  return sends;
}

// Signals what this warp has stored.
__device__ __forceinline__ void SignalStored(Signal* signal, Signal value) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    FenceRelease();
    StoreRelaxed(signal, value);
  }
}

}  // namespace jflux

#endif  // JFLUX_GPU_COPY_VECTORS_CUH_
