// latent_decode: flash_decode where values are the first elements of keys, so that a position is
// read once for both: the compressed cache of multi-head latent attention (DeepSeek-V2, arXiv
// 2405.04434, section 2.1.2), 512 latent elements and 64 of rotary positions, which all heads
// share.
//
//   q       [B, T, H, 576]
//   k       [B, S, G, 576], or in pages; of q's type
//   out     f32 [B, T, H, 513], parts f32 [splits, B, T, H, 513]
//
// and the rest as in ops/flash_decode/flash_decode.h, without v and scales. CPUs take plain lax.
// Python: jflux/_ops/attention/_flash_decode_primitive.py.
#ifndef JFLUX_OPS_LATENT_DECODE_LATENT_DECODE_H_
#define JFLUX_OPS_LATENT_DECODE_LATENT_DECODE_H_

#include <string>

#include "ops/flash_decode/flash_decode.h"

namespace jflux {

inline constexpr OpId kLatentDecodeId{49};
inline constexpr OpFormats kLatentDecodeFormats{kHalves};
inline constexpr int kLatentWidth = 576, kLatentValues = 512;
inline constexpr int kLatentQueries = 64;  // of an item, that share a head of the cache

// As LaunchFlashDecode; `arrays` have no v.
bool LaunchLatentDecode(const FlashDecodeParams& params, const FlashDecodeArrays& arrays,
                        DeviceState* state, cudaStream_t stream, std::string* error);

// Loads the kernels on the current device.
bool LoadLatentDecodeKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_LATENT_DECODE_LATENT_DECODE_H_
