#ifndef JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_PLAN_H_
#define JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_PLAN_H_

#include <string>

#include "ops/moe_dispatch/moe_dispatch.h"
#include "runtime/op.h"

namespace jflux {

// CTAs of an SM.
inline constexpr int kMoeDispatchCtasPerSm = 1, kMoeCombineCtasPerSm = 4;
// The most that a dispatch's CTA keeps in shared memory, of 227 KiB.
inline constexpr int64_t kMostMoeDispatchScratch = 224 << 10;
// The most choices of a token: a thread looks through them all.
inline constexpr int kMostMoeSlots = 64;
// What a combine's CTA keeps in shared memory at most.
inline constexpr int64_t kMostMoeCombineScratch =
    MoeCombineParams::ScratchBytesFor(kMaxRanks, kMostMoeSlots);

bool PlanMoeDispatch(const Fields& call, const Machine& machine, Fields* plan,
                     std::string* why_not);
bool PlanMoeCombine(const Fields& call, const Machine& machine, Fields* plan, std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_PLAN_H_
