// The interface of libjflux_nvshmem.so, which is the only part of jflux that links to NVSHMEM.
// libjflux_core loads it when a user asks for NVSHMEM (runtime/nvshmem.h), so jflux imports where
// NVSHMEM is not installed.
//
//   start    Collective over all processes, one for each GPU. Blocks until all have come, without
//            a timeout of its own. Once in the life of a process: NVSHMEM's state is global to it.
//   memory   One block, the arena, allocated in `start` while nothing runs: nvshmem_malloc is
//            collective and runs a barrier kernel, which could wait for a kernel that waits for
//            another process. jflux divides the arena itself.
//   end      With the process. Nothing is collective at the end, so nothing can hang there.
#ifndef JFLUX_NVSHMEM_PLUGIN_H_
#define JFLUX_NVSHMEM_PLUGIN_H_

#include <cstdint>

namespace jflux {

struct NodeExchangeArgs;

struct NvshmemPlugin {
  // Of this struct and of NodeExchangeArgs. Bump it with every change.
  static constexpr int32_t kVersion = 1;
  static constexpr int kIdBytes = 128;
  static constexpr const char* kSymbol = "jflux_nvshmem_plugin";

  int32_t version;
  int32_t args_bytes;  // sizeof(NodeExchangeArgs)

  // Those that return text return null on success, else the reason, valid until the next call.
  const char* (*unique_id)(unsigned char* id);  // kIdBytes; of one process, for all
  const char* (*start)(const unsigned char* id, int rank, int world, int ordinal, int64_t bytes,
                       char** arena);
  // Where this GPU finds `address` of the arena of process `pe`; null if only NVSHMEM reaches it.
  char* (*peer_address)(const char* address, int pe);
  const char* (*exchange)(const NodeExchangeArgs* args, void* stream);
};

}  // namespace jflux

// The plugin's only symbol.
extern "C" __attribute__((visibility("default"))) const jflux::NvshmemPlugin* jflux_nvshmem_plugin(
    void);

#endif  // JFLUX_NVSHMEM_PLUGIN_H_
