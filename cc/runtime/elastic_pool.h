// Threads that may block, and what happens when there are no more.
//
// A task of the pool never queues behind another: a thread is added whenever none is idle. Idle
// threads exit after a while. A system may refuse to make a thread (a limit on processes, no
// memory): that is an error of the caller's call, never the end of the process.
#ifndef JFLUX_RUNTIME_ELASTIC_POOL_H_
#define JFLUX_RUNTIME_ELASTIC_POOL_H_

#include <functional>
#include <string>
#include <vector>

namespace jflux {

// Runs all tasks, each on a thread of its own, or none: false, and why, if it would take a thread
// that cannot be made.
bool RunOnPool(std::vector<std::function<void()>> tasks, std::string* error);

// A detached thread that runs `body`. False, and why, if it cannot be made.
bool StartThread(std::function<void()> body, std::string* error);

// Tests only: StartThread fails while `refuse` is set.
void RefuseThreads(bool refuse);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_ELASTIC_POOL_H_
