// Instantiates the portable kernels of attention's backward pass and launches them.
#include "ops/flash_attention/flash_attention_args_cuda.h"
#include "ops/flash_attention/flash_attention_backward_sm80.cuh"

namespace jflux {
namespace {

template <AttentionPass kPass_>
struct Kernels {
  static constexpr AttentionPass kPass = kPass_;
  static constexpr int kMostWidth = 256;
  using Args = attention::Args;
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    using Shape = attention::BackwardShape80<T, kWidth, kSoftcap, kPass>;
    return {reinterpret_cast<const void*>(&attention::BackwardKernel80<Shape>), Shape::kThreads,
            Shape::kSmemBytes, Shape::kCtasPerSm};
  }
  static bool SetArgs(int width, const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                      Args* args, std::string* error) {
    return attention::SetArgs(kPass, width, p, arrays, args, error);
  }
};
using Dkv = Kernels<AttentionPass::kDkv>;
using Dq = Kernels<AttentionPass::kDq>;

}  // namespace

bool LoadFlashAttentionBackwardKernels80(std::string* error) {
  return attention::Load<Dkv>(error) && attention::Load<Dq>(error);
}

bool LaunchFlashAttentionBackward80(const FlashAttentionParams& p,
                                    const FlashAttentionArrays& arrays, cudaStream_t stream,
                                    std::string* error) {
  return LoadOnce(LoadFlashAttentionBackwardKernels80, error) &&
         attention::Launch<Dkv>(p, arrays, stream, error) &&
         attention::Launch<Dq>(p, arrays, stream, error);
}

}  // namespace jflux
