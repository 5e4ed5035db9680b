// The compiled GEMM configurations, shared by all ops: types x layout of w x GemmChoice. An op's
// Instances define
//
//   kFormats          the OpFormats of its kernels
//   Kernel<Config>()  its kernel for a configuration; null: none
//   kMostSplits       how many CTAs may split k; 1: k is not split
//   kMostSplitsOfBlocks  the same with Scales::kOfBlocks; unless defined: 1
//   kMayLendStage     whether tiles may lend a stage (gpu/gemm_smem.cuh)
//   kVectorScales     whether there are kernels for Scales::kOfVectors; unless defined: none
//   kQuantizes        whether there are kernels whose results are quantised; unless defined: none
//
// Kernels are compiled where GemmFamily is instantiated: in the op's own file; or, for an op that
// takes minutes, in a file for each INSTANCE of its row in cc/ops/registry.cc, which the build
// writes, and the op's header says JFLUX_INSTANCES_APART.
#ifndef JFLUX_RUNTIME_GEMM_INSTANCES_CUDA_H_
#define JFLUX_RUNTIME_GEMM_INSTANCES_CUDA_H_

#include <iterator>
#include <string>
#include <type_traits>

#include "gpu/gemm_config.h"
#include "gpu/gemm_sm90.cuh"
#include "gpu/types.cuh"
#include "runtime/kernels_cuda.h"

