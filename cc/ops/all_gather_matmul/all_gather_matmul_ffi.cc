// The plan and the FFI handlers of all_gather_matmul.
#include <algorithm>

#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "runtime/ffi.h"
#include "runtime/product_plan.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

bool PlanAllGatherMatmul(const Fields& fields, const Machine& machine, Fields* plan,
                         std::string* why_not) {
  CallReader reader(fields);
  const ProductCall call = ProductCall::Read(reader);
  const bool gated = reader.GetOr("gated", 0, 0, 1) == 1;
  if (!reader.Check(why_not)) return false;
  const AllGatherMatmulParams p{call.rows,          call.k, call.n, call.dtype, call.out_dtype,
                                call.transpose_rhs, false};
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
  const GemmChoice choice =
      gated ? ForGate(wanted, rows, p.n, k_bytes, machine,
                      Loading(kGatherCosts, k_bytes, n_bytes / 2, p.transpose_rhs, world))
            : FitSplits(wanted, rows, k_bytes, kGatherSplits);
  *plan =
      ProductPlan{choice, AllGatherSenders(p, machine), CudaLayoutOf(p).Workspace().TotalBytes()}
          .AsFields();
  return true;
}

struct Attributes {
  ProductAttributes product;
  int64_t activation = 0;  // number of an Activation
  Int64s biased;           // for each weight, 1 if it has a bias
  bool gated = false;
  bool sums = false;

  void Read(AttributeReader& read) {
    product.Read(read);
    read("activation", &activation);
    read("biased", &biased);
    read("gated", &gated);
    read("sums", &sums);
  }
};

// x [..., k] of this rank, w, and the results y[, gathered] -> what to compute; empty if they
// do not fit together.
std::optional<AllGatherMatmulParams> ParamsOf(const ProductAttributes& a, const ffi::AnyBuffer& x,
                                              const ffi::AnyBuffer& w, const ffi::AnyBuffer& y,
                                              bool gathered) {
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() < 2 || w.dimensions().size() != 2) return std::nullopt;
  AllGatherMatmulParams p{};
  p.rows = Rows{static_cast<int32_t>(a.call.world), a.outer, a.inner};
  p.k = x.dimensions().back();
  p.n = w.dimensions()[a.transpose_rhs ? 0 : 1];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = a.transpose_rhs;
  p.return_gathered = gathered;
  const auto count = [](const ffi::AnyBuffer& b) {
    return static_cast<int64_t>(b.element_count());
  };
  if (p.rows.PerRank() == 0 || p.k == 0 || p.n == 0) return std::nullopt;
  if (count(x) != p.rows.PerRank() * p.k || count(w) != p.k * p.n ||
      count(y) != p.rows.Total() * p.n) {
    return std::nullopt;
  }
  return p;
}

// One weight, without an epilogue: `sums`, `gated`, biases and activations are for GPUs.
ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Dictionary attributes,
                ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kAllGatherMatmulId, attributes, &a)) {
    return FailedFuture(*refused);
  }
  const auto no_fit = [] {
    return FailedFuture(InvalidArgument("all_gather_matmul: operands do not fit"));
  };
  if (!IsCpuPlan(a.product.choice, a.product.senders)) {
    return FailedFuture(InvalidArgument("all_gather_matmul: malformed plan"));
  }
  if (a.activation != 0 || a.gated || a.sums ||
      std::count(a.biased.begin(), a.biased.end(), 1) != 0 || rest.size() != 1 ||
      results.size() < 1 || results.size() > 2) {
    return no_fit();
  }
  const auto w = *rest.get<ffi::AnyBuffer>(0);
  auto y = *results.get<ffi::AnyBuffer>(0);
  const auto p = ParamsOf(a.product, x, w, *y, results.size() > 1);
  if (!p) return no_fit();
  AllGatherMatmulArrays arrays{x.untyped_data(), w.untyped_data(), y->untyped_data(), nullptr};
  if (p->return_gathered) arrays.gathered = (*results.get<ffi::AnyBuffer>(1))->untyped_data();

  const CpuTiling tiling;
  const int64_t bytes = AllGatherLayout::Make(*p, tiling.chunk_bytes).Workspace().TotalBytes();
  return JoinFfiCall(
      kAllGatherMatmulId, site, run_id, device, a.product.call, bytes,
      [p = *p, tiling, arrays](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
        return AllGatherMatmulCpu(p, tiling, arrays, view, epoch, ctx);
      });
}

