#include "runtime/fault.h"

#include <cstdio>

namespace jflux {

const char* NameOf(OpId op) {
  switch (op) {
    case OpId::kAllGatherMatmul:
      return "all_gather_matmul";
    case OpId::kMatmulReduceScatter:
      return "matmul_reduce_scatter";
    case OpId::kAllReduce:
      return "all_reduce";
    case OpId::kAllGather:
      return "all_gather";
    case OpId::kAllToAll:
      return "all_to_all";
    case OpId::kReduceScatter:
      return "reduce_scatter";
  }
  return "unknown op";
}

std::string Describe(const Fault& fault, double deadline_s) {
  char text[640];
  const char* op = NameOf(static_cast<OpId>(fault.op));
  const long long tile = fault.tile;
  if (static_cast<FaultKind>(fault.kind) == FaultKind::kMismatch) {
    std::snprintf(text, sizeof(text),
                  "jflux.%s: rank %d expects call %u with signature %08x, but rank %d sent call %u "
                  "with signature %08x (unit %lld). The ranks run different calls: check that all "
                  "of them trace the same ops with the same shapes, in the same order.",
                  op, fault.rank, EpochOf(fault.expected), SignatureOf(fault.expected), fault.peer,
                  EpochOf(fault.seen), SignatureOf(fault.seen), tile);
  } else {
    std::snprintf(
        text, sizeof(text),
        "jflux.%s: rank %d waited %.3g s for rank %d (unit %lld of call %u; last heard of "
        "in call %u). Rank %d never made this call, died, or is slower than the deadline: "
        "see its log, or raise jflux.init(deadline_seconds=...).",
        op, fault.rank, deadline_s, fault.peer, tile, EpochOf(fault.expected), EpochOf(fault.seen),
        fault.peer);
  }
  return text;
}

}  // namespace jflux
