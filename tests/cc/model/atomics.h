// The atomic functions of core/atomic.h as steps of the model checker. Include it before any header
// that uses them: what is included after it runs in the checker (model/checker.h), in a namespace
// of its own.
//
// A function that core/atomic.h gains needs a line here: without it, the real one would access the
// made-up addresses of a model, and the test crashes.
#ifndef JFLUX_TESTS_CC_MODEL_ATOMICS_H_
#define JFLUX_TESTS_CC_MODEL_ATOMICS_H_

#define jflux jflux_model
#include "core/atomic.h"
#include "core/platform.h"
#include "model/checker.h"

namespace jflux {

namespace model = ::model;

inline uint64_t ModelLoad(const uint64_t* p, model::Order order) {
  return model::Checker::Current()->Do(model::Kind::kLoad, order, p, 0);
}
inline void ModelStore(uint64_t* p, uint64_t v, model::Order order) {
  model::Checker::Current()->Do(model::Kind::kStore, order, p, v);
}
// Two stores, in any order for the readers.
inline void ModelStore2(uint64_t* p, uint64_t a, uint64_t b) {
  ModelStore(p, a, model::Order::kRelaxed);
  ModelStore(p + 1, b, model::Order::kRelaxed);
}
inline void ModelLoad2(const uint64_t* p, uint64_t* a, uint64_t* b) {
  *a = ModelLoad(p, model::Order::kRelaxed);
  *b = ModelLoad(p + 1, model::Order::kRelaxed);
}
inline uint64_t ModelAdd(uint64_t* p, uint64_t v) {
  return model::Checker::Current()->Do(model::Kind::kAdd, model::Order::kRelaxed, p, v);
}
inline bool ModelCompareExchange(uint64_t* p, uint64_t expected, uint64_t desired) {
  return model::Checker::Current()->Do(model::Kind::kCompareExchange, model::Order::kBoth, p,
                                       desired, expected) == expected;
}
inline void ModelFence() {
  model::Checker::Current()->Do(model::Kind::kReleaseFence, model::Order::kRelease, nullptr, 0);
}
inline void ModelPause() { model::Checker::Current()->Pause(); }

}  // namespace jflux

#define LoadAcquire(p) ModelLoad(p, model::Order::kAcquire)
#define LoadRelaxed(p) ModelLoad(p, model::Order::kRelaxed)
#define StoreRelease(p, v) ModelStore(p, v, model::Order::kRelease)
#define StoreRelaxed(p, v) ModelStore(p, v, model::Order::kRelaxed)
#define StoreRelaxed2(p, a, b) ModelStore2(p, a, b)
#define LoadRelaxed2(p, a, b) ModelLoad2(p, a, b)
#define AddRelaxed(p, v) ModelAdd(p, v)
#define CompareExchange(p, expected, desired) ModelCompareExchange(p, expected, desired)
#define FenceRelease() ModelFence()
#define FenceSystem() ModelFence()
#define PollPause(attempt) ((void)(attempt), ModelPause())

#include "core/layout.h"
#include "core/packet.h"
#include "core/signal.h"
#include "core/ticket_semaphore.h"
#include "testing.h"

namespace jflux {

// The parts of rank r's memory have addresses of their own, which nobody dereferences.
inline SymmetricView ModelView(int rank, int world) {
  SymmetricView view{};
  view.rank = rank;
  view.world = world;
  for (int r = 0; r < world; ++r) {
    view.base[r] = reinterpret_cast<char*>(static_cast<uintptr_t>(r + 1) << 32);
  }
  return view;
}

// A word that is in no rank's heap.
inline uint64_t* ModelWord(int index) {
  return reinterpret_cast<uint64_t*>((uintptr_t{1} << 40) + 64 * static_cast<uintptr_t>(index));
}

// For waits of this rank; its record of faults is `fault`.
inline WaitContext ModelWait(int rank, Fault* fault) {
  WaitContext ctx{};
  ctx.fault = fault;
  ctx.stop = ModelWord(rank);
  ctx.deadline_ns = ~uint64_t{0};
  ctx.rank = rank;
  return ctx;
}

// Words of 32 bits of epoch, or of however many there are.
using Epoch = decltype(EpochOf(Signal{}));

// One epoch before the last, after which NextEpoch begins again.
inline Epoch BeforeTheWrap() { return EpochOf(~Signal{0}) - 1; }

// Runs all schedules and prints what was explored. With `broken`, a name for what was broken, the
// checker must find something; without, nothing.
inline void Explore(const std::string& name, model::Checker& checker, const char* broken) {
  const model::Checker::Result r = checker.Run();
  std::printf("%s%s%s: %lld states, %lld steps, %.2f s%s%s\n", name.c_str(),
              broken ? ", broken: " : "", broken ? broken : "", static_cast<long long>(r.states),
              static_cast<long long>(r.steps), r.seconds, r.error.empty() ? "" : ": ",
              r.error.c_str());
  EXPECT(r.complete) << name << " has too many states";
  EXPECT(r.error.find("model:") == std::string::npos) << r.error;  // the checker's own limits
  EXPECT(r.error.empty() == (broken == nullptr)) << name;
  if (r.states < 1000) {  // the same without the reduction
    checker.ExploreAllOrders();
    const model::Checker::Result all = checker.Run();
    EXPECT(all.complete && all.error.empty() == r.error.empty()) << name << ": " << all.error;
    EXPECT(all.states >= r.states || !r.error.empty());
  }
  if (broken == nullptr) {
    for (const std::string& line : r.trace) std::printf("  %s\n", line.c_str());
  }
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_MODEL_ATOMICS_H_
