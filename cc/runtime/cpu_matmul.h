// Local products of the CPU back end: a tile of op(A) @ op(B), computed in the accumulator of the
// operands' formats: fp32 and fp64 by the BLAS that SciPy exports, int32 by a loop.
#ifndef JFLUX_RUNTIME_CPU_MATMUL_H_
#define JFLUX_RUNTIME_CPU_MATMUL_H_

#include <cstdint>
#include <vector>

#include "core/format.h"

namespace jflux {

// Fortran BLAS entry points, as scipy.linalg.cython_blas exports them. Without them (C++ tests),
// all products use the loop.
void SetBlas(void* sgemm, void* dgemm);

// w, converted once to the accumulation type. Stored [k, n], or [n, k] if transposed. It
// multiplies an `a` of its own format, or of the one that is given.
class CpuRhs {
 public:
  CpuRhs(const void* w, DType dtype, int64_t k, int64_t n, bool transposed)
      : CpuRhs(w, dtype, k, n, transposed, dtype) {}
  CpuRhs(const void* w, DType dtype, int64_t k, int64_t n, bool transposed, DType a_dtype);

  DType compute_dtype() const { return compute_; }

  // c[rows, cols] (compute type, row stride cols) = a[rows, k] @ w[:, col0 : col0 + cols].
  void Multiply(const void* a, int64_t rows, int64_t col0, int64_t cols, void* c) const;

 private:
  DType a_dtype_, compute_;
  int64_t k_, n_;
  bool transposed_;
  const void* w_;
  std::vector<char> converted_;
};

// dst[i] = src[i] for i < count, between any two formats. To floats of fewer bits it rounds to
// nearest even; from floats to integers as XLA: towards zero, to the nearest that there is, and NaN
// to 0.
void Convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t count);

// dst[i] += src[i]; dst is fp32 or fp64.
void Accumulate(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t count);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_CPU_MATMUL_H_
