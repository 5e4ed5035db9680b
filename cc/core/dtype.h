// Element types of operands and results.
#ifndef JFLUX_CORE_DTYPE_H_
#define JFLUX_CORE_DTYPE_H_

#include <cstdint>

#include "core/platform.h"

namespace jflux {

enum class DType : int32_t { kF16, kBF16, kF32, kF64 };

JFLUX_HD constexpr int64_t SizeOf(DType t) {
  switch (t) {  // without default: a compiler warns of a type that is missing
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF32:
      return 4;
    case DType::kF64:
      return 8;
  }
  Trap();  // a number that is no DType: whoever made one of it has not checked it
  return 0;
}

// In the order of DType, as numpy and Python name them.
inline constexpr const char* kDTypeNames[] = {"float16", "bfloat16", "float32", "float64"};

// Identifies an op in signatures and fault records. Each op defines its id in its header, above 0
// and below kFirstCustomOp, and never changes it: `inline constexpr OpId kFooBarId{12};`.
// tests/cc/ops_test.cc checks that ids are unique.
enum class OpId : uint32_t {};

// Custom calls get ids from here on. The ids are local to the process (runtime/fault.h), so they
// appear in fault records and not in signatures.
inline constexpr uint32_t kFirstCustomOp = 1 << 16;

}  // namespace jflux

#endif  // JFLUX_CORE_DTYPE_H_
