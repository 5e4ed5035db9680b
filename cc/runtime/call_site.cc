#include <atomic>
#include <memory>

#include "runtime/ffi.h"

namespace jflux {

ffi::TypeId CallSite::id = {};
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

namespace {

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attrs) {
  static std::atomic<uint64_t> count{0};
  const auto site = attrs.get<int64_t>("site");
  if (!site.has_value()) return ffi::Unexpected(InvalidArgument("attribute `site` is missing"));
  auto state = std::make_unique<CallSite>();
  state->number = ++count;
  state->name = static_cast<uint64_t>(*site);
  return state;
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace

XLA_FFI_Error* InstantiateCallSite(XLA_FFI_CallFrame* frame) { return kInstantiate(frame); }

}  // namespace jflux
