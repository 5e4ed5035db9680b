// The C interface of libjflux_core for custom-call handlers that are compiled out of tree, and the
// structs that cross it. jflux/ffi.h and jflux/kernel.cuh wrap it.
#ifndef JFLUX_CALL_H_
#define JFLUX_CALL_H_

#include <cstdint>

#include "../core/layout.h"
#include "../gpu/device_state.h"
#include "shmem.h"

#ifndef JFLUX_API
#define JFLUX_API extern "C" __attribute__((visibility("default")))
#endif

namespace jflux::shmem {

// Version of everything that kernels and handlers share with the library: the structs here and in
// the headers above. Bump it with every change. The library refuses a handler with another version.
inline constexpr int32_t kCallVersion = 4;

// A call, as described by its FFI attributes, which jflux.custom_call supplies. The pointers belong
// to the caller.
struct CallInfo {
  int32_t version = kCallVersion;
  uint32_t signature;  // hash of what the ranks must agree on
  const char* name;    // of the FFI target; not null-terminated
  int64_t name_size;
  const int64_t* groups;  // [groups_size / world][world] global device ids
  int64_t groups_size, world, site, data_bytes, num_signals;
  int64_t workspace_bytes;  // that jflux.custom_call has reserved
};

// A kernel's first argument, a __grid_constant__.
struct CallArgs {
  DeviceState* state;
  SymmetricView view;
  WorkspaceLayout layout;
  uint32_t signature, op;
};

// One rank's part of a call on the CPU. False if a wait failed.
using CpuBody = bool (*)(void* data, const Context& ctx);
// `error` is null on success, and valid until the function returns; `status` is its ffi::ErrorCode.
using CpuDone = void (*)(void* data, int32_t status, const char* error);

// Loads kernels on this device of the process. Returns null on success, else the reason.
using KernelLoader = const char* (*)(int ordinal);

}  // namespace jflux::shmem

// Fills `args` for a kernel of `blocks` CTAs on this device, which the caller launches next, once,
// on `stream` (a cudaStream_t). Returns null on success, else the reason, valid until the calling
// thread's next call.
JFLUX_API const char* jflux_cuda_begin_call(const jflux::shmem::CallInfo* info, int32_t ordinal,
                                            void* stream, int32_t blocks,
                                            jflux::shmem::CallArgs* args);

// Registers one rank's part of a call. When all ranks of this process have registered, body(data,
// ctx) runs on a thread of jflux, where it may wait for peers. done(data, error) follows in any
// case. `site` is the handler's state, `run_id` is XLA's.
JFLUX_API void jflux_cpu_join_call(const jflux::shmem::CallInfo* info, void* site, int64_t run_id,
                                   int32_t device, jflux::shmem::CpuBody body,
                                   jflux::shmem::CpuDone done, void* data);

// The XLA_FFI_TypeId of that state. jflux registers it.
JFLUX_API void* jflux_call_site_type_id(void);

#endif  // JFLUX_CALL_H_
