// The compiled kernels of grouped_matmul and grouped_matmul_dw, and what their launchers share.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_INSTANCES_CUDA_H_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_INSTANCES_CUDA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <iterator>
#include <string>

#include "gpu/gemm_smem.cuh"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/grouped_matmul/grouped_matmul_sm90.cuh"
#include "ops/grouped_matmul/local_device_cuda.h"
#include "runtime/cuda_check.h"
#include "runtime/cuda_device.h"
#include "runtime/kernels_cuda.h"

namespace jflux {

// Calls visit.template operator()<Config>() for each entry of GroupedChoicesOf(kScales,
// kQuantizes), until it returns true.
template <typename T, bool kTransposeRhs, bool kTransposeLhs, Scales kScales = Scales::kNone,
          bool kQuantizes = false, int kFirst = 0, typename F>
bool ForGroupedConfigs(F&& visit) {
  constexpr GroupedChoices kChoices = GroupedChoicesOf(kScales, kQuantizes);
  if constexpr (kFirst == kChoices.last - kChoices.first) {
    return false;
  } else {
    constexpr GemmChoice kThis = kChoices.first[kFirst];
    constexpr Scales kOfConfig = kScales == Scales::kNone ? Scales::kOfSums : kScales;
    // Only a weight gradient has scales of vectors. A forward tile may have no rows for a consumer.
    constexpr bool kMayLendStage = kScales == Scales::kOfVectors;
    using Config = GemmConfig<T, kThis.tile_n, kThis.cluster_m, kTransposeRhs, kMayLendStage,
                              /*kClusterK=*/1, kTransposeLhs, kOfConfig, kQuantizes>;
    return visit.template operator()<Config>() ||
           ForGroupedConfigs<T, kTransposeRhs, kTransposeLhs, kScales, kQuantizes, kFirst + 1>(
               visit);
  }
}

// Kernels::Kernel<Config>() is the kernel, or null, and Kernels::kSmemBytes<Config> its shared
// memory.
template <typename Kernels>
struct LoadGrouped {
  std::string* error;
  bool failed = false;
  template <typename Config>
  bool operator()() {
    const void* kernel = Kernels::template Kernel<Config>();
    failed |= kernel != nullptr && !LoadKernel(kernel, Kernels::template kSmemBytes<Config>, error);
    return failed;  // else goes on
  }
};

// ForGroupedConfigs of the forward product, with its types at run time.
template <typename F>
bool ForForwardConfigs(DType dtype, bool transpose_rhs, F&& visit) {
  return WithFormat<kGroupedFormats.operands>(dtype, [&](auto format) {
    using T = CudaType<format>;
    return transpose_rhs ? ForGroupedConfigs<T, true, false>(visit)
                         : ForGroupedConfigs<T, false, false>(visit);
  });
}

// All of them.
template <typename Kernels>
bool LoadForward(std::string* error) {
  LoadGrouped<Kernels> load{error};
  return ForFormats(kGroupedFormats.operands, [&](DType dtype) {
    return !ForForwardConfigs(dtype, false, load) && !ForForwardConfigs(dtype, true, load);
  });
}

template <typename Kernels>
struct LaunchGrouped {
  GemmChoice choice;
  void* args;
  int64_t most_tiles;  // the grid need not be larger
  int sm_count;
  cudaStream_t stream;
  std::string* error;
  bool failed = false;
  template <typename Config>
  bool operator()() {
    if (Config::kTileN != choice.tile_n || Config::kClusterM != choice.cluster_m) return false;
    const auto clusters = Min<int64_t>(most_tiles, sm_count / Config::kCluster);
    failed = !LaunchKernel(Kernels::template Kernel<Config>(), args, static_cast<int>(clusters),
                           Config::kCluster, Config::kThreads, Kernels::template kSmemBytes<Config>,
                           stream, error);
    return true;
  }
};

// Sets what the epilogue of the forward product needs, and the weights: all of *args but x and the
// groups.
bool SetGroupedArgs(const GroupedMatmulParams& params, const GemmChoice& choice,
                    const void* const (&w)[2], void* y, void* const (&sums)[2],
                    GroupedMatmulArgs* args, std::string* error);

// Sets the map of x, if its rows are loaded by TMA.
bool SetGroupedRows(const GroupedMatmulParams& params, const void* const (&x)[2],
                    GroupedMatmulArgs* args, std::string* error);

// Sets what a weight gradient's kernels need to know of the sizes.
inline void SetGroupedDwArgs(const GroupedMatmulDwParams& p, const GemmChoice& choice,
                             GroupedMatmulDwArgs* args) {
  args->tiles_k = static_cast<int32_t>(CeilDiv<int64_t>(p.k, kGemmTileM * choice.cluster_m));
  args->tiles_n = static_cast<int32_t>(CeilDiv<int64_t>(p.n, choice.tile_n));
  args->group_m = choice.group_m;
  args->k = static_cast<int32_t>(p.k);
  args->n = static_cast<int32_t>(p.n);
  args->out_f32 = p.out_dtype == DType::kF32;
}

// Each group may begin a tile.
inline int64_t MostTilesOf(const GroupedMatmulParams& p, const GroupTiles& tiles) {
  return Min(CeilDiv<int64_t>(p.m, tiles.tile_rows) + p.groups, p.m) * tiles.tiles_n;
}

// Why a kernel cannot take operands of such sizes; empty if it can.
inline std::string WhyNoGroupedSizes(int64_t m, int64_t k, int64_t n, int64_t groups, bool gated,
                                     TileChoice tile, Scales scales = Scales::kNone,
                                     bool quantizes = false) {
  constexpr int64_t kMostRows = int64_t{1} << 29;
  if (groups > kMostGroups) return "more than " + std::to_string(kMostGroups) + " groups";
  if (m > kMostRows || k > kMostRows || n > kMostRows ||
      groups * CeilDiv<int64_t>(n, 64) > kMostRows) {
    return "a dimension is too large";
  }
  if (!IsGroupedTile(gated, tile, scales, quantizes)) return "no kernel has the tile";
  return "";
}

// Why a kernel cannot take such operands; empty if it can.
inline std::string WhyNoGroupedKernel(int64_t m, int64_t k, int64_t n, int64_t groups, DType dtype,
                                      DType out_dtype, bool k_major, bool gated, TileChoice tile,
                                      bool portable) {
  const std::string why = WhyNotOperands(kGroupedFormats, FormatsOfLoop(portable), dtype, dtype,
                                         out_dtype, k, n, k_major);
  return why.empty() ? WhyNoGroupedSizes(m, k, n, groups, gated, tile) : why;
}

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_INSTANCES_CUDA_H_
