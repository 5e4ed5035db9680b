// Launches matmul; and its kernels on Hopper: all_gather_matmul's tiles and epilogue, without peers
// and their counters.
//
//   waits   for nobody
//   order   a launch after what wrote the operands; tiles of y are disjoint
#include "ops/all_gather_matmul/all_gather_matmul_sm90.cuh"
#include "ops/matmul/matmul.h"
#include "runtime/cuda_check.h"

namespace jflux {
namespace {

using MatmulArgs = AllGatherMatmulArgs;

template <typename Config_>
struct MatmulSm90 : AllGatherMatmulSm90<Config_, /*kGathers=*/false> {
  struct Schedule : OrderedTiles<Rounds> {
    using OrderedTiles::OrderedTiles;
  };
  struct Exchange : NoExchange {};
};

JFLUX_GEMM_KERNEL(Matmul);

struct Instances : MatmulKernels {
  static constexpr OpFormats kFormats = kMatmulFormats;
  static constexpr int kMostSplits = kGatherSplits, kMostSplitsOfBlocks = kGatherSplits;
  static constexpr bool kMayLendStage = true;
  static constexpr bool kVectorScales = true;
  static constexpr bool kQuantizes = true;
};

}  // namespace

bool LoadMatmulKernels(std::string* error) {
  return LoadBothLoops(LoadGemmInstances<Instances>, LoadMatmulKernels80, error);
}

bool LaunchMatmul(const AllGatherMatmulParams& p, const AllGatherMatmulOperands& operands,
                  const std::optional<GemmChoice>& given, cudaStream_t stream, std::string* error) {
  int ordinal = 0, sm_count = 0;
  JFLUX_CUDA_OR_FALSE(cudaGetDevice(&ordinal), error);
  JFLUX_CUDA_OR_FALSE(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, ordinal),
                      error);
  if (given && given->portable) {
    return LaunchMatmul80(p, operands, *given, sm_count, stream, error);
  }
  if (!LoadOnce(LoadGemmInstances<Instances>, error)) return false;
  const GemmChoice choice = ChooseMatmul(p, operands, given, Machine{sm_count});
  MatmulArgs args{};
  SymmetricView view{};
  view.world = 1;
  if (!SetProductArgs(p, operands, choice, sm_count, view, &args, error)) return false;
  return LaunchGemmInstance<Instances>(p.dtype, p.transpose_rhs, choice, &args, args.num_tiles,
                                       Min(sm_count, kMostSms), stream, error, operands.scales,
                                       operands.quantize != Quantizing::kNone);
}

}  // namespace jflux
