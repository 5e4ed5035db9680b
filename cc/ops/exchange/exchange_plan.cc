// The plan of an exchange: the bytes that it takes of the heap.
#include "ops/exchange/exchange_plan.h"

namespace jflux {

// Fields of a call: world, shard_bytes and chunked. Of the plan: workspace_bytes.
bool PlanExchange(const Fields& fields, const Machine&, Fields* plan, std::string* why_not) {
  CallReader call(fields);
  ExchangeParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.x = Shards{1, 1, call.Get("shard_bytes", 1, int64_t{1} << 40)};
  p.chunked = call.Get("chunked", 0, 1) == 1;
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"workspace_bytes", p.WorkspaceBytes()}};
  return true;
}

}  // namespace jflux
