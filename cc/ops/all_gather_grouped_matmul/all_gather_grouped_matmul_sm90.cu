// Instantiates the kernels of all_gather_grouped_matmul and launches one.
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul.h"
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_sm90.cuh"
#include "ops/grouped_matmul/grouped_matmul_instances_cuda.h"

namespace jflux {
namespace {

struct Kernels {
  template <typename Config>
  static const void* Kernel() {
    return reinterpret_cast<const void*>(&AllGatherGroupedMatmulKernel<GatherConfig<Config>>);
  }
  template <typename Config>
  static constexpr int kSmemBytes = GatherConfig<Config>::kSmemBytes;
};

}  // namespace

bool LoadAllGatherGroupedMatmulKernels(std::string* error) {
  return LoadBothLoops(LoadForward<Kernels>, LoadAllGatherGroupedMatmulKernels80, error);
}

bool LaunchAllGatherGroupedMatmul(const AllGatherGroupedMatmulParams& params,
                                  const AllGatherGroupedMatmulArrays& arrays,
                                  const GemmChoice& choice, int32_t senders, int64_t site,
                                  const CudaDevice& device, const SymmetricView& view,
                                  cudaStream_t stream, std::string* error) {
  if (choice.portable) {
    return LaunchAllGatherGroupedMatmul80(params, arrays, choice, senders, site, device, view,
                                          stream, error);
  }
  const GroupedMatmulParams& p = params.product;
  AllGatherGroupedMatmulArgs args{};
  if (!SetGroupedArgs(p, choice, arrays.w, arrays.y, arrays.sums, &args, error)) return false;
  args.groups = GroupedRows{nullptr, static_cast<int32_t>(p.groups), static_cast<int32_t>(p.m),
                            device.state, static_cast<uint32_t>(kAllGatherGroupedMatmulId)};
  args.state = device.state;
  args.view = view;
  args.signature = SignatureOf(params.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kAllGatherGroupedMatmulId);
  args.layout = CudaLayoutOf(params);
  args.workspace = args.layout.Workspace();
  args.order = GatheredTiles{{args.tiles, view.world, view.rank, params.parts}};
  args.senders = senders;
  args.tokens = static_cast<int32_t>(params.tokens);
  args.choices = params.choices;
  args.offsets = arrays.offsets;
  args.source = arrays.source;
  args.x_data = static_cast<const char*>(arrays.x);
  // Among peers all CTAs are of use: they send.
  const int sms = Min(device.sm_count, kMostSms);
  const int64_t most_tiles = view.world > 1 ? sms : MostTilesOf(p, args.tiles);
  LaunchGrouped<Kernels> launch{choice, &args, most_tiles, sms, stream, error};
  return ForForwardConfigs(p.dtype, p.transpose_rhs, launch) && !launch.failed;
}

}  // namespace jflux
