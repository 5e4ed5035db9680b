// The portable kernels of matmul_reduce_scatter for float8.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

JFLUX_FLOAT8_INSTANCES(MatmulReduceScatterKernels80);
JFLUX_FLOAT8_INSTANCES(MatmulReduceScatterWireKernels80);
