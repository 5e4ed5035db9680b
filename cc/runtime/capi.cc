#include "runtime/capi.h"

#include "runtime/cpu_matmul.h"
#include "runtime/ffi.h"

void* jflux_call_site_type_id(void) { return &jflux::CallSite::id; }
void* jflux_call_site_type_info(void) { return &jflux::CallSite::info; }

void jflux_begin_module(void) { jflux::BeginModule(); }

int jflux_built_with_cuda(void) {
#ifdef JFLUX_WITH_CUDA
  return 1;
#else
  return 0;
#endif
}

void jflux_set_blas(void* sgemm, void* dgemm) { jflux::SetBlas(sgemm, dgemm); }
