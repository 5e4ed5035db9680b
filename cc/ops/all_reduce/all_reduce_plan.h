#ifndef JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_PLAN_H_
#define JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_PLAN_H_

#include <string>

#include "ops/all_reduce/all_reduce.h"
#include "runtime/op.h"

namespace jflux {

bool PlanAllReduce(const Fields& call, const Machine& machine, Fields* plan, std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_ALL_REDUCE_ALL_REDUCE_PLAN_H_
