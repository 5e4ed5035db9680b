// The plan and the FFI handlers of all_to_all_matmul.
#include "ops/all_to_all_matmul/all_to_all_matmul.h"
#include "runtime/ffi.h"
#include "runtime/product_plan.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// The call's k is the columns of a shard of x.
bool PlanAllToAllMatmul(const Fields& fields, const Machine& machine, Fields* plan,
                        std::string* why_not) {
  CallReader reader(fields);
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
  if (!reader.Check(why_not)) return false;
  if (machine.IsCpu()) {
    const AllToAllMatmulTiling tiling;
    const auto layout = AllToAllMatmulLayout::Make(p, tiling.chunk_bytes);
    *plan = CpuPlan(layout.Workspace().TotalBytes());
    return true;
  }
  if (!IsPlannable(call, WhyNoKernel(p, FormatsOf(machine)), why_not)) return false;
  const GemmChoice wanted = call.given.value_or(ChooseAllToAllMatmul(
      p.rows.world, p.rows.PerRank(), p.k, p.n, p.dtype, p.concat_rows, machine, p.transpose_rhs));
  const GemmChoice choice = FitSplits(wanted, p.RowsOfY(), p.KOfW() * SizeOf(p.dtype), /*most=*/1);
  *plan = ProductPlan{choice, AllToAllMatmulSenders(p, machine),
                      CudaLayoutOf(p).Workspace().TotalBytes()}
              .AsFields();
  return true;
}

struct Attributes {
  ProductAttributes product;
  bool concat_rows = false, split_rows = false;

  void Read(AttributeReader& read) {
    product.Read(read);
    read("concat_rows", &concat_rows);
    read("split_rows", &split_rows);
  }
};

struct Operands {
  AllToAllMatmulParams params;
  AllToAllMatmulArrays arrays;
};

// x of this rank and w; the results are y and, if it is wanted, all_to_all(x). Empty if they do not
// fit together.
std::optional<Operands> OperandsOf(const Attributes& a, const ffi::AnyBuffer& x,
                                   const ffi::AnyBuffer& w, ffi::AnyBuffer& y,
                                   const ffi::RemainingRets& rest) {
  const ProductAttributes& product = a.product;
  const int64_t world = product.call.world;
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() < 2 || w.dimensions().size() != 2 || rest.size() > 1) {
    return std::nullopt;
  }
  Operands o{};
  AllToAllMatmulParams& p = o.params;
  p.rows = Rows{static_cast<int32_t>(world), product.outer, product.inner};
  p.k = w.dimensions()[product.transpose_rhs ? 1 : 0] / (a.concat_rows ? 1 : world);
  p.n = w.dimensions()[product.transpose_rhs ? 0 : 1];
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = product.transpose_rhs;
  p.split_rows = a.split_rows;
  p.concat_rows = a.concat_rows;
  p.return_gathered = rest.size() == 1;
  const auto count = [](const ffi::AnyBuffer& b) {
    return static_cast<int64_t>(b.element_count());
  };
  if (p.rows.PerRank() == 0 || p.k == 0 || p.n == 0) return std::nullopt;
  if (count(x) != p.RowsOfX() * p.ColumnsOfX() || count(w) != p.KOfW() * p.n ||
      count(y) != p.RowsOfY() * p.n) {
    return std::nullopt;
  }
  o.arrays = {x.untyped_data(), w.untyped_data(), y.untyped_data(), nullptr};
  if (p.return_gathered) {
    auto gathered = *rest.get<ffi::AnyBuffer>(0);
    if (gathered->element_type() != x.element_type() ||
        count(*gathered) != p.RowsOfY() * p.KOfW()) {
      return std::nullopt;
    }
    o.arrays.gathered = gathered->untyped_data();
  }
  return o;
}

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Dictionary attributes,
                ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y,
                ffi::RemainingRets rest) {
  Attributes a;
  if (auto refused = ReadAttributes(kAllToAllMatmulId, attributes, &a)) {
    return FailedFuture(*refused);
  }
  if (!IsCpuPlan(a.product.choice, a.product.senders)) {
    return FailedFuture(InvalidArgument("all_to_all_matmul: malformed plan"));
  }
  const auto o = OperandsOf(a, x, w, *y, rest);
  if (!o) return FailedFuture(InvalidArgument("all_to_all_matmul: operands do not fit"));

  const AllToAllMatmulTiling tiling;
  const int64_t bytes =
      AllToAllMatmulLayout::Make(o->params, tiling.chunk_bytes).Workspace().TotalBytes();
  return JoinFfiCall(
      kAllToAllMatmulId, site, run_id, device, a.product.call, bytes,
      [o = *o, tiling](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
        return AllToAllMatmulCpu(o.params, tiling, o.arrays, view, epoch, ctx);
      });
}

// Operands and results.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .RemainingRets();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes, ffi::AnyBuffer x,
                ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets rest) {
  Attributes a;
  if (auto refused = ReadAttributes(kAllToAllMatmulId, attributes, &a)) return *refused;
  const CallAttributes& call = a.product.call;
  const auto o = OperandsOf(a, x, w, *y, rest);
  if (!o) return InvalidArgument("all_to_all_matmul: operands do not fit");
  const auto plan = CudaPlanOf(a.product.choice, a.product.senders, call.workspace_bytes);
  if (!plan || !WhyNoKernel(o->params).empty() || plan->choice.splits != 1) {
    return InvalidArgument("all_to_all_matmul: no kernel for this plan");
  }
  return LaunchCudaCall(
      kAllToAllMatmulId, ordinal, call, CudaLayoutOf(o->params).Workspace().TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchAllToAllMatmul(o->params, o->arrays, *plan, call.site, device, view, stream,
                                    error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllToAllMatmulOp;
const Op kAllToAllMatmulOp = {kAllToAllMatmulId,    "all_to_all_matmul", kCpu,
                              JFLUX_IF_CUDA(kCuda), kCpuFormats,         kAllToAllMatmulFormats,
                              PlanAllToAllMatmul};

}  // namespace jflux
