// Launches a portable kernel of matmul.
#include "ops/matmul/matmul.h"
#include "ops/matmul/matmul_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {

JFLUX_FLOAT8_APART(MatmulKernels80);

bool LoadMatmulKernels80(std::string* error) {
  return LoadGemmInstances80<MatmulKernels80, kMatmulFormats.operands>(error);
}

bool LaunchMatmul80(const AllGatherMatmulParams& p, const AllGatherMatmulOperands& operands,
                    const GemmChoice& choice, int sm_count, cudaStream_t stream,
                    std::string* error) {
  if (!LoadOnce(LoadMatmulKernels80, error)) return false;
  MatmulArgs80 args{};
  SymmetricView view{};
  view.world = 1;
  SetProductArgs80(p, operands, choice, sm_count, view, &args);
  return LaunchGemmInstance80<MatmulKernels80, kMatmulFormats.operands>(
      p.dtype, /*transpose_rhs=*/true, &args, sm_count, stream, error);
}

}  // namespace jflux
