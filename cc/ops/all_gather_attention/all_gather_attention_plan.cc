// The plan of an all_gather_attention.
#include "ops/all_gather_attention/all_gather_attention_config.h"

namespace jflux {

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
  a.dtype = static_cast<DType>(call.Get("dtype", 0, 3));
  const double sequence = static_cast<double>(a.keys) * a.groups * a.width * SizeOf(a.dtype);
  if (sequence * a.batch * p.world > 0x1p42) call.Refuse("keys of more than 2^42 bytes");
  if (a.heads % a.groups != 0) call.Refuse("`heads` is no multiple of `groups`");
  if (!call.Check(why_not)) return false;
  if (machine.IsCpu()) {
    if (a.dtype == DType::kF64) {
      *why_not = "the CPU's body has sums in float32";
      return false;
    }
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

}  // namespace jflux
