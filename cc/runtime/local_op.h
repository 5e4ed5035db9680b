// The description of a local op: one without peers and without a workspace. It computes on one
// device, so its calls need neither the heap, nor a plan that ranks agree on, nor an axis.
//
// FFI targets, names in error messages and the loading of kernels follow from it, as from an Op
// (runtime/op.h). One constant per local op, listed in cc/ops/registry.cc.
#ifndef JFLUX_RUNTIME_LOCAL_OP_H_
#define JFLUX_RUNTIME_LOCAL_OP_H_

#include <string>
#include <vector>

#include "core/format.h"
#include "core/signal.h"
#include "gpu/machine.h"
#include "xla/ffi/api/c_api.h"

namespace jflux {

struct LocalOp {
  OpId id;                // unique among all ops
  const char* name;       // the FFI target is "jflux_" + name
  XLA_FFI_Handler* cpu;   // reads the attributes of `cuda`. Null if CPUs run plain lax. A handler
                          // may also only check operands, and lax computes (flash_decode.h)
  XLA_FFI_Handler* cuda;  // null without CUDA in the build
  // Loads the op's kernels on the current device. A new heap calls it, before any kernel that waits
  // for peers runs; without a heap, the op's launcher loads them. Null as in Op.
  bool (*load_kernels)(std::string* error);
  OpFormats cpu_formats, cuda_formats;  // as in Op
  int32_t least_arch = kHopperArch;
};

// Defined in cc/ops/registry.cc.
const std::vector<const LocalOp*>& AllLocalOps();

}  // namespace jflux

#endif  // JFLUX_RUNTIME_LOCAL_OP_H_
