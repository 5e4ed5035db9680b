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
// holds it several times; the n-th instantiation of the same attribute in a module is told apart by
// n. (Executions of different modules are told apart by their run ids.)
std::mutex g_mutex;
std::map<int64_t, int64_t>& Counts() {
  static auto* counts = new std::map<int64_t, int64_t>;
  return *counts;
}

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attrs) {
  const auto site = attrs.get<int64_t>("site");
  if (!site.has_value()) return ffi::Unexpected(InvalidArgument("attribute `site` is missing"));
  std::lock_guard<std::mutex> lock(g_mutex);
  const int64_t n = Counts()[*site]++;
  auto state = std::make_unique<CallSite>();
  state->number = (static_cast<uint64_t>(SignatureBuilder().Add(*site).Get()) << 32) |
                  SignatureBuilder().Add(n).Add(*site).Get();
  return state;
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

}  // namespace

void BeginModule() {
  std::lock_guard<std::mutex> lock(g_mutex);
  Counts().clear();
}

XLA_FFI_Error* InstantiateCallSite(XLA_FFI_CallFrame* frame) { return kInstantiate(frame); }

}  // namespace jflux
