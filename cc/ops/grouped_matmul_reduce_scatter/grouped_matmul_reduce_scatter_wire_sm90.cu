// Instantiates the kernels of grouped_matmul_reduce_scatter with a quantised wire and launches one.
#include "ops/grouped_matmul/grouped_matmul_instances_cuda.h"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter_sm90.cuh"

namespace jflux {
namespace {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1) GroupedMatmulReduceScatterWireKernel(
    const __grid_constant__ GroupedMatmulReduceScatterArgs args) {
  RunGemm<GroupedMatmulReduceScatterSm90<Config, /*kWire=*/true>>(args);
}

struct Kernels {
  template <typename Config>
  static constexpr int kSmemBytes = Config::kSmemBytes;
  template <typename Config>
  static const void* Kernel() {
    if constexpr (Config::kTileN == kWireTile.tile_n) {
      return reinterpret_cast<const void*>(&GroupedMatmulReduceScatterWireKernel<Config>);
    } else {
      return nullptr;
    }
  }
};

}  // namespace

bool LoadGroupedMatmulReduceScatterWireKernels(std::string* error) {
  return LoadForward<Kernels>(error);
}

bool LaunchGroupedMatmulReduceScatterWire(const GroupedMatmulParams& p, const GemmChoice& choice,
                                          GroupedMatmulReduceScatterArgs* args, int sms,
                                          cudaStream_t stream, std::string* error) {
  LaunchGrouped<Kernels> launch{choice, args, /*most_tiles=*/sms, sms, stream, error};
  return ForForwardConfigs(p.dtype, p.transpose_rhs, launch) && !launch.failed;
}

}  // namespace jflux
