// The CPU bodies of grouped_matmul and grouped_matmul_dw against triple loops.
#include "ops/grouped_matmul/grouped_matmul.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "runtime/cpu_matmul.h"
#include "testing.h"

namespace jflux {
namespace {

constexpr DType kTypes[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

// Numbers in a type, and the same in double.
struct Array {
  DType dtype;
  std::vector<double> values;
  std::vector<char> bytes;

  Array(DType dtype, std::vector<double> v)
      : dtype(dtype), values(std::move(v)), bytes(values.size() * SizeOf(dtype)) {
    const auto count = static_cast<int64_t>(values.size());
    Convert(values.data(), DType::kF64, bytes.data(), dtype, count);
    Read();
  }
  void Read() {
    const auto count = static_cast<int64_t>(values.size());
    Convert(bytes.data(), dtype, values.data(), DType::kF64, count);
  }
};

Array Random(std::mt19937& rng, DType dtype, int64_t count) {
  std::normal_distribution<double> normal;
  std::vector<double> v(count);
  for (double& x : v) x = normal(rng);
  return Array(dtype, v);
}

// What a call must overwrite.
Array Garbage(DType dtype, int64_t count) {
  return Array(dtype, std::vector<double>(count, std::numeric_limits<double>::quiet_NaN()));
}

double Tolerance(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 0x1p-9;
    case DType::kBF16:
      return 0x1p-6;
    case DType::kF32:
      return 1e-5;
    case DType::kF64:
      return 1e-13;
  }
  return 0;
}

// Of the two types, the one that says how exact a result is.
DType Coarser(DType in, DType out) { return in == DType::kF64 ? out : in; }

bool Near(double got, double want, DType dtype) {
  return std::abs(got - want) <= Tolerance(dtype) * (8 + std::abs(want));
}

double Reference(Activation a, double x) {
  switch (a) {
    case Activation::kNone:
      return x;
    case Activation::kGelu:
      return x * 0.5 * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
  }
  return 0;
}

struct Sizes {
  int64_t m, k, n;
  std::vector<int32_t> groups;
};
const Sizes kSizes[] = {
    {6, 3, 5, {2, 0, 4}},              // a group without rows
    {7, 4, 2, {0, 3, 0}},              // rows past the sum
    {3, 2, 2, {0, 0}},                 // all of them
    {300, 9, 1030, {140, 0, 0, 129}},  // several tiles each way
};

// The group of each row; -1 past the sum.
std::vector<int> GroupsOf(const Sizes& s) {
  std::vector<int> of(s.m, -1);
  int64_t row = 0;
  for (size_t e = 0; e < s.groups.size(); ++e) {
    for (int32_t i = 0; i < s.groups[e]; ++i) of[row++] = static_cast<int>(e);
  }
  return of;
}

TEST(EqualsItsDefinition) {
  std::mt19937 rng(1);
  int variant = 0;
  for (const Sizes& s : kSizes) {
    for (const DType dtype : kTypes) {
      for (const Activation activation :
           {Activation::kNone, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu,
            Activation::kSilu}) {
        ++variant;
        const bool none = activation == Activation::kNone;
        GroupedMatmulParams p{s.m,
                              s.k,
                              s.n,
                              static_cast<int64_t>(s.groups.size()),
                              dtype,
                              variant % 3 == 0 ? DType::kF32 : dtype,
                              variant % 2 == 0,
                              activation,
                              !none && variant % 4 < 2,
                              variant % 3 != 1,
                              !none && variant % 5 < 3};
        p.terms = !p.gated && variant % 7 < 3 ? 2 : 1;
        const DType exact = Coarser(dtype, p.out_dtype);
        std::vector<Array> xs;
        for (int i = 0; i < p.terms; ++i) xs.push_back(Random(rng, dtype, s.m * s.k));
        const std::vector<int> group = GroupsOf(s);
        std::vector<Array> ws, sums;
        for (int i = 0; i < p.Operands(); ++i) {
          ws.push_back(Random(rng, dtype, p.groups * s.k * s.n));
          sums.push_back(Garbage(p.out_dtype, s.m * s.n));
        }
        const Array scale = Random(rng, DType::kF32, s.m);
        Array y = Garbage(p.out_dtype, s.m * s.n);
        GroupedMatmulArrays arrays{};
        for (int i = 0; i < p.terms; ++i) arrays.x[i] = xs[i].bytes.data();
        arrays.group_sizes = s.groups.data();
        arrays.row_scale = reinterpret_cast<const float*>(scale.bytes.data());
        arrays.y = y.bytes.data();
        for (int i = 0; i < p.Operands(); ++i) {
          arrays.w[i] = ws[i].bytes.data();
          arrays.sums[i] = sums[i].bytes.data();
        }
        GroupedMatmulCpu(p, arrays);
        y.Read();
        for (Array& one : sums) one.Read();
        for (int64_t r = 0; r < s.m; ++r) {
          for (int64_t c = 0; c < s.n; c += s.n > 100 ? 7 : 1) {
            double products[2] = {0, 0};
            for (int i = 0; i < p.Operands() && group[r] >= 0; ++i) {
              const Array& x = xs[p.terms == 2 ? i : 0];
              for (int64_t l = 0; l < s.k; ++l) {
                const int64_t at = p.transpose_rhs ? c * s.k + l : l * s.n + c;
                products[p.gated ? i : 0] +=
                    x.values[r * s.k + l] * ws[i].values[group[r] * s.k * s.n + at];
              }
            }
            double want = Reference(activation, products[0]) * (p.gated ? products[1] : 1);
            if (p.scaled) want *= scale.values[r];
            const int64_t at = r * s.n + c;
            EXPECT(Near(y.values[at], want, exact))
                << "y[" << r << ", " << c << "] is " << y.values[at] << " for " << want << " dtype "
                << dtype << " activation " << activation;
            if (group[r] < 0) EXPECT_EQ(y.values[at], 0);
            for (int i = 0; i < p.Weights() && p.sums; ++i) {
              EXPECT(Near(sums[i].values[at], products[i], exact)) << "sums " << r << " " << c;
            }
          }
        }
      }
    }
  }
}

TEST(WeightGradientEqualsItsDefinition) {
  std::mt19937 rng(2);
  for (const Sizes& s : kSizes) {
    for (const DType dtype : kTypes) {
      const auto groups = static_cast<int64_t>(s.groups.size());
      const DType out = s.m == 6 ? DType::kF32 : dtype, exact = Coarser(dtype, out);
      const GroupedMatmulDwParams p{s.m, s.k, s.n, groups, dtype, out};
      const std::vector<int> group = GroupsOf(s);
      Array x = Random(rng, dtype, s.m * s.k), dy = Random(rng, dtype, s.m * s.n);
      Array dw = Garbage(out, groups * s.k * s.n);
      GroupedMatmulDwCpu(p, {x.bytes.data(), dy.bytes.data(), s.groups.data(), dw.bytes.data()});
      dw.Read();
      for (int64_t e = 0; e < groups; ++e) {
        for (int64_t l = 0; l < s.k; ++l) {
          for (int64_t c = 0; c < s.n; c += s.n > 100 ? 7 : 1) {
            double want = 0;
            for (int64_t r = 0; r < s.m; ++r) {
              if (group[r] == e) want += x.values[r * s.k + l] * dy.values[r * s.n + c];
            }
            const double got = dw.values[(e * s.k + l) * s.n + c];
            EXPECT(Near(got, want, exact)) << got << " for " << want << " dtype " << dtype;
            if (s.groups[e] == 0) EXPECT_EQ(got, 0);
          }
        }
      }
    }
  }
}

TEST(WrongSizes) {
  const int32_t good[] = {3, 0, 5}, negative[] = {3, -1, 5};
  EXPECT_EQ(SizesAreWrong(good, 3, 8), "");
  EXPECT_EQ(SizesAreWrong(good, 3, 9), "");
  EXPECT_EQ(SizesAreWrong(good, 3, 7), "group_sizes sum to 8, and x has 7 rows");
  EXPECT_EQ(SizesAreWrong(negative, 3, 8), "group_sizes[1] is -1");
  const int32_t large[] = {INT32_MAX, INT32_MAX};  // whose sum is no int32
  EXPECT_EQ(SizesAreWrong(large, 2, 8), "group_sizes sum to 4294967294, and x has 8 rows");
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
