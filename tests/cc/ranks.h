// Runs the ops' CPU bodies as a group of ranks would: a thread per rank, each with a heap of its
// own in plain memory, over several calls on one workspace. Results are compared with the
// definition of the op; all data are small integers, so that every dtype holds every sum exactly.
#ifndef JFLUX_TESTS_CC_RANKS_H_
#define JFLUX_TESTS_CC_RANKS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/dtype.h"
#include "core/layout.h"
#include "core/rows.h"
#include "core/signal.h"
#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "ops/all_reduce/all_reduce.h"
#include "ops/exchange/exchange.h"
#include "ops/matmul_all_reduce/few_rows.h"
#include "ops/matmul_all_reduce/matmul_all_reduce.h"
#include "ops/matmul_all_to_all/matmul_all_to_all.h"
#include "ops/matmul_reduce_scatter/matmul_reduce_scatter.h"
#include "runtime/cpu_matmul.h"
#include "runtime/fault.h"

namespace jflux {

constexpr char kPoison = '\xff';  // bytes of it are NaN in every dtype

using Values = std::vector<double>;

// With |x| <= 2, |w| <= 1, k <= 16 and 8 ranks, no sum exceeds 256: exact in bf16.
inline Values RandomIntegers(int64_t count, int bound, uint32_t seed) {
  std::mt19937 random(seed);
  Values v(count);
  for (double& e : v) e = static_cast<int>(random() % (2 * bound + 1)) - bound;
  return v;
}

// An operand or a result, as XLA would hold it.
struct Array {
  DType dtype;
  std::vector<char> bytes;

  Array(DType t, const Values& v) : dtype(t), bytes(v.size() * SizeOf(t)) {
    Convert(v.data(), DType::kF64, bytes.data(), t, static_cast<int64_t>(v.size()));
  }
  Array(DType t, int64_t count) : dtype(t), bytes(count * SizeOf(t), kPoison) {}

  Values AsValues() const {
    Values v(bytes.size() / SizeOf(dtype));
    Convert(bytes.data(), dtype, v.data(), DType::kF64, static_cast<int64_t>(v.size()));
    return v;
  }

  // How many elements are not `want`; NaN is never what is wanted.
  int64_t Wrong(const Values& want) const {
    const Values got = AsValues();
    int64_t wrong = got.size() != want.size();
    for (size_t i = 0; i < got.size() && i < want.size(); ++i) wrong += !(got[i] == want[i]);
    return wrong;
  }
};

// a[rows, k] @ w[k, n], or w[n, k] transposed.
inline Values Product(const Values& a, const Values& w, int64_t rows, int64_t k, int64_t n,
                      bool transposed) {
  Values y(rows * n);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += a[i * k + l] * (transposed ? w[j * k + l] : w[l * n + j]);
      }
      y[i * n + j] = sum;
    }
  }
  return y;
}

// What a test runs on every rank: one op's call with its operands and results.
class AnyCall {
 public:
  virtual ~AnyCall() = default;
  virtual bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) = 0;
  // Elements of all ranks' results that differ from the op's definition.
  virtual int64_t Wrong() const = 0;
};

// One that announces its data with signals.
class Call : public AnyCall {
 public:
  virtual WorkspaceLayout Workspace() const = 0;
};

class AllGatherMatmulCall : public Call {
 public:
  AllGatherMatmulCall(const AllGatherMatmulParams& p, const CpuTiling& tiling, uint32_t seed)
      : p_(p), tiling_(tiling) {
    const Rows& r = p.rows;
    gathered_ = Values(r.Total() * p.k);
    for (int rank = 0; rank < r.world; ++rank) {
      const Values shard = RandomIntegers(r.PerRank() * p.k, 2, seed * 100 + rank);
      for (int64_t o = 0; o < r.outer; ++o) {
        for (int64_t e = 0; e < r.inner * p.k; ++e) {
          gathered_[(o * r.world + rank) * r.inner * p.k + e] = shard[o * r.inner * p.k + e];
        }
      }
      w_values_.push_back(RandomIntegers(p.k * p.n, 1, seed * 100 + 50 + rank));
      x_.emplace_back(p.dtype, shard);
      w_.emplace_back(p.dtype, w_values_.back());
      y_.emplace_back(p.out_dtype, r.Total() * p.n);
      gathered_out_.emplace_back(p.dtype, r.Total() * p.k);
    }
  }

