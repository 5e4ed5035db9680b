// The portable kernels of matmul for float8.
#include "ops/matmul/matmul_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

JFLUX_FLOAT8_INSTANCES(MatmulKernels80);
