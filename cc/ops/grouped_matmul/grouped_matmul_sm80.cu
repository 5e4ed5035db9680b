// Launches portable kernels of grouped_matmul and grouped_matmul_dw.
#include "ops/grouped_matmul/grouped_matmul_sm80.cuh"
#include "ops/grouped_matmul/local_device_cuda.h"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {
namespace {

constexpr FormatSet kOf16Bits = kGroupedFormats.operands & kFormats80;

}  // namespace

bool LoadGroupedMatmulKernels80(std::string* error) {
  return LoadGemmInstances80<GroupedMatmulKernels80, kOf16Bits>(error) &&
         ForFormats(kOf16Bits, [&](DType dtype) {
           return WithFormat<kOf16Bits>(dtype, [&](auto format) {
             using Config = GemmConfig80<CudaType<format()>, false, true>;
             return LoadKernel(GroupedMatmulDwKernels80::Kernel<Config>(), Config::kSmemBytes,
                               error);
           });
         });
}

bool LaunchGroupedMatmul80(const GroupedMatmulParams& p, const GroupedMatmulArrays& arrays,
                           cudaStream_t stream, std::string* error) {
  LocalDevice device;
  if (!FindLocalDevice(&device, error)) return false;
  GroupedMatmulArgs80 args = GroupedArgs80(p, /*group_m=*/8, arrays.w, arrays.y, arrays.sums);
  args.groups = device.Rows(kGroupedMatmulId, arrays.group_sizes, p.groups, p.m);
  args.row_scale = arrays.row_scale;
  for (int i = 0; i < 2; ++i) args.x[i] = arrays.x[i];
  return LaunchGemmInstance80<GroupedMatmulKernels80, kOf16Bits>(p.dtype, p.transpose_rhs, &args,
                                                                 device.sm_count, stream, error);
}

bool LaunchGroupedMatmulDw80(const GroupedMatmulDwParams& p, const GroupedMatmulDwArrays& arrays,
                             cudaStream_t stream, std::string* error) {
  LocalDevice device;
  if (!FindLocalDevice(&device, error)) return false;
  GroupedMatmulDwArgs80 args{};
  args.groups = device.Rows(kGroupedMatmulDwId, arrays.group_sizes, p.groups, p.m);
  args.tiles_k = static_cast<int32_t>(CeilDiv<int64_t>(p.k, kGemmTileM));
  args.tiles_n = static_cast<int32_t>(CeilDiv<int64_t>(p.n, kTileN80));
  args.group_m = 8;
  args.k = static_cast<int32_t>(p.k);
  args.n = static_cast<int32_t>(p.n);
  args.out_f32 = p.out_dtype == DType::kF32;
  args.x = arrays.x;
  args.dy = arrays.dy;
  args.dw = arrays.dw;
  return WithFormat<kOf16Bits>(p.dtype, [&](auto format) {
    using Config = GemmConfig80<CudaType<format()>, false, true>;
    return LaunchPortable<Config>(GroupedMatmulDwKernels80::Kernel<Config>(), &args,
                                  device.sm_count, stream, error);
  });
}

}  // namespace jflux
