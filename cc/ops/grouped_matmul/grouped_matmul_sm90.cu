// Instantiates the kernels of grouped_matmul and launches one.
#include "ops/grouped_matmul/grouped_matmul_instances_cuda.h"
#include "ops/grouped_matmul/grouped_matmul_sm90.cuh"
#include "runtime/heap_cuda.h"

namespace jflux {
namespace {

struct Kernels : GroupedMatmulKernels {
  template <typename Config>
  static constexpr int kSmemBytes = Config::kSmemBytes;
};

}  // namespace

bool LoadGroupedMatmulKernels(std::string* error) {
  const auto hopper = [](std::string* e) {
    return LoadForward<Kernels>(e) && LoadGroupedMatmulDwKernels(e);
  };
  return LoadBothLoops(hopper, LoadGroupedMatmulKernels80, error);
}

bool FindLocalDevice(LocalDevice* device, std::string* error, bool (*load)(std::string*)) {
  int ordinal = 0;
  JFLUX_CUDA_OR_FALSE(cudaGetDevice(&ordinal), error);
  JFLUX_CUDA_OR_FALSE(
      cudaDeviceGetAttribute(&device->sm_count, cudaDevAttrMultiProcessorCount, ordinal), error);
  if (const auto heap = CurrentHeapCuda()) {
    if (const CudaDevice* found = heap->DeviceOf(ordinal)) device->state = found->state;
  }
  return LoadOnce(load, error);
}

std::string WhyNoGroupedMatmulKernel(const GroupedMatmulParams& p) {
  return WhyNoGroupedKernel(p.m, p.k, p.n, p.groups, p.dtype, p.out_dtype, p.transpose_rhs, p.gated,
                            p.tile, p.portable);
}

bool SetGroupedArgs(const GroupedMatmulParams& p, const GemmChoice& choice,
                    const void* const (&w)[2], void* y, void* const (&sums)[2],
                    GroupedMatmulArgs* args, std::string* error) {
  const int columns = choice.tile_n / p.Weights();  // of y in a tile
  args->tiles = GroupTiles{kGemmTileM * choice.cluster_m,
                           static_cast<int32_t>(CeilDiv<int64_t>(p.n, columns)), choice.group_m};
  args->k = static_cast<int32_t>(p.k);
  args->n = static_cast<int32_t>(p.n);
  args->gated = p.gated;
  args->fill = p.fill;
  args->terms = p.terms;
  args->out_f32 = p.out_dtype == DType::kF32;
  args->activation = p.activation;
  args->y_data = y;
  const auto encode_result = [&](CUtensorMap* map, void* data) {
    return args->out_f32 || data == nullptr ||
           EncodeTensorMap(map, p.out_dtype, data, {p.m, p.n}, {p.n}, {64, 64}, error);
  };
  if (!encode_result(&args->y, y)) return false;
  for (int i = 0; i < p.Operands(); ++i) {
    void* const sum = i < p.Weights() ? sums[i] : nullptr;
    args->sums_data[i] = sum;
    // Boxes of the shape in which LoadB (gpu/gemm_operands_sm90.cuh) loads w.
    const int share = p.gated ? 2 : choice.cluster_m, block = BlockElements(p.dtype);
    const bool encoded =
        p.transpose_rhs
            ? EncodeTensorMap(&args->w[i], p.dtype, w[i], {p.groups, p.n, p.k}, {p.n * p.k, p.k},
                              {1, choice.tile_n / share, block}, error)
            : EncodeTensorMap(&args->w[i], p.dtype, w[i], {p.groups, p.k, p.n}, {p.k * p.n, p.n},
                              {1, block / choice.cluster_m, block}, error);
    if (!encoded || !encode_result(&args->sums[i], sum)) return false;
  }
  return true;
}

bool SetGroupedRows(const GroupedMatmulParams& p, const void* const (&x)[2],
                    GroupedMatmulArgs* args, std::string* error) {
  args->box_rows = GroupedBoxRows(p);
  args->box_bytes = args->box_rows * kBlockBytes;
  for (int term = 0; term < p.terms; ++term) {
    if (!EncodeTensorMap(&args->x[term], p.dtype, x[term], {p.m, p.k}, {p.k},
                         {args->box_rows, BlockElements(p.dtype)}, error)) {
      return false;
    }
  }
  return true;
}

bool LaunchGroupedMatmul(const GroupedMatmulParams& p, const GroupedMatmulArrays& arrays,
                         cudaStream_t stream, std::string* error) {
  if (p.portable) return LaunchGroupedMatmul80(p, arrays, stream, error);
  LocalDevice device;
  if (!FindLocalDevice(&device, error)) return false;
  const GemmChoice choice = ChooseGrouped(p, Machine{device.sm_count});
  GroupedMatmulArgs args{};
  if (!SetGroupedArgs(p, choice, arrays.w, arrays.y, arrays.sums, &args, error) ||
      !SetGroupedRows(p, arrays.x, &args, error)) {
    return false;
  }
  args.groups = device.Rows(kGroupedMatmulId, arrays.group_sizes, p.groups, p.m);
  args.row_scale = arrays.row_scale;
  LaunchGrouped<Kernels> launch{choice,          &args,  MostTilesOf(p, args.tiles),
                                device.sm_count, stream, error};
  return ForForwardConfigs(p.dtype, p.transpose_rhs, launch) && !launch.failed;
}

}  // namespace jflux
