// Launches a portable kernel of grouped_matmul_scaled: grouped_matmul's, of operands of 8 bits.
#include "ops/grouped_matmul/grouped_matmul_sm80.cuh"
#include "ops/grouped_matmul/local_device_cuda.h"
#include "ops/grouped_matmul_scaled/grouped_matmul_scaled.h"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {

JFLUX_FLOAT8_APART(GroupedMatmulKernels80);

bool LoadGroupedMatmulScaledKernels80(std::string* error) {
  return LoadGemmInstances80<GroupedMatmulKernels80, kGroupedScaledFormats.operands>(error);
}

bool LaunchGroupedMatmulScaled80(const GroupedMatmulParams& p, const GroupedMatmulArrays& arrays,
                                 cudaStream_t stream, std::string* error) {
  LocalDevice device;
  if (!FindLocalDevice(&device, error, LoadGroupedMatmulScaledKernels)) return false;
  GroupedMatmulArgs80 args = GroupedArgs80(p, /*group_m=*/8, arrays.w, arrays.y, arrays.sums);
  args.groups = device.Rows(kGroupedMatmulScaledId, arrays.group_sizes, p.groups, p.m);
  args.row_scale = arrays.row_scale;
  args.x[0] = arrays.x[0];
  args.x_scale = arrays.x_scale;
  for (int i = 0; i < p.Weights(); ++i) args.w_scale[i] = arrays.w_scale[i];
  return LaunchGemmInstance80<GroupedMatmulKernels80, kGroupedScaledFormats.operands>(
      p.dtype, /*transpose_rhs=*/true, &args, device.sm_count, stream, error);
}

}  // namespace jflux
