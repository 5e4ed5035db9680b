#include <cudaTypedefs.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "gpu/machine.h"
#include "runtime/cuda_check.h"
#include "runtime/kernels_cuda.h"
#include "runtime/op.h"

namespace jflux {
namespace {

// Its code tells which code of this library a device has loaded.
__global__ void ArchKernel() {}

// The state of a device: which code it runs, and the stream of its last call.
struct Device {
  std::mutex mutex;
  int arch = 0;  // 0: not asked yet
  bool has_stream = false;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;  // made for the first change of streams
};

Device* CurrentDevice(std::string* error) {
  static std::mutex mutex;
  static auto* devices = new std::map<int, Device>;
  int ordinal = 0;
  JFLUX_CUDA_OR_FALSE(cudaGetDevice(&ordinal), error);
  std::lock_guard<std::mutex> lock(mutex);
  return &(*devices)[ordinal];
}

// Under device.mutex.
bool ReadArch(Device& device, std::string* error) {
  if (device.arch != 0) return true;
  cudaFuncAttributes attributes{};
  JFLUX_CUDA_OR_FALSE(
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&ArchKernel)), error);
  // ptxVersion names the source: 80 also where the driver has compiled sm_80's PTX for a later GPU.
  device.arch = attributes.ptxVersion >= kHopperArch ? kHopperArch
                : RunsFloat8Code()                   ? kFloat8Arch
                                                     : kPortableArch;
  return true;
}

}  // namespace

bool LoadedArch(int* arch, std::string* error) {
  Device* device = CurrentDevice(error);
  if (device == nullptr) return false;
  std::lock_guard<std::mutex> lock(device->mutex);
  if (!ReadArch(*device, error)) return false;
  *arch = device->arch;
  return true;
}

bool LoadKernels(std::string* error) {
  int arch = 0;
  if (!LoadedArch(&arch, error)) return false;
  for (const OpFolder& folder : AllFolders()) {
    if (folder.gpus.Has(arch) && !folder.load_kernels(error)) return false;
  }
  return true;
}

bool LoadKernel(const void* kernel, int smem_bytes, std::string* error) {
  int ordinal = 0, most = 0;
  JFLUX_CUDA_OR_FALSE(cudaGetDevice(&ordinal), error);
  JFLUX_CUDA_OR_FALSE(
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal), error);
  cudaFuncAttributes attributes;
  JFLUX_CUDA_OR_FALSE(cudaFuncGetAttributes(&attributes, kernel), error);
  if (smem_bytes > most) smem_bytes = most - static_cast<int>(attributes.sharedSizeBytes);
  JFLUX_CUDA_OR_FALSE(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes), error);
  return true;
}

bool LoadBothLoops(bool (*hopper)(std::string* error), bool (*portable)(std::string* error),
                   std::string* error) {
  int arch = 0;
  if (!LoadedArch(&arch, error)) return false;
  return (arch < kHopperArch || hopper(error)) && portable(error);
}

bool LoadOnce(bool (*load)(std::string* error), std::string* error) {
  static std::mutex mutex;
  static auto* loaded = new std::set<std::pair<bool (*)(std::string*), int>>;
  int ordinal = 0;
  JFLUX_CUDA_OR_FALSE(cudaGetDevice(&ordinal), error);
  std::lock_guard<std::mutex> lock(mutex);
  if (loaded->count({load, ordinal}) != 0) return true;
  if (!load(error)) return false;
  loaded->insert({load, ordinal});
  return true;
}

// The driver is reached through the runtime, so that the library loads where there is none.
static PFN_cuTensorMapEncodeTiled_v12000 EncodeFunction() {
  static const auto function = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess) {
      f = nullptr;
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
  }();
  return function;
}

