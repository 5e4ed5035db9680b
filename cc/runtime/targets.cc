#include "runtime/targets.h"

#include "runtime/ffi.h"

namespace jflux {

const Target* Targets() {
  static const Target kTargets[] = {
      {"jflux_all_gather_matmul", "cpu", InstantiateCallSite, AllGatherMatmulCpuHandler},
      {"jflux_matmul_reduce_scatter", "cpu", InstantiateCallSite, MatmulReduceScatterCpuHandler},
      {"jflux_matmul_all_to_all", "cpu", InstantiateCallSite, MatmulAllToAllCpuHandler},
      {"jflux_matmul_all_reduce", "cpu", InstantiateCallSite, MatmulAllReduceCpuHandler},
      {"jflux_all_reduce", "cpu", InstantiateCallSite, AllReduceCpuHandler},
      {"jflux_all_gather", "cpu", InstantiateCallSite, AllGatherCpuHandler},
      {"jflux_all_to_all", "cpu", InstantiateCallSite, AllToAllCpuHandler},
      {"jflux_reduce_scatter", "cpu", InstantiateCallSite, ReduceScatterCpuHandler},
#ifdef JFLUX_WITH_CUDA
      {"jflux_all_gather_matmul", "CUDA", nullptr, AllGatherMatmulCudaHandler},
      {"jflux_matmul_reduce_scatter", "CUDA", nullptr, MatmulReduceScatterCudaHandler},
      {"jflux_matmul_all_to_all", "CUDA", nullptr, MatmulAllToAllCudaHandler},
      {"jflux_matmul_all_reduce", "CUDA", nullptr, MatmulAllReduceCudaHandler},
      {"jflux_all_reduce", "CUDA", nullptr, AllReduceCudaHandler},
      {"jflux_all_gather", "CUDA", nullptr, AllGatherCudaHandler},
      {"jflux_all_to_all", "CUDA", nullptr, AllToAllCudaHandler},
      {"jflux_reduce_scatter", "CUDA", nullptr, ReduceScatterCudaHandler},
#endif
      {nullptr, nullptr, nullptr, nullptr},
  };
  return kTargets;
}

}  // namespace jflux
