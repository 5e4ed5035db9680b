// Launches a portable kernel of grouped_matmul_reduce_scatter.
#include "ops/grouped_matmul_reduce_scatter/grouped_matmul_reduce_scatter_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {
namespace {

constexpr FormatSet kOf16Bits = kGroupedFormats.operands & kFormats80;
constexpr int kMostTableBytes = 4 * (kMostSpans + 1 + kMostTileClasses);

}  // namespace

bool LoadGroupedMatmulReduceScatterKernels80(std::string* error) {
  return LoadGemmInstances80<GroupedMatmulReduceScatterKernels80, kOf16Bits>(error,
                                                                             kMostTableBytes);
}

bool LaunchGroupedMatmulReduceScatter80(const GroupedMatmulReduceScatterParams& params,
                                        const GroupedMatmulReduceScatterArrays& arrays,
                                        const GemmChoice& choice, int64_t site,
                                        const CudaDevice& device, const SymmetricView& view,
                                        cudaStream_t stream, std::string* error) {
  const GroupedMatmulParams& p = params.product;
  const void* const w[2] = {arrays.w, nullptr};
  void* const no_sums[2] = {nullptr, nullptr};
  GroupedMatmulReduceScatterArgs80 args{GroupedArgs80(p, choice.group_m, w, arrays.y, no_sums)};
  args.x[0] = arrays.h;
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
  if (params.wire) args.wire = *params.wire;
  const int table_bytes =
      4 * (args.groups.groups * args.order.Segments() + 1 + args.order.Classes());
  return LaunchGemmInstance80<GroupedMatmulReduceScatterKernels80, kOf16Bits>(
      p.dtype, p.transpose_rhs, &args, device.sm_count, stream, error, table_bytes);
}

}  // namespace jflux
