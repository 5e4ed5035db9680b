// FFI handlers of matmul_all_to_all.
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "runtime/ffi.h"
#include "runtime/targets.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/matmul_all_to_all/matmul_all_to_all_cuda.h"
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// x [..., k] of this rank, w and the result y -> what to compute; empty if they do not fit
// together.
std::optional<MatmulAllToAllParams> ParamsOf(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w,
                                             const ffi::AnyBuffer& y, int64_t world, int64_t outer,
                                             int64_t inner, bool transpose_rhs, bool split_rows,
                                             bool concat_rows) {
  const auto dtype = DTypeOf(x.element_type()), out_dtype = DTypeOf(y.element_type());
  if (!dtype || !out_dtype || w.element_type() != x.element_type()) return std::nullopt;
  if (x.dimensions().size() < 2 || w.dimensions().size() != 2) return std::nullopt;
  const int64_t columns = w.dimensions()[transpose_rhs ? 0 : 1];
  MatmulAllToAllParams p{};
  p.rows = Rows{static_cast<int32_t>(world), outer, inner};
  p.k = x.dimensions().back();
  p.n = split_rows ? columns : columns / world;
  p.dtype = *dtype;
  p.out_dtype = *out_dtype;
  p.transpose_rhs = transpose_rhs;
  p.split_rows = split_rows;
  p.concat_rows = concat_rows;
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

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Span<const int64_t>,
                bool concat_rows, ffi::Span<const int64_t> groups, int64_t inner, int64_t outer,
                int64_t, bool split_rows, bool transpose_rhs, int64_t world, ffi::AnyBuffer x,
                ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(x, w, *y, world, outer, inner, transpose_rhs, split_rows, concat_rows);
  if (!p) return FailedFuture(InvalidArgument("matmul_all_to_all: operands do not fit"));
  const MatmulAllToAllArrays arrays{x.untyped_data(), w.untyped_data(), y->untyped_data()};

  const ShardTiling tiling;
  const int64_t bytes =
      AllToAllLayout::Make(*p, tiling.tile_m, tiling.tile_n).Workspace().TotalBytes();
  return JoinFfiCall(
      OpId::kMatmulAllToAll, site, run_id, device, groups, world, bytes,
      [p = *p, tiling, arrays](const SymmetricView& view, uint32_t epoch, const WaitContext& ctx) {
        return MatmulAllToAllCpu(p, tiling, arrays, view, epoch, ctx);
      });
}

// Attributes in alphabetical order, as Cpu() and Cuda() take them, and the operands.
constexpr auto Bind = [](auto binding) {
  return std::move(binding)
      .template Attr<ffi::Span<const int64_t>>("choice")
      .template Attr<bool>("concat_rows")
      .template Attr<ffi::Span<const int64_t>>("groups")
      .template Attr<int64_t>("inner")
      .template Attr<int64_t>("outer")
      .template Attr<int64_t>("site")
      .template Attr<bool>("split_rows")
      .template Attr<bool>("transpose_rhs")
      .template Attr<int64_t>("world")
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>();
};

XLA_FFI_DEFINE_HANDLER(
    kCpu, Cpu,
    Bind(ffi::Ffi::Bind().Ctx<ffi::State<CallSite>>().Ctx<ffi::RunId>().Ctx<ffi::DeviceOrdinal>()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Span<const int64_t> choice,
                bool concat_rows, ffi::Span<const int64_t> groups, int64_t inner, int64_t outer,
                int64_t site, bool split_rows, bool transpose_rhs, int64_t world, ffi::AnyBuffer x,
                ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(x, w, *y, world, outer, inner, transpose_rhs, split_rows, concat_rows);
  if (!p || !FitsKernel(*p)) {
    return InvalidArgument("matmul_all_to_all: operands do not fit");
  }
  if (!IsPossibleChoice(choice)) {
    return InvalidArgument("matmul_all_to_all: no kernel for this `choice`");
  }
  const MatmulAllToAllArrays arrays{x.untyped_data(), w.untyped_data(), y->untyped_data()};
  const auto choice_for = [&](int sm_count) {
    const GemmChoice wanted = ChoiceOf(choice).value_or(
        ChooseAllToAll(p->rows.world, p->rows.PerRank(), p->n, p->k, sm_count));
    return FitSplits(wanted, p->rows.Total(), p->k, /*most=*/1);
  };
  return LaunchCudaCall(
      OpId::kMatmulAllToAll, ordinal, groups, world,
      [&](int sm_count) { return MatmulAllToAllWorkspace(*p, choice_for(sm_count)); },
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchMatmulAllToAll(*p, arrays, choice_for(device.sm_count), site, device, view,
                                    stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(
    kCuda, Cuda,
    Bind(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>()),
    {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

XLA_FFI_Error* MatmulAllToAllCpuHandler(XLA_FFI_CallFrame* frame) { return kCpu(frame); }

#ifdef JFLUX_WITH_CUDA
XLA_FFI_Error* MatmulAllToAllCudaHandler(XLA_FFI_CallFrame* frame) { return kCuda(frame); }
#endif

}  // namespace jflux