  WorkspaceLayout Workspace() const override {
    return AllGatherLayout::Make(p_, tiling_.chunk_bytes).Workspace();
  }
  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    const int r = view.rank;
    ctx.op = static_cast<uint32_t>(OpId::kAllGatherMatmul);
    void* gathered = p_.return_gathered ? gathered_out_[r].bytes.data() : nullptr;
    const AllGatherMatmulArrays arrays{x_[r].bytes.data(), w_[r].bytes.data(), y_[r].bytes.data(),
                                       gathered};
    return AllGatherMatmulCpu(p_, tiling_, arrays, view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (int r = 0; r < p_.rows.world; ++r) {
      wrong += y_[r].Wrong(
          Product(gathered_, w_values_[r], p_.rows.Total(), p_.k, p_.n, p_.transpose_rhs));
      if (p_.return_gathered) wrong += gathered_out_[r].Wrong(gathered_);
    }
    return wrong;
  }

 private:
  AllGatherMatmulParams p_;
  CpuTiling tiling_;
  Values gathered_;
  std::vector<Values> w_values_;
  std::vector<Array> x_, w_, y_, gathered_out_;
};

class MatmulReduceScatterCall : public Call {
 public:
  MatmulReduceScatterCall(const MatmulReduceScatterParams& p, const ScatterTiling& tiling,
                          uint32_t seed)
      : p_(p), tiling_(tiling), sum_(p.rows.Total() * p.n) {
    for (int rank = 0; rank < p.rows.world; ++rank) {
      const Values x = RandomIntegers(p.rows.Total() * p.k, 2, seed * 100 + rank);
      const Values w = RandomIntegers(p.k * p.n, 1, seed * 100 + 50 + rank);
      const Values part = Product(x, w, p.rows.Total(), p.k, p.n, p.transpose_rhs);
      for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += part[i];
      x_.emplace_back(p.dtype, x);
      w_.emplace_back(p.dtype, w);
      y_.emplace_back(p.out_dtype, p.rows.PerRank() * p.n);
    }
  }

  WorkspaceLayout Workspace() const override {
    return ReduceScatterLayout::Make(p_, tiling_.tile_m, tiling_.tile_n, 1).Workspace();
  }
  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    const int r = view.rank;
    ctx.op = static_cast<uint32_t>(OpId::kMatmulReduceScatter);
    const MatmulReduceScatterArrays arrays{x_[r].bytes.data(), w_[r].bytes.data(),
                                           y_[r].bytes.data()};
    return MatmulReduceScatterCpu(p_, tiling_, arrays, view, epoch, ctx);
  }
  int64_t Wrong() const override {
    const Rows& r = p_.rows;
    int64_t wrong = 0;
    for (int rank = 0; rank < r.world; ++rank) {
      Values want;
      for (int64_t o = 0; o < r.outer; ++o) {
        const auto first = sum_.begin() + (o * r.world + rank) * r.inner * p_.n;
        want.insert(want.end(), first, first + r.inner * p_.n);
      }
      wrong += y_[rank].Wrong(want);
    }
    return wrong;
  }

 private:
  MatmulReduceScatterParams p_;
  ScatterTiling tiling_;
  Values sum_;
  std::vector<Array> x_, w_, y_;
};

// Parts are rounded to y's type, and so is their sum with the residual, once. |x| <= bound; from 3
// on that shows. With a residual and 8 ranks, k <= 15 keeps sums exact in bf16 below.
class MatmulAllReduceCall : public Call {
 public:
  MatmulAllReduceCall(const MatmulAllReduceParams& p, const ScatterTiling& tiling, uint32_t seed,
                      bool residual = false, int bound = 2)
      : p_(p), tiling_(tiling), sum_(p.scatter.rows.Total() * p.scatter.n) {
    const auto& s = p.scatter;
    if (residual) {
      const Values added = RandomIntegers(static_cast<int64_t>(sum_.size()), 8 * bound - 1, seed);
      residual_.emplace(s.out_dtype, added);
      sum_ = residual_->AsValues();
    }
    for (int rank = 0; rank < s.rows.world; ++rank) {
      const Values x = RandomIntegers(s.rows.Total() * s.k, bound, seed * 100 + rank);
      const Values w = RandomIntegers(s.k * s.n, bound / 2, seed * 100 + 50 + rank);
      const Array part(s.out_dtype, Product(x, w, s.rows.Total(), s.k, s.n, s.transpose_rhs));
      const Values sent = part.AsValues();
      for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += sent[i];
      x_.emplace_back(s.dtype, x);
      w_.emplace_back(s.dtype, w);
      y_.emplace_back(s.out_dtype, s.rows.Total() * s.n);
    }
    sum_ = Array(s.out_dtype, sum_).AsValues();
  }

