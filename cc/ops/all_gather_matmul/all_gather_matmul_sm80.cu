// Launches a portable kernel of all_gather_matmul.
#include "ops/all_gather_matmul/all_gather_matmul_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {

JFLUX_FLOAT8_APART(AllGatherMatmulKernels80);

bool LoadAllGatherMatmulKernels80(std::string* error) {
  return LoadGemmInstances80<AllGatherMatmulKernels80, kScaledProduct80>(error);
}

bool LaunchAllGatherMatmul80(const AllGatherMatmulParams& p,
                             const AllGatherMatmulOperands& operands, const ProductPlan& plan,
                             int64_t site, const CudaDevice& device, const SymmetricView& view,
                             cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  AllGatherMatmulArgs80 args{};
  args.state = device.state;
  args.layout = CudaLayoutOf(p);
  args.workspace = CudaWorkspaceOf(p, operands.scales);
  SetProductArgs80(p, operands, choice, device.sm_count, view, &args);
  args.send_group = p.rows.Total() <= kGemmTileM ? 0 : choice.group_m;
  args.senders = plan.senders;
  args.signature = SignatureOf(p.Signature(operands.scales), site, choice);
  args.op = static_cast<uint32_t>(kAllGatherMatmulId);
  return LaunchGemmInstance80<AllGatherMatmulKernels80, kScaledProduct80>(
      p.dtype, p.transpose_rhs, &args, device.sm_count, stream, error);
}

}  // namespace jflux