namespace jflux {

// Whether there are kernels whose results are quantised: an op says kQuantizes if it has gates.
template <typename Instances, typename = void>
inline constexpr bool kHasQuantizing = false;
template <typename Instances>
inline constexpr bool kHasQuantizing<Instances, std::void_t<decltype(Instances::kQuantizes)>> =
    Instances::kQuantizes;

// Whether an op has kernels with tiles of so many columns.
template <typename Instances>
constexpr bool HasTile(Scales scales, bool quantizes, int32_t tile_n) {
  return quantizes ? CanQuantize(scales, tile_n)
                   : CanHave(scales, tile_n, kHasQuantizing<Instances>);
}

// Calls visit.template operator()<Config>() for the configuration that fits `c`, among those from
// kFirst on. False if there is none.
template <typename Instances, typename T, bool kTransposeRhs, Scales kScales, bool kQuantizes,
          size_t kFirst = 0, typename F>
bool WithTile(const GemmChoice& c, F&& visit) {
  if constexpr (kFirst == std::size(kCompiled)) {
    return false;
  } else {
    constexpr GemmChoice kThis = kCompiled[kFirst];
    if constexpr (HasTile<Instances>(kScales, kQuantizes, kThis.tile_n)) {
      if (c.tile_n == kThis.tile_n && c.cluster_m == kThis.cluster_m) {
        using Config = GemmConfig<T, kThis.tile_n, kThis.cluster_m, kTransposeRhs,
                                  Instances::kMayLendStage, 1, false, kScales, kQuantizes>;
        return visit.template operator()<Config>();
      }
    }
    return WithTile<Instances, T, kTransposeRhs, kScales, kQuantizes, kFirst + 1>(c, visit);
  }
}

template <typename Instances, typename = void>
inline constexpr int kMostSplitsOfBlocks = 1;
template <typename Instances>
inline constexpr int
    kMostSplitsOfBlocks<Instances, std::void_t<decltype(Instances::kMostSplitsOfBlocks)>> =
        Instances::kMostSplitsOfBlocks;
template <typename Instances, typename Config>
inline constexpr int kMostSplitsOf = !CanShareK(Config::kTileN, Config::kClusterM) ? 1
                                     : Config::kScales == Scales::kOfVectors       ? 1
                                     : Config::kBlockScales ? kMostSplitsOfBlocks<Instances>
                                                            : Instances::kMostSplits;
template <typename Config, int kSplits>
using SharedKConfig = GemmConfig<typename Config::T, kSharedKTile, 1, Config::kTransposeRhs, false,
                                 kSplits, false, Config::kScales>;

// An op's kernels, but of int8 those of FewTileN alone.
template <typename Kernels>
struct FewOfInt8 {
  template <typename Config>
  static const void* Kernel() {
    if constexpr (Config::kWhole && Config::kTileN != FewTileN(Config::kClusterM)) {
      return nullptr;
    } else {
      return Kernels::template Kernel<Config>();
    }
  }
};

template <typename Instances>
struct LoadInstance {
  std::string* error;
  template <typename Config>
  bool operator()() const {
    return Load<Config>() && LoadShared<Config>();
  }
  template <typename Config, int kSplits = 2>
  bool LoadShared() const {
    if constexpr (kSplits <= kMostSplitsOf<Instances, Config>) {
      return Load<SharedKConfig<Config, kSplits>>() && LoadShared<Config, 2 * kSplits>();
    }
    return true;
  }
  template <typename Config>
  bool Load() const {
    const void* kernel = Instances::template Kernel<Config>();
    return kernel == nullptr || LoadKernel(kernel, Config::kSmemBytes, error);
  }
};

template <typename Instances>
struct LaunchInstance {
  void* args;
  int num_tiles, sm_count, splits;
  cudaStream_t stream;
  std::string* error;
  template <typename Config>
  bool operator()() const {
    return LaunchShared<Config>();
  }
  template <typename Config, int kSplits = 2>
  bool LaunchShared() const {
    if constexpr (kSplits <= kMostSplitsOf<Instances, Config>) {
      if (splits == kSplits) return Launch<SharedKConfig<Config, kSplits>>();
      return LaunchShared<Config, 2 * kSplits>();
    } else {
      return splits == 1 && Launch<Config>();
    }
  }
  template <typename Config>
  bool Launch() const {
    // At most as many clusters as run at the same time: each may have a static first tile.
    const int at_once = AtOnce(GemmChoice{Config::kTileN, Config::kClusterM, 0, splits}, sm_count);
    const int clusters = Min(num_tiles, at_once / Config::kCluster);
    return LaunchKernel(Instances::template Kernel<Config>(), args, clusters, Config::kCluster,
                        Config::kThreads, Config::kSmemBytes, stream, error);
  }
};

// The kernels for one format, layout of w, and kind of scales, of which results are quantised or
// not.
template <typename Instances, DType kFormat, bool kTransposeRhs, Scales kScales = Scales::kOfSums,
          bool kQuantizes = false>
struct GemmFamily {
  using T = CudaType<kFormat>;
  static bool Load(std::string* error);
  // False, and nothing said, if there is no kernel for the choice.
  static bool Launch(const GemmChoice& choice, const LaunchInstance<Instances>& launch);
};

template <typename Instances, DType kFormat, bool kTransposeRhs, Scales kScales, bool kQuantizes>
bool GemmFamily<Instances, kFormat, kTransposeRhs, kScales, kQuantizes>::Load(std::string* error) {
  for (const GemmChoice& c : kCompiled) {
    if (!HasTile<Instances>(kScales, kQuantizes, c.tile_n)) continue;
    if (!WithTile<Instances, T, kTransposeRhs, kScales, kQuantizes>(
            c, LoadInstance<Instances>{error})) {
      return false;
    }
  }
  return true;
}

template <typename Instances, DType kFormat, bool kTransposeRhs, Scales kScales, bool kQuantizes>
bool GemmFamily<Instances, kFormat, kTransposeRhs, kScales, kQuantizes>::Launch(
    const GemmChoice& choice, const LaunchInstance<Instances>& launch) {
  return WithTile<Instances, T, kTransposeRhs, kScales, kQuantizes>(choice, launch);
}

// Whether an op has kernels for Scales::kOfVectors: it says kVectorScales.
template <typename Instances, typename = void>
inline constexpr bool kHasVectorScales = false;
template <typename Instances>
inline constexpr bool kHasVectorScales<Instances, std::void_t<decltype(Instances::kVectorScales)>> =
    Instances::kVectorScales;

template <typename Instances, Scales kScales>
using QuantizingFamily = GemmFamily<Instances, kQuantized, true, kScales, /*kQuantizes=*/true>;

// The formats of an op that wgmma multiplies.
template <typename Instances>
inline constexpr FormatSet kWgmmaFormatsOf = Instances::kFormats.operands & kWgmmaFormats;

template <typename Instances>
bool LoadGemmInstances(std::string* error) {
  return ForFormats(kWgmmaFormatsOf<Instances>, [&](DType dtype) {
    return WithFormat<kWgmmaFormatsOf<Instances>>(dtype, [&](auto format) {
      bool loaded = GemmFamily<Instances, format(), true>::Load(error);
      if constexpr (!FormatOf(format()).k_major) {
        loaded = loaded && GemmFamily<Instances, format(), false>::Load(error);
      }
      if constexpr (HasBlockScales(format())) {
        loaded = loaded && GemmFamily<Instances, format(), true, Scales::kOfBlocks>::Load(error);
      }
      if constexpr (HasVectorScales(format()) && kHasVectorScales<Instances>) {
        loaded = loaded && GemmFamily<Instances, format(), true, Scales::kOfVectors>::Load(error);
      }
      if constexpr (format() == kQuantized && kHasQuantizing<Instances>) {
        loaded = loaded && QuantizingFamily<Instances, Scales::kOfSums>::Load(error) &&
                 QuantizingFamily<Instances, Scales::kOfBlocks>::Load(error);
      }
      return loaded;
    });
  });
}

template <typename Instances>
bool LaunchGemmInstance(DType dtype, bool transpose_rhs, const GemmChoice& choice, void* args,
                        int num_tiles, int sm_count, cudaStream_t stream, std::string* error,
                        Scales scales = Scales::kNone, bool quantizes = false) {
  *error = "no kernel has tiles of " + std::to_string(choice.tile_n) + " columns, clusters of " +
           std::to_string(choice.cluster_m) + " and k in " + std::to_string(choice.splits);
  const LaunchInstance<Instances> launch{args, num_tiles, sm_count, choice.splits, stream, error};
  return WithFormat<kWgmmaFormatsOf<Instances>>(dtype, [&](auto format) {
    if constexpr (!FormatOf(format()).k_major) {
      if (!transpose_rhs) return GemmFamily<Instances, format(), false>::Launch(choice, launch);
    }
    if constexpr (format() == kQuantized && kHasQuantizing<Instances>) {
      if (quantizes) {
        return scales == Scales::kOfBlocks
                   ? QuantizingFamily<Instances, Scales::kOfBlocks>::Launch(choice, launch)
                   : QuantizingFamily<Instances, Scales::kOfSums>::Launch(choice, launch);
      }
    }
    if constexpr (HasBlockScales(format())) {
      if (scales == Scales::kOfBlocks) {
        return GemmFamily<Instances, format(), true, Scales::kOfBlocks>::Launch(choice, launch);
      }
    }
    if constexpr (HasVectorScales(format()) && kHasVectorScales<Instances>) {
      if (scales == Scales::kOfVectors) {
        return GemmFamily<Instances, format(), true, Scales::kOfVectors>::Launch(choice, launch);
      }
    }
    return GemmFamily<Instances, format(), true>::Launch(choice, launch);
  });
}

// The files of an op's instances have its kernels, and no other file.
#define JFLUX_INSTANCES_APART(Instances)                                                   \
  extern template struct GemmFamily<Instances, DType::kF16, false>;                        \
  extern template struct GemmFamily<Instances, DType::kF16, true>;                         \
  extern template struct GemmFamily<Instances, DType::kBF16, false>;                       \
  extern template struct GemmFamily<Instances, DType::kBF16, true>;                        \
  extern template struct GemmFamily<Instances, DType::kF8E4M3FN, true>;                    \
  extern template struct GemmFamily<Instances, DType::kF8E4M3FN, true, Scales::kOfBlocks>; \
  extern template struct GemmFamily<Instances, kQuantized, true, Scales::kOfSums, true>;   \
  extern template struct GemmFamily<Instances, kQuantized, true, Scales::kOfBlocks, true>; \
  extern template struct GemmFamily<Instances, DType::kF8E5M2, true>;                      \
  extern template struct GemmFamily<Instances, DType::kF8E5M2, true, Scales::kOfBlocks>;   \
  extern template struct GemmFamily<Instances, DType::kS8, true>

// The tensor map of w as LoadB (gpu/gemm_operands_sm90.cuh) reads it. `halves`: w is half of a
// tile's columns.
inline bool EncodeRhsMap(CUtensorMap* map, DType dtype, const void* w, int64_t k, int64_t n,
                         bool transpose_rhs, bool halves, const GemmChoice& choice,
                         std::string* error) {
  const int block = BlockElements(dtype);
  if (transpose_rhs) {
    const int rows = choice.tile_n / (halves ? 2 : choice.cluster_m);
    return EncodeTensorMap(map, dtype, w, {n, k}, {k}, {rows, block}, error);
  }
  return EncodeTensorMap(map, dtype, w, {k, n}, {n}, {block / choice.cluster_m, block}, error);
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_GEMM_INSTANCES_CUDA_H_
