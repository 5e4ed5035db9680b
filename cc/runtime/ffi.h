// Code that the ops' FFI handlers share: finding a call's group and rank, and joining the call on
// the CPU. runtime/attributes.h reads their attributes.
#ifndef JFLUX_RUNTIME_FFI_H_
#define JFLUX_RUNTIME_FFI_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/format.h"
#include "core/rows.h"
#include "core/signal.h"
#include "runtime/attributes.h"
#include "runtime/cpu_call.h"
#include "runtime/denormals.h"
#include "runtime/fault.h"
#include "xla/ffi/api/ffi.h"

namespace jflux {

// A group of ranks as this device sees it.
struct Group {
  std::vector<int64_t> devices;  // global ids in rank order
  int32_t rank = -1;
};

// The error of a process whose devices have other ids than the devices the program was lowered for.
inline constexpr char kNotOfTheCall[] =
    "device is in none of the call's groups: the program was lowered for other devices; lower it "
    "again for these";

// `groups` is a table [number of groups][world] of global device ids. Empty if the device is in
// none, or if this is no such table.
inline std::optional<Group> FindGroup(Int64s groups, int64_t world, int64_t device) {
  if (world < 1 || world > kMaxRanks || groups.size() % world != 0) return std::nullopt;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups.begin()[i] != device) continue;
    const int64_t* first = groups.begin() + i / world * world;
    return Group{std::vector<int64_t>(first, first + world), static_cast<int32_t>(i % world)};
  }
  return std::nullopt;
}

inline std::optional<DType> DTypeOf(ffi::DataType t, FormatSet among = kWideFormats) {
  switch (t) {
#define JFLUX_CASE(ID, ...) \
  case ffi::DataType::ID:   \
    return Has(among, DType::k##ID) ? std::optional(DType::k##ID) : std::nullopt;
    JFLUX_FORMATS(JFLUX_CASE)
#undef JFLUX_CASE
    default:
      return std::nullopt;
  }
}

// The bytes of the heap that the layout of a call takes, and those that its plan has reserved. If
// they differ, the handler refuses the call.
struct WorkspaceBytes {
  int64_t of_layout, of_plan;

  std::optional<ffi::Error> Refused(OpId op) const {
    if (of_layout == of_plan) return std::nullopt;
    return InvalidArgument(std::string(NameOf(op)) + ": the call takes a workspace of " +
                           std::to_string(of_layout) + " bytes, and its plan has one of " +
                           std::to_string(of_plan));
  }
};

// Whether a buffer has this type and these dimensions.
inline bool Is(const ffi::AnyBuffer& b, ffi::DataType type,
               std::initializer_list<int64_t> dimensions) {
  const auto d = b.dimensions();
  return b.element_type() == type && d.size() == dimensions.size() &&
         std::equal(dimensions.begin(), dimensions.end(), d.begin());
}

// A Future that is already an error. The CPU handlers return one Future whatever happens.
inline ffi::Future FailedFuture(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

// Completes the promise of a call.
inline auto CompletionOf(ffi::Promise promise) {
  return [promise = std::move(promise)](const CallError& error) mutable {
    FlushDenormals flush;  // XLA goes on here
    if (error.empty()) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error(static_cast<ffi::ErrorCode>(error.kind), error.text));
    }
  };
}

// A call site on the CPU, where the order of independent calls is not fixed. XLA makes one per
// custom call and executable.
struct CallSite : CpuCallSite {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
};

// The body of a CPU handler. It registers one rank's part of a call, and returns a Future that is
// completed when that part is done. `workspace_bytes`: of the call's layout. `body`: CpuCall::body.
template <typename Body>
ffi::Future JoinFfiCall(OpId op, CallSite* site, ffi::RunId run_id, int32_t device,
                        const CallAttributes& attributes, int64_t workspace_bytes, Body&& body) {
  const WorkspaceBytes workspace{workspace_bytes, attributes.workspace_bytes};
  if (auto refused = workspace.Refused(op)) return FailedFuture(*std::move(refused));
  auto group = FindGroup(attributes.groups, attributes.world, device);
  if (!group) return FailedFuture(InvalidArgument(kNotOfTheCall));
  ffi::Promise promise;
  ffi::Future future(promise);
  CpuCall call;
  call.op = op;
  call.run_id = run_id.run_id;
  call.site = site;
  call.group = std::move(group->devices);
  call.rank = group->rank;
  call.bytes = workspace.of_plan;
  call.body = std::forward<Body>(body);
  call.done = CompletionOf(std::move(promise));
  JoinCpuCall(std::move(call));
  return future;
}

// The instantiate stage of every op on the CPU.
XLA_FFI_Error* InstantiateCallSite(XLA_FFI_CallFrame* frame);

// The context and the attributes of a handler on the CPU, which its operands follow.
inline constexpr auto BindCpu = [] {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<CallSite>>()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::DeviceOrdinal>()
      .Attrs();
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_FFI_H_
