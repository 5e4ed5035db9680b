// Instantiates the kernels of grouped_matmul_scaled on Hopper and launches one.
#include "ops/grouped_matmul/grouped_matmul_instances_cuda.h"
#include "ops/grouped_matmul_scaled/grouped_matmul_scaled.h"

namespace jflux {
namespace {

struct Kernels : GroupedMatmulScaledKernels {
  template <typename Config>
  static constexpr int kSmemBytes = Config::kSmemBytes;
};

template <typename F>
bool ForConfigs(DType dtype, Scales scales, bool quantizes, F&& visit) {
  if (quantizes) {
    using T = CudaType<kQuantized>;
    return scales == Scales::kOfBlocks
               ? ForGroupedConfigs<T, true, false, Scales::kOfBlocks, true>(visit)
               : ForGroupedConfigs<T, true, false, Scales::kOfSums, true>(visit);
  }
  return WithFormat<kGroupedScaledFormats.operands>(dtype, [&](auto format) {
    using T = CudaType<format>;
    if constexpr (HasBlockScales(format())) {
      if (scales == Scales::kOfBlocks) {
        return ForGroupedConfigs<T, true, false, Scales::kOfBlocks>(visit);
      }
    }
    return ForGroupedConfigs<T, true, false, Scales::kOfSums>(visit);
  });
}

bool LoadHopper(std::string* error) {
  LoadGrouped<Kernels> load{error};
  return ForFormats(kGroupedScaledFormats.operands, [&](DType dtype) {
    bool loaded = true;
    for (const bool quantizes : {false, true}) {
      if (quantizes && dtype != kQuantized) continue;
      loaded = loaded && !ForConfigs(dtype, Scales::kOfSums, quantizes, load) &&
               (!HasBlockScales(dtype) || !ForConfigs(dtype, Scales::kOfBlocks, quantizes, load));
    }
    return loaded;
  });
}

}  // namespace

bool LoadGroupedMatmulScaledKernels(std::string* error) {
  return LoadBothLoops(LoadHopper, LoadGroupedMatmulScaledKernels80, error);
}

std::string WhyNoGroupedMatmulScaledKernel(const GroupedMatmulParams& p, DType w_dtype) {
  const std::string why = WhyNotOperands(kGroupedScaledFormats, FormatsOfScaledLoop(p.portable),
                                         p.dtype, w_dtype, p.out_dtype, p.k, p.n, p.transpose_rhs);
  if (!why.empty()) return why;
  if (p.scales == Scales::kOfVectors || (HasEntriesOfK(p.scales) && !HasBlockScales(p.dtype))) {
    return "no kernel has the scales";
  }
  const bool quantizes = p.quantize != Quantizing::kNone;
  if (p.portable && (p.scales != Scales::kOfSums || quantizes)) {
    return "portable kernels take scales of rows and columns, and quantise no results";
  }
  if (p.terms > 1 && (p.scales != Scales::kOfBlocks || p.k % kScaleBlock != 0 || quantizes)) {
    return "several terms have scales of whole blocks, and results that are not quantised";
  }
  if (quantizes && (p.dtype != kQuantized || w_dtype != kQuantized)) {
    return "no kernel quantises the product";
  }
  return WhyNoGroupedSizes(p.m, p.k, p.n, p.groups, p.gated, p.tile, p.scales, quantizes);
}

bool LaunchGroupedMatmulScaled(const GroupedMatmulParams& p, const GroupedMatmulArrays& arrays,
                               cudaStream_t stream, std::string* error) {
  if (p.portable) return LaunchGroupedMatmulScaled80(p, arrays, stream, error);
  LocalDevice device;
  if (!FindLocalDevice(&device, error, LoadGroupedMatmulScaledKernels)) return false;
  const GemmChoice choice = ChooseGrouped(p, Machine{device.sm_count});
  GroupedMatmulScaledArgs args{};
  if (!SetGroupedArgs(p, choice, arrays.w, arrays.y, arrays.sums, &args, error) ||
      !SetGroupedRows(p, arrays.x, &args, error)) {
    return false;
  }
  args.groups = device.Rows(kGroupedMatmulScaledId, arrays.group_sizes, p.groups, p.m);
  args.row_scale = arrays.row_scale;
  args.x_scale = arrays.x_scale;
  args.out_f16 = p.out_dtype == DType::kF16;
  args.y_scale = arrays.y_scale;
  args.power_of_two = p.quantize == Quantizing::kByPowersOfTwo;
  for (int i = 0; i < p.Weights(); ++i) args.w_scale[i] = arrays.w_scale[i];
  LaunchGrouped<Kernels> launch{choice,          &args,  MostTilesOf(p, args.tiles),
                                device.sm_count, stream, error};
  const bool quantizes = p.quantize != Quantizing::kNone;
  return ForConfigs(p.dtype, p.scales, quantizes, launch) && !launch.failed;
}

}  // namespace jflux
