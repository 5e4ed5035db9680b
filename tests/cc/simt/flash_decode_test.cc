// The kernels of flash_decode and latent_decode in the simulator, against attention in double:
// cp.async in a ring, ldmatrix, mma.sync, shuffles, wgmma, and the second kernel, which merges
// parts.
#include "ops/flash_decode/flash_decode.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "ops/latent_decode/latent_decode.h"
#include "simt/machine.h"
#include "simt/values.h"
#include "testing.h"

namespace jflux {
namespace {

using simt::Array;
using simt::RandomArray;

// A copy that ends where memory does: reading past it ends the test.
template <typename T>
class Guarded {
 public:
  explicit Guarded(const Array<T>& array) {
    constexpr int64_t kPage = 4096;
    const int64_t bytes = array.size() * static_cast<int64_t>(sizeof(T));
    bytes_ = (bytes + kPage - 1) / kPage * kPage;
    base_ = static_cast<char*>(
        mmap(nullptr, bytes_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT(base_ != MAP_FAILED && mprotect(base_ + bytes_, kPage, PROT_NONE) == 0);
    data_ = reinterpret_cast<T*>(base_ + bytes_ - bytes);
    std::copy(array.data.begin(), array.data.end(), data_);
    bytes_ += kPage;
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(base_, bytes_); }
  const T* get() const { return data_; }
  double operator[](int64_t i) const { return static_cast<double>(static_cast<float>(data_[i])); }

 private:
  char* base_;
  T* data_;
  int64_t bytes_;
};

// Of kLatentWidth: of latent_decode, whose values are the first elements of keys.
struct Case {
  int64_t batch, heads, groups, width, positions, page_size, splits;
  double softcap;
  int64_t ranks = 1, rank = 0;  // of which the kernel is one
  int64_t tokens = 1;
  bool alibi = false, portable = false;  // portable: of latent_decode
};

// What a case is given wrongly.
struct Planted {
  int64_t sequence = -1;  // none
  int32_t length = 0;     // in place of its own, if `page` is -1
  int32_t page = -1;      // in place of the last one that the length needs
};

struct Sizes {
  float q = 1;       // of queries; keys' scales are its inverse
  float v = 1;       // of values, by their scales
  bool nan = false;  // the first sequence's first head has a NaN where it begins
};

// C: what the cache is of; e4m3 with scales.
template <typename T, typename C = T>
void Check(const Case& c, uint32_t seed, const Planted& planted = {},
           CacheScales scales = CacheScales::kNone, const Sizes& sizes = {}) {
  std::mt19937 random(seed);
  const int64_t kv_rows = c.batch * c.positions;
  auto q = RandomArray<T>(random, c.batch * c.tokens * c.heads * c.width);
  const bool is_latent = c.width == kLatentWidth;
  const int64_t columns = is_latent ? kLatentValues : c.width;  // of a result
  const auto keys = RandomArray<C>(random, kv_rows * c.groups * c.width);
  auto values = is_latent ? keys : RandomArray<C>(random, kv_rows * c.groups * c.width);
  const Guarded<C> k(keys);
  const bool of_rows = scales == CacheScales::kOfRows;
  Array<float> of_k((of_rows ? kv_rows : 1) * c.groups), of_v(of_k.size());
  for (float& scale : of_k.data) scale = std::exp2(static_cast<float>(random() % 5) - 2) / sizes.q;
  for (float& scale : of_v.data)
    scale = sizes.v * static_cast<float>(static_cast<int>(random() % 9) - 2);
  for (T& one : q.data) one = T(static_cast<float>(one) * sizes.q);
  const auto origin = static_cast<int32_t>(c.rank * c.positions);
  std::vector<DecodeBounds> bounds;
  for (int64_t b = 0; b < c.batch; ++b) {
    const int32_t first = origin + static_cast<int32_t>(random() % 20);
    // The last sequence attends to nothing.
    const int64_t left = c.ranks * c.positions - first;
    const auto count = static_cast<int32_t>(b + 1 == c.batch ? 0 : 1 + random() % left);
    const auto end = first + count;
    // The last token of the second sequence has no position, and windows begin before the first.
    const auto own = static_cast<int32_t>(end - c.tokens + 1 + (c.tokens > 1 && b == 1));
    bounds.push_back({c.tokens > 1 && b == 0 ? first - 22 : first, end, origin, own});
  }
  if (planted.sequence >= 0 && planted.page == -1) bounds[planted.sequence].end = planted.length;
  if (sizes.nan) values.data[(bounds[0].first - origin) * c.groups * c.width] = C(NAN);
  const Guarded<C> v(values);
  // Pages in any order; one of them is missing.
  const int64_t pages = c.page_size == 0 ? 0 : kv_rows / c.page_size;
  std::vector<int32_t> table(pages);
  for (int64_t i = 0; i < pages; ++i) table[i] = static_cast<int32_t>(i);
  std::shuffle(table.begin(), table.end(), random);
  if (pages > 0) table[0] = -1;
  if (planted.page != -1) {
    bounds[planted.sequence].end = origin + static_cast<int32_t>(c.positions) - 1;
    bounds[planted.sequence].own = bounds[planted.sequence].end;
    table[(planted.sequence + 1) * (c.positions / c.page_size) - 1] = planted.page;
  }
  HostRecords records{};
  DeviceState state{};
  state.limits.fault = &records.fault;
  Array<float> out(c.batch * c.tokens * c.heads * (columns + 1));
  Array<float> parts(c.splits * out.size());
  const double scale = 1 / std::sqrt(static_cast<double>(c.width));
  Array<float> slopes(c.heads);
  for (float& slope : slopes.data) slope = static_cast<float>(random() % 64) / 256;
  const int64_t capacity = c.ranks * c.positions;
  const FlashDecodeParams p{c.batch,     c.tokens,  c.heads,           c.groups, c.width,
                            c.positions, capacity,  c.page_size,       pages,    c.splits,
                            scale,       c.softcap, simt::kDTypeOf<T>, scales,   c.portable};
  std::string error;
  const FlashDecodeArrays arrays{
      q.get(),   k.get(),     v.get(),    bounds.data(), pages == 0 ? nullptr : table.data(),
      out.get(), parts.get(), of_k.get(), of_v.get(),    c.alibi ? slopes.get() : nullptr};
  const auto launch = is_latent ? LaunchLatentDecode : LaunchFlashDecode;
  EXPECT(launch(p, arrays, &state, nullptr, &error)) << error;
  const std::string failure = simt::Run(seed);
  EXPECT(failure.empty()) << failure << ", seed " << seed;
  const Fault& fault = records.fault;
  if (planted.sequence < 0) {
    EXPECT_EQ(fault.kind, 0u);
  } else {
    const bool of_length = planted.page == -1;
    EXPECT_EQ(fault.kind, static_cast<uint64_t>(of_length ? FaultKind::kLength : FaultKind::kPage));
    EXPECT_EQ(fault.op, static_cast<uint32_t>(kFlashDecodeId));
    EXPECT_EQ(fault.rank, c.rank);
    EXPECT_EQ(fault.tile, planted.sequence);
    EXPECT_EQ(static_cast<int64_t>(fault.seen), of_length ? planted.length : planted.page);
    EXPECT_EQ(static_cast<int64_t>(fault.expected), of_length ? capacity : pages);
    if (!of_length) EXPECT_EQ(fault.peer, c.positions / c.page_size - 1);
  }

  int64_t wrong = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    if (b == planted.sequence && planted.page == -1) {
      const int64_t row = c.tokens * c.heads * (columns + 1);
      for (int64_t i = 0; i < row; ++i) wrong += !std::isnan(out[b * row + i]);
      continue;
    }
    for (int64_t query = 0; query < c.tokens * c.heads; ++query) {
      const int64_t token = query / c.heads, h = query % c.heads;
      std::vector<double> mean(columns), terms(columns);  // of the values, and of their sizes
      double total = 0;
      const int64_t own = bounds[b].own + token;
      const int64_t last = std::min<int64_t>(own - origin, c.positions);
      const int64_t end = own > bounds[b].end ? 0 : last;
      for (int64_t t = std::max<int64_t>(bounds[b].first + token - origin, 0); t < end; ++t) {
        int64_t row = b * c.positions + t;
        if (pages > 0) {
          const int32_t page = table[(b * c.positions + t) / c.page_size];
          if (page < 0 || page >= pages) continue;
          row = page * c.page_size + t % c.page_size;
        }
        const int64_t of_head = h / (c.heads / c.groups), at = (row * c.groups + of_head) * c.width;
        const int64_t of_scale = of_rows ? row * c.groups + of_head : of_head;
        const bool is_scaled = scales != CacheScales::kNone;
        double score = 0;
        for (int64_t i = 0; i < c.width; ++i)
          score += q[((b * c.tokens + token) * c.heads + h) * c.width + i] * k[at + i];
        score *= scale * (is_scaled ? of_k[of_scale] : 1);
        if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
        if (c.alibi) score += slopes[h] * static_cast<double>(origin + t - (own - 1));
        total += std::exp(score);
        for (int64_t i = 0; i < columns; ++i) {
          const double term =
              std::exp(score) * v[at + i] * (is_scaled ? of_v[of_scale] / sizes.v : 1);
          mean[i] += term;
          terms[i] += std::abs(term);
        }
      }
      // Probabilities are rounded to T, or to float16 with their scales.
      const bool is_scaled = scales != CacheScales::kNone;
      const double tolerance = std::is_same_v<T, __half> || is_scaled ? 0x1p-11 : 0x1p-8;
      const int64_t at = (b * c.tokens * c.heads + query) * (columns + 1);
      for (int64_t i = 0; i < columns; ++i) {
        const double want = total > 0 ? mean[i] / total : 0;
        const double most = tolerance * (total > 0 ? terms[i] / total : 1);
        wrong += std::isnan(want) ? !std::isnan(out[at + i])
                                  : !(std::abs(out[at + i] / sizes.v - want) <= most);
      }
      const double lse = out[at + columns];
      wrong += total > 0 ? !(std::abs(lse - std::log(total)) < 1e-4) : !(lse == -INFINITY);
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << out.size() << ", seed " << seed;
}

TEST(EqualsAttention) {
  const Case cases[] =
      {
          {2, 4, 2, 64, 100, 0, 1, 0},  {2, 20, 1, 128, 150, 0, 3, 20},
          {3, 2, 2, 256, 96, 16, 2, 0}, {2, 4, 2, 64, 100, 0, 1, 1e6},
          {1, 3, 1, 64, 300, 0, 7, 0},  // parts that two warps merge, and eight
          {1, 3, 1, 64, 700, 0, 37, 0},
  };
  uint32_t seed = 1;
  for (const Case& c : cases) {
    for (int schedule = 0; schedule < simt::Schedules(1); ++schedule) {
      Check<__half>(c, seed++);
      Check<__nv_bfloat16>(c, seed++);
    }
  }
}

TEST(SeveralTokens) {
  uint32_t seed = 50;
  for (const Case& c :
       {Case{3, 4, 2, 64, 100, 0, 1, 0, 1, 0, 3}, Case{3, 6, 2, 128, 90, 0, 3, 20, 1, 0, 7},
        Case{3, 2, 2, 256, 96, 16, 2, 0, 1, 0, 16}, Case{3, 2, 1, 64, 64, 0, 2, 0, 3, 1, 5}}) {
    Check<__half>(c, seed++);
    Check<__nv_bfloat16>(c, seed++);
  }
  Check<__half>({3, 2, 1, 64, 64, 0, 2, 0, 3, 1, 5}, seed++, {1, 193});
}

TEST(Alibi) {
  uint32_t seed = 40;
  for (const Case& c : {Case{2, 4, 2, 64, 100, 0, 1, 0, 1, 0, 1, true},
                        Case{3, 6, 2, 128, 90, 0, 3, 20, 1, 0, 7, true},
                        Case{3, 2, 2, 256, 96, 16, 2, 0, 1, 0, 16, true},
                        Case{3, 2, 1, 64, 64, 0, 2, 0, 3, 1, 5, true}}) {
    Check<__half>(c, seed++);
    Check<__nv_bfloat16>(c, seed++);
    Check<__nv_bfloat16, __nv_fp8_e4m3>(c, seed++, {}, CacheScales::kOfRows);
  }
}

TEST(Latent) {
  uint32_t seed = 80;
  for (const Case& c :
       {Case{2, 9, 1, 576, 150, 0, 1, 0}, Case{3, 33, 1, 576, 130, 0, 2, 20, 1, 0, 2},
        Case{3, 4, 2, 576, 96, 16, 2, 0, 1, 0, 3}, Case{3, 2, 1, 576, 64, 0, 2, 0, 3, 1, 5},
        Case{3, 128, 1, 576, 224, 8, 3, 0}}) {
    for (int schedule = 0; schedule < simt::Schedules(1); ++schedule) {
      Check<__half>(c, seed++);
      Check<__nv_bfloat16>(c, seed++);
    }
  }
  Check<__half>({3, 2, 1, 576, 64, 0, 2, 0, 3, 1, 5}, seed++, {1, 193});
  Check<__half>({3, 2, 2, 576, 64, 16, 2, 0}, seed++, {2, 0, 12});
}

// Up to 32 queries, and more, in one block and in two; parts without positions.
TEST(LatentInPortableCode) {
  uint32_t seed = 100;
  for (Case c :
       {Case{2, 9, 1, 576, 150, 0, 1, 0}, Case{3, 33, 1, 576, 66, 0, 2, 20, 1, 0, 2},
        Case{3, 4, 2, 576, 96, 16, 2, 0, 1, 0, 3}, Case{3, 2, 1, 576, 64, 0, 2, 0, 3, 1, 5},
        Case{2, 32, 1, 576, 40, 8, 3, 0}, Case{2, 64, 1, 576, 90, 0, 1, 0}}) {
    c.portable = true;
    for (int schedule = 0; schedule < simt::Schedules(1); ++schedule) {
      Check<__half>(c, seed++);
      Check<__nv_bfloat16>(c, seed++);
    }
  }
  Case of_length{3, 2, 1, 576, 64, 0, 2, 0, 3, 1, 5}, of_page{3, 2, 2, 576, 64, 16, 2, 0};
  of_length.portable = of_page.portable = true;
  Check<__half>(of_length, seed++, {1, 193});
  Check<__half>(of_page, seed++, {2, 0, 12});
}

TEST(TeamsOfWarps) {
  uint32_t seed = 60;
  using E = __nv_fp8_e4m3;
  // 9 and 17 queries that share a head, three warps, eight, and two teams of five and nine.
  for (const Case& c :
       {Case{2, 9, 1, 64, 70, 0, 1, 0}, Case{2, 17, 1, 128, 40, 0, 1, 0},
        Case{2, 12, 2, 64, 90, 0, 2, 0, 1, 0, 16}, Case{2, 15, 1, 64, 40, 0, 1, 20, 1, 0, 16},
        Case{2, 19, 1, 64, 64, 16, 1, 0, 1, 0, 16}, Case{2, 9, 1, 256, 40, 0, 1, 0, 1, 0, 16}}) {
    for (int schedule = 0; schedule < simt::Schedules(1); ++schedule) {
      Check<__half>(c, seed++);
      Check<__nv_bfloat16, E>(c, seed++, {}, CacheScales::kOfRows);
    }
  }
}

TEST(CachesOf8Bits) {
  uint32_t seed = 70;
  using E = __nv_fp8_e4m3;
  for (const CacheScales scales : {CacheScales::kOfRows, CacheScales::kOfHeads}) {
    for (const Case& c :
         {Case{2, 4, 2, 64, 100, 0, 1, 0}, Case{3, 10, 2, 128, 90, 0, 3, 20, 1, 0, 5},
          Case{3, 2, 2, 256, 96, 16, 2, 0}, Case{3, 4, 2, 64, 64, 16, 2, 0, 3, 1, 2}}) {
      // Of values far below what float16 holds, and far beyond.
      Check<__half, E>(c, seed++, {}, scales, {1, 1e-7f});
      Check<__nv_bfloat16, E>(c, seed++, {}, scales, {1, 1e7f});
      for (const float size : {0x1p40f, 0x1p-40f}) {
        Check<__nv_bfloat16, E>(c, seed++, {}, scales, {size});
      }
    }
    Check<__half, E>({3, 2, 2, 64, 64, 16, 2, 0}, seed++, {2, 0, 12}, scales);
    Check<__half, E>({2, 4, 2, 128, 100, 0, 1, 0}, seed++, {1, 101}, scales);
  }
  for (int64_t width : {64, 128, 256}) {
    const Case c{2, 4, 2, width, 100, 0, 1, 0};
    Check<__half, E>(c, seed++, {}, CacheScales::kOfHeads, {1, 1, true});
    Check<__nv_bfloat16, E>(c, seed++, {}, CacheScales::kOfRows, {1, 1, true});
  }
}

// One position has nearly all of the weight, and values of zero: the result is what the others add.
template <typename T, typename C>
void CheckTail(float bits) {
  constexpr int64_t kWidth = 64, kPositions = 512;
  Array<T> q(kWidth);
  Array<C> k(kPositions * kWidth), v(kPositions * kWidth);
  const float scale = bits * std::log(2.0f) / 64;
  std::fill(q.data.begin(), q.data.end(), T(0.0f));
  std::fill(k.data.begin(), k.data.end(), C(0.0f));
  for (int64_t i = 0; i < kPositions; ++i) k.data[i * kWidth] = C(.0625f);  // no power of two
  q.data[0] = T(8.0f);
  k.data[0] = C(8.0f);
  for (int64_t i = 0; i < kWidth; ++i) v.data[i] = C(0.0f);
  for (int64_t i = kWidth; i < v.size(); ++i) v.data[i] = C(1.0f);
  const float one = 1;
  const DecodeBounds bounds{0, kPositions, 0, kPositions};
  Array<float> out(kWidth + 1);
  FlashDecodeParams p{1, 1, 1, 1, kWidth, kPositions, kPositions, 0, 0, 1, scale, 0};
  p.dtype = simt::kDTypeOf<T>;
  if (!std::is_same_v<T, C>) p.scales = CacheScales::kOfHeads;
  std::string error;
  const FlashDecodeArrays arrays{q.get(),   k.get(), v.get(), &bounds, nullptr,
                                 out.get(), nullptr, &one,    &one};
  EXPECT(LaunchFlashDecode(p, arrays, nullptr, nullptr, &error)) << error;
  const std::string failure = simt::Run(1);
  EXPECT(failure.empty()) << failure;
  const double others = (kPositions - 1) * std::exp2(-static_cast<double>(bits) * 127 / 128);
  for (int64_t i = 0; i < kWidth; ++i)
    EXPECT(std::abs(out[i] / (others / (1 + others)) - 1) < 0x1p-7) << out[i] << " " << bits;
}

TEST(SmallWeightsAreNotRoundedOff) {
  for (const float bits : {10.3f, 14.2f, 16.9f, 19.7f}) {
    CheckTail<__half, __half>(bits);
    CheckTail<__nv_bfloat16, __nv_bfloat16>(bits);
    CheckTail<__half, __nv_fp8_e4m3>(bits);
    CheckTail<__nv_bfloat16, __nv_fp8_e4m3>(bits);
  }
}

TEST(AWrongLengthIsReportedAndReadsNothing) {
  uint32_t seed = 100;
  for (int32_t length : {101, 1 << 30, INT32_MAX, -1, INT32_MIN}) {
    Check<__half>({2, 4, 2, 64, 100, 0, 1, 0}, seed++, {1, length});
    Check<__nv_bfloat16>({3, 2, 2, 128, 150, 0, 3, 0}, seed++, {2, length == 101 ? 151 : length});
  }
  // Of three ranks, each of which sees it.
  for (int64_t rank = 0; rank < 3; ++rank) {
    Check<__half>({2, 2, 1, 64, 64, 0, 2, 0, 3, rank}, seed++);
    Check<__half>({2, 2, 1, 64, 64, 0, 2, 0, 3, rank}, seed++, {0, 193});
    Check<__half>({2, 2, 1, 64, 64, 0, 2, 0, 3, rank}, seed++, {1, -7});
  }
}

TEST(AnEntryThatIsNoPageIsReportedAndReadsNothing) {
  uint32_t seed = 200;
  for (int32_t page : {12, 1 << 20, INT32_MAX, -2, INT32_MIN}) {
    Check<__half>({3, 2, 2, 64, 64, 16, 2, 0}, seed++, {2, 0, page});
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
