// XLA FFI handlers of a custom call. A handler binds the context, all attributes, its operands and
// its results:
//
//   ffi::Future Cpu(ffi::Context context, ffi::Dictionary attrs, ffi::AnyBuffer x,
//                   ffi::Result<ffi::AnyBuffer> y) {
//     return jflux::shmem::JoinCall(context, attrs, [=](const jflux::shmem::Context& ctx) {...});
//   }
//   XLA_FFI_DEFINE_HANDLER_SYMBOL(MyOpCpu, Cpu, ffi::Ffi::Bind().Ctx<ffi::Context>().Attrs()
//       .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
//
// The CUDA handler also binds the stream; it calls BeginCall and launches its kernel there. XLA's
// headers are in jax.ffi.include_dir().
#ifndef JFLUX_FFI_H_
#define JFLUX_FFI_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "call.h"
#include "xla/ffi/api/ffi.h"

namespace jflux::shmem {

namespace internal {

// The state that XLA creates for each call site on the CPU.
struct Site {
  static inline xla::ffi::TypeId id{};
};

inline xla::ffi::Error Failed(const std::string& reason) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInternal, reason);
}

// False if an attribute of jflux.custom_call is missing. `info` points into `attrs`.
inline bool InfoOf(const xla::ffi::Dictionary& attrs, CallInfo* info) {
  const auto number = [&](const char* name, int64_t* value) {
    const auto attr = attrs.get<int64_t>(name);
    if (attr.has_value()) *value = *attr;
    return attr.has_value();
  };
  const auto name = attrs.get<std::string_view>("op");
  const auto groups = attrs.get<xla::ffi::Span<const int64_t>>("groups");
  int64_t signature = 0;
  if (!name.has_value() || !groups.has_value() || !number("world", &info->world) ||
      !number("site", &info->site) || !number("data_bytes", &info->data_bytes) ||
      !number("num_signals", &info->num_signals) || !number("signature", &signature) ||
      !number("workspace_bytes", &info->workspace_bytes)) {
    return false;
  }
  info->signature = static_cast<uint32_t>(signature);
  info->name = name->data();
  info->name_size = static_cast<int64_t>(name->size());
  info->groups = groups->begin();
  info->groups_size = static_cast<int64_t>(groups->size());
  return true;
}

inline constexpr char kNoCall[] = "jflux: this handler is for jflux.custom_call";

}  // namespace internal

// A failed future, for a CPU handler that has no call to join.
inline xla::ffi::Future FailedCall(xla::ffi::Error error) {
  xla::ffi::Promise promise;
  xla::ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

// For CPU handlers. Returns at once; the future completes when body(ctx) has run on a thread of
// jflux. A handler must not wait for peers itself.
template <typename Body>
xla::ffi::Future JoinCall(const xla::ffi::Context& context, const xla::ffi::Dictionary& attrs,
                          Body body) {
  namespace ffi = xla::ffi;
  struct Call {
    Body body;
    ffi::Promise promise;
  };
  static const bool known = [] {
    internal::Site::id = *static_cast<ffi::TypeId*>(jflux_call_site_type_id());
    return true;
  }();
  (void)known;

  auto* call = new Call{std::move(body), ffi::Promise()};
  ffi::Future future(call->promise);
  const auto done = [](void* data, const char* error) {
    auto* call = static_cast<Call*>(data);
    ffi::Promise promise = std::move(call->promise);
    delete call;
    if (error == nullptr) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error(ffi::ErrorCode::kDeadlineExceeded, error));
    }
  };
  CallInfo info;
  const auto site = context.get<ffi::State<internal::Site>>();
  const auto run_id = context.get<ffi::RunId>();
  const auto device = context.get<ffi::DeviceOrdinal>();
  if (!internal::InfoOf(attrs, &info) || !site.has_value() || !run_id.has_value() ||
      !device.has_value()) {
    done(call, internal::kNoCall);
    return future;
  }
  jflux_cpu_join_call(
      &info, *site, run_id->run_id, *device,
      [](void* data, const Context& ctx) { return static_cast<Call*>(data)->body(ctx); }, done,
      call);
  return future;
}

// For CUDA handlers. Fills the arguments of a kernel of `blocks` CTAs. The handler launches it
// next, once, on the stream that XLA gives it.
inline xla::ffi::Error BeginCall(const xla::ffi::Context& context,
                                 const xla::ffi::Dictionary& attrs, int32_t blocks,
                                 CallArgs* args) {
  CallInfo info;
  const auto device = context.get<xla::ffi::DeviceOrdinal>();
  const auto stream = context.get<xla::ffi::PlatformStream<void*>>();
  if (!internal::InfoOf(attrs, &info) || !device.has_value() || !stream.has_value()) {
    return internal::Failed(internal::kNoCall);
  }
  const char* reason = jflux_cuda_begin_call(&info, *device, *stream, blocks, args);
  return reason == nullptr ? xla::ffi::Error::Success() : internal::Failed(reason);
}

}  // namespace jflux::shmem

#endif  // JFLUX_FFI_H_
