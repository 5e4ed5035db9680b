#include <cuda.h>
#include <cudaTypedefs.h>

#include <limits>
#include <map>
#include <mutex>

#include "runtime/cuda_check.h"
#include "runtime/kernels_cuda.h"
#include "runtime/module_table.h"

namespace jflux {
namespace {

// The driver is reached through the runtime, so that the library loads where there is none.
struct Driver {
  PFN_cuModuleLoadData_v2000 load = nullptr;
  PFN_cuModuleGetFunction_v2000 function = nullptr;
  PFN_cuFuncSetAttribute_v9000 set_attribute = nullptr;
  PFN_cuFuncGetAttribute_v2020 get_attribute = nullptr;
  PFN_cuOccupancyMaxActiveBlocksPerMultiprocessor_v6050 occupancy = nullptr;
  PFN_cuLaunchKernel_v4000 launch = nullptr;
  PFN_cuGetErrorString_v6000 error_string = nullptr;

  static const Driver* Get(std::string* error) {
    static const auto* driver = [] {
      auto* d = new Driver;
      d->Find("cuModuleLoadData", 2000, &d->load);
      d->Find("cuModuleGetFunction", 2000, &d->function);
      d->Find("cuFuncSetAttribute", 9000, &d->set_attribute);
      d->Find("cuFuncGetAttribute", 2020, &d->get_attribute);
      d->Find("cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050, &d->occupancy);
      d->Find("cuLaunchKernel", 4000, &d->launch);
      d->Find("cuGetErrorString", 6000, &d->error_string);
      return d;
    }();
    if (driver->missing_ == nullptr) return driver;
    *error = std::string("the CUDA driver has no ") + driver->missing_;
    return nullptr;
  }

  bool Check(const char* what, CUresult result, std::string* error) const {
    if (result == CUDA_SUCCESS) return true;
    const char* text = nullptr;
    if (error_string(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
    *error = std::string(what) + ": " + text;
    return false;
  }

 private:
  template <typename F>
  void Find(const char* name, unsigned version, F* function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result) !=
            cudaSuccess ||
        found == nullptr) {
      cudaGetLastError();
      if (missing_ == nullptr) missing_ = name;
      return;
    }
    *function = reinterpret_cast<F>(found);
  }

  const char* missing_ = nullptr;
};

struct Loaded {
  CUfunction function = nullptr;
  int64_t resident = 0;  // blocks that the device holds at once
};

struct Module {
  ModuleSpec spec;
  std::map<int, Loaded> by_ordinal;
};

// Elements stay where they are, and are never removed: an executable may live as long as the
// process.
struct Table {
  std::mutex mutex;
  std::map<std::string, Module> modules;

  static Table& Get() {
    static auto* table = new Table;
    return *table;
  }
};

// Under Table::mutex. The caller's current device is `ordinal`.
bool Load(Module* module, int ordinal, std::string* error) {
  if (module->by_ordinal.count(ordinal) != 0) return true;
  const Driver* driver = Driver::Get(error);
  if (driver == nullptr) return false;
  const ModuleSpec& spec = module->spec;
  Loaded loaded;
  CUmodule handle;
  int static_bytes = 0, per_multiprocessor = 0, multiprocessors = 0;
  if (!driver->Check("cuModuleLoadData", driver->load(&handle, spec.image.data()), error) ||
      !driver->Check("cuModuleGetFunction",
                     driver->function(&loaded.function, handle, spec.function.c_str()), error) ||
      !driver->Check("cuFuncGetAttribute",
                     driver->get_attribute(&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                                           loaded.function),
                     error)) {
    return false;
  }
  if (!driver->Check(
          "cuFuncSetAttribute",
          driver->set_attribute(loaded.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                spec.shared_bytes),
          error)) {
    *error += " (the kernel takes " + std::to_string(static_bytes + spec.shared_bytes) +
              " bytes of shared memory)";
    return false;
  }
  if (!driver->Check("cuOccupancyMaxActiveBlocksPerMultiprocessor",
                     driver->occupancy(&per_multiprocessor, loaded.function, spec.threads,
                                       static_cast<size_t>(spec.shared_bytes)),
                     error)) {
    return false;
  }
  JFLUX_CUDA_OR_FALSE(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal), error);
  loaded.resident = int64_t{per_multiprocessor} * multiprocessors;
  module->by_ordinal[ordinal] = loaded;
  return true;
}

}  // namespace

bool AddModule(const std::string& key, const ModuleSpec& spec, const std::vector<int>& ordinals,
               int64_t* resident, std::string* error) {
  int before = 0;
  if (!ordinals.empty()) {
    JFLUX_CUDA_OR_FALSE(cudaGetDevice(&before), error);
    // Not under the mutex, which a launch takes: what runs may wait for that launch.
    for (const int ordinal : ordinals) {
      JFLUX_CUDA_OR_FALSE(cudaSetDevice(ordinal), error);
      JFLUX_CUDA_OR_FALSE(cudaDeviceSynchronize(), error);
    }
  }
  Table& table = Table::Get();
  std::lock_guard<std::mutex> lock(table.mutex);
  Module& module = table.modules[key];
  if (module.spec.image.empty()) module.spec = spec;
  int64_t least = std::numeric_limits<int64_t>::max();
  bool ok = true;
  for (const int ordinal : ordinals) {
    if (cudaSetDevice(ordinal) != cudaSuccess || !Load(&module, ordinal, error)) {
      ok = false;
      break;
    }
    if (module.by_ordinal[ordinal].resident < least) least = module.by_ordinal[ordinal].resident;
  }
  *resident = ordinals.empty() ? 0 : least;
  if (!ordinals.empty()) JFLUX_CUDA_OR_FALSE(cudaSetDevice(before), error);
  return ok;
}

bool LoadModules(int ordinal, std::string* error) {
  Table& table = Table::Get();
  std::lock_guard<std::mutex> lock(table.mutex);
  for (auto& [key, module] : table.modules) {
    if (!Load(&module, ordinal, error)) return false;
  }
  return true;
}

bool LaunchModule(const std::string& key, int ordinal, int blocks, void** arguments,
                  cudaStream_t stream, std::string* error) {
  CUfunction function = nullptr;
  ModuleSpec spec;
  {
    Table& table = Table::Get();
    std::lock_guard<std::mutex> lock(table.mutex);
    const auto found = table.modules.find(key);
    if (found != table.modules.end()) {
      const auto loaded = found->second.by_ordinal.find(ordinal);
      if (loaded != found->second.by_ordinal.end()) {
        function = loaded->second.function;
        spec.threads = found->second.spec.threads;
        spec.shared_bytes = found->second.spec.shared_bytes;
      }
    }
  }
  if (function == nullptr) {
    *error = "its kernel is not loaded on GPU " + std::to_string(ordinal) +
             ": the program was compiled in another process; lower it again";
    return false;
  }
  const Driver* driver = Driver::Get(error);
  if (driver == nullptr || !RunAfterLastCall(stream, error)) return false;
  return driver->Check("cuLaunchKernel",
                       driver->launch(function, blocks, 1, 1, spec.threads, 1, 1, spec.shared_bytes,
                                      stream, arguments, nullptr),
                       error);
}

}  // namespace jflux
