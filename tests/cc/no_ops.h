// A mutant is a copy of the library in another namespace, without handlers, so without ops: fault
// records there have numbers instead of names.
#ifndef JFLUX_TESTS_CC_NO_OPS_H_
#define JFLUX_TESTS_CC_NO_OPS_H_

#include <vector>

#include "runtime/op.h"

namespace jflux {

const std::vector<OpFolder>& AllFolders() {
  static const std::vector<OpFolder> kNone;
  return kNone;
}

const std::vector<const Op*>& AllOps() {
  static const std::vector<const Op*> kNone;
  return kNone;
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_NO_OPS_H_
