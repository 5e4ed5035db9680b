// Instantiates the portable kernels of all_gather_attention and launches one.
#include "ops/all_gather_attention/all_gather_attention.h"
#include "ops/all_gather_attention/all_gather_attention_sm80.cuh"
#include "ops/flash_attention/flash_attention_args_cuda.h"

namespace jflux {
namespace {

struct Kernels {
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    using Shape = attention::ForwardShape80<T, kWidth, kSoftcap>;
    return {reinterpret_cast<const void*>(&AllGatherAttentionKernel80<Shape>), Shape::kThreads,
            Shape::kSmemBytes};
  }
};

}  // namespace

bool LoadAllGatherAttentionKernels80(std::string* error) { return attention::Load<Kernels>(error); }

bool LaunchAllGatherAttention80(const AllGatherAttentionParams& params,
                                const FlashAttentionArrays& arrays, int32_t senders, int64_t site,
                                const CudaDevice& device, const SymmetricView& view,
                                cudaStream_t stream, std::string* error) {
  const FlashAttentionParams& p = params.attention;
  AllGatherAttentionArgs80 args{};
  if (!attention::SetArgs(AttentionPass::kForward, WidthFor(p.width), p, arrays, &args, error)) {
    return false;
  }
  SetGatherArgs(params, senders, site, device, view, &args);
  return attention::LaunchInstance<Kernels>(p, &args, device.sm_count, device.sm_count, stream,
                                            error);
}

}  // namespace jflux
