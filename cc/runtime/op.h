// The description of an op that the runtime needs: one constant per op, listed in
// cc/ops/registry.cc.
//
// The runtime includes no header of cc/ops. FFI targets, error messages, the loading of kernels and
// the C interface go through AllOps().
//
// How a call is decided, once:
//
//   Python, when the call is lowered   op.plan(call, machine) -> plan: configuration, senders,
//                                      workspace_bytes; reserves a workspace of that size
//   XLA                                carries the plan to the handler, as attributes
//   the op's handler                   computes the layout of this plan, refuses it if the layout
//                                      takes another number of bytes, and launches
//
// A handler never chooses. Whatever depends on the call and the machine belongs into the plan.
#ifndef JFLUX_RUNTIME_OP_H_
#define JFLUX_RUNTIME_OP_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/format.h"
#include "core/signal.h"
#include "gpu/machine.h"
#include "xla/ffi/api/c_api.h"

namespace jflux {

// A call, or a plan: numbers by name. Element types are numbers of DType, booleans 0 or 1.
using Fields = std::map<std::string, int64_t>;

// A number that Python reads by its name, e.g. {"max_ranks", 8}. A dot makes a list: {"norms.rms",
// 1}, {"norms.layer", 2} are "norms": ["rms", "layer"] there, in this order.
struct Constant {
  const char* name;
  int64_t value;
};

// Reads the fields of a call. A field that is missing, out of range or unknown makes Check() false.
class CallReader {
 public:
  explicit CallReader(const Fields& call) : call_(call) {}

  // A field that every call has.
  int64_t Get(const char* name, int64_t least, int64_t most) {
    const auto field = call_.find(name);
    if (field == call_.end()) Refuse(std::string("the call has no `") + name + "`");
    return field == call_.end() ? least : Ranged(*field, least, most);
  }
  int64_t GetOr(const char* name, int64_t fallback, int64_t least, int64_t most) {
    const auto field = call_.find(name);
    return field == call_.end() ? fallback : Ranged(*field, least, most);
  }
  // The number of a format's row.
  DType GetFormat(const char* name) { return static_cast<DType>(Get(name, 0, kFormatCount - 1)); }
  bool Has(const char* name) const { return call_.count(name) != 0; }
  // Makes Check() fail; the first reason is the one that it tells.
  void Refuse(const std::string& why) {
    if (failed_.empty()) failed_ = why;
  }

  // After the last field has been read.
  bool Check(std::string* why_not) {
    for (const auto& [name, value] : call_) {
      if (read_.count(name) == 0) Refuse("the call has an unknown field `" + name + "`");
    }
    if (!failed_.empty()) *why_not = failed_;
    return failed_.empty();
  }

 private:
  int64_t Ranged(const Fields::value_type& field, int64_t least, int64_t most) {
    read_[field.first] = 1;
    if (least <= field.second && field.second <= most) return field.second;
    Refuse("`" + field.first + "` is " + std::to_string(field.second) + ", not from " +
           std::to_string(least) + " to " + std::to_string(most));
    return least;
  }
  const Fields& call_;
  Fields read_;
  std::string failed_;
};

struct Op {
  OpId id;           // unique among all ops
  const char* name;  // the FFI target is "jflux_" + name
  // Null if CPUs run plain lax. Of a local op it may also only check operands.
  XLA_FFI_Handler* cpu;
  XLA_FFI_Handler* cuda;  // reads the same attributes (runtime/attributes.h)
  // Of the CPU's body, and of the GPU's kernels.
  OpFormats cpu_formats, cuda_formats;
  // The plan of the kernels for this call on this machine; false and *why_not if they do not take
  // it. A pure function, so every rank gets the same plan. Null: a local op, without peers and
  // without a workspace. It computes on one device, so its calls need neither the heap, nor a plan
  // that ranks agree on, nor an axis.
  bool (*plan)(CallReader& call, const Machine& machine, Fields* plan,
               std::string* why_not) = nullptr;
  int32_t most_splits = 1;  // CTAs that may share the k of a tile; 1: the op is not tuned so
  const Constant* constants = nullptr;  // the op's own; ends with a null name
  // Arguments whose elements are checked when the call runs, as Fault::argument counts them; ends
  // with null.
  const char* const* arguments = nullptr;
  // The message of a value out of range by which another function reports a fault of its own, as
  // moe_dispatch does by ragged_all_to_all; "" for any other value.
  std::string (*meaning)(const Fault& fault) = nullptr;

  bool IsLocal() const { return plan == nullptr; }
};

// A folder of cc/ops: ops that share kernels.
struct OpFolder {
  Gpus gpus;  // that the kernels are compiled for
  // Loads the kernels on the current device. A new heap calls it, before any kernel that waits for
  // peers runs; without a heap, launchers of local ops load them.
  bool (*load_kernels)(std::string* error);
  std::vector<const Op*> ops;
};

// What a build without CUDA does not have.
#ifdef JFLUX_WITH_CUDA
#define JFLUX_IF_CUDA(x) x
#else
#define JFLUX_IF_CUDA(x) nullptr
#endif

// Defined in cc/ops/registry.cc.
const std::vector<OpFolder>& AllFolders();
const std::vector<const Op*>& AllOps();

// Null if there is none.
const Op* FindOp(const std::string& name);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_OP_H_
