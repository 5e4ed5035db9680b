// Launches a portable kernel of matmul_all_to_all.
#include "ops/matmul_all_to_all/matmul_all_to_all_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {
namespace {

constexpr FormatSet kOf16Bits = kMatmulAllToAllFormats.operands & kFormats80;

}  // namespace

bool LoadMatmulAllToAllKernels80(std::string* error) {
  return LoadGemmInstances80<MatmulAllToAllKernels80, kOf16Bits>(error);
}

bool LaunchMatmulAllToAll80(const MatmulAllToAllParams& p, const MatmulAllToAllArrays& arrays,
                            const ProductPlan& plan, int64_t site, const CudaDevice& device,
                            const SymmetricView& view, cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  MatmulAllToAllArgs80 args{device.state, view, {}, CudaLayoutOf(p, choice), p};
  args.workspace = args.layout.Workspace();
  args.grid = ShardGridOf(p, choice, device.sm_count);
  args.signature = SignatureOf(p.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kMatmulAllToAllId);
  args.x = arrays.x;
  args.w = arrays.w;
  args.y = arrays.y;
  return LaunchGemmInstance80<MatmulAllToAllKernels80, kOf16Bits>(p.dtype, p.transpose_rhs, &args,
                                                                  device.sm_count, stream, error);
}

}  // namespace jflux
