// libjflux_nvshmem.so: compiled with -rdc=true and linked with libnvshmem_device.a.
#define JFLUX_WITH_NVSHMEM 1

#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "nvshmem/node_exchange.cuh"
#include "nvshmem/plugin.h"

namespace jflux {
namespace {

static_assert(sizeof(nvshmemx_uniqueid_t) == NvshmemPlugin::kIdBytes);

const char* Reason(const std::string& text) {
  thread_local std::string kept;
  kept = text;
  return kept.c_str();
}

const char* CudaReason(const char* what, cudaError_t status) {
  return Reason(std::string(what) + ": " + cudaGetErrorString(status));
}

const char* UniqueId(unsigned char* id) {
  nvshmemx_uniqueid_t unique = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int status = nvshmemx_get_uniqueid(&unique);
  if (status != 0) return Reason("nvshmemx_get_uniqueid failed: " + std::to_string(status));
  std::memcpy(id, &unique, sizeof(unique));
  return nullptr;
}

const char* Start(const unsigned char* id, int rank, int world, int ordinal, int64_t bytes,
                  char** arena) {
  cudaError_t cuda = cudaSetDevice(ordinal);
  if (cuda == cudaSuccess) cuda = cudaFree(nullptr);  // NVSHMEM takes the current context
  if (cuda != cudaSuccess) return CudaReason("cudaSetDevice", cuda);
  nvshmemx_uniqueid_t unique;
  std::memcpy(&unique, id, sizeof(unique));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  int status = nvshmemx_set_attr_uniqueid_args(rank, world, &unique, &attributes);
  if (status != 0) {
    return Reason("nvshmemx_set_attr_uniqueid_args failed: " + std::to_string(status));
  }
  // nvshmemx_init_attr ends the process where this returns an error.
  int provided = 0;
  const nvshmemi_version_t compiled = {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                       NVSHMEM_VENDOR_PATCH_VERSION};
  status = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID,
                                &attributes, compiled);
  if (status != 0) {
    return Reason("nvshmemx_init_attr failed: " + std::to_string(status) +
                  "; NVSHMEM_DEBUG=INFO says more");
  }
  *arena = static_cast<char*>(nvshmem_malloc(static_cast<size_t>(bytes)));
  if (*arena == nullptr) {
    return Reason("nvshmem_malloc has no " + std::to_string(bytes) +
                  " bytes: NVSHMEM_SYMMETRIC_SIZE, or the GPU's free memory, is too small");
  }
  if (reinterpret_cast<uintptr_t>(*arena) % 128 != 0) {  // TMA's alignment
    return Reason("nvshmem_malloc returns memory that is not aligned to 128 bytes");
  }
  cudaFuncAttributes loaded;
  cuda = cudaFuncGetAttributes(&loaded, NodeExchangeKernel);
  return cuda == cudaSuccess ? nullptr : CudaReason("a kernel cannot be loaded", cuda);
}

char* PeerAddress(const char* address, int pe) {
  return static_cast<char*>(nvshmem_ptr(address, pe));
}

const char* Exchange(const NodeExchangeArgs* args, void* stream) {
  NodeExchangeKernel<<<args->exchange.slices, kNodeExchangeThreads, 0,
                       static_cast<cudaStream_t>(stream)>>>(*args);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : CudaReason("launch", status);
}

}  // namespace
}  // namespace jflux

const jflux::NvshmemPlugin* jflux_nvshmem_plugin(void) {
  static const jflux::NvshmemPlugin plugin = {
      jflux::NvshmemPlugin::kVersion,
      sizeof(jflux::NodeExchangeArgs),
      jflux::UniqueId,
      jflux::Start,
      jflux::PeerAddress,
      jflux::Exchange,
  };
  return &plugin;
}
