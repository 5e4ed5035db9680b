// The device that a grouped product runs on, as its launchers see it.
#ifndef JFLUX_OPS_GROUPED_MATMUL_LOCAL_DEVICE_CUDA_H_
#define JFLUX_OPS_GROUPED_MATMUL_LOCAL_DEVICE_CUDA_H_

#include <cstdint>
#include <string>

#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/grouped_matmul/grouped_rows.cuh"

namespace jflux {

// What a launch needs to know of the current device. Loads the kernels of an op there.
struct LocalDevice {
  int sm_count = 0;
  DeviceState* state = nullptr;

  GroupedRows Rows(OpId op, const int32_t* sizes, int64_t groups, int64_t rows) const {
    return GroupedRows{sizes, static_cast<int32_t>(groups), static_cast<int32_t>(rows), state,
                       static_cast<uint32_t>(op)};
  }
};
bool FindLocalDevice(LocalDevice* device, std::string* error,
                     bool (*load)(std::string*) = LoadGroupedMatmulKernels);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_LOCAL_DEVICE_CUDA_H_
