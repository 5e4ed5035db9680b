// Shared-memory buffers through which one lane copies staged boxes from a workspace to y: bulk
// loads in, TMA stores out. They use the memory that Send uses in other ops.
#ifndef JFLUX_GPU_BOX_BUFFERS_CUH_
#define JFLUX_GPU_BOX_BUFFERS_CUH_

#include <cstdint>

#include "gpu/epilogue_sm90.cuh"
#include "gpu/gemm_smem.cuh"
#include "gpu/ptx.cuh"

namespace jflux {

// kCount boxes, as many as fit.
template <typename Config>
struct BoxBuffers {
  using Box = Staged<Config::kTileN>;
  static constexpr int kCount = Config::kSendBoxes * Config::kSendBoxBytes / Box::kBoxBytes;
  static_assert(1 < kCount && kCount <= Config::kSendBoxes && Config::kSendOffset % 1024 == 0);
  GemmSmem<Config> smem;
  uint32_t parities = 0;  // one bit per box

  __device__ uint32_t At(int i) const { return smem.SendBox(0) + i * Box::kBoxBytes; }
  __device__ void Load(int i, const char* from, int bytes) {
    ptx::MbarrierArriveExpectTx(smem.SendBoxFull(i), bytes);
    ptx::BulkLoad(At(i), from, bytes, smem.SendBoxFull(i));
  }
  __device__ uint32_t Await(int i) {
    ptx::MbarrierWait(smem.SendBoxFull(i), (parities >> i) & 1);
    parities ^= 1u << i;
    return At(i);
  }
};

}  // namespace jflux

#endif  // JFLUX_GPU_BOX_BUFFERS_CUH_
