// The CPU back end's arithmetic: conversions against the definitions of the formats, products
// against a double loop, and the arguments passed to a BLAS.
#include "runtime/cpu_matmul.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "testing.h"

namespace jflux {
namespace {

constexpr DType kTypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

// A 16-bit format by its definition (exponent and mantissa bits), independent of the conversions.
struct Format {
  DType dtype;
  int mantissa_bits, bias;

  int MaxExponent() const { return (1 << (15 - mantissa_bits)) - 1; }
  uint16_t Infinity() const { return static_cast<uint16_t>(MaxExponent() << mantissa_bits); }
  double ValueOf(uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    double magnitude;
    if (exponent == MaxExponent()) {
      magnitude = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
      magnitude = std::ldexp(mantissa, 1 - bias - mantissa_bits);
    } else {
      magnitude = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    }
    return bits & 0x8000 ? -magnitude : magnitude;
  }
  // Nearest, ties to even, by search among all values. The value after the largest finite one
  // counts as infinity, as IEEE 754 rounds.
  uint16_t Nearest(double v) const {
    const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
    const long double target = std::fabs(static_cast<long double>(v));
    uint16_t low = 0, high = Infinity();  // ValueOf(low) <= target < the value after high
    if (std::isinf(v)) return sign | high;
    while (high - low > 1) {
      const auto middle = static_cast<uint16_t>((low + high) / 2);
      (ValueOf(middle) <= target ? low : high) = middle;
    }
    const long double above =
        high == Infinity() ? std::ldexp(1.0L, MaxExponent() - bias) : ValueOf(high);
    const long double down = target - ValueOf(low), up = above - target;
    return sign | (down < up || (down == up && low % 2 == 0) ? low : high);
  }
};
constexpr Format kHalf{DType::kF16, 10, 15}, kBrain{DType::kBF16, 7, 127};

template <typename From, typename To>
std::vector<To> Converted(const std::vector<From>& from, DType from_dtype, DType to_dtype) {
  std::vector<To> to(from.size());
  Convert(from.data(), from_dtype, to.data(), to_dtype, static_cast<int64_t>(from.size()));
  return to;
}

std::vector<uint16_t> AllPatterns() {
  std::vector<uint16_t> all(1 << 16);
  for (int i = 0; i < 1 << 16; ++i) all[i] = static_cast<uint16_t>(i);
  return all;
}

bool SameValue(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

TEST(SixteenBitsToWider) {
  for (const Format& f : {kHalf, kBrain}) {
    const auto bits = AllPatterns();
    const auto f32 = Converted<uint16_t, float>(bits, f.dtype, DType::kF32);
    const auto f64 = Converted<uint16_t, double>(bits, f.dtype, DType::kF64);
    for (int i = 0; i < 1 << 16; ++i) {
      EXPECT(SameValue(f32[i], f.ValueOf(bits[i]))) << i << " gives " << f32[i];
      EXPECT(SameValue(f64[i], f.ValueOf(bits[i]))) << i << " gives " << f64[i];
    }
  }
}

TEST(RoundTripKeepsEveryPattern) {
  for (const Format& f : {kHalf, kBrain}) {
    const auto bits = AllPatterns();
    for (DType wide : {DType::kF32, DType::kF64}) {
      std::vector<double> storage(bits.size());
      Convert(bits.data(), f.dtype, storage.data(), wide, bits.size());
      std::vector<uint16_t> back(bits.size());
      Convert(storage.data(), wide, back.data(), f.dtype, bits.size());
      for (int i = 0; i < 1 << 16; ++i) {
        const bool nan = std::isnan(f.ValueOf(bits[i]));
        EXPECT(nan ? std::isnan(f.ValueOf(back[i])) : back[i] == bits[i]) << i << ": " << back[i];
        EXPECT((back[i] & 0x8000) == (bits[i] & 0x8000)) << i;
      }
    }
  }
}

TEST(SixteenBitsToTheOtherSixteen) {
  const auto bits = AllPatterns();
  for (const Format& f : {kHalf, kBrain}) {
    const Format& to = f.dtype == DType::kF16 ? kBrain : kHalf;
    const auto got = Converted<uint16_t, uint16_t>(bits, f.dtype, to.dtype);
    for (int i = 0; i < 1 << 16; ++i) {
      const double v = f.ValueOf(bits[i]);
      const bool ok = std::isnan(v) ? std::isnan(to.ValueOf(got[i])) : got[i] == to.Nearest(v);
      EXPECT(ok) << "pattern " << i << " value " << v << " gives " << got[i];
    }
  }
}

TEST(Fp32RoundsToNearestEven) {
  for (const Format& f : {kHalf, kBrain}) {
    std::vector<float> values;
    for (uint16_t bits = 0; bits < f.Infinity(); ++bits) {
      // Each value, the midpoint to the next, and the adjacent floats of both.
      const auto v = static_cast<float>(f.ValueOf(bits));
      const double next = bits + 1 == f.Infinity() ? std::ldexp(1.0, f.MaxExponent() - f.bias)
                                                   : f.ValueOf(bits + 1);
      const auto middle = static_cast<float>((f.ValueOf(bits) + next) / 2);
      for (float c : {v, middle}) {
        for (float s : {1.0f, -1.0f}) {
          values.push_back(s * c);
          values.push_back(s * std::nextafter(c, INFINITY));
          values.push_back(s * std::nextafter(c, 0.0f));
        }
      }
    }
    std::mt19937 random(7);
    for (int i = 0; i < 500000; ++i) {
      const auto u = static_cast<uint32_t>(random());
      float v;
      std::memcpy(&v, &u, 4);
      if (!std::isnan(v)) values.push_back(v);
    }
    values.push_back(INFINITY);
    values.push_back(-INFINITY);
    values.push_back(std::numeric_limits<float>::max());
    values.push_back(std::numeric_limits<float>::denorm_min());
    const auto got = Converted<float, uint16_t>(values, DType::kF32, f.dtype);
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT(got[i] == f.Nearest(values[i]))
          << values[i] << " gives " << got[i] << ", not " << f.Nearest(values[i]);
    }
  }
}

TEST(NanStaysNan) {
  std::vector<float> nans;
  for (uint32_t mantissa : {1u, 0x1fffu, 0x2000u, 0xffffu, 0x10000u, 0x400000u, 0x7fffffu}) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      const uint32_t u = sign | 0x7f800000u | mantissa;
      float v;
      std::memcpy(&v, &u, 4);
      nans.push_back(v);
    }
  }
  const std::vector<double> wide(nans.begin(), nans.end());
  for (const Format& f : {kHalf, kBrain}) {
    for (uint16_t b : Converted<float, uint16_t>(nans, DType::kF32, f.dtype)) {
      EXPECT(std::isnan(f.ValueOf(b))) << b;
    }
    for (uint16_t b : Converted<double, uint16_t>(wide, DType::kF64, f.dtype)) {
      EXPECT(std::isnan(f.ValueOf(b))) << b;
    }
  }
}

