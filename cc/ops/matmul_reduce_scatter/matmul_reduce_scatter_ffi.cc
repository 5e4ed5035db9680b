// The plan and the FFI handlers of matmul_reduce_scatter.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

bool PlanMatmulReduceScatter(CallReader& reader, const Machine& machine, Fields* plan,
                             std::string* why_not) {
  const ProductCall call = ProductCall::Read(reader);
  const int64_t first_k = reader.GetOr("first_k", call.k, 1, call.k);  // of the first term
  const auto scales = static_cast<Scales>(reader.GetOr("scales", 0, 0, 3));
  const DType w_dtype = reader.Has("w_dtype") ? reader.GetFormat("w_dtype") : call.dtype;
  MatmulReduceScatterParams p{call.rows,          call.k, call.n, call.dtype, call.out_dtype,
                              call.transpose_rhs, w_dtype};
  if (reader.Has("wire")) p.wire = reader.GetFormat("wire");  // of GPUs alone
  if (!reader.Check(why_not)) return false;
  if (machine.IsCpu()) {
    const ScatterTiling tiling;
    const auto layout =
        ReduceScatterLayout::Make(p, tiling.tile_m, tiling.tile_n, /*signals_per_slot=*/1);
    *plan = CpuPlan(layout.Workspace().TotalBytes());
    return true;
  }
  const bool portable = IsForPortable(machine);
  const std::string refused = p.wire ? WhyNoWireKernel(p, portable, FormatsOf(machine))
                                     : WhyNoKernel(p, FormatsOf(machine));
  if (!IsPlannable(call, refused, why_not)) return false;
  if (portable) {
    const GemmChoice choice = ChoosePortable(p.rows.world, p.rows.PerRank(), machine);
    *plan = ProductPlan{choice, /*senders=*/0, CudaLayoutOf(p, choice).Workspace().TotalBytes()}
                .AsFields();
    return true;
  }
  const GemmChoice wanted = call.given.value_or(ChooseReduceScatter(
      p.rows.world, p.rows.PerRank(), p.n, p.k, p.dtype, machine, p.transpose_rhs));
  // Each of the CTAs that share k has some of the first term's.
  GemmChoice choice = FitSplits(wanted, p.rows.Total(), first_k * SizeOf(p.dtype), kReduceSplits);
  choice = p.wire ? ForWire(choice, scales) : ForScales(choice, scales);
  *plan = ProductPlan{choice, ReduceScatterSenders(p, choice, machine),
                      CudaLayoutOf(p, choice).Workspace().TotalBytes()}
              .AsFields();
  return true;
}

struct Attributes : ScaledAttributes {
  bool adds_bias = false, adds_residual = false;
  int64_t wire = -1;  // number of the format of what travels; -1: y's

  void Read(AttributeReader& read) {
    ScaledAttributes::Read(read);
    read("adds_bias", &adds_bias)("adds_residual", &adds_residual)("wire", &wire);
  }
};

// x [..., k] of this rank, w and the result y -> what to compute; empty if they do not fit
// together.
std::optional<MatmulReduceScatterParams> ParamsOf(const ProductAttributes& a,
                                                  const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
                                                  const ffi::AnyBuffer& y) {
  DType w_dtype{};
  auto p = ProductOf<MatmulReduceScatterParams>(a, x, w, y, &w_dtype);
  if (!p || CountOf(x) != p->rows.Total() * p->k || CountOf(w) != p->k * p->n ||
      CountOf(y) != p->rows.PerRank() * p->n) {
    return std::nullopt;
  }
  p->w_dtype = w_dtype;
  return p;
}

// One term, without an epilogue: `adds_bias` and `adds_residual` are for GPUs.
struct CallOnCpu : TiledCall<kMatmulReduceScatterId, MatmulReduceScatterCpu> {
  std::string Read(const Attributes& a, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y) {
    if (!IsCpuPlan(a.choice, a.senders)) return kMalformed;
    if (args.size() != 2 || a.wire >= 0 || a.adds_bias || a.adds_residual || a.scales != 0)
      return kDoNotFit;
    const auto x = *args.get<ffi::AnyBuffer>(0), w = *args.get<ffi::AnyBuffer>(1);
    const auto params = ParamsOf(a, x, w, *y);
    if (!params || !AreForCpu(*params)) return kDoNotFit;
    p = *params;
    arrays = {x.untyped_data(), w.untyped_data(), y->untyped_data()};
    return "";
  }
  int64_t WorkspaceBytes() const {
    return ReduceScatterLayout::Make(p, tiling.tile_m, tiling.tile_n, 1).Workspace().TotalBytes();
  }
};

