// How a call on the CPU back end comes together.
//
// XLA:CPU runs a handler per device on threads that it needs for other work, so a handler must not
// depend on its peers' being called, and whoever completes its Future runs the device's next
// operations (which may block) inside SetAvailable. Hence: a handler registers what its rank has to
// do; when every rank of the group that lives in this process has registered, the bodies run on
// jflux's own threads, one each, and so do the completions. Bodies wait for each other, and for
// other processes' ranks, through the heap alone.
//
// A handler does wait for the completion as long as that seems to get nearer, and leaves it to the
// Future otherwise. A loop whose iterations wait for Futures lets XLA go on with what follows it;
// its own collectives there then mix with those in the loop, and it gets their order, and with that
// the data, wrong (docs/design/0004).
//
// A call is named by (run, call site, group, occurrence): XLA's run id is the same in all processes
// and new for every execution; the call site is counted when XLA instantiates the handler; the
// occurrence counts iterations of a loop.
#ifndef JFLUX_RUNTIME_CPU_CALL_H_
#define JFLUX_RUNTIME_CPU_CALL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/layout.h"
#include "core/signal.h"

namespace jflux {

struct CpuCallSite {
  uint64_t number = 0;                 // the same in all processes
  std::atomic<bool> impatient{false};  // its handlers do not wait
};

struct CpuCall {
  OpId op;
  int64_t run_id;
  CpuCallSite* site;
  std::vector<int64_t> group;  // global device ids in rank order
  int32_t rank;
  int64_t bytes;  // of the workspace

  // One rank's work; false if a wait failed.
  std::function<bool(const SymmetricView&, uint32_t epoch, const WaitContext&)> body;
  // Empty string: success.
  std::function<void(const std::string& error)> done;
};

// Returns when the call is done, or when it may take its peers' handlers to return first.
void JoinCpuCall(CpuCall call);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_CPU_CALL_H_
