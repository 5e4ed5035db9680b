// Instantiates the kernels of matmul_all_reduce and launches one.
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ops/matmul_all_reduce/matmul_all_reduce_sm90.cuh"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter_sm90.cuh"
#include "runtime/gemm_instances_cuda.h"

namespace jflux {
namespace {

struct Instances : FewOfInt8<MatmulAllReduceKernels> {
  static constexpr OpFormats kFormats = kMatmulAllReduceFormats;
  static constexpr int kMostSplits = 1;
  static constexpr bool kMayLendStage = false;
};

// Few rows are one row of tiles: a cluster can share k, if anything.
struct FewRowsInstances {
  static constexpr OpFormats kFormats = kMatmulAllReduceFormats;
  static constexpr int kMostSplits = kReduceSplits;
  static constexpr bool kMayLendStage = false;
  template <typename Config>
  static const void* Kernel() {
    if constexpr (CanShareK(Config::kTileN, Config::kClusterM)) {
      return reinterpret_cast<const void*>(&FewRowsKernel<Config>);
    } else {
      return nullptr;
    }
  }
};

bool LaunchFew(const MatmulAllReduceParams& params, const MatmulAllReduceArrays& arrays,
               const GemmChoice& choice, int64_t site, const CudaDevice& device,
               const SymmetricView& view, cudaStream_t stream, std::string* error) {
  const MatmulReduceScatterParams& p = params.scatter;
  FewRowsArgs args{};
  args.state = device.state;
  args.view = view;
  args.rows = p.rows.Total();
  args.k = p.k;
  args.n = p.n;
  args.layout = FewRowsLayoutOf(params, choice);
  args.workspace = args.layout.Workspace();
  args.num_tiles = static_cast<int32_t>(CeilDiv<int64_t>(p.n, choice.tile_n));
  args.a_bytes = BoxRows(args.rows) * kBlockBytes;
  args.signature = SignatureOf(params.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kMatmulAllReduceId);
  args.residual = arrays.residual;
  args.x_scale = arrays.x_scale;
  args.w_scale = arrays.w_scale;
  args.out_f16 = SizeOf(p.dtype) == 1 && p.out_dtype == DType::kF16;
  return EncodeTensorMap(&args.x, p.dtype, arrays.x, {args.rows, p.k}, {p.k},
                         {BoxRows(args.rows), BlockElements(p.dtype)}, error) &&
         EncodeRhsMap(&args.w, p.dtype, arrays.w, p.k, p.n, p.transpose_rhs, /*halves=*/false,
                      choice, error) &&
         EncodeTensorMap(&args.y, p.out_dtype, arrays.y, {args.rows, p.n}, {p.n},
                         {64, StoreColumns(choice)}, error) &&
         LaunchGemmInstance<FewRowsInstances>(p.dtype, p.transpose_rhs, choice, &args,
                                              args.num_tiles, device.sm_count, stream, error,
                                              arrays.scales);
}

}  // namespace

bool LoadMatmulAllReduceKernels(std::string* error) {
  return LoadBothLoops(
      [](std::string* why) {
        return LoadGemmInstances<Instances>(why) && LoadGemmInstances<FewRowsInstances>(why);
      },
      LoadMatmulAllReduceKernels80, error);
}

bool LaunchMatmulAllReduce(const MatmulAllReduceParams& params, const MatmulAllReduceArrays& arrays,
                           const ProductPlan& plan, int64_t site, const CudaDevice& device,
                           const SymmetricView& view, cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  if (choice.portable) {
    return LaunchMatmulAllReduce80(params, arrays, plan, site, device, view, stream, error);
  }
  if (AreFewRows(params)) {
    return LaunchFew(params, arrays, choice, site, device, view, stream, error);
  }
  const MatmulReduceScatterParams& p = params.scatter;
  MatmulReduceScatterOperands scattered = OwnRowsOf(params, arrays, view.rank);
  scattered.x_scale = arrays.x_scale;
  scattered.w_scale = arrays.w_scale;
  MatmulAllReduceArgs args{};
  if (!MakeScatterArgs(p, scattered, choice, device, view, &args, error)) return false;
  args.finished = CudaLayoutOf(params, choice);
  args.workspace = args.finished.Workspace();
  args.senders = plan.senders;
  args.signature = SignatureOf(params.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kMatmulAllReduceId);
  args.tiles_n = static_cast<int32_t>(CeilDiv<int64_t>(p.n, choice.tile_n));
  args.rank_row_blocks = static_cast<int32_t>(p.rows.PerRank() / kGemmTileM);
  args.group_m = choice.group_m == 0 ? args.rank_row_blocks : choice.group_m * choice.cluster_m;
  return EncodeTensorMap(&args.all, p.out_dtype, arrays.y, {p.rows.Total(), p.n}, {p.n},
                         {64, StoreColumns(choice)}, error) &&
         LaunchGemmInstance<Instances>(p.dtype, p.transpose_rhs, choice, &args, args.num_tiles,
                                       device.sm_count, stream, error, arrays.scales);
}

}  // namespace jflux
