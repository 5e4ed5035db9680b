// A FIFO counting semaphore for the threads of one rank.
//
// A thread takes a ticket, and proceeds when `ticket - released < count`: when at most `count - 1`
// holders of earlier tickets have not released theirs. With count 0 every thread proceeds at once.
//
//   waits   a thread with a ticket, in Acquire, until a deadline
//   wakes   the holders of earlier tickets, in Release
//   order   relaxed: the semaphore guards no data
//   reset   never: both counters grow from call to call, and are equal when no ticket is held
//
// Every ticket is released once, also that of a thread whose Acquire has failed: the thread
// proceeds without a grant, and calls Release like the others. So the counters are equal after a
// call that failed too. Until then a ticket that is released early may let one thread more proceed,
// which does no harm: the call has failed, and the semaphore guards no data.
//
// A holder must not wait for a thread that may call Acquire: then an Acquire ends without its
// deadline.
#ifndef JFLUX_CORE_TICKET_SEMAPHORE_H_
#define JFLUX_CORE_TICKET_SEMAPHORE_H_

#include <cstdint>

#include "core/atomic.h"
#include "core/platform.h"
#include "core/signal.h"

namespace jflux {

struct TicketSemaphore {
  uint64_t* issued;    // tickets
  uint64_t* released;  // tickets
  int32_t count;       // threads that may proceed at a time; 0: all

  // False if the wait timed out, or another wait of the rank has failed; the fault's record has the
  // reason. `item` names the thread's work there.
  JFLUX_HD bool Acquire(const WaitContext& ctx, int64_t item) const {
    if (count == 0) return true;
    const uint64_t ticket = AddRelaxed(issued, 1);
    Patience patience(ctx);
    for (uint32_t attempt = 0; !IsGranted(ticket); ++attempt) {
      if (Patience::Looks(attempt) && !patience.Lasts(ctx, attempt, FaultKind::kNoTicket, ctx.rank,
                                                      item, ticket, LoadRelaxed(released))) {
        return false;
      }
      PollPause(attempt);
    }
    return true;
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
