// The CPU back end of grouped_matmul and grouped_matmul_dw: group after group, on the caller's
// thread.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/numbers.h"
#include "ops/grouped_matmul/group_rows_cpu.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "runtime/cpu_matmul.h"

namespace jflux {
namespace {

constexpr int64_t kTileRows = 128, kTileColumns = 1024;

char* At(void* array, DType dtype, int64_t element) {
  return static_cast<char*>(array) + element * SizeOf(dtype);
}
const char* At(const void* array, DType dtype, int64_t element) {
  return static_cast<const char*>(array) + element * SizeOf(dtype);
}

template <typename T>
T Activate(Activation activation, T x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kGelu:
      return x * std::erfc(-x * static_cast<T>(0.70710678118654752440)) / 2;
    case Activation::kGeluTanh:
      return x / 2 *
             (1 + std::tanh(static_cast<T>(0.79788456080286535588) *
                            (x + static_cast<T>(0.044715) * x * x * x)));
    case Activation::kRelu:
      return x > 0 || std::isnan(x) ? x : 0;
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return x;
}

// sums += terms, of `count` numbers.
void AddTo(DType compute, char* sums, const char* terms, int64_t count) {
  const auto add = [&](auto* to, const auto* from) {
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
  };
  if (compute == DType::kF64) {
    add(reinterpret_cast<double*>(sums), reinterpret_cast<const double*>(terms));
  } else {
    add(reinterpret_cast<float*>(sums), reinterpret_cast<const float*>(terms));
  }
}

// y = scale * activation(p) [* other] over one row; in place.
template <typename T>
void Finish(const GroupedMatmulParams& p, T scale, T* product, const T* other, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T y = Activate(p.activation, product[i]);
    if (p.gated) y *= other[i];
    product[i] = p.scaled ? scale * y : y;
  }
}

}  // namespace

std::string SizesAreWrong(const int32_t* group_sizes, int64_t groups, int64_t m) {
  int64_t sum = 0;
  for (int64_t e = 0; e < groups; ++e) {
    if (group_sizes[e] < 0) {
      return "group_sizes[" + std::to_string(e) + "] is " + std::to_string(group_sizes[e]);
    }
    sum += group_sizes[e];
  }
  if (sum <= m) return "";
  return "group_sizes sum to " + std::to_string(sum) + ", and x has " + std::to_string(m) + " rows";
}

GroupRowsCpu::GroupRowsCpu(const GroupedMatmulParams& p, const void* const (&w)[2], int64_t group)
    : p_(p) {
  weights_.reserve(2);
  for (int i = 0; i < p.Operands(); ++i) {
    weights_.emplace_back(At(w[i], p.dtype, group * p.k * p.n), p.dtype, p.k, p.n, p.transpose_rhs);
  }
}

void GroupRowsCpu::Multiply(const void* x, int64_t first, int64_t count, const float* row_scale,
                            void* y, void* const (&sums)[2], const void* second) const {
  const DType compute = FormatOf(p_.dtype).accumulator;
  const int64_t tile_bytes = kTileRows * std::min(p_.n, kTileColumns) * SizeOf(compute);
  std::vector<char> products[2];
  for (int i = 0; i < p_.Operands(); ++i) products[i].resize(tile_bytes);
  for (int64_t row = 0; row < count; row += kTileRows) {
    const int64_t rows = std::min(kTileRows, count - row);
    for (int64_t col = 0; col < p_.n; col += kTileColumns) {
      const int64_t cols = std::min(kTileColumns, p_.n - col);
      for (int i = 0; i < p_.Operands(); ++i) {
        const void* const from = i > 0 && p_.terms == 2 ? second : x;
        weights_[i].Multiply(At(from, p_.dtype, row * p_.k), rows, col, cols, products[i].data());
      }
      if (p_.terms == 2) AddTo(compute, products[0].data(), products[1].data(), rows * cols);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t to = (first + row + r) * p_.n + col;
        char* product = At(products[0].data(), compute, r * cols);
        char* other = p_.gated ? At(products[1].data(), compute, r * cols) : nullptr;
        for (int i = 0; i < p_.Weights() && p_.sums; ++i) {
          Convert(i == 0 ? product : other, compute, At(sums[i], p_.out_dtype, to), p_.out_dtype,
                  cols);
        }
        const float scale = p_.scaled ? row_scale[first + row + r] : 1;
        if (compute == DType::kF64) {
          Finish<double>(p_, scale, reinterpret_cast<double*>(product),
                         reinterpret_cast<double*>(other), cols);
        } else {
          Finish<float>(p_, scale, reinterpret_cast<float*>(product),
                        reinterpret_cast<float*>(other), cols);
        }
        Convert(product, compute, At(y, p_.out_dtype, to), p_.out_dtype, cols);
      }
    }
  }
}

