// Kernels for float16, w [n, k].
#include "ops/all_gather_matmul/all_gather_matmul_instances.cuh"

namespace jflux {

template struct GemmFamily<AllGatherMatmulInstances, __half, true>;

}  // namespace jflux
