// The FFI handler of latent_decode.
#include "ops/latent_decode/latent_decode.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/flash_decode/flash_decode_call.h"
#endif

namespace jflux {
namespace {

#ifdef JFLUX_WITH_CUDA

struct Attributes {
  DecodeAttributes decode;
  bool portable = false;  // by the kernel for GPUs other than Hopper

  void Read(AttributeReader& read) {
    decode.Read(read);
    read("portable", &portable);
  }
};

ffi::Error Cuda(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kLatentDecodeId, attributes, &a)) return *refused;
  auto call = DecodeCallOf(a.decode, operands, results, kLatentValues);
  if (call) call->params.portable = a.portable;
  return LaunchDecode(kLatentDecodeId, call, LaunchLatentDecode, stream);
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, BindLocalCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kLatentDecodeOp;
const Op kLatentDecodeOp = {kLatentDecodeId,      "latent_decode", /*cpu=*/nullptr,
                            JFLUX_IF_CUDA(kCuda), OpFormats{},     kLatentDecodeFormats};

}  // namespace jflux
