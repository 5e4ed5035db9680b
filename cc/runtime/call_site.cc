#include <map>
#include <memory>
#include <mutex>

#include "core/signal.h"
#include "runtime/ffi.h"

namespace jflux {

ffi::TypeId CallSite::id = {};
ffi::TypeInfo CallSite::info = ffi::MakeTypeInfo<CallSite>();

namespace {

// The attribute `site` is unique in a module as it is lowered, but XLA may inline a function that
// holds it several times; the n-th instantiation of the same attribute is told apart by n. All
// processes compile the same modules, so they count alike.
ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attrs) {
  const auto site = attrs.get<int64_t>("site");
  if (!site.has_value()) return ffi::Unexpected(InvalidArgument("attribute `site` is missing"));
  static std::mutex mutex;
  static auto* counts = new std::map<int64_t, int64_t>;
  std::lock_guard<std::mutex> lock(mutex);
  const int64_t n = (*counts)[*site]++;
  auto state = std::make_unique<CallSite>();
  state->number = (static_cast<uint64_t>(SignatureBuilder().Add(*site).Get()) << 32) |
                  SignatureBuilder().Add(n).Add(*site).Get();
  return state;
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace

XLA_FFI_Error* InstantiateCallSite(XLA_FFI_CallFrame* frame) { return kInstantiate(frame); }

}  // namespace jflux
