// Kernels that are compiled while the program runs: modules (cubins) by a key that names their
// content. A module is loaded on every device of this process before its first launch: a kernel
// that is loaded later could wait for one that spins.
#ifndef JFLUX_RUNTIME_MODULE_TABLE_H_
#define JFLUX_RUNTIME_MODULE_TABLE_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace jflux {

struct ModuleSpec {
  std::string image;      // a cubin
  std::string function;   // its kernel
  int32_t threads;        // of a block
  int32_t shared_bytes;   // dynamic shared memory of a block
  int64_t scratch_bytes;  // global memory of a block, which Triton's tensor descriptors lie in
};

// Adds the module, unless `key` is known, and loads it on these devices. *per_sm: how many blocks a
// multiprocessor holds at once, of the device where it holds the fewest; 0 for no devices. Changes
// the current device.
bool AddModule(const std::string& key, const ModuleSpec& spec, const std::vector<int>& ordinals,
               int64_t* per_sm, std::string* error);

// Loads all modules on a device, for a new heap.
bool LoadModules(int ordinal, std::string* error);

// The arguments of a kernel: a struct, unless it is null, then values of up to 8 bytes.
struct ModuleArguments {
  const void* first = nullptr;
  std::vector<uint64_t> values;
};

// Launches a module's kernel of `blocks` blocks, after the last call of the current device, which
// is `ordinal`. Triton's two scratch pointers follow the arguments; other kernels do not read them.
bool LaunchModule(const std::string& key, int ordinal, int blocks, ModuleArguments arguments,
                  cudaStream_t stream, std::string* error);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_MODULE_TABLE_H_
