// Instantiates the kernels of matmul_all_to_all and launches one.
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "ops/matmul_all_to_all/matmul_all_to_all_sm90.cuh"
#include "runtime/gemm_instances_cuda.h"

namespace jflux {
namespace {

struct Instances : FewOfInt8<MatmulAllToAllKernels> {
  static constexpr OpFormats kFormats = kMatmulAllToAllFormats;
  static constexpr int kMostSplits = 1;
  static constexpr bool kMayLendStage = false;
};

}  // namespace

bool LoadMatmulAllToAllKernels(std::string* error) {
  return LoadBothLoops(LoadGemmInstances<Instances>, LoadMatmulAllToAllKernels80, error);
}

bool LaunchMatmulAllToAll(const MatmulAllToAllParams& p, const MatmulAllToAllArrays& arrays,
                          const ProductPlan& plan, int64_t site, const CudaDevice& device,
                          const SymmetricView& view, cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  if (choice.portable) {
    return LaunchMatmulAllToAll80(p, arrays, plan, site, device, view, stream, error);
  }
  const Rows& r = p.rows;
  MatmulAllToAllArgs args{};
  args.layout = CudaLayoutOf(p, choice);
  args.workspace = args.layout.Workspace();
  args.state = device.state;
  args.view = view;
  args.rows = r;
  args.grid = ShardGridOf(p, choice, device.sm_count);
  args.k = p.k;
  args.n = p.n;
  args.signature = SignatureOf(p.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kMatmulAllToAllId);
  args.num_tiles = args.grid.Total();
  args.senders = plan.senders;
  args.split_rows = p.split_rows;
  args.concat_rows = p.concat_rows;
  args.out_f16 = SizeOf(p.dtype) == 1 && p.out_dtype == DType::kF16;
  args.x_scale = arrays.x_scale;
  args.w_scale = arrays.w_scale;
  const int box_rows = BoxRows(r.PerRank());
  args.a_bytes = box_rows * kBlockBytes;
  // x's actual row = (o * world + rank) * inner + i; unless both are to be told apart, all rows are
  // inner ones.
  const bool flat = r.outer == 1 || !p.split_rows;
  const int64_t inner = flat ? p.RowsOfX() : r.inner;
  if (!EncodeTensorMap(&args.x, p.dtype, arrays.x,
                       {flat ? 1 : r.world, flat ? 1 : r.outer, inner, p.k},
                       {inner * p.k, r.world * inner * p.k, p.k},
                       {1, 1, box_rows, BlockElements(p.dtype)}, error) ||
      !EncodeRhsMap(&args.w, p.dtype, arrays.w, p.k, p.ColumnsOfW(), p.transpose_rhs,
                    /*halves=*/false, choice, error)) {
    return false;
  }
  const int columns = StoreColumns(choice);
  const bool encoded =
      p.concat_rows
          ? EncodeTensorMap(&args.y, p.out_dtype, arrays.y, {r.outer, r.world, r.inner, p.n},
                            {r.world * r.inner * p.n, r.inner * p.n, p.n}, {1, 1, 64, columns},
                            error)
          : EncodeTensorMap(&args.y, p.out_dtype, arrays.y, {1, r.PerRank(), r.world, p.n},
                            {r.Total() * p.n, r.world * p.n, p.n}, {1, 64, 1, columns}, error);
  return encoded &&
         LaunchGemmInstance<Instances>(p.dtype, p.transpose_rhs, choice, &args, args.num_tiles,
                                       device.sm_count, stream, error, arrays.scales);
}

}  // namespace jflux
