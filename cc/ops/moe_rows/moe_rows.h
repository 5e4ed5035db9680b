// moe_rows: rows between the order of tokens and that of experts, on one device. With R rows, T
// tokens of k slots each, and C columns:
//
//   combine   y [R, C], w f32 [T, k]    ->  [T, C]      sum over j of w[t, j] y[destination[t, j]]
//   spread    g [T, C], w f32 [T, k]    ->  [R, C]      w[s] g[s / k] of s = source[r]; else zeros,
//                                                       or nothing (MoeRowsParams::fill)
//   dots      y [R, C], g [T, C]        ->  f32 [T, k]  <y[destination[t, j]], g[t]>; else 0
//
// source i32 [R] and destination i32 [T, k] say the same; -1: there is none. Sums are in float32,
// and in the order of j. Weights without a row do not count, whatever they are.
//
// On CPUs it is plain lax. Python: jflux/_ops/experts/moe_rows.py, which says how the three are
// related.
#ifndef JFLUX_OPS_MOE_ROWS_MOE_ROWS_H_
#define JFLUX_OPS_MOE_ROWS_MOE_ROWS_H_

#include <cstdint>
#include <string>

#include "core/format.h"
#include "core/signal.h"
#include "runtime/cuda_device.h"

namespace jflux {

inline constexpr OpId kMoeRowsId{38};
inline constexpr OpFormats kMoeRowsFormats{SetOf(DType::kF16, DType::kBF16, DType::kF32),
                                           SetOf(DType::kF32)};

enum class MoeRowsForm : int64_t { kCombine, kSpread, kDots };

struct MoeRowsParams {
  MoeRowsForm form;
  int64_t rows, tokens, slots, columns;  // R, T, k, C
  DType dtype;                           // of y and g
  DType out_dtype;                       // that, or of a combine float32
  bool fill = true;                      // a spread writes zeros to rows that no slot has
};

struct MoeRowsArrays {
  const void *y, *g;           // those that the form takes; else null
  const float* w;              // likewise
  const int32_t* source;       // [R]
  const int32_t* destination;  // [T, k]
  void* out;
};

// Enqueues the call on `stream`, on the current device: false and *error if it cannot.
bool LaunchMoeRows(const MoeRowsParams& params, const MoeRowsArrays& arrays, cudaStream_t stream,
                   std::string* error);

// Loads the kernels on the current device.
bool LoadMoeRowsKernels(std::string* error);

}  // namespace jflux

#endif  // JFLUX_OPS_MOE_ROWS_MOE_ROWS_H_
