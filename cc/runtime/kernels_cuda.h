// Code that the ops' launchers share: loading kernels ahead of time, tensor maps, the launch
// itself.
#ifndef JFLUX_RUNTIME_KERNELS_CUDA_H_
#define JFLUX_RUNTIME_KERNELS_CUDA_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>

#include "core/format.h"

namespace jflux {

// The architecture of the kernels' code that the current device runs (gpu/machine.h).
bool LoadedArch(int* arch, std::string* error);

// Whether the current device runs code for kFloat8Arch.
bool RunsFloat8Code();

// Loads the kernels of all ops (runtime/op.h) of which there is code for the current device.
bool LoadKernels(std::string* error);

// Adds the kernels of a custom call: load(ordinal) is called on each device of the heap, now and
// whenever a new heap is made (runtime/heap_cuda.cc).
bool AddKernels(const char* (*load)(int ordinal), std::string* error);

// Makes a kernel launchable with this much shared memory, and loads it. Where a device has less,
// the kernel takes all of it, and calls that need more fail; Python plans none
// (`why_not_portable`).
bool LoadKernel(const void* kernel, int smem_bytes, std::string* error);

// Calls load(error) unless it has succeeded on the current device before. It is for kernels that
// run without a heap too: a heap loads the kernels of all ops when it is made.
bool LoadOnce(bool (*load)(std::string* error), std::string* error);

// Loads an op's kernels for Hopper, where they run, and its portable ones.
bool LoadBothLoops(bool (*hopper)(std::string* error), bool (*portable)(std::string* error),
                   std::string* error);

// Whether the rows of a box, of 128 bytes, are swizzled in shared memory, as wgmma reads them, or
// consecutive.
enum class Boxes { kSwizzled, kLinear };

// A map of a row-major array (the last of `sizes` contiguous) of elements of up to 16 bits; reads
// outside are zero. `strides` are in elements and leave out the contiguous one.
// Sizes, strides and box go from the outermost to the innermost dimension.
bool EncodeTensorMap(CUtensorMap* map, DType dtype, const void* data,
                     std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides,
                     std::initializer_list<int> box, std::string* error,
                     Boxes boxes = Boxes::kSwizzled);

// Calls launch(error), which enqueues a kernel on `stream`, in the order of the device's calls. No
// other thread's call of the device comes between.
//
// `stream` first waits for the last call of the device, if that was on another stream: kernels of
// one device must not overlap (gpu/call.cuh). A stream that is being captured does not wait, since
// the graph orders its nodes.
//
// This holds for local ops too. They wait for no peer, but their CTAs would hold SMs that another
// call needs, for which peers wait.
bool LaunchAfterLastCall(cudaStream_t stream, const std::function<bool(std::string*)>& launch,
                         std::string* error);

// The same for handlers out of tree, which launch after this has returned. Kernels could overlap if
// two host threads launched on different streams of one device at once. XLA does not: it has one
// thread per device for programs of several devices, and one stream without `compute_on`.
bool RunAfterLastCall(cudaStream_t stream, std::string* error);

// Forgets the stream of the current device's last call, which is done. Called with every new heap:
// XLA destroys its streams with its client, and their handles must not be used afterwards.
bool ForgetLastStream(std::string* error);

// Launches `clusters` clusters of `ctas` CTAs, after the last call of the current device. Portable
// code has clusters of one CTA alone.
bool LaunchKernel(const void* kernel, void* args, int clusters, int ctas, int threads,
                  int smem_bytes, cudaStream_t stream, std::string* error);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_KERNELS_CUDA_H_
