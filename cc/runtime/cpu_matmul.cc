#include "runtime/cpu_matmul.h"

#include <algorithm>
#include <cstring>

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
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      T sum = 0;
      for (int64_t l = 0; l < k; ++l)
        sum += a[i * k + l] * (transposed ? b[j * ldw + l] : b[l * ldw + j]);
      c[i * cols + j] = sum;
    }
  }
}

template <typename To, typename From>
To Cast(From v) {
  if constexpr (std::is_same_v<To, BF16> || std::is_same_v<To, F16>) {
    return To::From(static_cast<float>(v));
  } else if constexpr (std::is_same_v<From, BF16> || std::is_same_v<From, F16>) {
    return static_cast<To>(static_cast<float>(v));
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
  WithFormat(src_dtype, [&](auto from) {
    WithFormat(dst_dtype, [&](auto to) {
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

CpuRhs::CpuRhs(const void* w, DType dtype, int64_t k, int64_t n, bool transposed)
    : dtype_(dtype),
      compute_(FormatOf(dtype).accumulator),
      k_(k),
      n_(n),
      transposed_(transposed),
      w_(w) {
  if (dtype_ == compute_) return;
  converted_.resize(k * n);
  Convert(w, dtype_, converted_.data(), DType::kF32, k * n);
  w_ = converted_.data();
}

void CpuRhs::Multiply(const void* a, int64_t rows, int64_t col0, int64_t cols, void* c) const {
  const int64_t ld = transposed_ ? k_ : n_;
  const int64_t first = transposed_ ? col0 * k_ : col0;
  if (compute_ == DType::kF64) {
    MultiplyAs(static_cast<const double*>(a), static_cast<const double*>(w_) + first, ld,
               transposed_, rows, cols, k_, static_cast<double*>(c));
    return;
  }
  std::vector<float> wide;
  const auto* a32 = static_cast<const float*>(a);
  if (dtype_ != DType::kF32) {
    wide.resize(rows * k_);
    Convert(a, dtype_, wide.data(), DType::kF32, rows * k_);
    a32 = wide.data();
  }
  MultiplyAs(a32, static_cast<const float*>(w_) + first, ld, transposed_, rows, cols, k_,
             static_cast<float*>(c));
}

}  // namespace jflux
