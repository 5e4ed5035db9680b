// grouped_matmul: y[r] = x[r] @ w[e] for the rows r of each group e, on one device.
// grouped_matmul_dw: dw[e] = x_e^T @ dy_e, its gradient with respect to w.
//
// Rows lie group after group. Group e has group_sizes[e] rows, from the sum of the sizes before it:
//
//   rows      0 .. s0 | s0 .. s0 + s1 | ... | sum .. M
//   weight    w[0]    | w[1]          | ... | none: y is 0, and dw takes nothing from them
//
// group_sizes is read on the device, by the kernel. Sizes below 0, and sizes that sum to more than
// M, are an error that names the op and the number (SizesAreWrong says it in words); no memory
// outside of the arrays is touched.
//
// The calls (Params), their arrays, and the CPU back end's bodies. GPU: the launchers in
// grouped_matmul_cuda.h. Python: jflux/_ops/products/grouped_matmul.py.
#ifndef JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_H_
#define JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_H_

#include <cstdint>
#include <string>

#include "core/activation.h"
#include "core/dtype.h"

namespace jflux {

inline constexpr OpId kGroupedMatmulId{32}, kGroupedMatmulDwId{33};

// The compiled GPU kernel to run; all 0: the kernel that the heuristic takes.
struct TileChoice {
  int32_t columns = 0;
  int32_t cluster_m = 0;  // CTAs one below the other
};

// One weight w0, or two of the same shape if `gated`. In the accumulation type, rounded once:
//
//   p_i = x[r] @ w_i[e]
//   y[r] = scale[r] * activation(p_0)          without a gate
//   y[r] = scale[r] * activation(p_0) * p_1    gated
//   sums_i[r] = p_i                            if `sums`: what backward needs of an activation
struct GroupedMatmulParams {
  int64_t m;              // rows of x and y
  int64_t k;              // columns of x
  int64_t n;              // columns of y, and of each weight
  int64_t groups;         // E
  DType dtype;            // of x and the weights; accumulated in fp32, fp64 in fp64
  DType out_dtype;        // of y and the sums
  bool transpose_rhs;     // weights are stored [E, n, k]
  Activation activation;  // kNone without a gate: y is the product
  bool gated;             // needs an activation
  bool scaled;            // there is a row scale
  bool sums;              // also write the sums
  TileChoice tile;

  int Weights() const { return gated ? 2 : 1; }
};

struct GroupedMatmulArrays {
  const void* x;               // [m, k]
  const void* w[2];            // [groups, k, n], or [groups, n, k] if transpose_rhs
  const int32_t* group_sizes;  // [groups]
  const float* row_scale;      // [m], or null
  void* y;                     // [m, n]
  void* sums[2];               // [m, n] each, or null
};

// dw[e] = sum over the rows r of group e of x[r]^T dy[r], accumulated in fp32 (fp64 for fp64) and
// rounded once. Exactly 0 for a group without rows. In one order of rows: the same bits each time.
// For weights stored [E, n, k], the caller swaps x and dy.
struct GroupedMatmulDwParams {
  int64_t m;        // rows of x and dy
  int64_t k;        // columns of x
  int64_t n;        // columns of dy
  int64_t groups;   // E
  DType dtype;      // of x and dy
  DType out_dtype;  // of dw
  TileChoice tile;
};

struct GroupedMatmulDwArrays {
  const void* x;               // [m, k]
  const void* dy;              // [m, n]
  const int32_t* group_sizes;  // [groups]
  void* dw;                    // [groups, k, n]
};

// What is wrong with the sizes of `groups` groups of m rows; empty if nothing is.
std::string SizesAreWrong(const int32_t* group_sizes, int64_t groups, int64_t m);

// The CPU back end's bodies. The sizes are right.
void GroupedMatmulCpu(const GroupedMatmulParams& params, const GroupedMatmulArrays& arrays);
void GroupedMatmulDwCpu(const GroupedMatmulDwParams& params, const GroupedMatmulDwArrays& arrays);

}  // namespace jflux

#endif  // JFLUX_OPS_GROUPED_MATMUL_GROUPED_MATMUL_H_
