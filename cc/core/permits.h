// How many threads of a rank do something at a time: first come, first served.
//
//   who waits    a thread, until at most `count - 1` of those with smaller numbers hold a permit
//   who ends it  those threads, each with Release
//   order        relaxed: permits guard no data
//   reset        never: numbers go on from call to call, and are equal when nobody holds a permit
//
// Waits have no deadline: whoever holds a permit must wait for nobody who may want one.
#ifndef JFLUX_CORE_PERMITS_H_
#define JFLUX_CORE_PERMITS_H_

#include <cstdint>

#include "core/atomic.h"
#include "core/platform.h"

namespace jflux {

struct Permits {
  uint64_t* taken;     // how many numbers
  uint64_t* returned;  // how many permits came back
  int32_t count;       // 0: as many as there are threads

  JFLUX_HD void Acquire() const {
    if (count == 0) return;
    const uint64_t number = AddRelaxed(taken, 1);
    for (uint32_t turn = 0; !IsGranted(number); ++turn) PollPause(turn);
  }
  // Those with larger numbers may come and go before this one looks: the difference may be
  // negative.
  JFLUX_HD bool IsGranted(uint64_t number) const {
    return static_cast<int64_t>(number - LoadRelaxed(returned)) < count;
  }
  JFLUX_HD void Release() const {
    if (count != 0) AddRelaxed(returned, 1);
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_PERMITS_H_
