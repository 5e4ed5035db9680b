// Instantiates the kernels of grouped_matmul_dw and launches one.
#include "ops/grouped_matmul/grouped_matmul_dw_sm90.cuh"
#include "ops/grouped_matmul/grouped_matmul_instances_cuda.h"

namespace jflux {
namespace {

struct Kernels : GroupedMatmulDwKernels {
  template <typename Config>
  static constexpr int kSmemBytes = Config::kSmemBytes;
};

template <typename F>
bool ForConfigs(DType dtype, F&& visit) {
  return WithFormat<kGroupedFormats.operands>(
      dtype, [&](auto format) { return ForGroupedConfigs<CudaType<format>, false, true>(visit); });
}

}  // namespace

bool LoadGroupedMatmulDwKernels(std::string* error) {
  LoadGrouped<Kernels> load{error};
  return ForFormats(kGroupedFormats.operands,
                    [&](DType dtype) { return !ForConfigs(dtype, load); });
}

std::string WhyNoGroupedMatmulDwKernel(const GroupedMatmulDwParams& p) {
  return WhyNoGroupedKernel(p.m, p.k, p.n, p.groups, p.dtype, p.out_dtype, /*k_major=*/false,
                            /*gated=*/false, p.tile, p.portable);
}

bool LaunchGroupedMatmulDw(const GroupedMatmulDwParams& p, const GroupedMatmulDwArrays& arrays,
                           cudaStream_t stream, std::string* error) {
  if (p.portable) return LaunchGroupedMatmulDw80(p, arrays, stream, error);
  LocalDevice device;
  if (!FindLocalDevice(&device, error)) return false;
  const GemmChoice choice = ChooseGroupedDw(p, Machine{device.sm_count});
  GroupedMatmulDwArgs args{};
  args.groups = device.Rows(kGroupedMatmulDwId, arrays.group_sizes, p.groups, p.m);
  SetGroupedDwArgs(p, choice, &args);
  args.dw_data = arrays.dw;
  // Rows past M are zeros: ZeroTail overwrites them anyway.
  const int block = BlockElements(p.dtype);
  if (!EncodeTensorMap(&args.x, p.dtype, arrays.x, {p.m, p.k}, {p.k}, {block, block}, error) ||
      !EncodeTensorMap(&args.dy, p.dtype, arrays.dy, {p.m, p.n}, {p.n},
                       {block / choice.cluster_m, block}, error)) {
    return false;
  }
  if (!args.out_f32 && !EncodeTensorMap(&args.dw, p.dtype, arrays.dw, {p.groups, p.k, p.n},
                                        {p.k * p.n, p.n}, {1, 64, 64}, error)) {
    return false;
  }
  const int64_t most_tiles = p.groups * args.tiles_k * args.tiles_n;
  LaunchGrouped<Kernels> launch{choice, &args, most_tiles, device.sm_count, stream, error};
  return ForConfigs(p.dtype, launch) && !launch.failed;
}

}  // namespace jflux
