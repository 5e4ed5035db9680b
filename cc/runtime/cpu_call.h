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
// (docs/internals/cpu.md). The handler returns before its call is complete in four cases:
//
//   - Devices wait for each other in a circle: this device waits for a peer, whose handler waits in
//     another call for this device, directly or through more devices. This happens if devices start
//     independent calls in different orders. The handler that would close the circle does not wait.
//   - All of XLA's threads would wait, some of them for the same device. The handler that would
//     take the last thread does not wait.
//   - A quarter of the timeout has passed, but at most 2 s; in a loop three quarters, but at most
//     30 s. Another rank may be in one of XLA's own collectives, which waits for this device. The
//     site does not wait again; a site in a loop does not wait again in that run.
//   - The group has ranks in other processes, whose handlers this process cannot see, and one
//     second has passed, or ten in a loop. A site in a loop does not wait again in that run.
//
// If a handler of a loop has returned early, one line on stderr says what that may mean.
//
// A call is identified by (run, call site, group, occurrence). The occurrence counts iterations of
// a loop. Run and call site have two names each:
//
//             in this process               in all processes that have ranks of the group
//   site      its state, which XLA makes    the attribute `site`, which Python makes of the program
//             for each call of an           and of the call's place in it
//             (jflux/_call/call_names.py) executable
//   run       XLA's run id, new for each    the first, second, ... run of that program over the
//             execution                     group since the heap was made, in the order in which
//                                           the runs make their first calls: XLA runs a device's
//                                           programs one after the other
//
// XLA's names differ between processes: run ids begin at a hash of the module with its source
// lines, and states depend on the other programs that a process has compiled. But the run ids of an
// executable are consecutive. From them a process counts runs that made no call too, since such a
// run may have failed in this process alone. (Runs before the first one that made a call are not
// counted.)
//
// A call that fails, whatever the reason, is an error of all its ranks, also of ranks that come
// later.
//
// A fork of the process that made the heap makes no calls: it lacks the threads, and the heap's
// memory belongs to its parent (jflux/_heap/_fork.py).
#ifndef JFLUX_RUNTIME_CPU_CALL_H_
#define JFLUX_RUNTIME_CPU_CALL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/signal.h"
#include "runtime/call_error.h"

namespace jflux {

struct CpuCallSite {
  uint64_t number = 0;  // this process's
  uint64_t name = 0;    // the same in all processes: the attribute `site`
  bool waits = true;    // false in tests: handlers do not wait, only XLA waits for their Futures
  // State of the handlers' waits:
  std::atomic<bool> loops{false};       // a run has called the site more than once for a device
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
