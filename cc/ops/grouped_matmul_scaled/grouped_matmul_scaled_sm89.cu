// The portable kernels of grouped_matmul_scaled for float8.
#include "ops/grouped_matmul/grouped_matmul_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

JFLUX_FLOAT8_INSTANCES(GroupedMatmulKernels80);
