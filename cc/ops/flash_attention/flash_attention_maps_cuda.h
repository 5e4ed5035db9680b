// What launchers of Hopper's kernels of attention add: tensor maps.
#ifndef JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_MAPS_CUDA_H_
#define JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_MAPS_CUDA_H_

#include <string>

#include "ops/flash_attention/attention_sm90.cuh"
#include "ops/flash_attention/flash_attention_args_cuda.h"

namespace jflux::attention {

inline bool SetMapArgs(AttentionPass pass, int width, const FlashAttentionParams& p,
                       const FlashAttentionArrays& arrays, MapArgs* args, std::string* error) {
  if (!SetArgs(pass, width, p, arrays, args, error)) return false;
  const AttentionBlocks blocks = BlocksOf(pass, width);
  const auto encode = [&](CUtensorMap* map, const void* data, int64_t rows, int64_t heads,
                          int block) {
    return EncodeTensorMap(map, p.dtype, data, {p.batch, rows, heads, p.width},
                           {rows * heads * p.width, heads * p.width, p.width}, {1, block, 1, 64},
                           error);
  };
  return encode(&args->q, arrays.q, p.queries, p.heads, blocks.queries) &&
         encode(&args->k, arrays.k, p.keys, p.groups, blocks.keys) &&
         encode(&args->v, arrays.v, p.keys, p.groups, blocks.keys) &&
         (pass == AttentionPass::kForward ||
          encode(&args->d_out, arrays.d_out, p.queries, p.heads, blocks.queries));
}

}  // namespace jflux::attention

#endif  // JFLUX_OPS_FLASH_ATTENTION_FLASH_ATTENTION_MAPS_CUDA_H_
