#include <cudaTypedefs.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "runtime/cuda_check.h"
#include "runtime/kernels_cuda.h"
#include "runtime/local_op.h"
#include "runtime/op.h"

namespace jflux {

bool LoadKernels(std::string* error) {
  for (const Op* op : AllOps()) {
    if (op->load_kernels != nullptr && !op->load_kernels(error)) return false;
  }
  for (const LocalOp* op : AllLocalOps()) {
    if (op->load_kernels != nullptr && !op->load_kernels(error)) return false;
  }
  return true;
}

bool LoadKernel(const void* kernel, int smem_bytes, std::string* error) {
  JFLUX_CUDA_OR_FALSE(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes), error);
  cudaFuncAttributes attributes;
  JFLUX_CUDA_OR_FALSE(cudaFuncGetAttributes(&attributes, kernel), error);
  return true;
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
  const auto type =
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
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

// The stream of a device's last call.
struct LastStream {
  std::mutex mutex;
  bool known = false;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;  // made for the first change of streams
};

LastStream* LastStreamOfDevice(std::string* error) {
  static std::mutex mutex;
  static auto* last = new std::map<int, LastStream>;
  int ordinal = 0;
  JFLUX_CUDA_OR_FALSE(cudaGetDevice(&ordinal), error);
  std::lock_guard<std::mutex> lock(mutex);
  return &(*last)[ordinal];
}

bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  cudaGetLastError();
  return true;
}

// Under last.mutex.
bool RunAfter(LastStream& last, cudaStream_t stream, std::string* error) {
  if (last.known && last.stream == stream) return true;
  if (IsCapturing(stream)) return true;
  if (last.known && !IsCapturing(last.stream)) {
    if (last.event == nullptr) {
      JFLUX_CUDA_OR_FALSE(cudaEventCreateWithFlags(&last.event, cudaEventDisableTiming), error);
    }
    if (cudaEventRecord(last.event, last.stream) == cudaSuccess) {
      JFLUX_CUDA_OR_FALSE(cudaStreamWaitEvent(stream, last.event, 0), error);
    } else {
      cudaGetLastError();  // the stream is gone, and its work is done
    }
  }
  last.known = true;
  last.stream = stream;
  return true;
}

}  // namespace

bool RunAfterLastCall(cudaStream_t stream, std::string* error) {
  LastStream* last = LastStreamOfDevice(error);
  if (last == nullptr) return false;
  std::lock_guard<std::mutex> lock(last->mutex);
  return RunAfter(*last, stream, error);
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
  config.numAttrs = 1;  // also for clusters of one: the kernels' instructions want a cluster
  void* arguments[] = {args};
  LastStream* last = LastStreamOfDevice(error);
  if (last == nullptr) return false;
  std::lock_guard<std::mutex> lock(last->mutex);  // until the kernel is enqueued
  if (!RunAfter(*last, stream, error)) return false;
  JFLUX_CUDA_OR_FALSE(cudaLaunchKernelExC(&config, kernel, arguments), error);
  return true;
}

}  // namespace jflux
