// The plan and the FFI handlers of all_to_all_matmul.
#include "ops/all_to_all_matmul/all_to_all_matmul.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

// The call's k is the columns of a shard of x.
bool PlanAllToAllMatmul(CallReader& reader, const Machine& machine, Fields* plan,
                        std::string* why_not) {
  const ProductCall call = ProductCall::Read(reader);
  AllToAllMatmulParams p{};
  p.rows = call.rows;
  p.k = call.k;
  p.n = call.n;
  p.dtype = call.dtype;
  p.out_dtype = call.out_dtype;
  p.transpose_rhs = call.transpose_rhs;
  p.split_rows = reader.GetOr("split_rows", 0, 0, 1) == 1;
  p.concat_rows = reader.GetOr("concat_rows", 0, 0, 1) == 1;
  const auto scales = static_cast<Scales>(reader.GetOr("scales", 0, 0, 3));
  p.w_dtype = reader.Has("w_dtype") ? reader.GetFormat("w_dtype") : call.dtype;
  if (!reader.Check(why_not)) return false;
  if (machine.IsCpu()) {
    const AllToAllMatmulTiling tiling;
    const auto layout = AllToAllMatmulLayout::Make(p, tiling.chunk_bytes);
    *plan = CpuPlan(layout.Workspace().TotalBytes());
    return true;
  }
  const bool portable = IsForPortable(machine);
  if (!IsPlannable(call, WhyNoKernel(p, portable, scales), why_not)) return false;
  if (portable) {
    const int world = p.rows.world;
    const int64_t rows = p.rows.PerRank();
    const GemmChoice choice = p.concat_rows ? GatherGroups(Portable(8), world, rows, p.n, machine)
                                            : TermGroups(Portable(8), world, rows, machine);
    *plan = ProductPlan{choice, AllToAllMatmulSenders(p, machine),
                        CudaLayoutOf(p).Workspace().TotalBytes()}
                .AsFields();
    return true;
  }
  const GemmChoice wanted = call.given.value_or(ChooseAllToAllMatmul(
      p.rows.world, p.rows.PerRank(), p.k, p.n, p.dtype, p.concat_rows, machine, p.transpose_rhs));
  const GemmChoice choice = Possible(p, wanted, scales);
  *plan = ProductPlan{choice, AllToAllMatmulSenders(p, machine),
                      CudaLayoutOf(p).Workspace().TotalBytes()}
              .AsFields();
  return true;
}

// x of this rank, w, and perhaps the scales of all_to_all(x)'s rows and w's columns; the results
// are y and, if it is wanted, all_to_all(x). Why they do not fit, or "".
template <typename Call>
std::string ReadOperands(const ShardAttributes& a, Call* call, ffi::AnyBuffer x, ffi::AnyBuffer w,
                         ffi::RemainingArgs scales, ffi::AnyBuffer y, ffi::RemainingRets rest) {
  AllToAllMatmulParams& p = call->p;
  AllToAllMatmulArrays& arrays = call->arrays;
  DType w_dtype{};
  const auto product = ProductOf<AllToAllMatmulParams>(a, x, w, y, &w_dtype);
  if (!product || rest.size() > 1 || scales.size() != (a.scales != 0 ? 2 : 0)) return kDoNotFit;
  p = *product;
  p.w_dtype = w_dtype;
  p.k = w.dimensions()[a.transpose_rhs ? 1 : 0] / (a.concat_rows ? 1 : p.rows.world);
  p.split_rows = a.split_rows;
  p.concat_rows = a.concat_rows;
  p.return_gathered = rest.size() == 1;
  if (p.k == 0 || CountOf(x) != p.RowsOfX() * p.ColumnsOfX() || CountOf(w) != p.KOfW() * p.n ||
      CountOf(y) != p.RowsOfY() * p.n) {
    return kDoNotFit;
  }
  arrays = {x.untyped_data(), w.untyped_data(), y.untyped_data(), nullptr};
  if (p.return_gathered) {
    auto gathered = *rest.get<ffi::AnyBuffer>(0);
    arrays.gathered = gathered->untyped_data();
    if (gathered->element_type() != x.element_type() ||
        CountOf(*gathered) != p.RowsOfY() * p.KOfW()) {
      return kDoNotFit;
    }
  }
  return ReadScales(a.scales, scales, /*first=*/0, p.RowsOfY(), p.n, ScaleEntries(p), p.dtype,
                    &arrays);
}

struct CallOnCpu : TiledCall<kAllToAllMatmulId, AllToAllMatmulCpu> {
  std::string Read(const ShardAttributes& a, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> y,
                   ffi::RemainingRets rest) {
    if (!IsCpuPlan(a.choice, a.senders)) return kMalformed;
    const std::string why = ReadOperands(a, this, x, w, scales, *y, rest);
    return why.empty() && (a.scales != 0 || !AreForCpu(p)) ? kDoNotFit : why;
  }
  int64_t WorkspaceBytes() const {
    return AllToAllMatmulLayout::Make(p, tiling.chunk_bytes).Workspace().TotalBytes();
  }
};

struct CallOnCuda : PlannedCall<kAllToAllMatmulId, LaunchAllToAllMatmul> {
  std::string Read(const ShardAttributes& a, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> y,
                   ffi::RemainingRets rest) {
    const std::string why = ReadOperands(a, this, x, w, scales, *y, rest);
    if (!why.empty()) return why;
    if (!ReadPlan(a) || !WhyNoKernel(p, plan.choice.portable, arrays.scales).empty() ||
        (p.rows.world > 1 && plan.senders < 1)) {
      return kNoKernel;
    }
    if (plan.choice.portable) return arrays.scales == Scales::kNone ? "" : kNoKernel;
    return plan.choice == Possible(p, plan.choice, arrays.scales) ? "" : kNoKernel;
  }
  int64_t WorkspaceBytes() const { return CudaLayoutOf(p).Workspace().TotalBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllToAllMatmulOp;
const Op kAllToAllMatmulOp = {
    kAllToAllMatmulId, "all_to_all_matmul",    OnCpu<CallOnCpu>,  JFLUX_IF_CUDA(OnCuda<CallOnCuda>),
    kCpuFormats,       kAllToAllMatmulFormats, PlanAllToAllMatmul};

}  // namespace jflux
