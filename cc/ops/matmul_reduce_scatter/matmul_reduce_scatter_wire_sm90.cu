// Instantiates the kernels of matmul_reduce_scatter with a quantised wire and launches one.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm90.cuh"

namespace jflux {
namespace {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    MatmulReduceScatterWireKernel(const __grid_constant__ MatmulReduceScatterArgs args) {
  RunGemm<MatmulReduceScatterSm90<Config, /*kWire=*/true>>(args);
}

struct Instances {
  static constexpr OpFormats kFormats = kMatmulReduceScatterWireFormats;
  static constexpr int kMostSplits = 1;
  static constexpr bool kMayLendStage = false;

  template <typename Config>
  static const void* Kernel() {
    constexpr GemmChoice kOnly = ForWire({}, Config::kScales);
    if constexpr (Config::kTileN == kOnly.tile_n && Config::kClusterM == kOnly.cluster_m) {
      return reinterpret_cast<const void*>(&MatmulReduceScatterWireKernel<Config>);
    } else {
      return nullptr;
    }
  }
};

}  // namespace

bool LoadMatmulReduceScatterWireKernels(std::string* error) {
  return LoadGemmInstances<Instances>(error);
}

bool LaunchMatmulReduceScatterWire(const MatmulReduceScatterParams& p,
                                   const MatmulReduceScatterOperands& operands,
                                   const ProductPlan& plan, int64_t site, const CudaDevice& device,
                                   const SymmetricView& view, cudaStream_t stream,
                                   std::string* error) {
  MatmulReduceScatterArgs args{};
  if (!MakeScatterArgs(p, operands, plan.choice, device, view, &args, error)) return false;
  args.senders = plan.senders;
  args.signature = SignatureOf(p.Signature(), site, plan.choice);
  args.op = static_cast<uint32_t>(kMatmulReduceScatterId);
  return LaunchGemmInstance<Instances>(p.dtype, p.transpose_rhs, plan.choice, &args, args.num_tiles,
                                       device.sm_count, stream, error, operands.scales);
}

}  // namespace jflux
