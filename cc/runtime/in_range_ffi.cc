// The handler of a check on CPUs: integers as they are, or the call's error with the first one that
// is out of bounds. A GPU's handler does not know them when it runs. Python:
// jflux/_call/value_checks.py.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "runtime/attributes.h"

namespace jflux {
namespace {

ffi::Error InRange(ffi::Buffer<ffi::S32> x, ffi::Result<ffi::Buffer<ffi::S32>> same, int64_t low,
                   int64_t high, std::string_view what) {
  const int32_t *begin = x.typed_data(), *end = begin + x.element_count();
  const int32_t* wrong =
      std::find_if(begin, end, [&](int32_t value) { return value < low || value > high; });
  if (wrong != end) {
    const bool any_low = low <= std::numeric_limits<int32_t>::min();
    const std::string bounds = any_low
                                   ? "at most " + std::to_string(high)
                                   : "from " + std::to_string(low) + " to " + std::to_string(high);
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      std::string(what) + " must be " + bounds + ", got " + std::to_string(*wrong));
  }
  std::copy(begin, end, same->typed_data());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInRange, InRange,
                       ffi::Ffi::Bind()
                           .Arg<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Attr<int64_t>("low")
                           .Attr<int64_t>("high")
                           .Attr<std::string_view>("what"));

}  // namespace

extern XLA_FFI_Handler* const kInRangeCpu;
XLA_FFI_Handler* const kInRangeCpu = kInRange;

}  // namespace jflux
