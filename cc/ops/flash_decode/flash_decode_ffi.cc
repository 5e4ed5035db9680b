// The FFI handlers of flash_decode.
#include <algorithm>
#include <string>

#include "ops/flash_decode/flash_decode.h"
#include "runtime/fault.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/flash_decode/flash_decode_call.h"
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

// Operand and result: the bounds, if they are right.
struct CheckAttributes {
  int64_t capacity = 0;   // positions of all ranks
  int64_t positions = 0;  // of a rank

  void Read(AttributeReader& read) {
    read("capacity", &capacity)("positions", &positions);
    if (positions < 1) read.Refuse("attribute `positions` is less than 1");
  }
};

ffi::Error CheckOnCpu(ffi::Dictionary attributes, ffi::AnyBuffer bounds,
                      ffi::Result<ffi::AnyBuffer> same) {
  CheckAttributes a;
  if (auto refused = ReadAttributes(kFlashDecodeId, attributes, &a)) return *refused;
  const int64_t batch = bounds.dimensions().size() == 2 ? bounds.dimensions()[0] : 0;
  if (!Is(bounds, ffi::S32, {batch, 4}) || !Is(*same, ffi::S32, {batch, 4})) {
    return InvalidArgument("flash_decode: operands do not fit");
  }
  const auto* of = static_cast<const DecodeBounds*>(bounds.untyped_data());
  for (int64_t b = 0; b < batch; ++b) {
    if (of[b].HasLength(a.capacity)) continue;
    WaitContext context{};
    context.op = static_cast<uint32_t>(kFlashDecodeId);
    context.rank = of[b].Rank(a.positions);
    Fault fault{};
    WriteRecord(&fault, context, FaultKind::kLength, /*peer=*/0, b, static_cast<Signal>(a.capacity),
                static_cast<Signal>(int64_t{of[b].end}));
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, Describe(fault, /*deadline_s=*/0));
  }
  std::copy(of, of + batch, static_cast<DecodeBounds*>(same->untyped_data()));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kCheckOnCpu, CheckOnCpu,
                       ffi::Ffi::Bind().Attrs().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

#ifdef JFLUX_WITH_CUDA

ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  DecodeAttributes a;
  if (auto refused = ReadAttributes(kFlashDecodeId, attributes, &a)) return *refused;
  const auto call = DecodeCallOf(a, operands, results, /*value_width=*/0);
  return LaunchDecode(kFlashDecodeId, call, LaunchFlashDecode, stream);
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, BindLocalCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kFlashDecodeOp;
const Op kFlashDecodeOp = {kFlashDecodeId,       "flash_decode", kCheckOnCpu,
                           JFLUX_IF_CUDA(kCuda), OpFormats{},    kFlashDecodeFormats};

}  // namespace jflux
