// The plan and the FFI handlers of all_gather_attention.
#include <optional>
#include <string>

#include "ops/all_gather_attention/all_gather_attention.h"
#include "ops/flash_attention/flash_attention_operands.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

// Fields of a call: world, batch, queries, keys, heads, groups, width, dtype. Of the plan:
// workspace_bytes; on GPUs senders too.
bool PlanAllGatherAttention(CallReader& call, const Machine& machine, Fields* plan,
                            std::string* why_not) {
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
  static constexpr OpId kId = kAllGatherAttentionId;
  AllGatherAttentionParams p{};
  FlashAttentionArrays arrays{};

  // q, k, v, positions of queries, of keys, kinds of blocks, their order[, segments of queries, of
  // keys] -> out, lse.
  bool ReadOperands(const Attributes& a, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    if (a.call.world < 2 || a.call.world > kMaxRanks) return false;
    AttentionReader reader(operands, results, a.call.world);
    if (!reader.ReadHeads(a.attention) || !reader.ReadPositions() ||
        !reader.ReadBlocks(AttentionPass::kForward) || !reader.ReadSegments() ||
        !reader.ReadOutputs()) {
      return false;
    }
    p = {static_cast<int32_t>(a.call.world), reader.params};
    arrays = reader.arrays;
    return true;
  }
};

struct CallOnCpu : Call {
  std::string Read(const Attributes& a, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    return ReadOperands(a, operands, results) && a.senders == 0 ? "" : kDoNotFit;
  }
  int64_t WorkspaceBytes() const {
    return KeyLayout::Make(p, kCpuLogKeyChunk).Workspace().TotalBytes();
  }
  bool Run(const SymmetricView& view, uint64_t epoch, const WaitContext& ctx) const {
    return AllGatherAttentionCpu(p, kCpuLogKeyChunk, arrays, view, epoch, ctx);
  }
};

struct CallOnCuda : Call {
  int32_t senders = 0;

  std::string Read(const Attributes& a, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    if (!ReadOperands(a, operands, results)) return kDoNotFit;
    // With no sender all CTAs would wait for keys for ever.
    if (a.senders < 1 || a.senders > kMostSms) return kNoKernel;
    senders = static_cast<int32_t>(a.senders);
    return WhyNoKernel(p);
  }
  int64_t WorkspaceBytes() const { return CudaLayoutOf(p).Workspace().TotalBytes(); }
  bool Launch(int64_t site, const CudaDevice& device, const SymmetricView& view,
              cudaStream_t stream, std::string* error) const {
    return LaunchAllGatherAttention(p, arrays, senders, site, device, view, stream, error);
  }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kAllGatherAttentionOp;
const Op kAllGatherAttentionOp = {kAllGatherAttentionId,
                                  "all_gather_attention",
                                  OnCpu<CallOnCpu>,
                                  JFLUX_IF_CUDA(OnCuda<CallOnCuda>),
                                  kAllGatherAttentionCpuFormats,
                                  kFlashAttentionFormats,
                                  PlanAllGatherAttention};

}  // namespace jflux
