// The plan and the FFI handlers of all_gather_attention.
#include <optional>
#include <string>

#include "ops/all_gather_attention/all_gather_attention.h"
#include "ops/flash_attention/flash_attention_operands.h"
#include "runtime/ffi.h"
#include "runtime/op.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/cuda_call.h"
#endif

namespace jflux {
namespace {

// Fields of a call: world, batch, queries, keys, heads, groups, width, dtype. Of the plan:
// workspace_bytes; on GPUs senders too.
bool PlanAllGatherAttention(const Fields& fields, const Machine& machine, Fields* plan,
                            std::string* why_not) {
  CallReader call(fields);
  AllGatherAttentionParams p{};
  FlashAttentionParams& a = p.attention;
  p.world = static_cast<int32_t>(call.Get("world", 2, kMaxRanks));
  constexpr int64_t kMost = int64_t{1} << 20;
  a.batch = call.Get("batch", 1, kMost);
  a.queries = call.Get("queries", 1, kFurthest);
  a.keys = call.Get("keys", 1, kFurthest);
  a.heads = call.Get("heads", 1, kMost);
  a.groups = call.Get("groups", 1, kMost);
  a.width = call.Get("width", 1, kMost);
  a.dtype = call.GetFormat("dtype");
  const double sequence = static_cast<double>(a.keys) * a.groups * a.width * SizeOf(a.dtype);
  if (sequence * a.batch * p.world > 0x1p42) call.Refuse("keys of more than 2^42 bytes");
  if (a.heads % a.groups != 0) call.Refuse("`heads` is no multiple of `groups`");
  if (!call.Check(why_not)) return false;
  if (machine.IsCpu()) {
    *why_not = WhyNotFormats(kAllGatherAttentionCpuFormats, kAllFormats, a.dtype, a.dtype);
    if (!why_not->empty()) return false;
    const KeyLayout layout = KeyLayout::Make(p, kCpuLogKeyChunk);
    *plan = Fields{{"workspace_bytes", layout.Workspace().TotalBytes()}};
    return true;
  }
  *why_not = WhyNoKernel(p);
  if (!why_not->empty()) return false;
  *plan = Fields{{"senders", KeySenders(p, machine)},
                 {"workspace_bytes", CudaLayoutOf(p).Workspace().TotalBytes()}};
  return true;
}

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
    kAllGatherAttentionId, "all_gather_attention",        kCpu,
    JFLUX_IF_CUDA(kCuda),  kAllGatherAttentionCpuFormats, kFlashAttentionFormats,
    PlanAllGatherAttention};

}  // namespace jflux
