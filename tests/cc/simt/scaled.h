// Scales of a product under test, and what the product is with them.
#ifndef JFLUX_TESTS_CC_SIMT_SCALED_H_
#define JFLUX_TESTS_CC_SIMT_SCALED_H_

#include <algorithm>
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
  std::vector<float> x, w, given_x, given_w, rolled_x, rolled_w;

  // `twice`: a launcher gets the entries of k twice, one after the other.
  TestScales(Scales kind, int64_t rows, int64_t k, int64_t n, bool twice = false)
      : kind(kind), rows(rows), k(k), n(n) {
    if (kind == Scales::kNone) return;
    for (int64_t i = 0; i < rows * KBlocks(); ++i) x.push_back(i % 3 == 0 ? 2 : 1);
    for (int64_t i = 0; i < CeilDiv(n, ColumnBlock()) * KBlocks(); ++i) {
      w.push_back(i % 5 < 2 ? -1 : 1);
    }
    rolled_x = x, rolled_w = w;
    std::rotate(rolled_x.begin(), rolled_x.begin() + 1, rolled_x.end());
    std::rotate(rolled_w.begin(), rolled_w.begin() + 1, rolled_w.end());
    given_x = Given(x, twice), given_w = Given(w, twice);
    rolled_x = Given(rolled_x, twice), rolled_w = Given(rolled_w, twice);
  }
  int64_t KBlocks() const {
    return kind == Scales::kOfBlocks ? CeilDiv<int64_t>(k, kScaleBlock) : 1;
  }
  int64_t ColumnBlock() const { return kind == Scales::kOfBlocks ? kScaleBlock : 1; }

  // Gives them to a launcher. `rolls`: each row and column gets those of the next one, or its
  // block.
  template <typename Arrays>
  void Give(Arrays* arrays, bool rolls = false) const {
    arrays->scales = kind;
    if (kind == Scales::kNone) return;
    arrays->x_scale = (rolls ? rolled_x : given_x).data();
    arrays->w_scale = (rolls ? rolled_w : given_w).data();
  }

  std::vector<float> Given(const std::vector<float>& scale, bool twice) const {
    if (!twice) return scale;
    std::vector<float> given;
    for (auto entry = scale.begin(); entry != scale.end(); entry += KBlocks()) {
      for (int time = 0; time < 2; ++time) given.insert(given.end(), entry, entry + KBlocks());
    }
    return given;
  }

  // a [rows, k] @ b [k, n], or b [n, k] if `transposed`.
  Values Product(const Values& a, const Values& b, bool transposed) const {
    return Product(a, b, transposed, k);
  }
  // The same of a term, of so many of k, whose scales begin at that block.
  Values Product(const Values& a, const Values& b, bool transposed, int64_t of_k,
                 int64_t first_block = 0) const {
    if (kind == Scales::kNone) return jflux::Product(a, b, rows, of_k, n, transposed);
    const int64_t blocks = KBlocks(), size = blocks == 1 ? k : kScaleBlock;
    if (blocks == 1) first_block = 0;
    Values y(rows * n);
    for (int64_t i = 0; i < rows * n; ++i) {
      const int64_t row = i / n, column = i % n;
      for (int64_t l = 0; l < of_k; ++l) {
        const int64_t block = first_block + l / size;
        y[i] += a[row * of_k + l] * b[transposed ? column * of_k + l : l * n + column] *
                x[row * blocks + block] * w[column / ColumnBlock() * blocks + block];
      }
    }
    return y;
  }
};

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_SCALED_H_
