// Launches a portable kernel of all_to_all_matmul.
#include "ops/all_to_all_matmul/all_to_all_matmul_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {
namespace {

constexpr FormatSet kOf16Bits = kAllToAllMatmulFormats.operands & kFormats80;

}  // namespace

bool LoadAllToAllMatmulKernels80(std::string* error) {
  return LoadGemmInstances80<AllToAllMatmulKernels80, kOf16Bits>(error);
}

bool LaunchAllToAllMatmul80(const AllToAllMatmulParams& p, const AllToAllMatmulArrays& arrays,
                            const ProductPlan& plan, int64_t site, const CudaDevice& device,
                            const SymmetricView& view, cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  AllToAllMatmulArgs80 args{device.state, view, p};
  args.order = TileOrderOf(p, choice, device.sm_count);
  args.num_tiles = args.order.Total();
  args.terms = p.concat_rows ? 1 : p.rows.world;
  args.signature = SignatureOf(p.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kAllToAllMatmulId);
  args.senders = plan.senders;
  args.panels = CudaLayoutOf(p);
  args.workspace = args.panels.Workspace();
  args.send_order = ShardSendOrder::Make(args.panels, args.order.group_m, p.concat_rows);
  args.x = arrays.x;
  args.w = arrays.w;
  args.y = arrays.y;
  args.gathered = arrays.gathered;
  return LaunchGemmInstance80<AllToAllMatmulKernels80, kOf16Bits>(p.dtype, p.transpose_rhs, &args,
                                                                  device.sm_count, stream, error);
}

}  // namespace jflux