TEST(Fp64GoesThroughFp32) {
  std::mt19937_64 random(3);
  std::vector<double> values;
  for (int i = 0; i < 100000; ++i) {
    const double v =
        std::ldexp(static_cast<double>(random()), static_cast<int>(random() % 60) - 90);
    values.push_back(i % 2 ? v : -v);
  }
  std::vector<float> narrow(values.size());
  for (size_t i = 0; i < values.size(); ++i) narrow[i] = static_cast<float>(values[i]);
  EXPECT((Converted<double, float>(values, DType::kF64, DType::kF32)) == narrow);
  for (const Format& f : {kHalf, kBrain}) {
    EXPECT((Converted<double, uint16_t>(values, DType::kF64, f.dtype)) ==
           (Converted<float, uint16_t>(narrow, DType::kF32, f.dtype)));
  }
  const std::vector<double> widened(narrow.begin(), narrow.end());
  EXPECT((Converted<float, double>(narrow, DType::kF32, DType::kF64)) == widened);
}

TEST(FloatsToIntegersAsXla) {
  const std::vector<float> values = {0, -0.9f, 1.9f, -1.9f, 127, 128, -128, -1e9f, INFINITY, NAN};
  EXPECT((Converted<float, int8_t>(values, DType::kF32, DType::kS8)) ==
         (std::vector<int8_t>{0, 0, 1, -1, 127, 127, -128, -128, 127, 0}));
  const std::vector<double> wide = {2147483647.0, 2147483648.0, -2147483648.0, -3e9};
  EXPECT((Converted<double, int32_t>(wide, DType::kF64, DType::kS32)) ==
         (std::vector<int32_t>{INT32_MAX, INT32_MAX, INT32_MIN, INT32_MIN}));
}

