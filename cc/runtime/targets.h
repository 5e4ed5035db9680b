// Every FFI target of the library. An op adds its line(s) to targets.cc.
#ifndef JFLUX_RUNTIME_TARGETS_H_
#define JFLUX_RUNTIME_TARGETS_H_

#include "xla/ffi/api/c_api.h"

namespace jflux {

// ops/*
XLA_FFI_Error* AllGatherMatmulCpuHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* AllGatherMatmulCudaHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MatmulReduceScatterCpuHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MatmulReduceScatterCudaHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MatmulAllToAllCpuHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MatmulAllToAllCudaHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MatmulAllReduceCpuHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* MatmulAllReduceCudaHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* AllReduceCpuHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* AllReduceCudaHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* AllGatherCpuHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* AllGatherCudaHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* AllToAllCpuHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* AllToAllCudaHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ReduceScatterCpuHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ReduceScatterCudaHandler(XLA_FFI_CallFrame* frame);

struct Target {
  const char* name;
  const char* platform;          // "cpu" or "CUDA"
  XLA_FFI_Handler* instantiate;  // or null
  XLA_FFI_Handler* execute;
};

// Ends with an entry whose name is null.
const Target* Targets();

}  // namespace jflux

#endif  // JFLUX_RUNTIME_TARGETS_H_
