// How the ranks of a call meet on the CPU back end.
//
// XLA:CPU runs a handler per device, on threads that it needs for other work. Two rules follow:
//
//   - A handler must not depend on its peers' handlers being called.
//   - SetAvailable on a Future runs the device's next operations, which may block, so it needs a
//     thread that may block.
//
// Hence a handler only registers its rank's part. When all ranks of the group in this process have
// registered, the bodies run on jflux's own threads, one each, and then the completions. Bodies
// wait for each other, and for ranks in other processes, only through the heap.
//
// A handler then waits for the completion, with a timeout, before it returns. After the timeout it
// leaves the completion to the Future. Reason for the wait: if the iterations of a loop wait for
// Futures, XLA runs the operations that follow the loop concurrently with it, and can mix up the
// data of its own collectives there and in the loop (docs/internals/cpu.md).
//
// A call is identified by (run, call site, group, occurrence). XLA's run id is the same in all
// processes and new for each execution. Call sites are numbered when XLA instantiates the handler.
// The occurrence counts iterations of a loop.
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
  uint64_t number = 0;                  // the same in all processes
  std::atomic<bool> skips_wait{false};  // its handlers leave the completion to the Future
};

struct CpuCall {
  OpId op;
  int64_t run_id;
  CpuCallSite* site;
  std::vector<int64_t> group;  // global device ids in rank order
  int32_t rank;
  int64_t bytes;  // of the workspace

  // One rank's work. False if a wait failed.
  std::function<bool(const SymmetricView&, uint64_t epoch, const WaitContext&)> body;
  // `error` is empty on success.
  std::function<void(const std::string& error)> done;
};

// Returns when the call is done, or as soon as the peers' handlers may depend on this one
// returning.
void JoinCpuCall(CpuCall call);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_CPU_CALL_H_
