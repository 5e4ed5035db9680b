// The weight gradient of grouped_matmul in 8 bits: instantiates its kernels and launches one. They
// are those of grouped_matmul_dw, but for operands and scales: tensor cores read 8 bits along k
// alone, which here are the rows of a group, so that both operands are transposes. In these each
// group begins a k-block, and zeros fill up its last one: no k-block has rows of two groups, and
// nothing has to be zeroed in shared memory.
#include "gpu/block_scales_sm90.cuh"
#include "ops/grouped_matmul/grouped_matmul_dw_sm90.cuh"
#include "ops/grouped_matmul/grouped_matmul_instances_cuda.h"
#include "ops/grouped_matmul_dw_scaled/grouped_matmul_dw_scaled.h"

namespace jflux {
namespace {

template <typename Config_>
struct GroupedMatmulDwScaledSm90 : GroupedMatmulDwSm90<Config_, GroupedMatmulDwScaledArgs> {
  using Config = Config_;
  using Args = GroupedMatmulDwScaledArgs;
  using Base = GroupedMatmulDwSm90<Config, Args>;
  static_assert(Config::kBlockScales && Config::kTileK == kScaleBlock);

  // Rows are counted along the transposes.
  using Schedule = typename Base::template ScheduleOf<kScaleBlock>;
  struct Operands : Base::template OperandsOf<BoxesOfA> {
    struct Source {
      const CUtensorMap* map;
      int32_t row;
      __device__ void Load(uint32_t smem, uint32_t bar, int k0) const {
        ptx::TmaLoad2d(smem, map, bar, k0, row);
      }
    };
    static __device__ Source SourceOf(const Args& args, const CallContext&,
                                      const typename Base::Coords& coords, int) {
      return Source{&args.x, coords.k0};
    }
  };

  static __device__ auto ScalesOf(const Args& args, const CallContext&, int32_t row_block,
                                  Tile tile) {
    const int32_t row0 = Base::FirstRowOf(row_block, 0);
    ScaleSource<Config, /*kArrives=*/true> scales;
    scales.SetPanel(args.x_scale + row0, Min(Config::kTileM, args.k - row0), args.k);
    const int32_t n0 = Base::FirstColumnOf(args, tile);
    if constexpr (Config::kScales == Scales::kOfVectors) {
      scales.SetVectors(args.dy_scale, n0, args.n);
    } else {
      scales.SetColumns(args.dy_scale, n0, args.n, args.k_blocks);
    }
    return scales;
  }
};

JFLUX_GEMM_KERNEL(GroupedMatmulDwScaled);

struct Kernels : GroupedMatmulDwScaledKernels {
  template <typename Config>
  static constexpr int kSmemBytes = Config::kSmemBytes;
};

template <typename F>
bool ForConfigs(Scales scales, F&& visit) {
  using T = __nv_fp8_e4m3;
  return scales == Scales::kOfBlocks ? ForGroupedConfigs<T, true, false, Scales::kOfBlocks>(visit)
                                     : ForGroupedConfigs<T, true, false, Scales::kOfVectors>(visit);
}

}  // namespace

bool LoadGroupedMatmulDwScaledKernels(std::string* error) {
  LoadGrouped<Kernels> load{error};
  return !ForConfigs(Scales::kOfVectors, load) && !ForConfigs(Scales::kOfBlocks, load);
}

std::string WhyNoGroupedMatmulDwScaledKernel(const GroupedMatmulDwParams& p) {
  const std::string why = WhyNotOperands(kGroupedDwScaledFormats, kWgmmaFormats, p.dtype, p.dtype,
                                         p.out_dtype, p.k, p.n, /*transpose_rhs=*/true);
  if (!why.empty()) return why;
  if (!HasEntriesOfK(p.scales)) return "no kernel has the scales";
  return WhyNoGroupedSizes(p.m, p.k, p.n, p.groups, /*gated=*/false, p.tile, p.scales);
}

bool LaunchGroupedMatmulDwScaled(const GroupedMatmulDwParams& p,
                                 const GroupedMatmulDwArrays& arrays, cudaStream_t stream,
                                 std::string* error) {
  LocalDevice device;
  if (!FindLocalDevice(&device, error, LoadGroupedMatmulDwScaledKernels)) return false;
  const GemmChoice choice = ChooseGroupedDw(p, Machine{device.sm_count});
  GroupedMatmulDwScaledArgs args{};
  SetGroupedDwArgs(p, choice, &args);
  args.groups = device.Rows(kGroupedMatmulDwScaledId, arrays.group_sizes, p.groups, p.m);
  args.dw_data = arrays.dw;
  args.x_scale = arrays.x_scale;
  args.dy_scale = arrays.dy_scale;
  args.a_bytes = BoxRows(p.k) * kBlockBytes;
  args.k_blocks = static_cast<int32_t>(MostGroupBlocks(p.m, p.groups, kScaleBlock));
  const int64_t columns = int64_t{kScaleBlock} * args.k_blocks;
  if (!EncodeTensorMap(&args.x, p.dtype, arrays.x, {p.k, columns}, {columns},
                       {BoxRows(p.k), kScaleBlock}, error) ||
      !EncodeTensorMap(&args.dy, p.dtype, arrays.dy, {p.n, columns}, {columns},
                       {choice.tile_n / choice.cluster_m, kScaleBlock}, error)) {
    return false;
  }
  if (!args.out_f32 && !EncodeTensorMap(&args.dw, p.out_dtype, arrays.dw, {p.groups, p.k, p.n},
                                        {p.k * p.n, p.n}, {1, 64, 64}, error)) {
    return false;
  }
  const int64_t most_tiles = p.groups * args.tiles_k * args.tiles_n;
  LaunchGrouped<Kernels> launch{choice, &args, most_tiles, device.sm_count, stream, error};
  return ForConfigs(p.scales, launch) && !launch.failed;
}

}  // namespace jflux
