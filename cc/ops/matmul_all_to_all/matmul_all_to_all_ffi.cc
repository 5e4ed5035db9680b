// The plan and the FFI handlers of matmul_all_to_all.
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

bool PlanMatmulAllToAll(CallReader& reader, const Machine& machine, Fields* plan,
                        std::string* why_not) {
  const ProductCall call = ProductCall::Read(reader);
  MatmulAllToAllParams p{call.rows,          call.k, call.n, call.dtype, call.out_dtype,
                         call.transpose_rhs, false,  false};
  p.split_rows = reader.GetOr("split_rows", 0, 0, 1) == 1;
  p.concat_rows = reader.GetOr("concat_rows", 0, 0, 1) == 1;
  const auto scales = static_cast<Scales>(reader.GetOr("scales", 0, 0, 3));
  p.w_dtype = reader.Has("w_dtype") ? reader.GetFormat("w_dtype") : call.dtype;
  if (!reader.Check(why_not)) return false;
  if (machine.IsCpu()) {
    const ShardTiling tiling;
    const auto layout = AllToAllLayout::Make(p, tiling.tile_m, tiling.tile_n);
    *plan = CpuPlan(layout.Workspace().TotalBytes());
    return true;
  }
  const bool portable = IsForPortable(machine);
  if (!IsPlannable(call, WhyNoKernel(p, portable, scales), why_not)) return false;
  if (portable) {
    const GemmChoice choice = Portable(8);
    *plan = ProductPlan{choice, /*senders=*/0, CudaLayoutOf(p, choice).Workspace().TotalBytes()}
                .AsFields();
    return true;
  }
  const GemmChoice wanted = call.given.value_or(
      ChooseAllToAll(p.rows.world, p.rows.PerRank(), p.n, p.k, p.dtype, machine, p.transpose_rhs));
  const GemmChoice choice = Possible(p, wanted, scales);
  *plan = ProductPlan{choice, AllToAllSenders(p, choice, machine),
                      CudaLayoutOf(p, choice).Workspace().TotalBytes()}
              .AsFields();
  return true;
}

// x [..., k] of this rank, w, perhaps the scales of x's rows and w's columns, and the result y. Why
// they do not fit, or "".
template <typename Call>
std::string ReadOperands(const ShardAttributes& a, Call* call, ffi::AnyBuffer x, ffi::AnyBuffer w,
                         ffi::RemainingArgs scales, ffi::AnyBuffer y) {
  MatmulAllToAllParams& p = call->p;
  MatmulAllToAllArrays& arrays = call->arrays;
  DType w_dtype{};
  const auto product = ProductOf<MatmulAllToAllParams>(a, x, w, y, &w_dtype);
  if (!product || scales.size() != (a.scales != 0 ? 2 : 0)) return kDoNotFit;
  p = *product;
  p.w_dtype = w_dtype;
  if (!a.split_rows) p.n /= p.rows.world;
  p.split_rows = a.split_rows;
  p.concat_rows = a.concat_rows;
  arrays = {x.untyped_data(), w.untyped_data(), y.untyped_data()};
  if (p.n == 0 || CountOf(x) != p.RowsOfX() * p.k || CountOf(w) != p.k * p.ColumnsOfW() ||
      CountOf(y) != p.rows.Total() * p.n) {
    return kDoNotFit;
  }
  return ReadScales(a.scales, scales, /*first=*/0, p.RowsOfX(), p.ColumnsOfW(),
                    CeilDiv<int64_t>(p.k, kScaleBlock), p.dtype, &arrays);
}

struct CallOnCpu : TiledCall<kMatmulAllToAllId, MatmulAllToAllCpu> {
  std::string Read(const ShardAttributes& a, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> y) {
    if (!IsCpuPlan(a.choice, a.senders)) return kMalformed;
    const std::string why = ReadOperands(a, this, x, w, scales, *y);
    return why.empty() && (a.scales != 0 || !AreForCpu(p)) ? kDoNotFit : why;
  }
  int64_t WorkspaceBytes() const {
    return AllToAllLayout::Make(p, tiling.tile_m, tiling.tile_n).Workspace().TotalBytes();
  }
};

struct CallOnCuda : PlannedCall<kMatmulAllToAllId, LaunchMatmulAllToAll> {
  std::string Read(const ShardAttributes& a, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> y) {
    const std::string why = ReadOperands(a, this, x, w, scales, *y);
    if (!why.empty()) return why;
    if (!ReadPlan(a) || !WhyNoKernel(p, plan.choice.portable, arrays.scales).empty()) {
      return kNoKernel;
    }
    if (plan.choice.portable) return arrays.scales == Scales::kNone ? "" : kNoKernel;
    return plan.choice == Possible(p, plan.choice, arrays.scales) ? "" : kNoKernel;
  }
  int64_t WorkspaceBytes() const { return CudaLayoutOf(p, plan.choice).Workspace().TotalBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMatmulAllToAllOp;
const Op kMatmulAllToAllOp = {
    kMatmulAllToAllId, "matmul_all_to_all",    OnCpu<CallOnCpu>,  JFLUX_IF_CUDA(OnCuda<CallOnCuda>),
    kCpuFormats,       kMatmulAllToAllFormats, PlanMatmulAllToAll};

}  // namespace jflux