bool EncodeTensorMap(CUtensorMap* map, DType dtype, const void* data,
                     std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides,
                     std::initializer_list<int> box, std::string* error, Boxes boxes) {
  const auto rank = static_cast<cuuint32_t>(sizes.size());
  cuuint64_t global_size[5], global_stride[5];
  cuuint32_t box_size[5], element_stride[5];
  for (cuuint32_t i = 0; i < rank; ++i) {  // innermost first
    global_size[i] = std::data(sizes)[rank - 1 - i];
    box_size[i] = std::data(box)[rank - 1 - i];
    element_stride[i] = 1;
    if (i + 1 < rank) global_stride[i] = std::data(strides)[rank - 2 - i] * SizeOf(dtype);
  }
  // TMA only moves bytes, and what it fills in is zeros.
  const auto type =
      SizeOf(dtype) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  // Rows of 128 bytes, or of 64.
  const auto swizzle = boxes == Boxes::kLinear             ? CU_TENSOR_MAP_SWIZZLE_NONE
                       : box_size[0] * SizeOf(dtype) == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_128B;
  const auto encode = EncodeFunction();
  const CUresult result =
      encode == nullptr
          ? CUDA_ERROR_NOT_FOUND
          : encode(map, type, rank, const_cast<void*>(data), global_size, global_stride, box_size,
                   element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    *error = "cuTensorMapEncodeTiled failed with " + std::to_string(result);
    return false;
  }
  return true;
}

namespace {

bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  cudaGetLastError();
  return true;
}

// Under device.mutex.
bool RunAfter(Device& device, cudaStream_t stream, std::string* error) {
  if (device.has_stream && device.stream == stream) return true;
  if (IsCapturing(stream)) return true;
  if (device.has_stream && !IsCapturing(device.stream)) {
    if (device.event == nullptr) {
      JFLUX_CUDA_OR_FALSE(cudaEventCreateWithFlags(&device.event, cudaEventDisableTiming), error);
    }
    if (cudaEventRecord(device.event, device.stream) == cudaSuccess) {
      JFLUX_CUDA_OR_FALSE(cudaStreamWaitEvent(stream, device.event, 0), error);
    } else {
      cudaGetLastError();  // the stream is gone, and its work is done
    }
  }
  device.has_stream = true;
  device.stream = stream;
  return true;
}

}  // namespace

bool LaunchAfterLastCall(cudaStream_t stream, const std::function<bool(std::string*)>& launch,
                         std::string* error) {
  Device* device = CurrentDevice(error);
  if (device == nullptr) return false;
  std::lock_guard<std::mutex> lock(device->mutex);
  return RunAfter(*device, stream, error) && launch(error);
}

bool RunAfterLastCall(cudaStream_t stream, std::string* error) {
  return LaunchAfterLastCall(stream, [](std::string*) { return true; }, error);
}

bool ForgetLastStream(std::string* error) {
  Device* device = CurrentDevice(error);
  if (device == nullptr) return false;
  std::lock_guard<std::mutex> lock(device->mutex);
  device->has_stream = false;
  return true;
}

bool LaunchKernel(const void* kernel, void* args, int clusters, int ctas, int threads,
                  int smem_bytes, cudaStream_t stream, std::string* error) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * ctas);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeClusterDimension;
  attribute[0].val.clusterDim.x = ctas;
  attribute[0].val.clusterDim.y = 1;
  attribute[0].val.clusterDim.z = 1;
  config.attrs = attribute;
  void* arguments[] = {args};
  Device* device = CurrentDevice(error);
  if (device == nullptr) return false;
  std::lock_guard<std::mutex> lock(device->mutex);  // until the kernel is enqueued
  if (!ReadArch(*device, error)) return false;
  // Clusters of one CTA need the attribute too: Hopper's kernels use instructions of clusters.
  config.numAttrs = device->arch >= kHopperArch ? 1 : 0;
  if (config.numAttrs == 0 && ctas > 1) {
    *error = "portable code has no clusters";
    return false;
  }
  if (!RunAfter(*device, stream, error)) return false;
  JFLUX_CUDA_OR_FALSE(cudaLaunchKernelExC(&config, kernel, arguments), error);
  return true;
}

}  // namespace jflux
