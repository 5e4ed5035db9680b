// FFI handlers of all_gather_matmul.
#include <algorithm>

#include "ops/all_gather_matmul/all_gather_matmul_config.h"
#include "runtime/ffi.h"
#include "runtime/product_plan.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/all_gather_matmul/all_gather_matmul_cuda.h"
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// x [..., k] of this rank, w, and the results y[, gathered] -> what to compute; empty if they
// do not fit together.
std::optional<AllGatherMatmulParams> ParamsOf(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
                                              const ffi::AnyBuffer& y, int64_t world, int64_t outer,
                                              int64_t inner, bool transpose_rhs, bool gathered) {
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() < 2 || w.dimensions().size() != 2) return std::nullopt;
  AllGatherMatmulParams p{};
  p.rows = Rows{static_cast<int32_t>(world), outer, inner};
  p.k = x.dimensions().back();
  p.n = w.dimensions()[transpose_rhs ? 0 : 1];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = transpose_rhs;
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
ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, int64_t activation,
                ffi::Span<const int64_t> biased, ffi::Span<const int64_t> choice, bool gated,
                ffi::Span<const int64_t> groups, int64_t inner, int64_t outer, int64_t senders,
                int64_t, bool sums, bool transpose_rhs, int64_t workspace_bytes, int64_t world,
                ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results) {
  const auto no_fit = [] {
    return FailedFuture(InvalidArgument("all_gather_matmul: operands do not fit"));
  };
  if (!IsCpuPlan(choice, senders)) {
    return FailedFuture(InvalidArgument("all_gather_matmul: malformed plan"));
  }
  if (activation != 0 || gated || sums || std::count(biased.begin(), biased.end(), 1) != 0 ||
      rest.size() != 1 || results.size() < 1 || results.size() > 2) {
    return no_fit();
  }
  const auto w = *rest.get<ffi::AnyBuffer>(0);
  auto y = *results.get<ffi::AnyBuffer>(0);
  const auto p = ParamsOf(x, w, *y, world, outer, inner, transpose_rhs, results.size() > 1);
  if (!p) return no_fit();
  AllGatherMatmulArrays arrays{x.untyped_data(), w.untyped_data(), y->untyped_data(), nullptr};
  if (p->return_gathered) arrays.gathered = (*results.get<ffi::AnyBuffer>(1))->untyped_data();

  const CpuTiling tiling;
  const int64_t bytes = AllGatherLayout::Make(*p, tiling.chunk_bytes).Workspace().TotalBytes();
  return JoinFfiCall(
      kAllGatherMatmulId, site, run_id, device, groups, world, {bytes, workspace_bytes},
      [p = *p, tiling, arrays](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
        return AllGatherMatmulCpu(p, tiling, arrays, view, epoch, ctx);
      });
}

// Attributes in alphabetical order, as Cpu() and Cuda() take them, operands and results.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding)
      .template Attr<int64_t>("activation")
      .template Attr<ffi::Span<const int64_t>>("biased")
      .template Attr<ffi::Span<const int64_t>>("choice")
      .template Attr<bool>("gated")
      .template Attr<ffi::Span<const int64_t>>("groups")
      .template Attr<int64_t>("inner")
      .template Attr<int64_t>("outer")
      .template Attr<int64_t>("senders")
      .template Attr<int64_t>("site")
      .template Attr<bool>("sums")
      .template Attr<bool>("transpose_rhs")
      .template Attr<int64_t>("workspace_bytes")
      .template Attr<int64_t>("world")
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, int64_t activation,
                ffi::Span<const int64_t> biased, ffi::Span<const int64_t> choice, bool gated,
                ffi::Span<const int64_t> groups, int64_t inner, int64_t outer, int64_t senders,
                int64_t site, bool sums, bool transpose_rhs, int64_t workspace_bytes, int64_t world,
                ffi::AnyBuffer x, ffi::RemainingArgs rest, ffi::RemainingRets results) {
  // Operands x, w_0 .. w_p-1, and a bias for each of them that is `biased`. Results: all y (of
  // which there is one if they are gated), p sums if there are `sums`, and perhaps the gathered x.
  const size_t count = biased.size(), products = gated ? 1 : count;
  const size_t biases = std::count(biased.begin(), biased.end(), 1);
  const size_t computed = products + (sums ? count : 0);
  const bool gathered = results.size() == computed + 1;
  if (count < 1 || count > kMaxWeights || rest.size() != count + biases ||
      results.size() != computed + (gathered ? 1 : 0) || (gated && count != 2) ||
      !IsActivation(activation)) {
    return InvalidArgument("all_gather_matmul: operands do not fit");
  }
  AllGatherMatmulOperands operands{};
  operands.x = x.untyped_data();
  operands.weights = static_cast<int32_t>(count);
  operands.activation = static_cast<Activation>(activation);
  operands.gated = gated;
  size_t next_bias = count;
  std::optional<AllGatherMatmulParams> p;
  int64_t columns = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto w = *rest.get<ffi::AnyBuffer>(i);
    auto y = *results.get<ffi::AnyBuffer>(gated ? 0 : i);
    p = ParamsOf(x, w, *y, world, outer, inner, transpose_rhs, gathered);
    if (!p) return InvalidArgument("all_gather_matmul: operands do not fit");
    auto& product = operands.products[i];
    product.w = w.untyped_data();
    product.y = y->untyped_data();
    product.n = p->n;
    if (sums) product.sums = (*results.get<ffi::AnyBuffer>(products + i))->untyped_data();
    if (biased[i] == 1) {
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
  const auto plan = CudaPlanOf(choice, senders, workspace_bytes);
  // Without a sender all would wait. A gate needs tiles of two halves, and nobody to share k.
  if (!plan || !FitsKernel(*p) || plan->senders < 1 ||
      !SharesK(plan->choice, p->rows.Total(), p->k, kGatherSplits) ||
      (gated && (plan->choice.tile_n % 128 != 0 || plan->choice.splits != 1))) {
    return InvalidArgument("all_gather_matmul: no kernel for this plan");
  }
  return LaunchCudaCall(
      kAllGatherMatmulId, ordinal, groups, world,
      {CudaLayoutOf(*p).Workspace().TotalBytes(), workspace_bytes},
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchAllGatherMatmul(*p, operands, *plan, site, device, view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllGatherMatmulOp;
const Op kAllGatherMatmulOp = {
    kAllGatherMatmulId,
    "all_gather_matmul",
    kCpu,
#ifdef JFLUX_WITH_CUDA
    kCuda,
    LoadAllGatherMatmulKernels,
#else
    nullptr,
    nullptr,
#endif
    /*most_splits=*/kGatherSplits,
    PlanAllGatherMatmul,
};

}  // namespace jflux
