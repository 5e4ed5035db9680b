// FFI handlers of all_reduce.
#include "ops/all_reduce/all_reduce.h"
#include "runtime/ffi.h"
#include "runtime/targets.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/all_reduce/all_reduce_cuda.h"
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// x of this rank and the result y -> what to compute; empty if they do not fit together.
std::optional<AllReduceParams> ParamsOf(int64_t algorithm, int64_t world, const ffi::AnyBuffer& x,
                                        const ffi::AnyBuffer& y) {
  const auto dtype = DTypeOf(x.element_type());
  if (!dtype || y.element_type() != x.element_type()) return std::nullopt;
  if (x.element_count() == 0 || y.element_count() != x.element_count()) return std::nullopt;
  if (algorithm < 0 || algorithm >= kAllReduceAlgorithms) return std::nullopt;
  return AllReduceParams{static_cast<int32_t>(world), static_cast<int64_t>(x.element_count()),
                         *dtype, static_cast<AllReduceAlgorithm>(algorithm)};
}

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, int64_t algorithm,
                ffi::Span<const int64_t> groups, int64_t, int64_t world, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(algorithm, world, x, *y);
  if (!p) return FailedFuture(InvalidArgument("all_reduce: operands do not fit"));
  const AllReduceArrays arrays{x.untyped_data(), y->untyped_data()};

  const int64_t bytes = p->Channel().TotalBytes();
  return JoinFfiCall(
      OpId::kAllReduce, *site, run_id, device, groups, world, bytes,
      [p = *p, arrays](const SymmetricView& view, uint32_t epoch, const WaitContext& ctx) {
        return AllReduceCpu(p, arrays, view, epoch, ctx);
      });
}

// Attributes in alphabetical order, as Cpu() and Cuda() take them.
constexpr auto Attributes = [](auto binding) {
  return std::move(binding)
      .template Attr<int64_t>("algorithm")
      .template Attr<ffi::Span<const int64_t>>("groups")
      .template Attr<int64_t>("site")
      .template Attr<int64_t>("world");
};

XLA_FFI_DEFINE_HANDLER(
    kCpu, Cpu,
    Attributes(
        ffi::Ffi::Bind().Ctx<ffi::State<CallSite>>().Ctx<ffi::RunId>().Ctx<ffi::DeviceOrdinal>())
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>());

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, int64_t algorithm,
                ffi::Span<const int64_t> groups, int64_t site, int64_t world, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> y) {
  const auto p = ParamsOf(algorithm, world, x, *y);
  if (!p) return InvalidArgument("all_reduce: operands do not fit");
  const AllReduceArrays arrays{x.untyped_data(), y->untyped_data()};
  return LaunchCudaCall(
      OpId::kAllReduce, ordinal, groups, world, [&](int) { return p->Channel(); },
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchAllReduce(*p, arrays, site, device, view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(
    kCuda, Cuda,
    Attributes(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>())
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>(),
    {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

XLA_FFI_Error* AllReduceCpuHandler(XLA_FFI_CallFrame* frame) { return kCpu(frame); }

#ifdef JFLUX_WITH_CUDA
XLA_FFI_Error* AllReduceCudaHandler(XLA_FFI_CallFrame* frame) { return kCuda(frame); }
#endif

}  // namespace jflux
