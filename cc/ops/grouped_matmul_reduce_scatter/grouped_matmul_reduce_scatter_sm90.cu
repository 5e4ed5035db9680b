// Instantiates the kernels of grouped_matmul_reduce_scatter and launches one.
#include "ops/grouped_matmul/grouped_matmul_instances_cuda.h"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter.h"
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter_sm90.cuh"

namespace jflux {
namespace {

struct Kernels : GroupedMatmulReduceScatterKernels {
  template <typename Config>
  static constexpr int kSmemBytes = Config::kSmemBytes;
};

}  // namespace

bool LoadGroupedMatmulReduceScatterKernels(std::string* error) {
  const auto hoppers = [](std::string* error) {
    return LoadForward<Kernels>(error) && LoadGroupedMatmulReduceScatterWireKernels(error);
  };
  return LoadBothLoops(hoppers, LoadGroupedMatmulReduceScatterKernels80, error);
}

bool LaunchGroupedMatmulReduceScatter(const GroupedMatmulReduceScatterParams& params,
                                      const GroupedMatmulReduceScatterArrays& arrays,
                                      const GemmChoice& choice, int64_t site,
                                      const CudaDevice& device, const SymmetricView& view,
                                      cudaStream_t stream, std::string* error) {
  if (choice.portable) {
    return LaunchGroupedMatmulReduceScatter80(params, arrays, choice, site, device, view, stream,
                                              error);
  }
  const GroupedMatmulParams& p = params.product;
  const void* const w[2] = {arrays.w, nullptr};
  void* const no_sums[2] = {nullptr, nullptr};
  GroupedMatmulReduceScatterArgs args{};
  if (!SetGroupedArgs(p, choice, w, arrays.y, no_sums, &args, error) ||
      !SetGroupedRows(p, {arrays.h, nullptr}, &args, error)) {
    return false;
  }
  args.groups = GroupedRows{nullptr, static_cast<int32_t>(p.groups), static_cast<int32_t>(p.m),
                            device.state, static_cast<uint32_t>(kGroupedMatmulReduceScatterId)};
  args.state = device.state;
  args.view = view;
  args.signature = SignatureOf(params.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kGroupedMatmulReduceScatterId);
  args.layout = SumLayout::Make(params);
  args.workspace = args.layout.Workspace();
  args.order = ScatteredTiles{{args.tiles, view.world, view.rank, params.parts}};
  args.items = params.Items(view.rank);
  args.tokens = static_cast<int32_t>(params.tokens);
  args.choices = params.choices;
  args.offsets = arrays.offsets;
  args.destination = arrays.destination;
  args.source = arrays.source;
  args.weights = static_cast<const float*>(arrays.weights);
  args.out = static_cast<char*>(arrays.out);
  // All CTAs are of use, however few tiles there are: they sum.
  const int sms = Min(device.sm_count, kMostSms);
  if (params.wire) {
    args.wire = *params.wire;
    return LaunchGroupedMatmulReduceScatterWire(p, choice, &args, sms, stream, error);
  }
  LaunchGrouped<Kernels> launch{choice, &args, /*most_tiles=*/sms, sms, stream, error};
  return ForForwardConfigs(p.dtype, p.transpose_rhs, launch) && !launch.failed;
}

}  // namespace jflux
