// Instantiates the portable kernels of attention and launches those of a pass.
#include "ops/flash_attention/flash_attention_args_cuda.h"
#include "ops/flash_attention/flash_attention_backward_sm80.cuh"
#include "ops/flash_attention/flash_attention_sm80.cuh"

namespace jflux {
namespace {

template <AttentionPass kPass_>
struct Kernels {
  static constexpr AttentionPass kPass = kPass_;
  using Args = attention::Args;
  static bool SetArgs(int width, const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                      Args* args, std::string* error) {
    return attention::SetArgs(kPass, width, p, arrays, args, error);
  }
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    if constexpr (kPass == AttentionPass::kForward) {
      using Shape = attention::ForwardShape80<T, kWidth, kSoftcap>;
      return {reinterpret_cast<const void*>(&attention::ForwardKernel80<Shape>), Shape::kThreads,
              Shape::kSmemBytes};
    } else {
      using Shape = attention::BackwardShape80<T, kWidth, kSoftcap, kPass>;
      return {reinterpret_cast<const void*>(&attention::BackwardKernel80<Shape>), Shape::kThreads,
              Shape::kSmemBytes, Shape::kCtasPerSm};
    }
  }
};
using Forward = Kernels<AttentionPass::kForward>;
using Dkv = Kernels<AttentionPass::kDkv>;
using Dq = Kernels<AttentionPass::kDq>;

bool LoadForward(std::string* error) { return attention::Load<Forward>(error); }

bool LoadBackward(std::string* error) {
  return attention::Load<Dkv>(error) && attention::Load<Dq>(error);
}

}  // namespace

bool LoadFlashAttentionKernels80(std::string* error) {
  return LoadForward(error) && LoadBackward(error);
}

bool LaunchFlashAttention80(const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                            cudaStream_t stream, std::string* error) {
  return LoadOnce(LoadForward, error) && attention::Launch<Forward>(p, arrays, stream, error);
}

bool LaunchFlashAttentionBackward80(const FlashAttentionParams& p,
                                    const FlashAttentionArrays& arrays, cudaStream_t stream,
                                    std::string* error) {
  return LoadOnce(LoadBackward, error) && attention::Launch<Dkv>(p, arrays, stream, error) &&
         attention::Launch<Dq>(p, arrays, stream, error);
}

}  // namespace jflux
