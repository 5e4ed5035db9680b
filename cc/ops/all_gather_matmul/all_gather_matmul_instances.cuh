// The kernels of all_gather_matmul. They take as long to compile as the kernels of three other ops
// together, so each type and layout has a file, all_gather_matmul_*_sm90.cu.
#ifndef JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_INSTANCES_CUH_
#define JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_INSTANCES_CUH_

#include "ops/all_gather_matmul/all_gather_matmul_sm90.cuh"
#include "runtime/gemm_instances_cuda.h"

namespace jflux {

struct AllGatherMatmulInstances {
  static constexpr int kMostSplits = kGatherSplits;
  // Results go to this GPU's memory, which takes them at once.
  static constexpr bool kMayLendStage = true;
  template <typename Config>
  static const void* Kernel() {
    return reinterpret_cast<const void*>(&AllGatherMatmulKernel<Config>);
  }
};

extern template struct GemmFamily<AllGatherMatmulInstances, __half, false>;
extern template struct GemmFamily<AllGatherMatmulInstances, __half, true>;
extern template struct GemmFamily<AllGatherMatmulInstances, __nv_bfloat16, false>;
extern template struct GemmFamily<AllGatherMatmulInstances, __nv_bfloat16, true>;

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_GATHER_MATMUL_ALL_GATHER_MATMUL_INSTANCES_CUH_
