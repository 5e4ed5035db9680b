// Fault records as sentences.
#ifndef JFLUX_RUNTIME_FAULT_H_
#define JFLUX_RUNTIME_FAULT_H_

#include <string>

#include "core/signal.h"
#include "runtime/call_error.h"

namespace jflux {

const char* NameOf(OpId op);

// The number of the calls with this name, "custom_call(target)" or "symm.call(kernel)".
OpId CustomOp(const std::string& name);

// "jflux.all_gather_matmul: rank 2 waited 60 s for rank 3 (item 17): ...". `deadline_s` is what
// the wait was given.
std::string Describe(const Fault& fault, double deadline_s);
ErrorKind KindOf(const Fault& fault);

// The warning of a wait that has lasted `warn_s`: who waits for whom, since when, and what follows.
std::string DescribeWarning(const Fault& fault, double warn_s, double deadline_s);

// Their parts, for other warnings: "12:34:56", and the sentences on what follows.
std::string TimeOfDay(double seconds_ago);
std::string WhatFollows(double deadline_s);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_FAULT_H_
