#include "runtime/cpu_matmul.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/numbers.h"

namespace jflux {
namespace {

template <typename T>
using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*,
                      const T*, const int*, const T*, const int*, const T*, T*, const int*);

Gemm<float> g_sgemm = nullptr;
Gemm<double> g_dgemm = nullptr;

Gemm<float> BlasOf(float) { return g_sgemm; }
Gemm<double> BlasOf(double) { return g_dgemm; }
Gemm<int32_t> BlasOf(int32_t) { return nullptr; }

// Row-major c = a @ b is column-major c^T = b^T @ a^T.
template <typename T>
void MultiplyAs(const T* a, const T* w, int64_t ldw, bool transposed, int64_t rows, int64_t cols,
                int64_t k, T* c) {
  const T* b = w;
  if (const Gemm<T> gemm = BlasOf(T{})) {
    // Call BLAS in tiles of at most kSerial multiplications (SMP_THRESHOLD_MIN *
    // GEMM_MULTITHREAD_THRESHOLD), which OpenBLAS runs on the caller's thread. It splits larger
    // products over threads of its own, which serve one caller at a time and spin: eight ranks at
    // once were 20 times slower. Tiles of this size are as fast as one call.
    constexpr int64_t kSerial = 65536 * 4, kDepth = 256, kCols = 64;
    const int lda = static_cast<int>(k), ldb = static_cast<int>(ldw), ldc = static_cast<int>(cols);
    const T one = 1, zero = 0;
    const int64_t depth = std::min(k, kDepth), width = std::min(cols, kCols);
    const int64_t height = std::max<int64_t>(1, kSerial / std::max<int64_t>(1, depth * width));
    for (int64_t l = 0; l < k; l += depth) {
      const int kk = static_cast<int>(std::min(depth, k - l));
      for (int64_t j = 0; j < cols; j += width) {
        const int m = static_cast<int>(std::min(width, cols - j));
        const T* tile = transposed ? b + j * ldw + l : b + l * ldw + j;
        for (int64_t i = 0; i < rows; i += height) {
          const int n = static_cast<int>(std::min(height, rows - i));
          gemm(transposed ? "T" : "N", "N", &m, &n, &kk, &one, tile, &ldb, a + i * k + l, &lda,
               l == 0 ? &zero : &one, c + i * cols + j, &ldc);
        }
      }
    }
    return;
  }
  using Sum = std::conditional_t<std::is_integral_v<T>, uint32_t, T>;  // integers wrap
  std::vector<Sum> sums(cols);
  for (int64_t i = 0; i < rows; ++i) {
    std::fill(sums.begin(), sums.end(), Sum{0});
    const T* row = a + i * k;
    for (int64_t j = 0; transposed && j < cols; ++j) {
      for (int64_t l = 0; l < k; ++l) sums[j] += Sum(row[l]) * Sum(b[j * ldw + l]);
    }
    for (int64_t l = 0; !transposed && l < k; ++l) {
      for (int64_t j = 0; j < cols; ++j) sums[j] += Sum(row[l]) * Sum(b[l * ldw + j]);
    }
    for (int64_t j = 0; j < cols; ++j) c[i * cols + j] = static_cast<T>(sums[j]);
  }
}

template <typename To, typename From>
To Cast(From v) {
  if constexpr (std::is_class_v<To>) {
    return To::From(static_cast<float>(v));
  } else if constexpr (std::is_class_v<From>) {
    return Cast<To>(static_cast<float>(v));
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    constexpr auto kLeast = std::numeric_limits<To>::min(), kMost = std::numeric_limits<To>::max();
    if (v != v) return 0;
    if (v <= static_cast<From>(kLeast)) return kLeast;
    return v >= static_cast<From>(kMost) ? kMost : static_cast<To>(v);
  } else {
    return static_cast<To>(v);
  }
}

}  // namespace

void SetBlas(void* sgemm, void* dgemm) {
  g_sgemm = reinterpret_cast<Gemm<float>>(sgemm);
  g_dgemm = reinterpret_cast<Gemm<double>>(dgemm);
}

void Convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t count) {
  if (count == 0) return;  // the arrays may be null
  if (src_dtype == dst_dtype) {
    std::memcpy(dst, src, count * SizeOf(src_dtype));
    return;
  }
  WithFormat<kAllFormats>(src_dtype, [&](auto from) {
    WithFormat<kAllFormats>(dst_dtype, [&](auto to) {
      const auto* s = static_cast<const Number<from>*>(src);
      auto* d = static_cast<Number<to>*>(dst);
      for (int64_t i = 0; i < count; ++i) d[i] = Cast<Number<to>>(s[i]);
    });
  });
}

void Accumulate(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t count) {
  WithFormat(src_dtype, [&](auto from) {
    const auto* s = static_cast<const Number<from>*>(src);
    if (dst_dtype == DType::kF64) {
      auto* d = static_cast<double*>(dst);
      for (int64_t i = 0; i < count; ++i) d[i] += Cast<double>(s[i]);
    } else {
      auto* d = static_cast<float*>(dst);
      for (int64_t i = 0; i < count; ++i) d[i] += Cast<float>(s[i]);
    }
  });
}

CpuRhs::CpuRhs(const void* w, DType dtype, int64_t k, int64_t n, bool transposed, DType a_dtype)
    : a_dtype_(a_dtype),
      compute_(FormatOf(dtype).accumulator),
      k_(k),
      n_(n),
      transposed_(transposed),
      w_(w) {
  if (dtype == compute_) return;
  converted_.resize(k * n * SizeOf(compute_));
  Convert(w, dtype, converted_.data(), compute_, k * n);
  w_ = converted_.data();
}

void CpuRhs::Multiply(const void* a, int64_t rows, int64_t col0, int64_t cols, void* c) const {
  const int64_t ld = transposed_ ? k_ : n_;
  const int64_t first = transposed_ ? col0 * k_ : col0;
  WithFormat<SetOf(DType::kF32, DType::kF64, DType::kS32)>(compute_, [&](auto format) {
    using T = Number<format>;
    std::vector<T> wide;
    const auto* left = static_cast<const T*>(a);
    if (a_dtype_ != compute_) {
      wide.resize(rows * k_);
      Convert(a, a_dtype_, wide.data(), compute_, rows * k_);
      left = wide.data();
    }
    MultiplyAs(left, static_cast<const T*>(w_) + first, ld, transposed_, rows, cols, k_,
               static_cast<T*>(c));
  });
}

}  // namespace jflux
