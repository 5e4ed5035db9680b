// FFI handlers of all_gather_attention.
#include <optional>
#include <string>

#include "ops/all_gather_attention/all_gather_attention_config.h"
#include "ops/flash_attention/flash_attention_operands.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "ops/all_gather_attention/all_gather_attention_cuda.h"
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

struct Attributes {
  CallAttributes call;
  AttentionAttributes attention;
  int64_t senders = 0;  // on the CPU 0

  void Read(AttributeReader& read) {
    call.Read(read);
    attention.Read(read);
    read("senders", &senders);
  }
};

struct Call {
  AllGatherAttentionParams params{};
  FlashAttentionArrays arrays{};
};

// q, k, v, positions of queries, of keys, kinds of blocks, their order[, segments of queries, of
// keys] -> out, lse. Empty if they do not fit together.
std::optional<Call> CallOf(const Attributes& a, ffi::RemainingArgs operands,
                           ffi::RemainingRets results) {
  if (a.call.world < 2 || a.call.world > kMaxRanks) return std::nullopt;
  AttentionReader reader(operands, results, a.call.world);
  if (!reader.ReadHeads(a.attention) || !reader.ReadPositions() ||
      !reader.ReadBlocks(AttentionPass::kForward) || !reader.ReadSegments() ||
      !reader.ReadOutputs()) {
    return std::nullopt;
  }
  return Call{{static_cast<int32_t>(a.call.world), reader.params}, reader.arrays};
}

ffi::Error NoFit() { return InvalidArgument("all_gather_attention: operands do not fit"); }

ffi::Future Cpu(CallSite* site, ffi::RunId run_id, int32_t device, ffi::Dictionary attributes,
                ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kAllGatherAttentionId, attributes, &a)) {
    return FailedFuture(*refused);
  }
  const auto call = CallOf(a, operands, results);
  if (!call || a.senders != 0) return FailedFuture(NoFit());
  const int64_t bytes = KeyLayout::Make(call->params, kCpuLogKeyChunk).Workspace().TotalBytes();
  return JoinFfiCall(
      kAllGatherAttentionId, site, run_id, device, a.call, bytes,
      [call = *call](const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) {
        return AllGatherAttentionCpu(call.params, kCpuLogKeyChunk, call.arrays, view, epoch, ctx);
      });
}

constexpr auto Bindings = [](auto binding) {
  return std::move(binding).RemainingArgs().RemainingRets();
};

XLA_FFI_DEFINE_HANDLER(kCpu, Cpu, Bindings(BindCpu()));

#ifdef JFLUX_WITH_CUDA
ffi::Error Cuda(cudaStream_t stream, int32_t ordinal, ffi::Dictionary attributes,
                ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Attributes a;
  if (auto refused = ReadAttributes(kAllGatherAttentionId, attributes, &a)) return *refused;
  const auto call = CallOf(a, operands, results);
  if (!call) return NoFit();
  const AllGatherAttentionParams& p = call->params;
  const std::string why = WhyNoKernel(p);
  if (!why.empty()) return InvalidArgument("all_gather_attention: " + why);
  // With no sender all CTAs would wait for keys for ever.
  if (a.senders < 1 || a.senders > kMostSms) {
    return InvalidArgument("all_gather_attention: no kernel for this plan");
  }
  return LaunchCudaCall(
      kAllGatherAttentionId, ordinal, a.call, CudaLayoutOf(p).Workspace().TotalBytes(),
      [&](const CudaDevice& device, const SymmetricView& view, std::string* error) {
        return LaunchAllGatherAttention(p, call->arrays, static_cast<int32_t>(a.senders),
                                        a.call.site, device, view, stream, error);
      });
}

XLA_FFI_DEFINE_HANDLER(kCuda, Cuda, Bindings(BindCuda()), {ffi::Traits::kCmdBufferCompatible});
#endif

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllGatherAttentionOp;
const Op kAllGatherAttentionOp = {
    kAllGatherAttentionId,
    "all_gather_attention",
    kCpu,
#ifdef JFLUX_WITH_CUDA
    kCuda,
    LoadAllGatherAttentionKernels,
#else
    nullptr,
    nullptr,
#endif
    /*most_splits=*/1,
    PlanAllGatherAttention,
};

}  // namespace jflux
