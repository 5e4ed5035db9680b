// How a call ends on the CPU back end: with success, or with an error of some kind.
#ifndef JFLUX_RUNTIME_CALL_ERROR_H_
#define JFLUX_RUNTIME_CALL_ERROR_H_

#include <cstdint>
#include <string>
#include <utility>

namespace jflux {

// Numbers of absl::StatusCode, which XLA's FFI has too (and gRPC): the status of the exception that
// a user sees.
enum class ErrorKind : int32_t {
  kNone = 0,
  kInvalidArgument = 3,     // ranks disagree on the call
  kDeadlineExceeded = 4,    // a rank did not come in time
  kResourceExhausted = 8,   // no room in the heap, no thread, no memory
  kFailedPrecondition = 9,  // no heap, or one of other devices
  kAborted = 10,            // the call failed elsewhere, or the heap went away
  kInternal = 13,           // anything else
};

// Success is an empty text.
struct CallError {
  ErrorKind kind = ErrorKind::kNone;
  std::string text;

  CallError() = default;
  CallError(ErrorKind kind, std::string text) : kind(kind), text(std::move(text)) {}
  bool empty() const { return text.empty(); }
  operator const std::string&() const { return text; }
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_CALL_ERROR_H_
