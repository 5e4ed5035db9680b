// Kernels for bfloat16, w [k, n].
#include "ops/all_gather_matmul/all_gather_matmul_sm90.cuh"

namespace jflux {

template struct GemmFamily<AllGatherMatmulInstances, __nv_bfloat16, false>;

}  // namespace jflux
