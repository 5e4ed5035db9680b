#ifndef JFLUX_OPS_EXCHANGE_EXCHANGE_PLAN_H_
#define JFLUX_OPS_EXCHANGE_EXCHANGE_PLAN_H_

#include <string>

#include "ops/exchange/exchange.h"
#include "runtime/op.h"

namespace jflux {

// The plan function of all three exchanges (runtime/op.h).
bool PlanExchange(const Fields& call, const Machine& machine, Fields* plan, std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_EXCHANGE_EXCHANGE_PLAN_H_
