#ifndef JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_PLAN_H_
#define JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_PLAN_H_

#include <string>

#include "ops/decode_merge/decode_merge.h"
#include "runtime/op.h"

namespace jflux {

bool PlanDecodeMerge(const Fields& call, const Machine& machine, Fields* plan,
                     std::string* why_not);

}  // namespace jflux

#endif  // JFLUX_OPS_DECODE_MERGE_DECODE_MERGE_PLAN_H_