  WorkspaceLayout Workspace() const override {
    return MatmulAllReduceLayout::Make(p_, tiling_.tile_m, tiling_.tile_n, 1).Workspace();
  }
  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(OpId::kMatmulAllReduce);
    return MatmulAllReduceCpu(p_, tiling_, ArraysOf(view.rank), view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (const Array& y : y_) wrong += y.Wrong(sum_);
    return wrong;
  }

 protected:
  MatmulAllReduceArrays ArraysOf(int rank) {
    return {x_[rank].bytes.data(), w_[rank].bytes.data(), y_[rank].bytes.data(),
            residual_ ? residual_->bytes.data() : nullptr};
  }

  const MatmulAllReduceParams p_;
  std::vector<Array> y_;

 private:
  ScatterTiling tiling_;
  Values sum_;
  std::optional<Array> residual_;
  std::vector<Array> x_, w_;
};

// The same by the protocol of few rows.
class FewRowsCall : public MatmulAllReduceCall {
 public:
  FewRowsCall(const MatmulAllReduceParams& p, int32_t slice_n, uint32_t seed, bool residual = false,
              int bound = 2)
      : MatmulAllReduceCall(p, {}, seed, residual, bound), slice_n_(slice_n) {}

  bool SameBits() const { return y_[0].bytes == y_[1].bytes; }

  WorkspaceLayout Workspace() const override { return FewRowsLayoutOf(p_, slice_n_).Workspace(); }
  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(OpId::kMatmulAllReduce);
    return FewRowsCpu(p_, slice_n_, ArraysOf(view.rank), view, epoch, ctx);
  }

 private:
  int32_t slice_n_;
};

class MatmulAllToAllCall : public Call {
 public:
  MatmulAllToAllCall(const MatmulAllToAllParams& p, const ShardTiling& tiling, uint32_t seed)
      : p_(p), tiling_(tiling) {
    const int64_t rows = p.rows.PerRank() * (p.split_rows ? p.rows.world : 1);
    const int64_t columns = p.n * (p.split_rows ? 1 : p.rows.world);
    for (int rank = 0; rank < p.rows.world; ++rank) {
      const Values x = RandomIntegers(rows * p.k, 2, seed * 100 + rank);
      const Values w = RandomIntegers(p.k * columns, 1, seed * 100 + 50 + rank);
      products_.push_back(Product(x, w, rows, p.k, columns, p.transpose_rhs));
      x_.emplace_back(p.dtype, x);
      w_.emplace_back(p.dtype, w);
      y_.emplace_back(p.out_dtype, p.rows.Total() * p.n);
    }
  }

  WorkspaceLayout Workspace() const override {
    return AllToAllLayout::Make(p_, tiling_.tile_m, tiling_.tile_n).Workspace();
  }
  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    const int r = view.rank;
    ctx.op = static_cast<uint32_t>(OpId::kMatmulAllToAll);
    const MatmulAllToAllArrays arrays{x_[r].bytes.data(), w_[r].bytes.data(), y_[r].bytes.data()};
    return MatmulAllToAllCpu(p_, tiling_, arrays, view, epoch, ctx);
  }
  // Both sides as [outer][rank if rows][inner][rank if columns][n].
  int64_t Wrong() const override {
    const Rows& r = p_.rows;
    const auto at = [&](bool by_rows, int64_t o, int64_t i, int64_t shard) {
      return by_rows ? ((o * r.world + shard) * r.inner + i) * p_.n
                     : ((o * r.inner + i) * r.world + shard) * p_.n;
    };
    int64_t wrong = 0;
    for (int dst = 0; dst < r.world; ++dst) {
      Values want(r.Total() * p_.n);
      for (int src = 0; src < r.world; ++src) {
        for (int64_t o = 0; o < r.outer; ++o) {
          for (int64_t i = 0; i < r.inner; ++i) {
            const auto from = products_[src].begin() + at(p_.split_rows, o, i, dst);
            std::copy(from, from + p_.n, want.begin() + at(p_.concat_rows, o, i, src));
          }
        }
      }
      wrong += y_[dst].Wrong(want);
    }
    return wrong;
  }

 private:
  MatmulAllToAllParams p_;
  ShardTiling tiling_;
  std::vector<Values> products_;
  std::vector<Array> x_, w_, y_;
};

