// Scales of a product under test, and what the product is with them.
#ifndef JFLUX_TESTS_CC_SIMT_SCALED_H_
#define JFLUX_TESTS_CC_SIMT_SCALED_H_

#include <cstdint>
#include <vector>

#include "gpu/gemm_config.h"
#include "ranks.h"

namespace jflux::simt {

// Of x's rows and w's columns, or of their blocks too. They differ by row, column and block, and
// sums stay whole numbers.
struct TestScales {
  Scales kind;
  int64_t rows, k, n;
  std::vector<float> x, w;

  TestScales(Scales kind, int64_t rows, int64_t k, int64_t n) : kind(kind), rows(rows), k(k), n(n) {
    if (kind == Scales::kNone) return;
    for (int64_t i = 0; i < rows * KBlocks(); ++i) x.push_back(i % 3 == 0 ? 2 : 1);
    for (int64_t i = 0; i < CeilDiv(n, ColumnBlock()) * KBlocks(); ++i) {
      w.push_back(i % 5 < 2 ? -1 : 1);
    }
  }
  int64_t KBlocks() const {
    return kind == Scales::kOfBlocks ? CeilDiv<int64_t>(k, kScaleBlock) : 1;
  }
  int64_t ColumnBlock() const { return kind == Scales::kOfBlocks ? kScaleBlock : 1; }

  // a [rows, k] @ b [k, n], or b [n, k] if `transposed`.
  Values Product(const Values& a, const Values& b, bool transposed) const {
    if (kind == Scales::kNone) return jflux::Product(a, b, rows, k, n, transposed);
    const int64_t size = KBlocks() == 1 ? k : kScaleBlock;
    Values y(rows * n);
    for (int64_t i = 0; i < rows * n; ++i) {
      const int64_t row = i / n, column = i % n;
      for (int64_t l = 0; l < k; ++l) {
        y[i] += a[row * k + l] * b[transposed ? column * k + l : l * n + column] *
                x[row * KBlocks() + l / size] * w[column / ColumnBlock() * KBlocks() + l / size];
      }
    }
    return y;
  }
};

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_SCALED_H_
