// The launchers of the portable main loop (gpu/gemm_sm80.cuh), which the simulator does not run:
// plans for Hopper never take them.
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/all_to_all_matmul/all_to_all_matmul.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/kernels_cuda.h"

namespace jflux {
namespace {

bool NotSimulated(std::string* error) {
  *error = "the simulator has no mma.sync";
  return false;
}

}  // namespace

bool RunsFloat8Code() { return false; }

bool LoadAllGatherMatmulKernels80(std::string*) { return true; }
bool LoadMatmulKernels80(std::string*) { return true; }
bool LoadMatmulReduceScatterKernels80(std::string*) { return true; }
bool LoadGroupedMatmulKernels80(std::string*) { return true; }
bool LoadMatmulAllReduceKernels80(std::string*) { return true; }
bool LoadMatmulAllToAllKernels80(std::string*) { return true; }
bool LoadAllToAllMatmulKernels80(std::string*) { return true; }
bool LoadAllGatherGroupedMatmulKernels80(std::string*) { return true; }
bool LoadGroupedMatmulReduceScatterKernels80(std::string*) { return true; }

bool LaunchAllGatherMatmul80(const AllGatherMatmulParams&, const AllGatherMatmulOperands&,
                             const ProductPlan&, int64_t, const CudaDevice&, const SymmetricView&,
                             cudaStream_t, std::string* error) {
  return NotSimulated(error);
}
bool LaunchMatmul80(const AllGatherMatmulParams&, const AllGatherMatmulOperands&, const GemmChoice&,
                    int, cudaStream_t, std::string* error) {
  return NotSimulated(error);
}
bool LaunchMatmulReduceScatter80(const MatmulReduceScatterParams&,
                                 const MatmulReduceScatterOperands&, const ProductPlan&, int64_t,
                                 const CudaDevice&, const SymmetricView&, cudaStream_t,
                                 std::string* error) {
  return NotSimulated(error);
}
bool LaunchMatmulAllReduce80(const MatmulAllReduceParams&, const MatmulAllReduceArrays&,
                             const ProductPlan&, int64_t, const CudaDevice&, const SymmetricView&,
                             cudaStream_t, std::string* error) {
  return NotSimulated(error);
}
bool LaunchMatmulAllToAll80(const MatmulAllToAllParams&, const MatmulAllToAllArrays&,
                            const ProductPlan&, int64_t, const CudaDevice&, const SymmetricView&,
                            cudaStream_t, std::string* error) {
  return NotSimulated(error);
}
bool LaunchAllToAllMatmul80(const AllToAllMatmulParams&, const AllToAllMatmulArrays&,
                            const ProductPlan&, int64_t, const CudaDevice&, const SymmetricView&,
                            cudaStream_t, std::string* error) {
  return NotSimulated(error);
}
bool LaunchAllGatherGroupedMatmul80(const AllGatherGroupedMatmulParams&,
                                    const AllGatherGroupedMatmulArrays&, const GemmChoice&, int32_t,
                                    int64_t, const CudaDevice&, const SymmetricView&, cudaStream_t,
                                    std::string* error) {
  return NotSimulated(error);
}
bool LaunchGroupedMatmulReduceScatter80(const GroupedMatmulReduceScatterParams&,
                                        const GroupedMatmulReduceScatterArrays&, const GemmChoice&,
                                        int64_t, const CudaDevice&, const SymmetricView&,
                                        cudaStream_t, std::string* error) {
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