// Operands and results.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding).template Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes, ffi::AnyBuffer x,
                ffi::RemainingArgs rest, ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kAllGatherMatmulId, attributes, &a)) return *refused;
  const CallAttributes& call = a.product.call;
  // Operands x, w_0 .. w_p-1, and a bias for each of them that is `biased`. Results: all y (of
  // which there is one if they are gated), p sums if there are `sums`, and perhaps the gathered x.
  const size_t count = a.biased.size(), products = a.gated ? 1 : count;
  const size_t biases = std::count(a.biased.begin(), a.biased.end(), 1);
  const size_t computed = products + (a.sums ? count : 0);
  const bool gathered = results.size() == computed + 1;
  if (count < 1 || count > kMaxWeights || rest.size() != count + biases ||
      results.size() != computed + (gathered ? 1 : 0) || (a.gated && count != 2) ||
      !IsActivation(a.activation)) {
    return InvalidArgument("all_gather_matmul: operands do not fit");
  }
  AllGatherMatmulOperands operands{};
  operands.x = x.untyped_data();
  operands.weights = static_cast<int32_t>(count);
  operands.activation = static_cast<Activation>(a.activation);
  operands.gated = a.gated;
  size_t next_bias = count;
  std::optional<AllGatherMatmulParams> p;
  int64_t columns = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto w = *rest.get<ffi::AnyBuffer>(i);
    auto y = *results.get<ffi::AnyBuffer>(a.gated ? 0 : i);
    p = ParamsOf(a.product, x, w, *y, gathered);
    if (!p) return InvalidArgument("all_gather_matmul: operands do not fit");
    auto& product = operands.products[i];
    product.w = w.untyped_data();
    product.y = y->untyped_data();
    product.n = p->n;
    if (a.sums) product.sums = (*results.get<ffi::AnyBuffer>(products + i))->untyped_data();
    if (a.biased[i] == 1) {
      const auto bias = *rest.get<ffi::AnyBuffer>(next_bias++);
      if (bias.element_type() != ffi::F32 || static_cast<int64_t>(bias.element_count()) != p->n) {
        return InvalidArgument("all_gather_matmul: a bias does not fit");
      }
      product.bias = static_cast<const float*>(bias.untyped_data());
    }
    columns += p->n;
  }
  p->n = columns;
  if (gathered) operands.gathered = (*results.get<ffi::AnyBuffer>(computed))->untyped_data();
  const auto plan = CudaPlanOf(a.product.choice, a.product.senders, call.workspace_bytes);
  // With no sender all CTAs would wait for rows for ever. A gate needs tiles of two halves whose k
  // one CTA computes.
  if (!plan || !WhyNoKernel(*p).empty() || plan->senders < 1 ||
      !SharesK(plan->choice, p->rows.Total(), p->k * SizeOf(p->dtype), kGatherSplits) ||
      (a.gated && (plan->choice.tile_n % 128 != 0 || plan->choice.splits != 1))) {
    return InvalidArgument("all_gather_matmul: no kernel for this plan");
  }
  return LaunchCudaCall(
      kAllGatherMatmulId, ordinal, call, CudaLayoutOf(*p).Workspace().TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchAllGatherMatmul(*p, operands, *plan, call.site, device, view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllGatherMatmulOp;
const Op kAllGatherMatmulOp = {kAllGatherMatmulId,
                               "all_gather_matmul",
                               kCpu,
                               JFLUX_IF_CUDA(kCuda),
                               kCpuFormats,
                               kAllGatherMatmulFormats,
                               PlanAllGatherMatmul,
                               /*most_splits=*/kGatherSplits};

}  // namespace jflux
