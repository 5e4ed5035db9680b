#include "runtime/fault.h"

#include <cstdarg>
#include <cstdio>
#include <ctime>
#include <deque>
#include <mutex>

#include "nvshmem/node_exchange.h"
#include "runtime/op.h"

namespace jflux {
namespace {

std::mutex g_mutex;
std::deque<std::string>& CustomNames() {  // whose elements stay where they are
  static auto* names = new std::deque<std::string>;
  return *names;
}

}  // namespace

OpId CustomOp(const std::string& name) {
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
  if (op == kNodeExchangeId) return "node_exchange";
  std::lock_guard<std::mutex> lock(g_mutex);
  const uint32_t custom = static_cast<uint32_t>(op) - kFirstCustomOp;
  return custom < CustomNames().size() ? CustomNames()[custom].c_str() : "unknown op";
}

namespace {

std::string Text(const char* format, ...) {
  char text[768];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

using Printed = unsigned long long;  // as %llu
Printed Epoch(Signal s) { return EpochOf(s); }

// "rank 2 ... 60 s ... for rank 3 (item 17 of call 5; last heard of in call 4)"
std::string WhomFor(const Fault& fault) {
  return Text("rank %d (item %lld of call %llu; last heard of in call %llu)", fault.peer,
              static_cast<long long>(fault.tile), Epoch(fault.expected), Epoch(fault.seen));
}

// "send_sizes[5]"
std::string ElementOf(const Fault& fault) {
  const char* name = "argument";
  for (const Op* op : AllOps()) {
    if (op->id != static_cast<OpId>(fault.op) || op->arguments == nullptr) continue;
    for (int32_t i = 0; op->arguments[i] != nullptr; ++i) {
      if (i + 1 == fault.argument) name = op->arguments[i];
    }
  }
  return Text("%s[%lld]", name, static_cast<long long>(fault.tile));
}

// The message of a bad value by which another function reports a fault of its own (Op::meaning); ""
// for any other value.
std::string MeaningOf(const Fault& fault) {
  for (const Op* op : AllOps()) {
    if (op->id == static_cast<OpId>(fault.op) && op->meaning != nullptr) return op->meaning(fault);
  }
  return "";
}

}  // namespace

std::string Describe(const Fault& fault, double deadline_s) {
  const char* op = NameOf(static_cast<OpId>(fault.op));
  switch (static_cast<FaultKind>(fault.kind)) {
    case FaultKind::kMismatch:
      return Text(
          "jflux.%s: rank %d expects call %llu with signature %06x, but rank %d sent call %llu "
          "with signature %06x (item %lld). The ranks run different calls: check that all "
          "of them trace the same ops with the same shapes, in the same order.",
          op, fault.rank, Epoch(fault.expected), SignatureOf(fault.expected), fault.peer,
          Epoch(fault.seen), SignatureOf(fault.seen), static_cast<long long>(fault.tile));
    case FaultKind::kNoTicket:
      return Text(
          "jflux.%s: rank %d waited %.3g s to send (row block %lld; ticket %llu, of which %llu "
          "have been returned). Another CTA of its GPU has not sent what it has begun to send: "
          "the link is stuck, or this is a fault of jflux, which its authors want to know.",
          op, fault.rank, deadline_s, static_cast<long long>(fault.tile),
          static_cast<Printed>(fault.expected), static_cast<Printed>(fault.seen));
    case FaultKind::kUnfinished:
      return Text(
          "jflux.%s: rank %d waited %.3g s for its own tiles (class %lld; %llu blocks of %llu). "
          "This is a fault of jflux, which its authors want to know.",
          op, fault.rank, deadline_s, static_cast<long long>(fault.tile),
          static_cast<Printed>(fault.seen), static_cast<Printed>(fault.expected));
    case FaultKind::kOverlap:
      return Text(
          "jflux.%s: rank %d found another of jflux's kernels in its workspace (launch %llu). "
          "The calls of a GPU must run one after the other: remove "
          "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT from XLA_FLAGS, keep jflux's "
          "calls on one stream (no compute_on), and launch a custom kernel once for each call, "
          "on the handler's stream.",
          op, fault.rank, static_cast<Printed>(fault.expected));
    case FaultKind::kAborted:
      return Text("jflux.%s: rank %d gave up waiting for ", op, fault.rank) + WhomFor(fault) +
             ", since this process has failed on another device";  // the heap adds the reason
    case FaultKind::kGroupSizes:
      if (fault.tile >= 0) {
        return Text("jflux.%s: group_sizes[%lld] is %lld", op, static_cast<long long>(fault.tile),
                    static_cast<long long>(fault.seen));
      }
      return Text("jflux.%s: group_sizes sum to %lld, and x has %lld rows", op,
                  static_cast<long long>(fault.seen), static_cast<long long>(fault.expected));
    case FaultKind::kLength:
      return Text(
          "jflux.%s: rank %d was given lengths[%lld] = %lld, and the cache has %lld positions on "
          "all ranks. A length counts the query's own token too: end a sequence that has filled "
          "its cache, or make the cache larger; 0 is a sequence that attends to nothing.",
          op, fault.rank, static_cast<long long>(fault.tile), static_cast<long long>(fault.seen),
          static_cast<long long>(fault.expected));
    case FaultKind::kPage:
      return Text(
          "jflux.%s: rank %d was given block_table[%lld, %d] = %lld, within the sequence's length, "
          "and the cache has %lld pages there. An entry is a page of that rank, or -1, which "
          "nothing attends to: allocate the page before the length reaches it.",
          op, fault.rank, static_cast<long long>(fault.tile), fault.peer,
          static_cast<long long>(fault.seen), static_cast<long long>(fault.expected));
    case FaultKind::kBadValue:
      if (std::string meaning = MeaningOf(fault); !meaning.empty()) return meaning;
      if (fault.peer == fault.rank) {
        return Text(
            "jflux.%s: rank %d was given %s = %lld, which must be from 0 to %lld. It sent "
            "nothing.",
            op, fault.rank, ElementOf(fault).c_str(), static_cast<long long>(fault.seen),
            static_cast<long long>(fault.expected));
      }
      return Text(
          "jflux.%s: rank %d got nothing from rank %d, which was given %s = %lld. That is "
          "out of range.",
          op, fault.rank, fault.peer, ElementOf(fault).c_str(), static_cast<long long>(fault.seen));
    case FaultKind::kUnequal:
      return Text(
          "jflux.%s: rank %d was given %s = %lld, but rank %d sends it %lld. Both ranks "
          "must be given the same size.",
          op, fault.rank, ElementOf(fault).c_str(), static_cast<long long>(fault.seen), fault.peer,
          static_cast<long long>(fault.expected));
    case FaultKind::kNone:
    case FaultKind::kTimeout:
      break;
  }
  return Text("jflux.%s: rank %d waited %.3g s for ", op, fault.rank, deadline_s) + WhomFor(fault) +
         Text(
             ". Rank %d never made this call, died, or is slower than the deadline: see its log, "
             "or raise jflux.init(deadline_seconds=...).",
             fault.peer);
}

ErrorKind KindOf(const Fault& fault) {
  switch (static_cast<FaultKind>(fault.kind)) {
    case FaultKind::kMismatch:
    case FaultKind::kBadValue:
    case FaultKind::kUnequal:
    case FaultKind::kGroupSizes:
    case FaultKind::kLength:
    case FaultKind::kPage:
      return ErrorKind::kInvalidArgument;
    case FaultKind::kOverlap:
      return ErrorKind::kFailedPrecondition;
    case FaultKind::kAborted:
      return ErrorKind::kAborted;
    case FaultKind::kNoTicket:
    case FaultKind::kUnfinished:
    case FaultKind::kNone:
    case FaultKind::kTimeout:
      break;
  }
  return ErrorKind::kDeadlineExceeded;
}

std::string TimeOfDay(double seconds_ago) {
  const std::time_t then = std::time(nullptr) - static_cast<std::time_t>(seconds_ago);
  std::tm parts{};
  localtime_r(&then, &parts);
  char text[16];
  std::strftime(text, sizeof(text), "%H:%M:%S", &parts);
  return text;
}

std::string DescribeWarning(const Fault& fault, double warn_s, double deadline_s) {
  return Text("jflux: warning: jflux.%s: rank %d has waited %.3g s, since %s, for ",
              NameOf(static_cast<OpId>(fault.op)), fault.rank, warn_s, TimeOfDay(warn_s).c_str()) +
         WhomFor(fault) + WhatFollows(deadline_s);
}

std::string WhatFollows(double deadline_s) {
  return Text(
      ". If a rank is only late (in a debugger, writing a checkpoint, compiling), nothing is "
      "lost: the call goes on when it comes. After %.6g s the call fails "
      "(jflux.init(deadline_seconds=...)).",
      deadline_s);
}

}  // namespace jflux
