#ifndef JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_PLAN_H_
#define JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_PLAN_H_

#include <string>

#include "ops/moe_dispatch/moe_dispatch.h"
#include "runtime/op.h"

namespace jflux {

// Threads of a CTA.
inline constexpr int kMoeDispatchThreads = 512, kMoeCombineThreads = 256;
// CTAs of an SM. A dispatch's CTA has tables that may fill the SM's shared memory.
inline constexpr int kMoeDispatchCtasPerSm = 1, kMoeCombineCtasPerSm = 2;
// The most that a dispatch's CTA keeps in shared memory, of 227 KiB.
inline constexpr int64_t kMostMoeDispatchScratch = 224 << 10;
// The most choices of a token: a thread looks through them all.
inline constexpr int kMostMoeSlots = 64;

bool PlanMoeDispatch(const Fields& call, const Machine& machine, Fields* plan,
                     std::string* why_not);
bool PlanMoeCombine(const Fields& call, const Machine& machine, Fields* plan, std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_DISPATCH_MOE_DISPATCH_PLAN_H_
