// The plan and the FFI handlers of matmul_reduce_scatter.
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/ffi.h"
#include "runtime/product_plan.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

bool PlanMatmulReduceScatter(const Fields& fields, const Machine& machine, Fields* plan,
                             std::string* why_not) {
  CallReader reader(fields);
  const ProductCall call = ProductCall::Read(reader);
  const int64_t first_k = reader.GetOr("first_k", call.k, 1, call.k);  // of the first term
  if (!reader.Check(why_not)) return false;
  const MatmulReduceScatterParams p{call.rows,  call.k,         call.n,
                                    call.dtype, call.out_dtype, call.transpose_rhs};
  if (machine.IsCpu()) {
    const ScatterTiling tiling;
    const auto layout =
        ReduceScatterLayout::Make(p, tiling.tile_m, tiling.tile_n, /*signals_per_slot=*/1);
    *plan = CpuPlan(layout.Workspace().TotalBytes());
    return true;
  }
  if (!IsPlannable(call, WhyNoKernel(p, FormatsOf(machine)), why_not)) return false;
  const GemmChoice wanted = call.given.value_or(ChooseReduceScatter(
      p.rows.world, p.rows.PerRank(), p.n, p.k, p.dtype, machine, p.transpose_rhs));
  // Each of the CTAs that share k has some of the first term's.
  const GemmChoice choice =
      FitSplits(wanted, p.rows.Total(), first_k * SizeOf(p.dtype), kReduceSplits);
  *plan = ProductPlan{choice, ReduceScatterSenders(p, choice, machine),
                      CudaLayoutOf(p, choice).Workspace().TotalBytes()}
              .AsFields();
  return true;
}

struct Attributes {
  ProductAttributes product;
  bool adds_bias = false, adds_residual = false;

  void Read(AttributeReader& read) {
    product.Read(read);
    read("adds_bias", &adds_bias);
    read("adds_residual", &adds_residual);
  }
};

// x [..., k] of this rank, w and the result y -> what to compute; empty if they do not fit
// together.
std::optional<MatmulReduceScatterParams> ParamsOf(const ProductAttributes& a,
                                                  const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
                                                  const ffi::AnyBuffer& y) {
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() < 2 || w.dimensions().size() != 2) return std::nullopt;
  MatmulReduceScatterParams p{};
  p.rows = Rows{static_cast<int32_t>(a.call.world), a.outer, a.inner};
  p.k = x.dimensions().back();
  p.n = w.dimensions()[a.transpose_rhs ? 0 : 1];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = a.transpose_rhs;
  const auto count = [](const ffi::AnyBuffer& b) {
    return static_cast<int64_t>(b.element_count());
  };
  if (p.rows.PerRank() == 0 || p.k == 0 || p.n == 0) return std::nullopt;
  if (count(x) != p.rows.Total() * p.k || count(w) != p.k * p.n ||
      count(y) != p.rows.PerRank() * p.n) {
    return std::nullopt;
  }
  return p;
}

// One term, without an epilogue: `adds_bias` and `adds_residual` are for GPUs.
ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Dictionary attributes,
                ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y) {
  Attributes a;
  if (auto refused = ReadAttributes(kMatmulReduceScatterId, attributes, &a)) {
    return FailedFuture(*refused);
  }
  if (!IsCpuPlan(a.product.choice, a.product.senders)) {
    return FailedFuture(InvalidArgument("matmul_reduce_scatter: malformed plan"));
  }
  std::optional<MatmulReduceScatterParams> p;
  if (args.size() == 2 && !a.adds_bias && !a.adds_residual) {
    p = ParamsOf(a.product, *args.get<ffi::AnyBuffer>(0), *args.get<ffi::AnyBuffer>(1), *y);
  }
  if (!p) return FailedFuture(InvalidArgument("matmul_reduce_scatter: operands do not fit"));
  const MatmulReduceScatterArrays arrays{args.get<ffi::AnyBuffer>(0)->untyped_data(),
                                         args.get<ffi::AnyBuffer>(1)->untyped_data(),
                                         y->untyped_data()};

  const ScatterTiling tiling;
  const int64_t bytes =
      ReduceScatterLayout::Make(*p, tiling.tile_m, tiling.tile_n, 1).Workspace().TotalBytes();
  return JoinFfiCall(
      kMatmulReduceScatterId, site, run_id, device, a.product.call, bytes,
      [p = *p, tiling, arrays](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
        return MatmulReduceScatterCpu(p, tiling, arrays, view, epoch, ctx);
      });
}

// Operands and the result.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding).RemainingArgs().template Ret<ffi::AnyBuffer>();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes,
                ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y) {
  Attributes a;
  if (auto refused = ReadAttributes(kMatmulReduceScatterId, attributes, &a)) return *refused;
  const CallAttributes& call = a.product.call;
  // Operands x_0 .. x_p-1, w_0 .. w_p-1, and perhaps the bias and the residual.
  const size_t added = (a.adds_bias ? 1 : 0) + (a.adds_residual ? 1 : 0);
  const size_t count = args.size() < added ? 0 : (args.size() - added) / 2;
  if (count < 1 || count > kMaxWeights || args.size() != 2 * count + added) {
    return InvalidArgument("matmul_reduce_scatter: operands do not fit");
  }
  MatmulReduceScatterOperands operands{};
  operands.terms = static_cast<int32_t>(count);
  operands.y = y->untyped_data();
  std::optional<MatmulReduceScatterParams> p;
  int64_t k = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto x = *args.get<ffi::AnyBuffer>(i), w = *args.get<ffi::AnyBuffer>(count + i);
    p = ParamsOf(a.product, x, w, *y);
    if (!p) return InvalidArgument("matmul_reduce_scatter: operands do not fit");
    operands.products[i] = {x.untyped_data(), w.untyped_data(), p->k};
    k += p->k;
  }
  p->k = k;
  if (a.adds_bias) {
    const auto bias = *args.get<ffi::AnyBuffer>(2 * count);
    if (bias.element_type() != ffi::F32 || static_cast<int64_t>(bias.element_count()) != p->n) {
      return InvalidArgument("matmul_reduce_scatter: the bias does not fit");
    }
    operands.bias = static_cast<const float*>(bias.untyped_data());
  }
  if (a.adds_residual) {
    const auto residual = *args.get<ffi::AnyBuffer>(args.size() - 1);
    if (residual.element_type() != y->element_type() ||
        residual.element_count() != y->element_count()) {
      return InvalidArgument("matmul_reduce_scatter: the residual does not fit");
    }
    operands.residual = residual.untyped_data();
  }
  const auto plan = CudaPlanOf(a.product.choice, a.product.senders, call.workspace_bytes);
  if (!plan || !WhyNoKernel(*p).empty() ||
      !SharesK(plan->choice, p->rows.Total(), operands.products[0].k * SizeOf(p->dtype),
               kReduceSplits)) {
    return InvalidArgument("matmul_reduce_scatter: no kernel for this plan");
  }
  return LaunchCudaCall(
      kMatmulReduceScatterId, ordinal, call,
      CudaLayoutOf(*p, plan->choice).Workspace().TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchMatmulReduceScatter(*p, operands, *plan, call.site, device, view, stream,
                                         error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMatmulReduceScatterOp;
const Op kMatmulReduceScatterOp = {kMatmulReduceScatterId,
                                   "matmul_reduce_scatter",
                                   kCpu,
                                   JFLUX_IF_CUDA(kCuda),
                                   kCpuFormats,
                                   kMatmulReduceScatterFormats,
                                   PlanMatmulReduceScatter,
                                   /*most_splits=*/kReduceSplits};

}  // namespace jflux
