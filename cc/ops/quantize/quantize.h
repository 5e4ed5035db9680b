// quantize: matrices as values of 8 bits with scales, and their transposes too, on one device.
//
//   x [stack, rows, columns]  ->  values [stack, rows, columns], scale [stack, counts of blocks]
//                                 and with `transpose` the same of [stack, columns, rows]
//
// Or x [rows, columns] is itself values of 8 bits with a scale, and quantised again along the other
// dimension (QuantizeParams::again). Or what is quantised is computed from several arrays as they
// are read, and rounded to their type (QuantizeSource). Or rows belong to groups, whose sizes are
// on the device, and the transpose is for products that sum over the rows of each group
// (QuantizeParams::groups).
//
// On CPUs it is plain lax. Python: jflux/_ops/_quantize.py, which defines scales and values, and
// _quantize_computed.py.
#ifndef JFLUX_OPS_QUANTIZE_QUANTIZE_H_
#define JFLUX_OPS_QUANTIZE_QUANTIZE_H_

#include <cstdint>
#include <string>

#include "core/activation.h"
#include "core/format.h"
#include "core/group_tiles.h"
#include "core/signal.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kQuantizeId{42};
inline constexpr OpFormats kQuantizeFormats{SetOf(DType::kF16, DType::kBF16, DType::kF32),
                                            SetOf(DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8)};

// Rows and columns of a tile, and of a block that is neither one of them nor all.
inline constexpr int kQuantizeTile = 128;
// Rows of values are whole vectors: a multiple of this many columns, and with `transpose` of rows.
inline constexpr int kQuantizeMultiple = kVectorBytes;

// The elements that share a scale, each size 1, 128, or -1 for all.
struct QuantizeBlock {
  int32_t rows, columns;

  // Scales along a dimension with so many elements.
  static JFLUX_HD constexpr int64_t Count(int64_t elements, int32_t size) {
    return size == 1 ? elements : size == -1 ? 1 : CeilDiv<int64_t>(elements, size);
  }
  JFLUX_HD constexpr int64_t Scales(int64_t of_rows, int64_t of_columns) const {
    return Count(of_rows, rows) * Count(of_columns, columns);
  }
};

// What is quantised.
enum class QuantizeSource : int32_t {
  kGiven = 0,      // x
  kActivated = 1,  // activation(x), perhaps times `factor`
  kGradient = 2,   // `factor` times the derivative of activation(x)
  // The gradients of x and of `factor` where activation(x) * factor has the gradient `dy`. The
  // copies are written in turns, in dy's place.
  kGradients = 3,
  // x and `factor`, whose copies are written in turns: 128 columns of one, 128 of the other, and so
  // on.
  kPair = 4,
};
inline bool IsQuantizeSource(int64_t number) { return 0 <= number && number <= 4; }

struct QuantizeParams {
  int64_t stack, rows, columns;  // of x
  QuantizeBlock block;           // of x, and of its transpose: BlockOf()
  bool copy, transpose;          // which are results
  bool power_of_two;
  DType dtype;         // of x
  DType values_dtype;  // of values
  bool again = false;  // x has a scale; a block has 128 columns, and one or 128 rows
  QuantizeSource source = QuantizeSource::kGiven;
  Activation activation = Activation::kNone;
  // If not 0, the rows of x are those of so many groups, one group after the other. The copy has
  // blocks of {1, 128}, the transpose these or {128, 128}. In it each group begins a block of 128:
  // what fills up a group's last block are zeros. Scales of {1, 128} are [blocks, columns], as
  // products read them. Rows of no group are not read, nor written in the copy; blocks of no group
  // are not written, or zeros with `fill`.
  int64_t groups = 0;
  bool fill = false;

  // Of x's copy, or of the transpose.
  JFLUX_HD constexpr QuantizeBlock BlockOf(bool transposed) const {
    return transposed || groups == 0 ? block : QuantizeBlock{1, kQuantizeTile};
  }
  constexpr bool IsPair() const {
    return source == QuantizeSource::kGradients || source == QuantizeSource::kPair;
  }

  // Whether no CTA sees all elements of a block, so that one pass over x finds the largest of each
  // and a second one rounds. A row alone is one CTA's.
  constexpr bool HasMaxima() const {
    return (block.rows == -1 || block.columns == -1) && (transpose || block.rows != 1);
  }
  // Of all copies, and of the transpose of one.
  constexpr int64_t Scales() const {
    return stack * BlockOf(false).Scales(rows, columns) * (IsPair() ? 2 : 1);
  }
  // The columns of the transpose, and its scales.
  constexpr int64_t TransposedColumns() const {
    return groups == 0 ? rows : kQuantizeTile * MostGroupBlocks(rows, groups, kQuantizeTile);
  }
  constexpr int64_t TransposedScales() const {
    return stack * BlockOf(true).Scales(columns, TransposedColumns());
  }
  constexpr int64_t Maxima() const {
    return HasMaxima() ? (copy ? Scales() : 0) + (transpose ? TransposedScales() : 0) : 0;
  }
};

struct Quantized {
  uint8_t* values;
  float* scale;
  // The largest magnitude of each block, as bits of a float, of which the order is the numbers';
  // null without HasMaxima().
  uint32_t* maxima;
};

// What an element's rounding lost, summed up.
struct QuantizeLosses {
  int32_t flushed, saturated;
};

// The type of x that is quantised again.
inline constexpr DType kQuantizedAgain = DType::kF8E4M3FN;

// A scale of x: one for each row or all, and for each 128 columns or all.
struct ScaleOfX {
  const float* scale;
  int32_t down, across;  // from a row's to the next one's, and from a tile's
};

struct QuantizeArrays {
  const void* x;
  const float* scale;      // in place of x's own; null: none
  Quantized results[3];    // of x, of its transpose, and of a second transpose
  QuantizeLosses* losses;  // of x; null: nobody asks
  ScaleOfX x_scale{};
  const void* factor = nullptr;  // as x, or null
  const void* dy = nullptr;
  const int32_t* group_sizes = nullptr;  // [groups], or null
};

// Enqueues the call on `stream`, on the current device: false and *error if it cannot.
bool LaunchQuantize(const QuantizeParams& params, const QuantizeArrays& arrays, cudaStream_t stream,
                    std::string* error);

// Loads the kernels on the current device.
bool LoadQuantizeKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_QUANTIZE_QUANTIZE_H_
