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
#include <type_traits>
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

// Null, or the name of the first attribute of jflux.custom_call that is missing or has another
// type. `info` points into `attrs`.
inline const char* InfoOf(const xla::ffi::Dictionary& attrs, CallInfo* info) {
  const char* wrong = nullptr;
  const auto read = [&](const char* name, auto* value) {
    const auto attr = attrs.get<std::decay_t<decltype(*value)>>(name);
    if (attr.has_value()) {
      *value = *attr;
    } else if (wrong == nullptr) {
      wrong = name;
    }
  };
  std::string_view name;
  xla::ffi::Span<const int64_t> groups;
  int64_t signature = 0;
  read("op", &name);
  read("groups", &groups);
  read("world", &info->world);
  read("site", &info->site);
  read("data_bytes", &info->data_bytes);
  read("num_signals", &info->num_signals);
  read("signature", &signature);
  read("workspace_bytes", &info->workspace_bytes);
  info->signature = static_cast<uint32_t>(signature);
  info->name = name.data();
  info->name_size = static_cast<int64_t>(name.size());
  info->groups = groups.begin();
  info->groups_size = static_cast<int64_t>(groups.size());
  return wrong;
}

inline constexpr char kNoCall[] = "jflux: this handler is for jflux.custom_call";

inline std::string WrongAttribute(const char* name) {
  return std::string(kNoCall) + ", and the call's attribute `" + name +
         "` is missing or has another type";
}

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
  const auto done = [](void* data, int32_t status, const char* error) {
    auto* call = static_cast<Call*>(data);
    ffi::Promise promise = std::move(call->promise);
    delete call;
    if (error == nullptr) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error(static_cast<ffi::ErrorCode>(status), error));
    }
  };
  CallInfo info;
  const auto site = context.get<ffi::State<internal::Site>>();
  const auto run_id = context.get<ffi::RunId>();
  const auto device = context.get<ffi::DeviceOrdinal>();
  constexpr auto kInvalid = static_cast<int32_t>(ffi::ErrorCode::kInvalidArgument);
  if (const char* wrong = internal::InfoOf(attrs, &info)) {
    done(call, kInvalid, internal::WrongAttribute(wrong).c_str());
    return future;
  }
  if (!site.has_value() || !run_id.has_value() || !device.has_value()) {
    done(call, kInvalid, internal::kNoCall);
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
  if (const char* wrong = internal::InfoOf(attrs, &info)) {
    return internal::Failed(internal::WrongAttribute(wrong));
  }
  if (!device.has_value() || !stream.has_value()) return internal::Failed(internal::kNoCall);
  const char* reason = jflux_cuda_begin_call(&info, *device, *stream, blocks, args);
  return reason == nullptr ? xla::ffi::Error::Success() : internal::Failed(reason);
}

}  // namespace jflux::shmem

#endif  // JFLUX_FFI_H_
