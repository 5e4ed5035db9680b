// Launchers of the portable main loop (gpu/gemm_sm80.cuh) that no test here calls: plans for Hopper
// never take them. Those of other ops are linked.
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/matmul/matmul.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

bool NotSimulated(std::string* error) {
  *error = "not linked into this test";
  return false;
}

}  // namespace

bool RunsFloat8Code() { return false; }

bool LoadAllGatherMatmulKernels80(std::string*) { return true; }
bool LoadMatmulKernels80(std::string*) { return true; }
bool LoadGroupedMatmulKernels80(std::string*) { return true; }

bool LaunchAllGatherMatmul80(const AllGatherMatmulParams&, const AllGatherMatmulOperands&,
                             const ProductPlan&, int64_t, const CudaDevice&, const SymmetricView&,
                             cudaStream_t, std::string* error) {
  return NotSimulated(error);
}
bool LaunchMatmul80(const AllGatherMatmulParams&, const AllGatherMatmulOperands&, const GemmChoice&,
                    int, cudaStream_t, std::string* error) {
  return NotSimulated(error);
}
bool LaunchGroupedMatmul80(const GroupedMatmulParams&, const GroupedMatmulArrays&, cudaStream_t,
                           std::string* error) {
  return NotSimulated(error);
}
bool LaunchGroupedMatmulDw80(const GroupedMatmulDwParams&, const GroupedMatmulDwArrays&,
                             cudaStream_t, std::string* error) {
  return NotSimulated(error);
}

}  // namespace jflux
