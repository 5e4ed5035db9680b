// The plan and the FFI handlers of decode_merge.
#include <optional>
#include <string>

#include "ops/decode_merge/decode_merge.h"
#include "runtime/fault.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// Fields of a call: world, rows, width. Of the plan: workspace_bytes.
bool PlanDecodeMerge(const Fields& fields, const Machine&, Fields* plan, std::string* why_not) {
  CallReader call(fields);
  DecodeMergeParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.rows = call.Get("rows", 1, int64_t{1} << 31);
  p.width = call.Get("width", 1, int64_t{1} << 20);
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"workspace_bytes", p.Workspace().TotalBytes()}};
  return true;
}

struct Attributes {
  CallAttributes call;
  void Read(AttributeReader& read) { call.Read(read); }
};

// The parameters of the call; empty if operands do not fit.
std::optional<DecodeMergeParams> ParamsOf(const Attributes& a, const ffi::AnyBuffer& x,
                                          const ffi::AnyBuffer& y) {
  if (x.dimensions().size() != 2) return std::nullopt;
  const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
  if (!Is(x, ffi::F32, {rows, columns}) || !Is(y, ffi::F32, {rows, columns}) || rows < 1 ||
      columns < 2) {
    return std::nullopt;
  }
  return DecodeMergeParams{static_cast<int32_t>(a.call.world), rows, columns - 1};
}

DecodeMergeArrays ArraysOf(const ffi::AnyBuffer& x, ffi::AnyBuffer& y) {
  return {static_cast<const float*>(x.untyped_data()), static_cast<float*>(y.untyped_data())};
}

ffi::Error DoNotFit() { return InvalidArgument("decode_merge: operands do not fit"); }

// Operand and result.
constexpr auto Bindings = [](auto binding) {
  return std::move(binding).template Arg<ffi::AnyBuffer>().template Ret<ffi::AnyBuffer>();
};

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Dictionary attributes,
                ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  Attributes a;
  if (auto refused = ReadAttributes(kDecodeMergeId, attributes, &a)) return FailedFuture(*refused);
  const auto p = ParamsOf(a, x, *y);
  if (!p) return FailedFuture(DoNotFit());
  return JoinFfiCall(kDecodeMergeId, site, run_id, device, a.call, p->Workspace().TotalBytes(),
                     [p = *p, arrays = ArraysOf(x, *y)](const SymmetricView& view, uint64_t epoch,
                                                        const WaitContext& ctx) {
                       return DecodeMergeCpu(p, arrays, view, epoch, ctx);
                     });
}
XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> y) {
  Attributes a;
  if (auto refused = ReadAttributes(kDecodeMergeId, attributes, &a)) return *refused;
  const auto p = ParamsOf(a, x, *y);
  if (!p) return DoNotFit();
  return LaunchCudaCall(
      kDecodeMergeId, ordinal, a.call, p->Workspace().TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchDecodeMerge(*p, ArraysOf(x, *y), a.call.site, device, view, stream, error);
      });
}
XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kDecodeMergeOp;
const Op kDecodeMergeOp = {kDecodeMergeId,       "decode_merge",      kCpu,
                           JFLUX_IF_CUDA(kCuda), kDecodeMergeFormats, kDecodeMergeFormats,
                           PlanDecodeMerge};

}  // namespace jflux
