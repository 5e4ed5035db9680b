#ifdef JFLUX_WITH_CUDA

#include "runtime/module_table.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <limits>
#include <map>
#include <mutex>

#include "runtime/cuda_check.h"
#include "runtime/kernels_cuda.h"

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
  int64_t per_sm = 0;    // that a multiprocessor holds
  // Scratch memory for `resident` blocks. A device's calls run one after the other and share it.
  void* scratch = nullptr;
};

struct Module {
  ModuleSpec spec;
  std::map<int, Loaded> by_ordinal;
};

// Modules stay where they are, and are never removed: an executable may live as long as the
// process.
struct Table {
  std::mutex loading;  // one at a time. Taken before `mutex`
  std::mutex mutex;  // of the map. A launch takes it, so no driver call is made under it: it could
                     // wait for a kernel that waits for that launch
  std::map<std::string, Module> modules;

  static Table& Get() {
    static auto* table = new Table;
    return *table;
  }
};

// On the current device, which is `ordinal`.
bool Load(const ModuleSpec& spec, int ordinal, Loaded* loaded, std::string* error) {
  const Driver* driver = Driver::Get(error);
  if (driver == nullptr) return false;
  CUmodule handle;
  int static_bytes = 0, per_multiprocessor = 0, multiprocessors = 0;
  if (!driver->Check("cuModuleLoadData", driver->load(&handle, spec.image.data()), error) ||
      !driver->Check("cuModuleGetFunction",
                     driver->function(&loaded->function, handle, spec.function.c_str()), error) ||
      !driver->Check("cuFuncGetAttribute",
                     driver->get_attribute(&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                                           loaded->function),
                     error)) {
    return false;
  }
  if (!driver->Check(
          "cuFuncSetAttribute",
          driver->set_attribute(loaded->function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                spec.shared_bytes),
          error)) {
    *error += " (the kernel takes " + std::to_string(static_bytes + spec.shared_bytes) +
              " bytes of shared memory)";
    return false;
  }
  if (!driver->Check("cuOccupancyMaxActiveBlocksPerMultiprocessor",
                     driver->occupancy(&per_multiprocessor, loaded->function, spec.threads,
                                       static_cast<size_t>(spec.shared_bytes)),
                     error)) {
    return false;
  }
  JFLUX_CUDA_OR_FALSE(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal), error);
  loaded->per_sm = per_multiprocessor;
  loaded->resident = loaded->per_sm * multiprocessors;
  if (spec.scratch_bytes > 0) {
    JFLUX_CUDA_OR_FALSE(cudaMalloc(&loaded->scratch, spec.scratch_bytes * loaded->resident), error);
  }
  return true;
}

// Under Table::loading: loads a module on the current device, unless it is there.
bool LoadModule(const std::string& key, int ordinal, int64_t* per_sm, std::string* error) {
  Table& table = Table::Get();
  ModuleSpec spec;
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    const Module& module = table.modules[key];
    const auto found = module.by_ordinal.find(ordinal);
    if (found != module.by_ordinal.end()) {
      *per_sm = found->second.per_sm;
      return true;
    }
    spec = module.spec;
  }
  Loaded loaded;
  if (!Load(spec, ordinal, &loaded, error)) return false;
  *per_sm = loaded.per_sm;
  std::lock_guard<std::mutex> lock(table.mutex);
  table.modules[key].by_ordinal[ordinal] = loaded;
  return true;
}

}  // namespace

bool AddModule(const std::string& key, const ModuleSpec& spec, const std::vector<int>& ordinals,
               int64_t* per_sm, std::string* error) {
  Table& table = Table::Get();
  std::lock_guard<std::mutex> loading(table.loading);
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    Module& module = table.modules[key];
    if (module.spec.image.empty()) module.spec = spec;
  }
  *per_sm = ordinals.empty() ? 0 : std::numeric_limits<int64_t>::max();
  for (const int ordinal : ordinals) {
    int64_t blocks = 0;
    JFLUX_CUDA_OR_FALSE(cudaSetDevice(ordinal), error);
    if (!LoadModule(key, ordinal, &blocks, error)) return false;
    if (blocks < *per_sm) *per_sm = blocks;
  }
  return true;
}

bool LoadModules(int ordinal, std::string* error) {
  Table& table = Table::Get();
  std::lock_guard<std::mutex> loading(table.loading);
  std::vector<std::string> keys;
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    for (const auto& [key, module] : table.modules) keys.push_back(key);
  }
  for (const std::string& key : keys) {
    int64_t blocks = 0;
    if (!LoadModule(key, ordinal, &blocks, error)) return false;
  }
  return true;
}

bool LaunchModule(const std::string& key, int ordinal, int blocks, ModuleArguments arguments,
                  cudaStream_t stream, std::string* error) {
  Loaded loaded;
  ModuleSpec spec;
  {
    Table& table = Table::Get();
    std::lock_guard<std::mutex> lock(table.mutex);
    const auto found = table.modules.find(key);
    if (found != table.modules.end()) {
      const auto on_device = found->second.by_ordinal.find(ordinal);
      if (on_device != found->second.by_ordinal.end()) {
        loaded = on_device->second;
        spec.threads = found->second.spec.threads;
        spec.shared_bytes = found->second.spec.shared_bytes;
      }
    }
  }
  if (loaded.function == nullptr) {
    *error = "its kernel is not loaded on GPU " + std::to_string(ordinal) +
             ": the program was compiled in another process; lower it again";
    return false;
  }
  if (blocks > loaded.resident) {
    *error = std::to_string(blocks) + " blocks, of which GPU " + std::to_string(ordinal) +
             " holds " + std::to_string(loaded.resident) + " at once";
    return false;
  }
  arguments.values.push_back(reinterpret_cast<uintptr_t>(loaded.scratch));
  arguments.values.push_back(0);
  std::vector<void*> pointers;
  if (arguments.first != nullptr) pointers.push_back(const_cast<void*>(arguments.first));
  for (uint64_t& value : arguments.values) pointers.push_back(&value);
  const Driver* driver = Driver::Get(error);
  if (driver == nullptr) return false;
  const auto launch = [&](std::string* why) {
    return driver->Check("cuLaunchKernel",
                         driver->launch(loaded.function, blocks, 1, 1, spec.threads, 1, 1,
                                        spec.shared_bytes, stream, pointers.data(), nullptr),
                         why);
  };
  return LaunchAfterLastCall(stream, launch, error);
}

}  // namespace jflux

#endif  // JFLUX_WITH_CUDA