struct CallOnCuda : PlannedCall<kMatmulReduceScatterId, LaunchMatmulReduceScatter> {
  std::string Read(const Attributes& a, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y) {
    // Operands x_0 .. x_p-1, w_0 .. w_p-1, and perhaps the bias, the residual, and the scales of
    // x's rows and w's columns.
    const size_t added =
        (a.adds_bias ? 1 : 0) + (a.adds_residual ? 1 : 0) + (a.scales != 0 ? 2 : 0);
    const size_t count = args.size() < added ? 0 : (args.size() - added) / 2;
    if (!IsScales(a.scales) || count < 1 || count > kMaxWeights ||
        args.size() != 2 * count + added) {
      return kDoNotFit;
    }
    const bool of_blocks = static_cast<Scales>(a.scales) == Scales::kOfBlocks;
    arrays.terms = static_cast<int32_t>(count);
    arrays.y = y->untyped_data();
    int64_t k = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto x = *args.get<ffi::AnyBuffer>(i), w = *args.get<ffi::AnyBuffer>(count + i);
      const auto term = ParamsOf(a, x, w, *y);
      if (!term || (i > 0 && term->DTypeOfW() != p.DTypeOfW())) return kDoNotFit;
      p = *term;
      // Scales are numbered by the k-blocks of all terms.
      if (a.scales != 0 && count > 1 && !(of_blocks && p.k % kScaleBlock == 0)) return kNoKernel;
      arrays.products[i] = {x.untyped_data(), w.untyped_data(), p.k};
      k += p.k;
    }
    p.k = k;
    if (a.wire >= 0) {
      if (a.wire >= kFormatCount) return kDoNotFit;
      p.wire = static_cast<DType>(a.wire);
    }
    size_t next = 2 * count;
    if (a.adds_bias) {
      arrays.bias = FloatsOf(*args.get<ffi::AnyBuffer>(next++), p.n);
      if (arrays.bias == nullptr) return "the bias does not fit";
    }
    if (a.adds_residual) {
      const auto residual = *args.get<ffi::AnyBuffer>(next++);
      if (residual.element_type() != y->element_type() ||
          residual.element_count() != y->element_count()) {
        return "the residual does not fit";
      }
      arrays.residual = residual.untyped_data();
    }
    const std::string why = ReadScales(a.scales, args, next, p.rows.Total(), p.n,
                                       CeilDiv<int64_t>(p.k, kScaleBlock), p.dtype, &arrays);
    if (!why.empty()) return why;
    if (!ReadPlan(a)) return kNoKernel;
    const bool portable = plan.choice.portable;
    const FormatSet formats = FormatsOfScaledLoop(portable);
    const std::string refused =
        p.wire ? WhyNoWireKernel(p, portable, formats) : WhyNoKernel(p, formats);
    if (!refused.empty()) return kNoKernel;
    if (portable) {
      const bool takes =
          (SizeOf(p.dtype) > 1 && !p.wire) || (count == 1 && !HasEntriesOfK(arrays.scales));
      return takes ? "" : kNoKernel;
    }
    if (p.wire) return ForWire(plan.choice, arrays.scales) == plan.choice ? "" : kNoKernel;
    if (!SharesK(plan.choice, p.rows.Total(), arrays.products[0].k * SizeOf(p.dtype),
                 kReduceSplits) ||
        !(ForScales(plan.choice, arrays.scales) == plan.choice)) {
      return kNoKernel;
    }
    return "";
  }
  int64_t WorkspaceBytes() const { return CudaLayoutOf(p, plan.choice).Workspace().TotalBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMatmulReduceScatterOp;
const Op kMatmulReduceScatterOp = {kMatmulReduceScatterId,
                                   "matmul_reduce_scatter",
                                   OnCpu<CallOnCpu>,
                                   JFLUX_IF_CUDA(OnCuda<CallOnCuda>),
                                   kCpuFormats,
                                   kMatmulReduceScatterFormats,
                                   PlanMatmulReduceScatter,
                                   /*most_splits=*/kReduceSplits};

}  // namespace jflux
