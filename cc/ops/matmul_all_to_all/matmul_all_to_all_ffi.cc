// The plan and the FFI handlers of matmul_all_to_all.
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "runtime/ffi.h"
#include "runtime/product_plan.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

bool PlanMatmulAllToAll(const Fields& fields, const Machine& machine, Fields* plan,
                        std::string* why_not) {
  CallReader reader(fields);
  const ProductCall call = ProductCall::Read(reader);
  MatmulAllToAllParams p{call.rows,          call.k, call.n, call.dtype, call.out_dtype,
                         call.transpose_rhs, false,  false};
  p.split_rows = reader.GetOr("split_rows", 0, 0, 1) == 1;
  p.concat_rows = reader.GetOr("concat_rows", 0, 0, 1) == 1;
  if (!reader.Check(why_not)) return false;
  if (machine.IsCpu()) {
    const ShardTiling tiling;
    const auto layout = AllToAllLayout::Make(p, tiling.tile_m, tiling.tile_n);
    *plan = CpuPlan(layout.Workspace().TotalBytes());
    return true;
  }
  if (!IsPlannable(call, WhyNoKernel(p, FormatsOf(machine)), why_not)) return false;
  const GemmChoice wanted = call.given.value_or(
      ChooseAllToAll(p.rows.world, p.rows.PerRank(), p.n, p.k, p.dtype, machine, p.transpose_rhs));
  const GemmChoice choice = FitSplits(wanted, p.rows.Total(), p.k * SizeOf(p.dtype), /*most=*/1);
  *plan = ProductPlan{choice, AllToAllSenders(p, choice, machine),
                      CudaLayoutOf(p, choice).Workspace().TotalBytes()}
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

// x [..., k] of this rank, w and the result y -> what to compute; empty if they do not fit
// together.
std::optional<MatmulAllToAllParams> ParamsOf(const Attributes& a, const ffi::AnyBuffer& x,
                                             const ffi::AnyBuffer& w, const ffi::AnyBuffer& y) {
  const ProductAttributes& product = a.product;
  const int64_t world = product.call.world;
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() < 2 || w.dimensions().size() != 2) return std::nullopt;
  const int64_t columns = w.dimensions()[product.transpose_rhs ? 0 : 1];
  MatmulAllToAllParams p{};
  p.rows = Rows{static_cast<int32_t>(world), product.outer, product.inner};
  p.k = x.dimensions().back();
  p.n = a.split_rows ? columns : columns / world;
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = product.transpose_rhs;
  p.split_rows = a.split_rows;
  p.concat_rows = a.concat_rows;
  const auto count = [](const ffi::AnyBuffer& b) {
    return static_cast<int64_t>(b.element_count());
  };
  if (p.rows.PerRank() == 0 || p.k == 0 || p.n == 0) return std::nullopt;
  if (count(x) != p.RowsOfX() * p.k || count(w) != p.k * p.ColumnsOfW() ||
      count(y) != p.rows.Total() * p.n) {
    return std::nullopt;
  }
  return p;
}

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Dictionary attributes,
                ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y) {
  Attributes a;
  if (auto refused = ReadAttributes(kMatmulAllToAllId, attributes, &a)) {
    return FailedFuture(*refused);
  }
  if (!IsCpuPlan(a.product.choice, a.product.senders)) {
    return FailedFuture(InvalidArgument("matmul_all_to_all: malformed plan"));
  }
  const auto p = ParamsOf(a, x, w, *y);
  if (!p) return FailedFuture(InvalidArgument("matmul_all_to_all: operands do not fit"));
  const MatmulAllToAllArrays arrays{x.untyped_data(), w.untyped_data(), y->untyped_data()};

  const ShardTiling tiling;
  const int64_t bytes =
      AllToAllLayout::Make(*p, tiling.tile_m, tiling.tile_n).Workspace().TotalBytes();
  return JoinFfiCall(
      kMatmulAllToAllId, site, run_id, device, a.product.call, bytes,
      [p = *p, tiling, arrays](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
        return MatmulAllToAllCpu(p, tiling, arrays, view, epoch, ctx);
      });
}

// Operands and the result.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes, ffi::AnyBuffer x,
                ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y) {
  Attributes a;
  if (auto refused = ReadAttributes(kMatmulAllToAllId, attributes, &a)) return *refused;
  const CallAttributes& call = a.product.call;
  const auto p = ParamsOf(a, x, w, *y);
  if (!p) return InvalidArgument("matmul_all_to_all: operands do not fit");
  const auto plan = CudaPlanOf(a.product.choice, a.product.senders, call.workspace_bytes);
  if (!plan || !WhyNoKernel(*p).empty() || plan->choice.splits != 1) {
    return InvalidArgument("matmul_all_to_all: no kernel for this plan");
  }
  const MatmulAllToAllArrays arrays{x.untyped_data(), w.untyped_data(), y->untyped_data()};
  return LaunchCudaCall(
      kMatmulAllToAllId, ordinal, call, CudaLayoutOf(*p, plan->choice).Workspace().TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchMatmulAllToAll(*p, arrays, *plan, call.site, device, view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kMatmulAllToAllOp;
const Op kMatmulAllToAllOp = {kMatmulAllToAllId,    "matmul_all_to_all", kCpu,
                              JFLUX_IF_CUDA(kCuda), kCpuFormats,         kMatmulAllToAllFormats,
                              PlanMatmulAllToAll};

}  // namespace jflux
