// Launches a portable kernel of all_gather_grouped_matmul.
#include "ops/all_gather_grouped_matmul/all_gather_grouped_matmul_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {
namespace {

constexpr FormatSet kOf16Bits = kGroupedFormats.operands & kFormats80;
constexpr int kMostTableBytes = 4 * (kMostSpans + 1);

}  // namespace

bool LoadAllGatherGroupedMatmulKernels80(std::string* error) {
  return LoadGemmInstances80<AllGatherGroupedMatmulKernels80, kOf16Bits>(error, kMostTableBytes);
}

bool LaunchAllGatherGroupedMatmul80(const AllGatherGroupedMatmulParams& params,
                                    const AllGatherGroupedMatmulArrays& arrays,
                                    const GemmChoice& choice, int32_t senders, int64_t site,
                                    const CudaDevice& device, const SymmetricView& view,
                                    cudaStream_t stream, std::string* error) {
  const GroupedMatmulParams& p = params.product;
  AllGatherGroupedMatmulArgs80 args{
      GroupedArgs80(p, choice.group_m, arrays.w, arrays.y, arrays.sums)};
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
  const int table_bytes = 4 * (args.groups.groups * args.order.Segments() + 1);
  return LaunchGemmInstance80<AllGatherGroupedMatmulKernels80, kOf16Bits>(
      p.dtype, p.transpose_rhs, &args, device.sm_count, stream, error, table_bytes);
}

}  // namespace jflux
