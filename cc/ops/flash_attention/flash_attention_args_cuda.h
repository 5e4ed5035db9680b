// The kernels' arguments for a call, and their instances, for the launchers.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_ARGS_CUDA_H_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_ARGS_CUDA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "core/numbers.h"
#include "gpu/types.cuh"
#include "ops/flash_attention/attention.cuh"
#include "ops/flash_attention/flash_attention.h"
#include "runtime/cuda_check.h"
#include "runtime/kernels_cuda.h"

namespace jflux::attention {

// The arguments of a pass. `width`: that of its kernel.
inline bool SetArgs(AttentionPass pass, int width, const FlashAttentionParams& p,
                    const FlashAttentionArrays& arrays, Args* args, std::string* error) {
  const AttentionBlocks blocks = BlocksOf(pass, width);
  args->arrays = arrays;
  args->heads = static_cast<int32_t>(p.heads);
  args->groups = static_cast<int32_t>(p.groups);
  args->width = static_cast<int32_t>(p.width);
  args->queries = static_cast<int32_t>(p.queries);
  args->keys = static_cast<int32_t>(p.keys);
  args->padded_queries = static_cast<int32_t>(Padded(p.queries));
  args->padded_keys = static_cast<int32_t>(Padded(p.keys));
  args->query_blocks = CeilDiv(args->queries, blocks.queries);
  args->key_blocks = CeilDiv(args->keys, blocks.keys);
  const int64_t items = pass == AttentionPass::kDkv ? p.batch * p.groups * args->key_blocks
                                                    : p.batch * p.heads * args->query_blocks;
  if (items > INT32_MAX / 4) {
    *error = "too many blocks of queries";
    return false;
  }
  args->items = static_cast<int32_t>(items);
  args->low = p.low;
  args->span = p.span;
  args->positions_by_batch = p.position_batches != 1;
  args->blocks_by_batch = p.block_batches != 1;
  args->shared_batches = static_cast<int32_t>(p.batch / p.block_batches);
  args->wide_out = p.wide_out;
  args->scale = static_cast<float>(p.scale);
  args->inner = p.softcap == 0 ? 0.0f : static_cast<float>(p.scale / p.softcap);
  args->factor = static_cast<float>((p.softcap == 0 ? p.scale : p.softcap) * double{kLog2e});
  return true;
}

// A pass's kernels, Hopper's or portable ones:
//
//   kPass, Args
//   For<T, width, softcap>() -> Instance
//   SetArgs(width, params, arrays, Args*, error)
struct Instance {
  const void* kernel;
  int threads, smem_bytes;
  int ctas_per_sm = 1;
};

// Calls visit(width, softcap, Instance) for the kernels of a type, until it returns true.
template <typename Kernels, typename T, int kWidth = 64, typename F>
bool ForInstances(F&& visit) {
  if constexpr (WidthFor(kWidth) == 0) {
    return false;
  } else {
    return visit(kWidth, false, Kernels::template For<T, kWidth, false>()) ||
           visit(kWidth, true, Kernels::template For<T, kWidth, true>()) ||
           ForInstances<Kernels, T, 2 * kWidth>(visit);
  }
}

template <typename Kernels, typename F>
bool ForInstancesOf(DType dtype, F&& visit) {
  return WithFormat<kFlashAttentionFormats.operands>(
      dtype, [&](auto format) { return ForInstances<Kernels, CudaType<format>>(visit); });
}

template <typename Kernels>
bool Load(std::string* error) {
  const auto fails = [&](int, bool, const Instance& instance) {
    return !LoadKernel(instance.kernel, instance.smem_bytes, error);
  };
  return ForFormats(kFlashAttentionFormats.operands,
                    [&](DType dtype) { return !ForInstancesOf<Kernels>(dtype, fails); });
}

// `args`: of Kernels. `most`: CTAs that are of use.
template <typename Kernels>
bool LaunchInstance(const FlashAttentionParams& p, void* args, int most, int sm_count,
                    cudaStream_t stream, std::string* error) {
  bool launched = false;
  ForInstancesOf<Kernels>(p.dtype, [&](int width, bool softcap, const Instance& instance) {
    if (width != WidthFor(p.width) || softcap != (p.softcap != 0)) return false;
    launched = LaunchKernel(instance.kernel, args, Min(most, instance.ctas_per_sm * sm_count), 1,
                            instance.threads, instance.smem_bytes, stream, error);
    return true;
  });
  return launched;
}

template <typename Kernels>
bool Launch(const FlashAttentionParams& p, const FlashAttentionArrays& arrays, cudaStream_t stream,
            std::string* error) {
  *error = WhyNotFormats(kFlashAttentionFormats, kWgmmaFormats, p.dtype, p.dtype);
  if (!error->empty()) return false;
  const int width = WidthFor(p.width);
  if (width == 0) {
    *error = "the kernels take heads of a multiple of 8 elements, up to 256";
    return false;
  }
  int ordinal = 0, sm_count = 0;
  JFLUX_CUDA_OR_FALSE(cudaGetDevice(&ordinal), error);
  JFLUX_CUDA_OR_FALSE(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, ordinal),
                      error);
  typename Kernels::Args args{};
  return Kernels::SetArgs(width, p, arrays, &args, error) &&
         LaunchInstance<Kernels>(p, &args, args.items, sm_count, stream, error);
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_ARGS_CUDA_H_
