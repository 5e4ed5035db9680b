// Element types of operands and results, as every layer below the FFI names them.
#ifndef JFLUX_CORE_DTYPE_H_
#define JFLUX_CORE_DTYPE_H_

#include <cstdint>

#include "core/platform.h"

namespace jflux {

enum class DType : int32_t { kF16, kBF16, kF32, kF64 };

JFLUX_HD constexpr int64_t SizeOf(DType t) {
  return t == DType::kF64 ? 8 : t == DType::kF32 ? 4 : 2;
}

// Identifies an op in signatures and fault records. Append only.
enum class OpId : uint32_t {
  kAllGatherMatmul = 1,
  kMatmulReduceScatter = 2,
  kAllReduce = 3,
  kAllGather = 4,
  kAllToAll = 5,
  kReduceScatter = 6,
  kMatmulAllToAll = 7,
  kMatmulAllReduce = 8,
};

// Custom calls have numbers from here on, which mean something in this process alone
// (runtime/fault.h): in fault records, not in signatures.
inline constexpr uint32_t kFirstCustomOp = 1 << 16;

}  // namespace jflux

#endif  // JFLUX_CORE_DTYPE_H_
