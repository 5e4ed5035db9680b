// A pool of threads that may block. A task never queues behind another: a thread is added whenever
// none is idle. Idle threads exit after a while.
#ifndef JFLUX_RUNTIME_ELASTIC_POOL_H_
#define JFLUX_RUNTIME_ELASTIC_POOL_H_

#include <functional>

namespace jflux {

void RunOnPool(std::function<void()> task);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_ELASTIC_POOL_H_
