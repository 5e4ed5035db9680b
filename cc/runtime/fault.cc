#include "runtime/fault.h"

#include <cstdio>
#include <deque>
#include <mutex>

#include "runtime/op.h"

namespace jflux {
namespace {

std::mutex g_mutex;
std::deque<std::string>& CustomNames() {  // whose elements stay where they are
  static auto* names = new std::deque<std::string>;
  return *names;
}

}  // namespace

OpId CustomOp(const std::string& target) {
  const std::string name = "custom_call(" + target + ")";
  std::lock_guard<std::mutex> lock(g_mutex);
  auto& names = CustomNames();
  uint32_t i = 0;
  while (i < names.size() && names[i] != name) ++i;
  if (i == names.size()) names.push_back(name);
  return static_cast<OpId>(kFirstCustomOp + i);
}

const char* NameOf(OpId op) {
  for (const Op* known : AllOps()) {
    if (known->id == op) return known->name;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  const uint32_t custom = static_cast<uint32_t>(op) - kFirstCustomOp;
  return custom < CustomNames().size() ? CustomNames()[custom].c_str() : "unknown op";
}

std::string Describe(const Fault& fault, double deadline_s) {
  char text[640];
  const char* op = NameOf(static_cast<OpId>(fault.op));
  const long long tile = fault.tile;
  const auto epoch = [](Signal s) { return static_cast<unsigned long long>(EpochOf(s)); };
  if (static_cast<FaultKind>(fault.kind) == FaultKind::kMismatch) {
    std::snprintf(
        text, sizeof(text),
        "jflux.%s: rank %d expects call %llu with signature %06x, but rank %d sent call %llu "
        "with signature %06x (unit %lld). The ranks run different calls: check that all "
        "of them trace the same ops with the same shapes, in the same order.",
        op, fault.rank, epoch(fault.expected), SignatureOf(fault.expected), fault.peer,
        epoch(fault.seen), SignatureOf(fault.seen), tile);
  } else {
    std::snprintf(
        text, sizeof(text),
        "jflux.%s: rank %d waited %.3g s for rank %d (unit %lld of call %llu; last heard of "
        "in call %llu). Rank %d never made this call, died, or is slower than the deadline: "
        "see its log, or raise jflux.init(deadline_seconds=...).",
        op, fault.rank, deadline_s, fault.peer, tile, epoch(fault.expected), epoch(fault.seen),
        fault.peer);
  }
  return text;
}

}  // namespace jflux
