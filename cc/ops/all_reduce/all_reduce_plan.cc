// The plan of an all_reduce: its algorithm, and the bytes that it takes of the heap.
#include "ops/all_reduce/all_reduce_plan.h"

#include "core/layout.h"

namespace jflux {

// Fields of a call: world, count, dtype, width (elements of a row that is to be normalised; 0: no
// norm) and algorithm (-1: to be chosen). Fields of the plan: algorithm (-1: XLA's own is faster),
// workspace_bytes (0 then), and fits_norm: whether that algorithm can normalise such rows. If it
// cannot, the plan is for the sum alone.
bool PlanAllReduce(const Fields& fields, const Machine& machine, Fields* plan,
                   std::string* why_not) {
  CallReader call(fields);
  AllReduceParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.count = call.Get("count", 1, int64_t{1} << 40);
  p.dtype = static_cast<DType>(call.Get("dtype", 0, 3));
  p.width = call.Get("width", 0, p.count);
  const int64_t asked = call.Get("algorithm", -1, kAllReduceAlgorithms - 1);
  if (!call.Check(why_not)) return false;
  if (asked < 0 && p.Bytes() > MostAllReduceBytes(p.world)) {
    *plan = Fields{{"algorithm", -1}, {"workspace_bytes", 0}, {"fits_norm", 0}};
    return true;
  }
  p.algorithm =
      asked < 0 ? ChooseAllReduce(p.world, p.Bytes()) : static_cast<AllReduceAlgorithm>(asked);
  // A row is normalised by a cluster.
  const bool has_clusters = machine.IsCpu() || machine.arch >= kHopperArch;
  const bool fits_norm = has_clusters && p.FitsNorm() && TakesNorm(p.algorithm);
  p.norm = fits_norm ? Norm::kRms : Norm::kNone;  // any norm takes as much
  *plan = Fields{{"algorithm", static_cast<int64_t>(p.algorithm)},
                 {"workspace_bytes", p.WorkspaceBytes()},
                 {"fits_norm", fits_norm}};
  return true;
}

}  // namespace jflux
