// The FFI handlers of flash_attention and flash_attention_backward.
#include <string>

#include "ops/flash_attention/flash_attention_operands.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/flash_attention/flash_attention.h"
#include "runtime/local_cuda_call.h"
#endif

namespace jflux {
namespace {

#ifdef JFLUX_WITH_CUDA

// q, k, v, positions of queries, of keys, kinds of blocks, their order[, segments of queries, of
// keys] -> out, lse
ffi::Error Forward(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  AttentionAttributes a;
  if (auto refused = ReadAttributes(kFlashAttentionId, attributes, &a)) return *refused;
  AttentionReader call(operands, results);
  if (!call.ReadHeads(a) || !call.ReadPositions() || !call.ReadBlocks(AttentionPass::kForward) ||
      !call.ReadSegments() || !call.ReadOutputs()) {
    return InvalidArgument("flash_attention: operands do not fit");
  }
  return LaunchLocalCuda(kFlashAttentionId, [&](std::string* error) {
    return LaunchFlashAttention(call.params, call.arrays, stream, error);
  });
}

// q, k, v, do, base, delta, positions of queries, of keys, kinds of blocks and their order for dk
// and dv, the same for dq[, segments of queries, of keys] -> dq, dk, dv
ffi::Error Backward(cudaStream_t stream, ffi::Dictionary attributes, ffi::RemainingArgs operands,
                    ffi::RemainingRets results) {
  AttentionAttributes a;
  if (auto refused = ReadAttributes(kFlashAttentionBackwardId, attributes, &a)) return *refused;
  AttentionReader call(operands, results);
  if (!call.ReadHeads(a) || !call.ReadCotangents() || !call.ReadPositions() ||
      !call.ReadBlocks(AttentionPass::kDkv) || !call.ReadBlocks(AttentionPass::kDq) ||
      !call.ReadSegments() || !call.ReadGradients()) {
    return InvalidArgument("flash_attention_backward: operands do not fit");
  }
  return LaunchLocalCuda(kFlashAttentionBackwardId, [&](std::string* error) {
    return LaunchFlashAttentionBackward(call.params, call.arrays, stream, error);
  });
}

XLA_FFI_DEFINE_HANDLER(kForward, Forward, BindLocalCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kBackward, Backward, BindLocalCuda().RemainingArgs().RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

#endif  // JFLUX_WITH_CUDA

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kFlashAttentionOp, kFlashAttentionBackwardOp;
const Op kFlashAttentionOp = {kFlashAttentionId,       "flash_attention", /*cpu=*/nullptr,
                              JFLUX_IF_CUDA(kForward), OpFormats{},       kFlashAttentionFormats};
const Op kFlashAttentionBackwardOp = {
    kFlashAttentionBackwardId, "flash_attention_backward",
    /*cpu=*/nullptr,           JFLUX_IF_CUDA(kBackward),   OpFormats{}, kFlashAttentionFormats};

}  // namespace jflux
