// How functions of the C interface return text.
#ifndef JFLUX_RUNTIME_REASON_H_
#define JFLUX_RUNTIME_REASON_H_

#include <string>

namespace jflux {

// The text as a C string, which lives until the calling thread's next call of this function.
inline const char* Reason(const std::string& text) {
  thread_local std::string kept;
  kept = text;
  return kept.c_str();
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_REASON_H_
