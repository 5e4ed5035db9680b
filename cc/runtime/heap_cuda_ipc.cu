#include <cuda_runtime.h>

#include <cstdio>
#include <sstream>

#include "runtime/cuda_check.h"
#include "runtime/heap_cuda_ipc.h"

namespace jflux {
std::shared_ptr<HeapCudaIpc> HeapCudaIpc::Create(const HeapConfig& config, std::string* error) {
  std::shared_ptr<HeapCudaIpc> heap(new HeapCudaIpc(config));
  return heap->Allocate(error) ? heap : nullptr;
}

HeapCudaIpc::~HeapCudaIpc() {
  for (auto& [ordinal, address] : opened_) {
    cudaSetDevice(ordinal);
    cudaIpcCloseMemHandle(address);
  }
}

bool HeapCudaIpc::Export(std::string* handle, std::string* error) const {
  handle->clear();
  for (const CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    cudaIpcMemHandle_t ipc;
    JFLUX_CUDA_OR_FALSE(cudaIpcGetMemHandle(&ipc, device.heap), error);
    *handle += (handle->empty() ? "" : ",") + std::to_string(device.id) + "=";
    for (size_t i = 0; i < sizeof(ipc); ++i) {
      char digits[3];
      std::snprintf(digits, sizeof(digits), "%02x", reinterpret_cast<unsigned char*>(&ipc)[i]);
      *handle += digits;
    }
  }
  return true;
}

bool HeapCudaIpc::Attach(const std::string& handle, std::string* error) {
  std::istringstream in(handle);
  for (std::string item; std::getline(in, item, ',');) {
    std::istringstream of_device(item);
    int64_t id = 0;
    char equals = 0;
    std::string hex;
    if (!(of_device >> id >> equals >> hex) || equals != '=') {
      *error = "malformed handle of a peer process's heap: " + handle;
      return false;
    }
    if (!AttachDevice(id, hex, error)) return false;
  }
  return true;
}

bool HeapCudaIpc::AttachDevice(int64_t id, const std::string& hex, std::string* error) {
  cudaIpcMemHandle_t ipc;
  if (hex.size() != 2 * sizeof(ipc) ||
      hex.find_first_not_of("0123456789abcdef") != std::string::npos) {
    *error = "malformed IPC handle of device " + std::to_string(id);
    return false;
  }
  for (size_t i = 0; i < sizeof(ipc); ++i) {
    reinterpret_cast<unsigned char*>(&ipc)[i] =
        static_cast<unsigned char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  for (CudaDevice& device : devices_) {
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(device.ordinal), error);
    void* address = nullptr;
    const cudaError_t opened = cudaIpcOpenMemHandle(&address, ipc, cudaIpcMemLazyEnablePeerAccess);
    if (opened != cudaSuccess) {
      *error = CudaReason("cudaIpcOpenMemHandle", opened) + " (for device " + std::to_string(id) +
               " on GPU " + std::to_string(device.ordinal) +
               "): all processes must run on one host and see each other's GPUs, and in one "
               "container if in any";
      return false;
    }
    opened_.emplace_back(device.ordinal, address);
    device.peers[id] = static_cast<char*>(address);
  }
  return true;
}

}  // namespace jflux
