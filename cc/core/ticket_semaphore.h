// A FIFO counting semaphore for the threads of one rank.
//
// A thread takes a ticket, and proceeds when `ticket - released < count`: when at most `count - 1`
// holders of earlier tickets have not released theirs. With count 0 every thread proceeds at once.
//
//   waits   a thread with a ticket, in Acquire
//   wakes   the holders of earlier tickets, in Release
//   order   relaxed: the semaphore guards no data
//   reset   never: both counters grow from call to call, and are equal when no ticket is held
//
// Acquire has no timeout. A holder must not wait for a thread that may call Acquire.
#ifndef JFLUX_CORE_TICKET_SEMAPHORE_H_
#define JFLUX_CORE_TICKET_SEMAPHORE_H_

#include <cstdint>

#include "core/atomic.h"
#include "core/platform.h"

namespace jflux {

struct TicketSemaphore {
  uint64_t* issued;    // tickets
  uint64_t* released;  // tickets
  int32_t count;       // threads that may proceed at a time; 0: all

  JFLUX_HD void Acquire() const {
    if (count == 0) return;
    const uint64_t ticket = AddRelaxed(issued, 1);
    for (uint32_t attempt = 0; !IsGranted(ticket); ++attempt) PollPause(attempt);
  }
  // Negative if later tickets have been released before this thread polls.
  JFLUX_HD bool IsGranted(uint64_t ticket) const {
    return static_cast<int64_t>(ticket - LoadRelaxed(released)) < count;
  }
  JFLUX_HD void Release() const {
    if (count != 0) AddRelaxed(released, 1);
  }
};

}  // namespace jflux

#endif  // JFLUX_CORE_TICKET_SEMAPHORE_H_
