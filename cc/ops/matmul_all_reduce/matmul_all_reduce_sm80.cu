// Launches a portable kernel of matmul_all_reduce.
#include "ops/matmul_all_reduce/matmul_all_reduce_sm80.cuh"
#include "runtime/gemm_instances_sm80_cuda.h"

namespace jflux {
namespace {

constexpr FormatSet kOf16Bits = kMatmulAllReduceFormats.operands & kFormats80;

}  // namespace

bool LoadMatmulAllReduceKernels80(std::string* error) {
  return LoadGemmInstances80<MatmulAllReduceKernels80, kOf16Bits>(error);
}

bool LaunchMatmulAllReduce80(const MatmulAllReduceParams& params,
                             const MatmulAllReduceArrays& arrays, const ProductPlan& plan,
                             int64_t site, const CudaDevice& device, const SymmetricView& view,
                             cudaStream_t stream, std::string* error) {
  const GemmChoice& choice = plan.choice;
  const MatmulReduceScatterParams& p = params.scatter;
  const bool few = AreFewRows(params);
  MatmulAllReduceArgs80 args{
      ScatterArgs80(p, OwnRowsOf(params, arrays, few ? 0 : view.rank), choice, device, view)};
  args.few = few;
  args.few_rows = FewRowsLayoutOf(params, choice);
  args.finished = CudaLayoutOf(params, choice);
  args.workspace = MatmulAllReduceWorkspace(params, choice);
  args.tiles_n = static_cast<int32_t>(CeilDiv<int64_t>(p.n, choice.tile_n));
  args.rank_row_blocks = static_cast<int32_t>(p.rows.PerRank() / kGemmTileM);
  args.group_m = choice.group_m == 0 ? args.rank_row_blocks : choice.group_m;
  args.all = arrays.y;
  args.signature = SignatureOf(params.Signature(), site, choice);
  args.op = static_cast<uint32_t>(kMatmulAllReduceId);
  return LaunchGemmInstance80<MatmulAllReduceKernels80, kOf16Bits>(p.dtype, p.transpose_rhs, &args,
                                                                   device.sm_count, stream, error);
}

}  // namespace jflux
