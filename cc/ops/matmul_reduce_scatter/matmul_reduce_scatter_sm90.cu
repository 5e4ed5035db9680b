// Instantiates the kernels of matmul_reduce_scatter and launches one.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm90.cuh"

namespace jflux {
namespace {

struct Instances : MatmulReduceScatterKernels {
  static constexpr OpFormats kFormats = kMatmulReduceScatterFormats;
  static constexpr int kMostSplits = kReduceSplits;
  static constexpr bool kMayLendStage = false;
};

}  // namespace

bool LoadMatmulReduceScatterKernels(std::string* error) {
  const auto hopper = [](std::string* error) {
    return LoadGemmInstances<Instances>(error) && LoadMatmulReduceScatterWireKernels(error);
  };
  return LoadBothLoops(hopper, LoadMatmulReduceScatterKernels80, error);
}

bool LaunchMatmulReduceScatter(const MatmulReduceScatterParams& p,
                               const MatmulReduceScatterOperands& operands, const ProductPlan& plan,
                               int64_t site, const CudaDevice& device, const SymmetricView& view,
                               cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  if (choice.portable) {
    return LaunchMatmulReduceScatter80(p, operands, plan, site, device, view, stream, error);
  }
  if (p.wire) {
    return LaunchMatmulReduceScatterWire(p, operands, plan, site, device, view, stream, error);
  }
  MatmulReduceScatterArgs args{};
  if (!MakeScatterArgs(p, operands, choice, device, view, &args, error)) return false;
  args.senders = plan.senders;
  args.signature = SignatureOf(p.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kMatmulReduceScatterId);
  return LaunchGemmInstance<Instances>(p.dtype, p.transpose_rhs, choice, &args, args.num_tiles,
                                       device.sm_count, stream, error, operands.scales);
}

}  // namespace jflux