class AllReduceCall : public AnyCall {
 public:
  AllReduceCall(const AllReduceParams& p, uint32_t seed)
      : p_(p), residual_(p.dtype, RandomIntegers(p.residual ? p.count : 0, 15, seed * 100 + 90)) {
    sum_ = p.residual ? RandomIntegers(p.count, 15, seed * 100 + 90) : Values(p.count);
    for (int rank = 0; rank < p.world; ++rank) {
      const Values x = RandomIntegers(p.count, 15, seed * 100 + rank);
      for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += x[i];
      x_.emplace_back(p.dtype, x);
      y_.emplace_back(p.dtype, p.count);
    }
  }

  PacketLayout Workspace() const { return p_.Workspace(); }
  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(OpId::kAllReduce);
    return AllReduceCpu(p_, ArraysOf(view.rank), view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (const Array& y : y_) wrong += y.Wrong(sum_);
    return wrong;
  }

 protected:
  virtual AllReduceArrays ArraysOf(int rank) {
    AllReduceArrays arrays{x_[rank].bytes.data(), y_[rank].bytes.data()};
    if (p_.residual) arrays.residual = residual_.bytes.data();
    return arrays;
  }

  const AllReduceParams p_;
  Values sum_;

 private:
  Array residual_;
  std::vector<Array> x_, y_;
};

// Of shards [outer][world][inner bytes] in x, in y, or in both. What is not summed is bytes.
class ExchangeCall : public AnyCall {
 public:
  ExchangeCall(const ExchangeParams& p, uint32_t seed) : p_(p) {
    std::mt19937 random(seed);
    for (int rank = 0; rank < p.world; ++rank) {
      const int64_t bytes = p.x.world * p.x.Bytes();
      if (p.Sums()) {
        values_.push_back(RandomIntegers(bytes / SizeOf(p.dtype), 15, seed * 100 + rank));
        x_.push_back(Array(p.dtype, values_.back()).bytes);
      } else {
        x_.emplace_back(bytes);
        for (char& c : x_.back()) c = static_cast<char>(random());
      }
      y_.emplace_back(p.y.world * p.y.Bytes(), kPoison);
    }
  }

  bool Run(const SymmetricView& view, uint32_t epoch, WaitContext ctx) override {
    ctx.op = static_cast<uint32_t>(p_.op);
    return ExchangeCpu(p_, ArraysOf(view.rank), view, epoch, ctx);
  }
  int64_t Wrong() const override {
    int64_t wrong = 0;
    for (int rank = 0; rank < p_.world; ++rank) wrong += p_.Sums() ? WrongSums(rank) : Moved(rank);
    return wrong;
  }

 protected:
  ExchangeArrays ArraysOf(int rank) { return {x_[rank].data(), y_[rank].data()}; }

  const ExchangeParams p_;

 private:
  // Byte b of a shard, by the definition of Shards.
  static int64_t At(const Shards& shards, int shard, int64_t b) {
    return (b / shards.inner * shards.world + shard) * shards.inner + b % shards.inner;
  }
  int64_t Moved(int rank) const {
    int64_t wrong = 0;
    for (int src = 0; src < p_.world; ++src) {
      for (int64_t b = 0; b < p_.x.Bytes(); ++b) {
        const int shard = p_.op == OpId::kAllGather ? 0 : rank;
        wrong += y_[rank][At(p_.y, src, b)] != x_[src][At(p_.x, shard, b)];
      }
    }
    return wrong;
  }
  int64_t WrongSums(int rank) const {
    const int64_t size = SizeOf(p_.dtype);
    Values want(p_.y.Bytes() / size);
    for (size_t i = 0; i < want.size(); ++i) {
      const int64_t at = At(p_.x, rank, static_cast<int64_t>(i) * size) / size;
      for (const Values& v : values_) want[i] += v[at];
    }
    Array got(p_.dtype, 0);
    got.bytes = y_[rank];
    return got.Wrong(want);
  }

  std::vector<Values> values_;
  std::vector<std::vector<char>> x_, y_;
};

