// The compiled kernels of the portable main loop (gpu/gemm_sm80.cuh), shared by all ops: formats x
// layout of w. An op's Kernels80 have Kernel<Config>().
#ifndef JFLUX_RUNTIME_GEMM_INSTANCES_SM80_CUDA_H_
#define JFLUX_RUNTIME_GEMM_INSTANCES_SM80_CUDA_H_

#include <string>

#include "gpu/gemm_config.h"
#include "gpu/gemm_sm80.cuh"
#include "gpu/types.cuh"
#include "runtime/kernels_cuda.h"

namespace jflux {

template <typename Kernels, FormatSet kFormats = kFormats80>
bool LoadGemmInstances80(std::string* error) {
  return ForFormats(kFormats, [&](DType dtype) {
    return WithFormat<kFormats>(dtype, [&](auto format) {
      using T = CudaType<format()>;
      using Rows = GemmConfig80<T, true>;
      using Columns = GemmConfig80<T, false>;
      return LoadKernel(Kernels::template Kernel<Rows>(), Rows::kSmemBytes, error) &&
             LoadKernel(Kernels::template Kernel<Columns>(), Columns::kSmemBytes, error);
    });
  });
}

// As many CTAs as fit: all of them may have chunks to send, also those that find no tile.
template <typename Config>
bool LaunchPortable(const void* kernel, void* args, int sm_count, cudaStream_t stream,
                    std::string* error) {
  return LaunchKernel(kernel, args, Config::kCtasPerSm * sm_count, 1, Config::kThreads,
                      Config::kSmemBytes, stream, error);
}

template <typename Kernels, FormatSet kFormats = kFormats80>
bool LaunchGemmInstance80(DType dtype, bool transpose_rhs, void* args, int sm_count,
                          cudaStream_t stream, std::string* error) {
  return WithFormat<kFormats>(dtype, [&](auto format) {
    using T = CudaType<format()>;
    const auto launch = [&](auto config) {
      using Config = decltype(config);
      return LaunchPortable<Config>(Kernels::template Kernel<Config>(), args, sm_count, stream,
                                    error);
    };
    return transpose_rhs ? launch(GemmConfig80<T, true>{}) : launch(GemmConfig80<T, false>{});
  });
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_GEMM_INSTANCES_SM80_CUDA_H_
