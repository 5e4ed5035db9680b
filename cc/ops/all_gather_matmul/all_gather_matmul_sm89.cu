// The portable kernels of all_gather_matmul for float8.
#include "ops/all_gather_matmul/all_gather_matmul_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

JFLUX_FLOAT8_INSTANCES(AllGatherMatmulKernels80);
