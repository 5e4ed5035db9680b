// Instantiates the kernels of matmul_reduce_scatter and launches one.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_args.h"

namespace jflux {
namespace {

struct Instances {
  static constexpr int kMostSplits = kReduceSplits;
  static constexpr bool kMayLend = false;
  template <typename Config>
  static const void* Kernel() {
    return reinterpret_cast<const void*>(&MatmulReduceScatterKernel<Config>);
  }
};

}  // namespace

bool LoadMatmulReduceScatterKernels(std::string* error) {
  return LoadGemmInstances<Instances>(error);
}

bool LaunchMatmulReduceScatter(const MatmulReduceScatterParams& p,
                               const MatmulReduceScatterOperands& operands,
                               const GemmChoice& choice, int64_t site, const CudaDevice& device,
                               const SymmetricView& view, cudaStream_t stream, std::string* error) {
  MatmulReduceScatterArgs args{};
  if (!MakeScatterArgs(p, operands, choice, device, view, &args, error)) return false;
  // In one raster group, or one wave, peers wait for the parts of the last tiles, which nothing
  // hides.
  const bool hides = choice.group_m != 0 && !IsOneWave(choice, args.num_tiles, device.sm_count);
  args.senders = hides ? SendingStorers(p.k, args.out_f32 ? 2 : 1, device.sm_count) : 0;
  args.signature = SignatureOf(p.Signature(), site, choice);
  args.op = static_cast<uint32_t>(OpId::kMatmulReduceScatter);
  return LaunchGemmInstance<Instances>(p.dtype, p.transpose_rhs, choice, &args, args.num_tiles,
                                       device.sm_count, stream, error);
}

}  // namespace jflux
