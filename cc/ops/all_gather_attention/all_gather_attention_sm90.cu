// Instantiates Hopper's kernels of all_gather_attention and launches one.
#include "ops/all_gather_attention/all_gather_attention.h"
#include "ops/all_gather_attention/all_gather_attention_sm90.cuh"
#include "ops/flash_attention/flash_attention_maps_cuda.h"

namespace jflux {
namespace {

struct Kernels {
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    using Shape = GatherShape<attention::ForwardShape<T, kWidth, kSoftcap>>;
    return {reinterpret_cast<const void*>(&AllGatherAttentionKernel<Shape>), attention::kThreads,
            Shape::kSmemBytes};
  }
};

}  // namespace

bool LoadAllGatherAttentionKernels(std::string* error) {
  return LoadBothLoops(attention::Load<Kernels>, LoadAllGatherAttentionKernels80, error);
}

bool LaunchAllGatherAttention(const AllGatherAttentionParams& params,
                              const FlashAttentionArrays& arrays, int32_t senders, int64_t site,
                              const CudaDevice& device, const SymmetricView& view,
                              cudaStream_t stream, std::string* error) {
  const FlashAttentionParams& p = params.attention;
  if (p.portable) {
    return LaunchAllGatherAttention80(params, arrays, senders, site, device, view, stream, error);
  }
  const int width = WidthFor(p.width);
  AllGatherAttentionArgs args{};
  if (!attention::SetMapArgs(AttentionPass::kForward, width, p, arrays, &args, error)) return false;
  SetGatherArgs(params, senders, site, device, view, &args);
  const int32_t block = BlocksOf(AttentionPass::kForward, width).keys;
  const int64_t sequences = args.layout.SequenceOf(params.world - 1, 0, 0);
  for (int half = 0; half < 2; ++half) {
    if (!EncodeTensorMap(&args.workspace_maps[half], p.dtype,
                         view.At(view.rank, args.workspace.DataOffset(half)),
                         {sequences, p.keys, p.groups, p.width},
                         {p.keys * p.groups * p.width, p.groups * p.width, p.width},
                         {1, block, 1, 64}, error)) {
      return false;
    }
  }
  // All CTAs are of use: they send.
  return attention::LaunchInstance<Kernels>(p, &args, device.sm_count, device.sm_count, stream,
                                            error);
}

}  // namespace jflux