void FillRowsCpu(const GroupedMatmulParams& p, int64_t first, void* y, void* const (&sums)[2]) {
  const int64_t rest = (p.m - first) * p.n * SizeOf(p.out_dtype);
  const int byte = p.fill ? 0 : 0xff;  // where anything may be, NaN shows who reads it
  std::memset(At(y, p.out_dtype, first * p.n), byte, rest);
  for (int i = 0; i < p.Weights() && p.sums; ++i) {
    std::memset(At(sums[i], p.out_dtype, first * p.n), byte, rest);
  }
}

bool OffsetsAreRight(const GroupedMatmulParams& p, const int32_t* offsets, const WaitContext& ctx) {
  for (int64_t e = 0; e < p.groups; ++e) {
    const int64_t begin = offsets[e], end = offsets[e + 1];
    if (0 <= begin && begin <= end && end <= p.m) continue;
    const int64_t seen = end < begin ? end - begin : begin < 0 ? begin : end;
    ReportFault(ctx, FaultKind::kGroupSizes, ctx.rank, end < begin ? e : -1,
                static_cast<Signal>(p.m), static_cast<Signal>(seen));
    return false;
  }
  return true;
}

void GroupedMatmulCpu(const GroupedMatmulParams& p, const GroupedMatmulArrays& arrays) {
  int64_t first = 0;
  for (int64_t e = 0; e < p.groups; ++e) {
    const int64_t rows = arrays.group_sizes[e];
    if (rows == 0) continue;
    GroupRowsCpu(p, arrays.w, e)
        .Multiply(At(arrays.x[0], p.dtype, first * p.k), first, rows, arrays.row_scale, arrays.y,
                  arrays.sums, p.terms == 2 ? At(arrays.x[1], p.dtype, first * p.k) : nullptr);
    first += rows;
  }
  FillRowsCpu(p, first, arrays.y, arrays.sums);
}

void GroupedMatmulDwCpu(const GroupedMatmulDwParams& p, const GroupedMatmulDwArrays& arrays) {
  const int64_t size = SizeOf(p.dtype);
  std::vector<char> transposed, product;
  int64_t first = 0;
  for (int64_t e = 0; e < p.groups; ++e) {
    const int64_t rows = arrays.group_sizes[e];
    char* dw = At(arrays.dw, p.out_dtype, e * p.k * p.n);
    if (rows == 0) {
      std::memset(dw, 0, p.k * p.n * SizeOf(p.out_dtype));
      continue;
    }
    const CpuRhs dy(At(arrays.dy, p.dtype, first * p.n), p.dtype, rows, p.n, false);
    product.resize(kTileRows * std::min(p.n, kTileColumns) * SizeOf(dy.compute_dtype()));
    transposed.resize(kTileRows * rows * size);
    for (int64_t k = 0; k < p.k; k += kTileRows) {
      const int64_t height = std::min(kTileRows, p.k - k);
      for (int64_t r = 0; r < rows; ++r) {
        const char* from = At(arrays.x, p.dtype, (first + r) * p.k + k);
        for (int64_t i = 0; i < height; ++i) {
          std::memcpy(transposed.data() + (i * rows + r) * size, from + i * size, size);
        }
      }
      for (int64_t col = 0; col < p.n; col += kTileColumns) {
        const int64_t cols = std::min(kTileColumns, p.n - col);
        dy.Multiply(transposed.data(), height, col, cols, product.data());
        for (int64_t i = 0; i < height; ++i) {
          Convert(At(product.data(), dy.compute_dtype(), i * cols), dy.compute_dtype(),
                  At(dw, p.out_dtype, (k + i) * p.n + col), p.out_dtype, cols);
        }
      }
    }
    first += rows;
  }
}

}  // namespace jflux
