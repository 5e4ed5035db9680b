// How a handler of one's own, compiled out of tree, gets its workspace: the C interface of
// libjflux_core that jflux/ffi.h and jflux/kernel.cuh are written with, and what passes through it.
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

// Goes up with every change of what kernels and handlers share with the library: the structs here
// and in the headers above. A handler that was compiled with another number is refused.
inline constexpr int32_t kCallVersion = 1;

// A call as its attributes say it: jflux.custom_call supplies them. The pointers are the caller's.
struct CallInfo {
  int32_t version = kCallVersion;
  uint32_t signature;  // of what the ranks must agree on
  const char* name;    // of the FFI target; not terminated
  int64_t name_size;
  const int64_t* groups;  // a table [groups_size / world][world] of global device ids
  int64_t groups_size, world, site, data_bytes, num_signals;
};

// What a kernel is given: its first argument, and a __grid_constant__.
struct CallArgs {
  DeviceState* state;
  SymmetricView view;
  WorkspaceLayout layout;
  uint32_t signature, op;
};

// One rank's part of a call on the CPU; false if a wait failed.
using CpuBody = bool (*)(void* data, const Context& ctx);
// `error` is null on success, and lives until the function returns.
using CpuDone = void (*)(void* data, const char* error);

// Loads kernels on this device of the process; null on success, else the reason.
using KernelLoader = const char* (*)(int ordinal);

}  // namespace jflux::shmem

// Fills `args` for a kernel of so many blocks on this device. Null on success, else the reason,
// which lives until the calling thread's next call.
JFLUX_API const char* jflux_cuda_begin_call(const jflux::shmem::CallInfo* info, int32_t ordinal,
                                            int32_t blocks, jflux::shmem::CallArgs* args);

// Registers one rank's part of a call. When all ranks have, `body(data, ctx)` runs on a
// thread of jflux's own, where it may wait for its peers. Then comes `done(data, error)`, in any
// case. `site` is what the handler's state holds, `run_id` XLA's.
JFLUX_API void jflux_cpu_join_call(const jflux::shmem::CallInfo* info, void* site, int64_t run_id,
                                   int32_t device, jflux::shmem::CpuBody body,
                                   jflux::shmem::CpuDone done, void* data);

// XLA_FFI_TypeId of that state, which jflux registers.
JFLUX_API void* jflux_call_site_type_id(void);

#endif  // JFLUX_CALL_H_