// One workspace on every rank: data poisoned, signals as calls before `first_epoch` left them.
class PlainHeap {
 public:
  PlainHeap(int world, PacketLayout workspace, uint32_t first_epoch = 1, bool poison = true)
      : half_bytes_(workspace.half_bytes), poison_(kPacketPoison), memory_(world) {
    Allocate(workspace.TotalBytes());
    for (uint32_t epoch : {0, 1}) half_[epoch] = workspace.PacketOffset(epoch);
    for (int rank = 0; rank < world; ++rank) {
      for (uint32_t epoch : {first_epoch, first_epoch + 1}) {
        if (poison) Poison(rank, epoch);
        for (int src = 0; src < kMaxRanks && first_epoch != 1; ++src) {
          *View(rank).At<Signal>(rank, workspace.HelloOffset(epoch, src)) =
              MakeSignal(epoch - 2, 0);
        }
      }
    }
  }
  PlainHeap(int world, WorkspaceLayout workspace, uint32_t first_epoch = 1)
      : half_bytes_(workspace.data_bytes), poison_(kPoison), memory_(world) {
    Allocate(workspace.TotalBytes());
    for (uint32_t epoch : {0, 1}) half_[epoch] = workspace.DataOffset(epoch);
    for (int rank = 0; rank < world; ++rank) {
      for (uint32_t epoch : {first_epoch, first_epoch + 1}) {
        Poison(rank, epoch);
        if (first_epoch == 1) continue;  // fresh memory
        auto* words = View(rank).At<Signal>(rank, workspace.SignalOffset(epoch));
        for (int64_t i = 0; i < workspace.SignalBytes() / 8; ++i)
          words[i] = MakeSignal(epoch - 2, 0);
      }
    }
  }

  int world() const { return static_cast<int>(memory_.size()); }
  SymmetricView View(int rank) {
    SymmetricView view{};
    view.rank = rank;
    view.world = world();
    for (int r = 0; r < view.world; ++r) view.base[r] = reinterpret_cast<char*>(memory_[r].data());
    return view;
  }
  void Poison(int rank, uint32_t epoch) {
    // As atomics: packets are ordered by nothing else.
    uint64_t word;
    std::memset(&word, poison_, sizeof(word));
    auto* words = View(rank).At<uint64_t>(rank, half_[epoch & 1]);
    for (int64_t i = 0; i < half_bytes_ / 8; ++i) StoreRelaxed(words + i, word);
  }

 private:
  void Allocate(int64_t bytes) {
    for (auto& m : memory_) m.resize(bytes / sizeof(Signal));
  }

  int64_t half_[2], half_bytes_;
  char poison_;
  std::vector<std::vector<Signal>> memory_;
};

struct RunOptions {
  uint32_t first_epoch = 1;
  int max_delay_us = 0;  // a rank sleeps up to this long before a call
  uint32_t seed = 1;
  // A rank that has finished a call poisons its half of it. Nobody else touches that half then: all
  // peers' data of this call have come, and those of the call after next need this rank's next
  // call.
  bool poison = true;
  double deadline_s = 60;
  int absent = -1;                                    // this rank never calls
  std::function<void(int rank, size_t call)> before;  // each call, if set
};

// Runs the calls in order on all ranks. Per rank: what went wrong, empty if nothing did.
inline std::vector<std::string> RunRanks(PlainHeap& heap, const std::vector<AnyCall*>& calls,
                                         const RunOptions& options = {}) {
  std::vector<std::string> errors(heap.world());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < heap.world(); ++rank) {
    if (rank == options.absent) continue;
    threads.emplace_back([&, rank] {
      std::mt19937 random(options.seed * 8 + rank);
      uint32_t epoch = options.first_epoch;
      for (size_t i = 0; i < calls.size() && errors[rank].empty(); ++i) {
        if (options.before) options.before(rank, i);
        if (options.max_delay_us > 0 && random() % 2 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % options.max_delay_us));
        }
        Fault fault{};
        uint64_t stop = 0;
        const uint64_t deadline = NowNs() + static_cast<uint64_t>(options.deadline_s * 1e9);
        const WaitContext ctx{&fault, &stop, deadline, /*op=*/0, rank, /*skip=*/false};
        if (!calls[i]->Run(heap.View(rank), epoch, ctx)) {
          errors[rank] = Describe(fault, options.deadline_s);
        } else if (options.poison) {
          heap.Poison(rank, epoch);
        }
        epoch = NextEpoch(epoch);
      }
    });
  }
  for (auto& t : threads) t.join();
  return errors;
}

// As a kernel's CTAs do it: `body(place)` for so many places, which threads take in the order in
// which they begin; only `running` of them run at once.
template <typename Body>
void InTurn(int places, int running, Body&& body) {
  std::atomic<int> place{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < running; ++t) {
    threads.emplace_back([&] {
      for (int mine = place++; mine < places; mine = place++) body(mine);
    });
  }
  for (auto& t : threads) t.join();
}

inline std::string Join(const std::vector<std::string>& errors) {
  std::string all;
  for (const auto& e : errors) all += e + (e.empty() ? "" : "\n");
  return all;
}

template <typename C>
std::vector<AnyCall*> Pointers(const std::vector<std::unique_ptr<C>>& calls) {
  std::vector<AnyCall*> pointers;
  for (const auto& c : calls) pointers.push_back(c.get());
  return pointers;
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_RANKS_H_
