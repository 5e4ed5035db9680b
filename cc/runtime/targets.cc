#include "runtime/targets.h"

#include "runtime/ffi.h"

namespace jflux {

const Target* Targets() {
  static const Target kTargets[] = {
      {"jflux_all_gather_matmul", "cpu", InstantiateCallSite, AllGatherMatmulCpuHandler},
      {"jflux_matmul_reduce_scatter", "cpu", InstantiateCallSite, MatmulReduceScatterCpuHandler},
#ifdef JFLUX_WITH_CUDA
      {"jflux_all_gather_matmul", "CUDA", nullptr, AllGatherMatmulCudaHandler},
      {"jflux_matmul_reduce_scatter", "CUDA", nullptr, MatmulReduceScatterCudaHandler},
#endif
      {nullptr, nullptr, nullptr, nullptr},
  };
  return kTargets;
}

}  // namespace jflux
