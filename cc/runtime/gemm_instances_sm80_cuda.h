// The compiled kernels of the portable main loop (gpu/gemm_sm80.cuh), shared by all ops: formats x
// layout of w. An op's Kernels80 have Kernel<Config>(). `table_bytes`: the op's own shared memory,
// behind the stages.
//
// Those for float8 are compiled in a file of their own, whose name ends in _sm89: it has
// JFLUX_FLOAT8_INSTANCES, and the op's other files have JFLUX_FLOAT8_APART.
#ifndef JFLUX_RUNTIME_GEMM_INSTANCES_SM80_CUDA_H_
#define JFLUX_RUNTIME_GEMM_INSTANCES_SM80_CUDA_H_

#include <string>

#include "gpu/gemm_config.h"
#include "gpu/gemm_sm80.cuh"
#include "gpu/types.cuh"
#include "runtime/kernels_cuda.h"

namespace jflux {

// As many CTAs as fit: all of them may have chunks to send, also those that find no tile. With
// tables of more than .9 KiB fewer may run at a time.
template <typename Config>
bool LaunchPortable(const void* kernel, void* args, int sm_count, cudaStream_t stream,
                    std::string* error, int table_bytes = 0) {
  return LaunchKernel(kernel, args, Config::kCtasPerSm * sm_count, 1, Config::kThreads,
                      Config::kSmemBytes + table_bytes, stream, error);
}

// The kernels for operands of one format.
template <typename Kernels, DType kFormat>
struct GemmFamily80 {
  using Rows = GemmConfig80<CudaType<kFormat>, true>;
  static bool Load(std::string* error, int table_bytes);
  static bool Launch(bool transpose_rhs, void* args, int sm_count, cudaStream_t stream,
                     std::string* error, int table_bytes);
};

template <typename Kernels, DType kFormat>
bool GemmFamily80<Kernels, kFormat>::Load(std::string* error, int table_bytes) {
  if (!LoadKernel(Kernels::template Kernel<Rows>(), Rows::kSmemBytes + table_bytes, error)) {
    return false;
  }
  if constexpr (!FormatOf(kFormat).k_major) {
    using Columns = GemmConfig80<CudaType<kFormat>, false>;
    return LoadKernel(Kernels::template Kernel<Columns>(), Columns::kSmemBytes + table_bytes,
                      error);
  }
  return true;
}

template <typename Kernels, DType kFormat>
bool GemmFamily80<Kernels, kFormat>::Launch(bool transpose_rhs, void* args, int sm_count,
                                            cudaStream_t stream, std::string* error,
                                            int table_bytes) {
  if constexpr (!FormatOf(kFormat).k_major) {
    using Columns = GemmConfig80<CudaType<kFormat>, false>;
    if (!transpose_rhs) {
      return LaunchPortable<Columns>(Kernels::template Kernel<Columns>(), args, sm_count, stream,
                                     error, table_bytes);
    }
  }
  return LaunchPortable<Rows>(Kernels::template Kernel<Rows>(), args, sm_count, stream, error,
                              table_bytes);
}

#define JFLUX_FLOAT8_APART(Kernels)                               \
  extern template struct GemmFamily80<Kernels, DType::kF8E4M3FN>; \
  extern template struct GemmFamily80<Kernels, DType::kF8E5M2>
#define JFLUX_FLOAT8_INSTANCES(Kernels)                                         \
  template struct jflux::GemmFamily80<jflux::Kernels, jflux::DType::kF8E4M3FN>; \
  template struct jflux::GemmFamily80<jflux::Kernels, jflux::DType::kF8E5M2>

// Those that the current device runs.
template <typename Kernels, FormatSet kFormats = kFormats80>
bool LoadGemmInstances80(std::string* error, int most_table_bytes = 0) {
  int arch = 0;
  if (!LoadedArch(&arch, error)) return false;
  return ForFormats(kFormats & MmaFormats(arch), [&](DType dtype) {
    return WithFormat<kFormats>(dtype, [&](auto format) {
      return GemmFamily80<Kernels, format()>::Load(error, most_table_bytes);
    });
  });
}

template <typename Kernels, FormatSet kFormats = kFormats80>
bool LaunchGemmInstance80(DType dtype, bool transpose_rhs, void* args, int sm_count,
                          cudaStream_t stream, std::string* error, int table_bytes = 0) {
  return WithFormat<kFormats>(dtype, [&](auto format) {
    return GemmFamily80<Kernels, format()>::Launch(transpose_rhs, args, sm_count, stream, error,
                                                   table_bytes);
  });
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_GEMM_INSTANCES_SM80_CUDA_H_
