// Kernels for float16, w [k, n].
#include "ops/all_gather_matmul/all_gather_matmul_instances.cuh"

namespace jflux {

template struct GemmFamily<AllGatherMatmulInstances, __half, false>;

}  // namespace jflux
