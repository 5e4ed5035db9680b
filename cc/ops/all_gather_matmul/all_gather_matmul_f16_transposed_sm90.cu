// Kernels for float16, w [n, k].
#include "ops/all_gather_matmul/all_gather_matmul_sm90.cuh"

namespace jflux {

template struct GemmFamily<AllGatherMatmulInstances, __half, true>;

}  // namespace jflux
