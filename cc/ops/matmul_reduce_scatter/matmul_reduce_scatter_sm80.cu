// Launches a portable kernel of matmul_reduce_scatter.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {

JFLUX_FLOAT8_APART(MatmulReduceScatterKernels80);
JFLUX_FLOAT8_APART(MatmulReduceScatterWireKernels80);

bool LoadMatmulReduceScatterKernels80(std::string* error) {
  return LoadGemmInstances80<MatmulReduceScatterKernels80, kScaledProduct80>(error) &&
         LoadGemmInstances80<MatmulReduceScatterWireKernels80, kScatteredInWire80>(error);
}

bool LaunchMatmulReduceScatter80(const MatmulReduceScatterParams& p,
                                 const MatmulReduceScatterOperands& operands,
                                 const ProductPlan& plan, int64_t site, const CudaDevice& device,
                                 const SymmetricView& view, cudaStream_t stream,
                                 std::string* error) {
  MatmulReduceScatterArgs80 args = ScatterArgs80(p, operands, plan.choice, device, view);
  args.signature = SignatureOf(p.Signature(), site, plan.choice);
  args.op = static_cast<uint32_t>(kMatmulReduceScatterId);
  if (p.wire) {
    return LaunchGemmInstance80<MatmulReduceScatterWireKernels80, kScatteredInWire80>(
        p.dtype, p.transpose_rhs, &args, device.sm_count, stream, error);
  }
  return LaunchGemmInstance80<MatmulReduceScatterKernels80, kScaledProduct80>(
      p.dtype, p.transpose_rhs, &args, device.sm_count, stream, error);
}

}  // namespace jflux
