// The plan and the FFI handlers of all_gather_matmul.
#include <algorithm>

#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

bool PlanAllGatherMatmul(CallReader& reader, const Machine& machine, Fields* plan,
                         std::string* why_not) {
  const ProductCall call = ProductCall::Read(reader);
  const bool gated = reader.GetOr("gated", 0, 0, 1) == 1;
  const bool block_scales = reader.GetOr("block_scales", 0, 0, 1) == 1;
  const DType w_dtype = reader.Has("w_dtype") ? reader.GetFormat("w_dtype") : call.dtype;
  if (!reader.Check(why_not)) return false;
  const AllGatherMatmulParams p{call.rows,          call.k, call.n, call.dtype, call.out_dtype,
                                call.transpose_rhs, false,  w_dtype};
  if (machine.IsCpu()) {
    const CpuTiling tiling;
    *plan = CpuPlan(AllGatherLayout::Make(p, tiling.chunk_bytes).Workspace().TotalBytes());
    return true;
  }
  if (!IsPlannable(call, WhyNoKernel(p, FormatsOf(machine)), why_not)) return false;
  const int64_t rows = p.rows.Total();
  const int64_t k_bytes = p.k * SizeOf(p.dtype), n_bytes = p.n * SizeOf(p.dtype);
  const int world = p.rows.world;
  const GemmChoice wanted = call.given.value_or(
      ChooseAllGather(world, p.rows.PerRank(), p.n, p.k, p.dtype, machine, p.transpose_rhs));
  GemmChoice choice =
      gated ? ForGate(wanted, rows, p.n, k_bytes, machine,
                      Loading(kGatherCosts, k_bytes, n_bytes / 2, p.transpose_rhs, world))
            : FitSplits(wanted, rows, k_bytes, kGatherSplits);
  if (block_scales) choice = ForBlockScales(choice, gated);
  *plan =
      ProductPlan{choice, AllGatherSenders(p, machine), CudaLayoutOf(p).Workspace().TotalBytes()}
          .AsFields();
  return true;
}

struct Attributes : ProductAttributes {
  int64_t activation = 0;  // number of an Activation
  Int64s biased;           // for each weight, 1 if it has a bias
  bool gated = false;
  int64_t scales = 0;  // number of a Scales
  bool sums = false;

  void Read(AttributeReader& read) {
    ProductAttributes::Read(read);
    read("activation", &activation)("biased", &biased)("gated", &gated)("scales", &scales)("sums",
                                                                                           &sums);
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
    if (a.activation != 0 || a.gated || a.sums ||
        std::count(a.biased.begin(), a.biased.end(), 1) != 0 || a.scales != 0 || rest.size() != 1 ||
        results.size() < 1 || results.size() > 2) {
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
    // Operands x, w_0 .. w_p-1, a bias for each of them that is `biased`, and, if there are
    // `scales`, that of all rows of y and one of the columns of each w. Results: all y (of which
    // there is one if they are gated), p sums if there are `sums`, and perhaps the gathered x.
    const size_t count = a.biased.size(), products = a.gated ? 1 : count;
    const size_t biases = std::count(a.biased.begin(), a.biased.end(), 1);
    const size_t computed = products + (a.sums ? count : 0);
    const bool gathered = results.size() == computed + 1;
    if (count < 1 || count > kMaxWeights || !IsScales(a.scales) ||
        rest.size() != count + biases + (a.scales != 0 ? 1 + count : 0) ||
        results.size() != computed + (gathered ? 1 : 0) || (a.gated && count != 2) ||
        !IsActivation(a.activation)) {
      return kDoNotFit;
    }
    arrays.x = x.untyped_data();
    arrays.weights = static_cast<int32_t>(count);
    arrays.activation = static_cast<Activation>(a.activation);
    arrays.gated = a.gated;
    arrays.scales = static_cast<Scales>(a.scales);
    const bool of_blocks = arrays.scales == Scales::kOfBlocks;
    const auto floats = [&](size_t i, int64_t size) {
      return FloatsOf(*rest.get<ffi::AnyBuffer>(i), size);
    };
    size_t next_bias = count;
    int64_t columns = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto w = *rest.get<ffi::AnyBuffer>(i);
      auto y = *results.get<ffi::AnyBuffer>(a.gated ? 0 : i);
      const auto product_params = ParamsOf(a, x, w, *y, gathered);
      if (!product_params) return kDoNotFit;
      p = *product_params;
      if (!WhyNoKernel(p).empty()) return kNoKernel;
      if (a.scales != 0 && SizeOf(p.dtype) != 1) return kDoNotFit;
      auto& product = arrays.products[i];
      product.w = w.untyped_data();
      product.y = y->untyped_data();
      product.n = p.n;
      if (a.sums) product.sums = (*results.get<ffi::AnyBuffer>(products + i))->untyped_data();
      if (a.biased[i] == 1) {
        product.bias = floats(next_bias++, p.n);
        if (product.bias == nullptr) return "a bias does not fit";
      }
      if (a.scales != 0) {
        const int64_t k_blocks = of_blocks ? CeilDiv<int64_t>(p.k, kScaleBlock) : 1;
        const int64_t columns = of_blocks ? CeilDiv<int64_t>(p.n, kScaleBlock) : p.n;
        arrays.x_scale = floats(count + biases, p.rows.Total() * k_blocks);
        product.scale = floats(count + biases + 1 + i, columns * k_blocks);
        if (arrays.x_scale == nullptr || product.scale == nullptr) return "a scale does not fit";
      }
      columns += p.n;
    }
    p.n = columns;
    if (gathered) arrays.gathered = (*results.get<ffi::AnyBuffer>(computed))->untyped_data();
    // With no sender all CTAs would wait for rows for ever. A gate needs tiles of two halves whose
    // k one CTA computes.
    if (!ReadPlan(a) || !WhyNoKernel(p).empty() || plan.senders < 1 ||
        !SharesK(plan.choice, p.rows.Total(), p.k * SizeOf(p.dtype), kGatherSplits) ||
        (a.gated && (plan.choice.tile_n % 128 != 0 || plan.choice.splits != 1)) ||
        (of_blocks && !(ForBlockScales(plan.choice, a.gated) == plan.choice))) {
      return kNoKernel;
    }
    return "";
  }
  int64_t WorkspaceBytes() const { return CudaLayoutOf(p).Workspace().TotalBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllGatherMatmulOp;
const Op kAllGatherMatmulOp = {kAllGatherMatmulId,         "all_gather_matmul",
                               OnCpu<CallOnCpu>,           JFLUX_IF_CUDA(OnCuda<CallOnCuda>),
                               kAllGatherMatmulCpuFormats, kAllGatherMatmulFormats,
                               PlanAllGatherMatmul,        /*most_splits=*/kGatherSplits};

}  // namespace jflux
