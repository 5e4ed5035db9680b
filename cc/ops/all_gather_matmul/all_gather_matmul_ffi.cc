// The plan and the FFI handlers of all_gather_matmul.
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/all_gather_matmul/weights_ffi.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

bool PlanAllGatherMatmul(CallReader& reader, const Machine& machine, Fields* plan,
                         std::string* why_not) {
  const ProductCall call = ProductCall::Read(reader);
  const bool gated = reader.GetOr("gated", 0, 0, 1) == 1;
  const bool quantizes = reader.GetOr("quantizes", 0, 0, 1) == 1;
  const auto scales = static_cast<Scales>(reader.GetOr("scales", 0, 0, 3));
  const DType w_dtype = reader.Has("w_dtype") ? reader.GetFormat("w_dtype") : call.dtype;
  if (!reader.Check(why_not)) return false;
  const AllGatherMatmulParams p{call.rows,          call.k, call.n, call.dtype, call.out_dtype,
                                call.transpose_rhs, false,  w_dtype};
  if (machine.IsCpu()) {
    const CpuTiling tiling;
    *plan = CpuPlan(AllGatherLayout::Make(p, tiling.chunk_bytes).Workspace().TotalBytes());
    return true;
  }
  const bool portable = IsForPortable(machine);
  if (!IsPlannable(call, WhyNoKernel(p, FormatsOf(machine)), why_not)) return false;
  if (portable) {
    const GemmChoice choice = GatherGroups(ChoosePortable(p.rows.world, p.rows.PerRank(), machine),
                                           p.rows.world, p.rows.PerRank(), p.n, machine);
    *plan =
        ProductPlan{choice, AllGatherSenders(p, machine), CudaWorkspaceOf(p, scales).TotalBytes()}
            .AsFields();
    return true;
  }
  const GemmChoice wanted = call.given.value_or(ChooseAllGather(
      p.rows.world, p.rows.PerRank(), p.n, p.k, p.dtype, machine, p.transpose_rhs, scales));
  const GemmChoice choice = FitWeights(wanted, p, gated, scales, quantizes, machine);
  *plan = ProductPlan{choice, AllGatherSenders(p, machine), CudaWorkspaceOf(p, scales).TotalBytes()}
              .AsFields();
  return true;
}

struct Attributes : ProductAttributes {
  WeightsAttributes weights;

  void Read(AttributeReader& read) {
    ProductAttributes::Read(read);
    weights.Read(read);
  }
};

// x [..., k] of this rank, w, and the results y[, gathered] -> what to compute; empty if they
// do not fit together.
std::optional<AllGatherMatmulParams> ParamsOf(const ProductAttributes& a, const ffi::AnyBuffer& x,
                                              const ffi::AnyBuffer& w, const ffi::AnyBuffer& y,
                                              bool gathered) {
  DType w_dtype{};
  auto p = ProductOf<AllGatherMatmulParams>(a, x, w, y, &w_dtype);
  if (!p || CountOf(x) != p->rows.PerRank() * p->k || CountOf(w) != p->k * p->n ||
      CountOf(y) != p->rows.Total() * p->n) {
    return std::nullopt;
  }
  p->return_gathered = gathered;
  p->w_dtype = w_dtype;
  return p;
}

// One weight, without an epilogue: `sums`, `gated`, biases and activations are for GPUs.
struct CallOnCpu : TiledCall<kAllGatherMatmulId, AllGatherMatmulCpu> {
  std::string Read(const Attributes& a, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                   ffi::RemainingRets results) {
    if (!IsCpuPlan(a.choice, a.senders)) return kMalformed;
    if (!a.weights.IsPlain() || rest.size() != 1 || results.size() < 1 || results.size() > 2) {
      return kDoNotFit;
    }
    const auto w = *rest.get<ffi::AnyBuffer>(0);
    auto y = *results.get<ffi::AnyBuffer>(0);
    const auto params = ParamsOf(a, x, w, *y, results.size() > 1);
    if (!params) return kDoNotFit;
    p = *params;
    const std::string why =
        WhyNotFormats(kAllGatherMatmulCpuFormats, kAllFormats, p.dtype, p.DTypeOfW(), p.out_dtype);
    if (!why.empty()) return why;
    arrays = {x.untyped_data(), w.untyped_data(), y->untyped_data(), nullptr};
    if (p.return_gathered) arrays.gathered = (*results.get<ffi::AnyBuffer>(1))->untyped_data();
    return "";
  }
  int64_t WorkspaceBytes() const {
    return AllGatherLayout::Make(p, tiling.chunk_bytes).Workspace().TotalBytes();
  }
};

struct CallOnCuda : PlannedCall<kAllGatherMatmulId, LaunchAllGatherMatmul> {
  std::string Read(const Attributes& a, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                   ffi::RemainingRets results) {
    arrays.x = x.untyped_data();
    const auto params_of = [&](const ffi::AnyBuffer& w, const ffi::AnyBuffer& y, bool gathered) {
      return ParamsOf(a, x, w, y, gathered);
    };
    const std::string why = ReadWeights(a.weights, rest, results, params_of, &p, &arrays);
    if (!why.empty()) return why;
    if (arrays.scales == Scales::kOfVectors) return kNoKernel;
    // With no sender all CTAs would wait for rows for ever.
    if (!ReadPlan(a) || !WhyNoKernel(p, FormatsOfScaledLoop(plan.choice.portable)).empty() ||
        plan.senders < 1 || !CanTake(plan.choice, p, arrays)) {
      return kNoKernel;
    }
    return "";
  }
  int64_t WorkspaceBytes() const { return CudaWorkspaceOf(p, arrays.scales).TotalBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllGatherMatmulOp;
const Op kAllGatherMatmulOp = {kAllGatherMatmulId,         "all_gather_matmul",
                               OnCpu<CallOnCpu>,           JFLUX_IF_CUDA(OnCuda<CallOnCuda>),
                               kAllGatherMatmulCpuFormats, kAllGatherMatmulFormats,
                               PlanAllGatherMatmul,        /*most_splits=*/kGatherSplits};

}  // namespace jflux
