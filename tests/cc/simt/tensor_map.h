// Tensor maps: what cuTensorMapEncodeTiled makes of its arguments here, and how the TMA unit
// (async_units.cc) reads it.
#ifndef JFLUX_TESTS_CC_SIMT_TENSOR_MAP_H_
#define JFLUX_TESTS_CC_SIMT_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

namespace jflux::simt {

struct TensorMap {
  static constexpr uint32_t kMagic = 0x54a9d21b;
  uint32_t magic;
  uint8_t rank;
  uint8_t element_bytes;
  uint8_t swizzle_bytes;      // 32, 64 or 128; 0: none
  uint8_t element_stride[5];  // [0] does not count
  uint16_t box[5];            // innermost first
  uint64_t size[5];
  char* data;
  uint64_t stride_bytes[4];  // of dimensions 1 and on

  // Elements of dimension i in a box in shared memory.
  uint32_t BoxSize(int i) const {
    return i == 0 ? box[0] : (box[i] + element_stride[i] - 1) / element_stride[i];
  }
  uint32_t RowBytes() const { return uint32_t{box[0]} * element_bytes; }
  uint32_t BoxBytes() const {
    uint32_t bytes = element_bytes;
    for (int i = 0; i < rank; ++i) bytes *= BoxSize(i);
    return bytes;
  }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

// As the driver's: CUDA_ERROR_INVALID_VALUE for what it refuses.
CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                     const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                     const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                     CUtensorMapFloatOOBfill fill);

// The address of 16 bytes under a swizzle: it permutes them within rows of 128 bytes.
inline uint32_t Swizzled(uint32_t address, uint32_t swizzle_bytes) {
  const uint32_t row = address >> 7 & 7;
  switch (swizzle_bytes) {
    case 128:
      return address ^ row << 4;
    case 64:
      return address ^ (row & 3) << 4;
    case 32:
      return address ^ (row & 1) << 4;
    default:
      return address;
  }
}

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_TENSOR_MAP_H_
