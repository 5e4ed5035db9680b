#include "runtime/capi.h"

#include "runtime/cpu_matmul.h"
#include "runtime/ffi.h"

#ifdef JFLUX_WITH_CUDA
#include "runtime/workspace_use.h"
#endif

// For custom calls (jflux/call.h).
JFLUX_API void* jflux_call_site_type_id(void) { return &jflux::CallSite::id; }

const JfluxStateType* jflux_state_types(void) {
  static const JfluxStateType types[] = {
      {"jflux_call_site", "cpu", &jflux::CallSite::id, &jflux::CallSite::info},
#ifdef JFLUX_WITH_CUDA
      {"jflux_workspace_use", "CUDA", &jflux::WorkspaceUse::id, &jflux::WorkspaceUse::info},
#endif
      {nullptr, nullptr, nullptr, nullptr}};
  return types;
}

int jflux_built_with_cuda(void) {
#ifdef JFLUX_WITH_CUDA
  return 1;
#else
  return 0;
#endif
}

void jflux_set_blas(void* sgemm, void* dgemm) { jflux::SetBlas(sgemm, dgemm); }
