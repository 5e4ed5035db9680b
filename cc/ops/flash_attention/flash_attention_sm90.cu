// Instantiates the kernels of attention and launches those of a pass.
#include "ops/flash_attention/flash_attention_args_cuda.h"
#include "ops/flash_attention/flash_attention_backward_sm90.cuh"
#include "ops/flash_attention/flash_attention_sm90.cuh"
#include "ops/flash_attention/flash_attention_wide_backward_sm90.cuh"

namespace jflux {
namespace {

template <AttentionPass kPass_>
struct Kernels {
  static constexpr AttentionPass kPass = kPass_;
  template <typename T, int kWidth, bool kSoftcap>
  static attention::Instance For() {
    if constexpr (kPass == AttentionPass::kForward) {
      using Shape = attention::ForwardShape<T, kWidth, kSoftcap>;
      return {reinterpret_cast<const void*>(&attention::ForwardKernel<Shape>), Shape::kSmemBytes};
    } else {
      using Shape = attention::BackwardShape<T, kWidth, kSoftcap, kPass>;
      if constexpr (Shape::kIsWide) {
        return {reinterpret_cast<const void*>(&attention::WideBackwardKernel<Shape>),
                Shape::kSmemBytes};
      } else {
        return {reinterpret_cast<const void*>(&attention::BackwardKernel<Shape>),
                Shape::kSmemBytes};
      }
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

bool LoadFlashAttentionKernels(std::string* error) {
  return LoadForward(error) && LoadBackward(error);
}

bool LaunchFlashAttention(const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                          cudaStream_t stream, std::string* error) {
  return LoadOnce(LoadForward, error) && attention::Launch<Forward>(p, arrays, stream, error);
}

bool LaunchFlashAttentionBackward(const FlashAttentionParams& p, const FlashAttentionArrays& arrays,
                                  cudaStream_t stream, std::string* error) {
  return LoadOnce(LoadBackward, error) && attention::Launch<Dkv>(p, arrays, stream, error) &&
         attention::Launch<Dq>(p, arrays, stream, error);
}

}  // namespace jflux
