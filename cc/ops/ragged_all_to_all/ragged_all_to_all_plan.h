#ifndef JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_ALL_TO_ALL_PLAN_H_
#define JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_ALL_TO_ALL_PLAN_H_

#include <string>

#include "ops/ragged_all_to_all/ragged_all_to_all.h"
#include "runtime/op.h"

namespace jflux {

bool PlanRaggedAllToAll(const Fields& call, const Machine& machine, Fields* plan,
                        std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_RAGGED_ALL_TO_ALL_RAGGED_ALL_TO_ALL_PLAN_H_
