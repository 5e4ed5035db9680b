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
// A handler then waits for its call to complete, and the Future that it returns is complete.
// Reason: if the iterations of a loop wait for Futures, XLA runs the operations that follow the
// loop concurrently with it, and can mix up the data of its own collectives there and in the loop
// (docs/internals/cpu.md). It returns earlier
//
//   - if devices wait for each other: this one in this call for a peer that waits in the handler of
//     another call, which lacks this device, or a longer circle. Independent calls have then been
//     started in different orders. The handler that would close the circle does not wait.
//   - if all of XLA's threads would wait, some of them for the same device. The handler that would
//     take the last one does not wait.
//   - after a quarter of the timeout, in a loop three quarters, but 30 s at most. A rank may be in
//   one of XLA's own
//     collectives, which lacks this one. The site does not wait again; in a loop, not in that run.
//   - if the group has ranks in other processes, whose handlers this process cannot see, after a
//     second at most, and in a loop after ten. A site in a loop does not wait again in that run.
//
// If a handler of a loop has returned early, one line on stderr says what that may mean.
//
// A call is identified by (run, call site, group, occurrence). The occurrence counts iterations of
// a loop. Run and call site have two names each:
//
//             in this process               in all processes that have ranks of the group
//   site      its state, which XLA makes    the attribute `site`, which Python makes of the program
//             for each call of an           and of the call's place in it (jflux/_call_names.py)
//             executable
//   run       XLA's run id, new for each    the first, second, ... run of that program over the
//             execution                     group since the heap was made, in the order in which
//                                           the runs make their first calls: XLA runs a device's
//                                           programs one after the other
//
// Processes cannot use what XLA has: run ids begin at a hash of the module with its source lines,
// and states depend on what else a process has compiled. But an executable's run ids follow each
// other, so runs that made no call are counted too: they may have failed in one process alone. (Not
// those before the first run that made one.)
//
// A call that fails, whatever the reason, is an error of all its ranks: those that have come, and
// those that come later.
//
// In a fork of the process that made the heap no call is made: the threads are not there, and the
// heap's memory is the other process's (jflux/_heap/_fork.py).
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
#include "runtime/call_error.h"

namespace jflux {

struct CpuCallSite {
  uint64_t number = 0;  // this process's
  uint64_t name = 0;    // the same in all processes: the attribute `site`
  bool waits = true;    // false in tests: all is left to the Futures
  // Of the handlers' waits:
  std::atomic<bool> loops{false};       // a run has called it more than once for a device
  std::atomic<bool> skips_wait{false};  // its handlers do not wait, unless it loops
  std::atomic<int64_t> early_run{-1};   // the last run in which a handler has returned early
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
  std::function<void(const CallError& error)> done;
};

// Returns when the call is done, or earlier, as described above.
void JoinCpuCall(CpuCall call);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_CPU_CALL_H_