TEST(IntegersWrap) {
  const std::vector<int8_t> a(140'000, -128), w(140'000, -128);
  const CpuRhs rhs(w.data(), DType::kS8, 140'000, 1, false);
  int32_t c;
  rhs.Multiply(a.data(), 1, 0, 1, &c);
  EXPECT_EQ(c, static_cast<int32_t>(140'000u << 14));
}

TEST(SameTypeCopiesBits) {
  std::vector<unsigned char> bytes(8 * 32);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 37 | 0x80);
  for (DType t : kTypes) {
    std::vector<unsigned char> out(bytes.size());
    Convert(bytes.data(), t, out.data(), t, static_cast<int64_t>(bytes.size()) / SizeOf(t));
    EXPECT(out == bytes);
  }
}

// Values in `dtype`, as an array in memory.
std::vector<char> Stored(const std::vector<double>& values, DType dtype) {
  std::vector<char> bytes(values.size() * SizeOf(dtype));
  Convert(values.data(), DType::kF64, bytes.data(), dtype, static_cast<int64_t>(values.size()));
  return bytes;
}

std::vector<double> SmallIntegers(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<double> v(count);
  for (double& e : v) e = static_cast<int>(random() % 9) - 4;
  return v;
}

TEST(AccumulateAdds) {
  const auto a = SmallIntegers(101, 1), b = SmallIntegers(101, 2);
  for (DType from : kTypes) {
    for (DType to : {DType::kF32, DType::kF64}) {
      auto sum = Stored(a, to);
      Accumulate(Stored(b, from).data(), from, sum.data(), to, 101);
      std::vector<double> got(101);
      Convert(sum.data(), to, got.data(), DType::kF64, 101);
      for (int i = 0; i < 101; ++i) EXPECT_EQ(got[i], a[i] + b[i]);
    }
  }
}

void CheckMultiply() {
  const struct {
    int64_t rows, k, n, col0, cols;
  } shapes[] = {
      {1, 1, 1, 0, 1}, {5, 7, 9, 0, 9}, {4, 16, 24, 8, 8}, {33, 20, 17, 5, 12}, {16, 3, 40, 39, 1}};
  for (const ProductFormats& formats : kProducts) {
    const auto [dtype, w_dtype, y, others] = formats;
    for (bool transposed : {false, true}) {
      for (const auto& s : shapes) {
        const auto a = SmallIntegers(s.rows * s.k, 11), w = SmallIntegers(s.k * s.n, 12);
        const auto w_stored = Stored(w, w_dtype), a_stored = Stored(a, dtype);
        const CpuRhs rhs(w_stored.data(), w_dtype, s.k, s.n, transposed, dtype);
        EXPECT_EQ(rhs.compute_dtype(), FormatOf(dtype).accumulator);
        // One extra element, to detect writes past the end.
        std::vector<char> c((s.rows * s.cols + 1) * SizeOf(rhs.compute_dtype()), '\x55');
        rhs.Multiply(a_stored.data(), s.rows, s.col0, s.cols, c.data());
        EXPECT(std::all_of(c.end() - SizeOf(rhs.compute_dtype()), c.end(),
                           [](char byte) { return byte == '\x55'; }));
        std::vector<double> got(s.rows * s.cols);
        Convert(c.data(), rhs.compute_dtype(), got.data(), DType::kF64, s.rows * s.cols);
        for (int64_t i = 0; i < s.rows; ++i) {
          for (int64_t j = 0; j < s.cols; ++j) {
            double want = 0;
            for (int64_t l = 0; l < s.k; ++l) {
              const int64_t column = s.col0 + j;
              want += a[i * s.k + l] * (transposed ? w[column * s.k + l] : w[l * s.n + column]);
            }
            EXPECT_EQ(got[i * s.cols + j], want)
                << "dtype " << dtype << " transposed " << transposed << " at " << i << "," << j;
          }
        }
      }
    }
  }
}

TEST(MultiplyWithTheLoop) { CheckMultiply(); }

// Reference BLAS: c = alpha op(a) op(b) + beta c, column-major, with the Fortran argument checks.
int g_gemm_calls = 0;
template <typename T>
void FortranGemm(const char* ta, const char* tb, const int* m, const int* n, const int* k,
                 const T* alpha, const T* a, const int* lda, const T* b, const int* ldb,
                 const T* beta, T* c, const int* ldc) {
  ++g_gemm_calls;
  const bool at = *ta == 'T', bt = *tb == 'T';
  EXPECT(*lda >= std::max(1, at ? *k : *m) && *ldb >= std::max(1, bt ? *n : *k) &&
         *ldc >= std::max(1, *m));
  for (int j = 0; j < *n; ++j) {
    for (int i = 0; i < *m; ++i) {
      T sum = 0;
      for (int l = 0; l < *k; ++l) {
        sum += (at ? a[l + i * *lda] : a[i + l * *lda]) * (bt ? b[j + l * *ldb] : b[l + j * *ldb]);
      }
      T& out = c[i + j * *ldc];
      out = *alpha * sum + (*beta == 0 ? T{0} : *beta * out);  // beta 0: c may be uninitialised
    }
  }
}

TEST(MultiplyWithABlas) {
  SetBlas(reinterpret_cast<void*>(&FortranGemm<float>),
          reinterpret_cast<void*>(&FortranGemm<double>));
  g_gemm_calls = 0;
  CheckMultiply();
  SetBlas(nullptr, nullptr);
  EXPECT_EQ(g_gemm_calls, (std::size(kProducts) - 1) * 2 * 5);  // none of integers
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
