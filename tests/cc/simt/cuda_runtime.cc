// The functions of the CUDA runtime that launchers call (runtime/kernels_cuda.cu, compiled here
// too): devices are numbers, a launch is enqueued for simt::Run, and tensor maps are the
// simulator's.
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "simt/machine.h"
#include "simt/tensor_map.h"

namespace jflux::simt {
namespace {

int device = 0;

// The most dynamic shared memory with which the current device launches a kernel.
int& MostSmem(const void* kernel) {
  static auto* most = new std::map<std::pair<int, const void*>, int>;
  return most->try_emplace({device, kernel}, 48 << 10).first->second;
}

}  // namespace

void SetDevice(int ordinal) { device = ordinal; }
int CurrentDevice() { return device; }

}  // namespace jflux::simt

using namespace jflux::simt;  // NOLINT

extern "C" {

cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = CurrentDevice();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = SmCount();
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kMostDynamicBytes;
      return cudaSuccess;
    default:
      return cudaErrorNotSupported;
  }
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "an error of the simulated runtime";
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorNotSupported;
  if (value < 0 || value > static_cast<int>(kMostDynamicBytes)) return cudaErrorInvalidValue;
  MostSmem(kernel) = value;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

// Nothing is captured, and all streams run at once: the tests order what they launch.
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaErrorNotSupported;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) {
  int cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      cluster = static_cast<int>(config->attrs[i].val.clusterDim.x);
    }
  }
  const auto ctas = static_cast<int>(config->gridDim.x);
  const auto smem = static_cast<int>(config->dynamicSmemBytes);
  if (ctas == 0 || ctas % cluster != 0 || config->blockDim.x == 0 || config->blockDim.x > 1024 ||
      smem > MostSmem(kernel)) {
    return cudaErrorInvalidValue;
  }
  Enqueue(Launch{kernel, CurrentDevice(), config->stream, ctas, cluster,
                 static_cast<int>(config->blockDim.x), smem, args[0]});
  return cudaSuccess;
}

// At once: before the kernels that are launched after it, and before those that wait for
// simt::Run, which must not need what it writes over.
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  if (std::string(symbol) != "cuTensorMapEncodeTiled") return cudaErrorNotSupported;
  *function = reinterpret_cast<void*>(&EncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
