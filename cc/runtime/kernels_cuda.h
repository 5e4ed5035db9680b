// What the ops' launchers share: loading kernels ahead of time, tensor maps, the launch itself.
#ifndef JFLUX_RUNTIME_KERNELS_CUDA_H_
#define JFLUX_RUNTIME_KERNELS_CUDA_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>

#include "core/dtype.h"

namespace jflux {

// The architecture of the kernels' code that the current device runs (gpu/machine.h).
bool LoadedArch(int* arch, std::string* error);

// Loads the kernels of all ops (runtime/op.h) of which there is code for the current device.
bool LoadKernels(std::string* error);

// Those of custom calls: has load(ordinal) called on each device of the heap, now and whenever
// there is another heap (runtime/heap_cuda.cc).
bool AddKernels(const char* (*load)(int ordinal), std::string* error);

// Makes a kernel launchable with this much shared memory, and loads it. Where a device has less,
// the kernel takes all of it, and calls that need more fail; Python plans none
// (`why_not_portable`).
bool LoadKernel(const void* kernel, int smem_bytes, std::string* error);

// Calls load(error) unless that has succeeded on the current device before: for kernels that are
// also launched where there is no heap, which loads those of all ops when it is made.
bool LoadOnce(bool (*load)(std::string* error), std::string* error);

// Whether a box's rows of 128 bytes are swizzled in shared memory, as wgmma reads them, or follow
// each other as they are.
enum class Boxes { kSwizzled, kLinear };

// A map of a row-major array (the last of `sizes` contiguous) of 16-bit elements; reads outside are
// zero. `strides` are in elements and leave out the contiguous one.
// Sizes, strides and box go from the outermost to the innermost dimension.
bool EncodeTensorMap(CUtensorMap* map, DType dtype, const void* data,
                     std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides,
                     std::initializer_list<int> box, std::string* error,
                     Boxes boxes = Boxes::kSwizzled);

// Makes `stream` wait for what the last call of the current device has enqueued, if that was on
// another stream: kernels of one device must not overlap (gpu/call.cuh). A stream that is being
// captured waits for nothing: the order of a graph's nodes is the graph's. The call that follows
// belongs to `stream`.
//
// Local ops wait for the last call too, and the next call for them. They wait for no peer, so this
// is not for progress: their CTAs would hold SMs that a call needs for which peers wait.
//
// Calls launch(error), which enqueues the kernel, before any other thread's call of the device.
bool LaunchAfterLastCall(cudaStream_t stream, const std::function<bool(std::string*)>& launch,
                         std::string* error);

// For handlers of others, which launch when this has returned. Two host threads that launch on one
// device's different streams at once could then overlap. XLA has one thread per device for programs
// of several devices, and one stream for what no `compute_on` moves.
bool RunAfterLastCall(cudaStream_t stream, std::string* error);

// Forgets the stream of the current device's last call, all of which is done: XLA destroys its
// streams with its client, and a handle must not be used after that. With every new heap.
bool ForgetLastStream(std::string* error);

// Launches `clusters` clusters of `ctas` CTAs, after the last call of the current device. Portable
// code has clusters of one CTA alone.
bool LaunchKernel(const void* kernel, void* args, int clusters, int ctas, int threads,
                  int smem_bytes, cudaStream_t stream, std::string* error);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_KERNELS_CUDA_H_
