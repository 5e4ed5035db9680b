// Runs the ops' CPU bodies as a group of ranks: a thread per rank, each with a heap in plain
// memory, over several calls on one workspace. Results are compared with the op's definition. All
// data are small integers, so that every dtype represents every sum exactly. Each op's call is in a
// header of its own, foo_bar_call.h beside foo_bar_test.cc.
#ifndef JFLUX_TESTS_CC_RANKS_H_
#define JFLUX_TESTS_CC_RANKS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/format.h"
#include "core/layout.h"
#include "core/packet.h"
#include "core/rows.h"
#include "core/signal.h"
#include "runtime/cpu_matmul.h"
#include "runtime/fault.h"

namespace jflux {

constexpr char kPoison = '\xff';  // NaN in every float

using Values = std::vector<double>;

// With |x| <= 2, |w| <= 1, k <= 16 and 8 ranks: no sum exceeds 256, which bf16 represents exactly.
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

  // Number of elements that differ from `want`. NaN always differs.
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

// What a test runs on every rank: one call of an op, with its operands and results.
class AnyCall {
 public:
  virtual ~AnyCall() = default;
  virtual bool Run(const SymmetricView& view, uint64_t epoch, WaitContext ctx) = 0;
  // Elements of all ranks' results that differ from the op's definition.
  virtual int64_t Wrong() const = 0;
};

// A call whose data is announced by signals.
class Call : public AnyCall {
 public:
  virtual WorkspaceLayout Workspace() const = 0;
};

// A product of random sizes. Each op makes a call of it (shared_workspace_test.cc).
struct RandomProduct {
  Rows rows;
  int64_t k, n;
  DType in, out;
  int32_t tile_m, tile_n;
  uint32_t seed;
  std::function<int64_t(int64_t low, int64_t high)> pick;  // another random number

  bool Flip() const { return pick(0, 1) == 1; }
};
using MakeRandomCall = std::unique_ptr<Call> (*)(const RandomProduct& p);

// The makers of random calls that the included *_call.h have registered.
inline std::vector<MakeRandomCall>& RandomCalls() {
  static std::vector<MakeRandomCall> calls;
  return calls;
}
inline bool AddRandomCall(MakeRandomCall make) {
  RandomCalls().push_back(make);
  return true;
}

// One workspace on every rank: data poisoned, signals as calls before `first_epoch` left them.
class PlainHeap {
 public:
  PlainHeap(int world, PacketLayout workspace, uint64_t first_epoch = 1, bool poison = true)
      : half_bytes_(workspace.half_bytes), poison_(kPacketPoison), memory_(world) {
    Allocate(workspace.TotalBytes());
    for (uint64_t epoch : {0, 1}) half_[epoch] = workspace.PacketOffset(epoch);
    for (int rank = 0; rank < world; ++rank) {
      for (uint64_t epoch : {first_epoch, first_epoch + 1}) {
        if (poison) Poison(rank, epoch);
        for (int src = 0; src < kMaxRanks && first_epoch != 1; ++src) {
          *View(rank).At<Signal>(rank, workspace.HelloOffset(epoch, src)) =
              MakeSignal(epoch - 2, 0);
        }
      }
    }
  }
  PlainHeap(int world, WorkspaceLayout workspace, uint64_t first_epoch = 1)
      : half_bytes_(workspace.data_bytes), poison_(kPoison), memory_(world) {
    Allocate(workspace.TotalBytes());
    for (uint64_t epoch : {0, 1}) half_[epoch] = workspace.DataOffset(epoch);
    for (int rank = 0; rank < world; ++rank) {
      for (uint64_t epoch : {first_epoch, first_epoch + 1}) {
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
  void Poison(int rank, uint64_t epoch) {
    // Atomic: nothing else orders packets.
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
  uint64_t first_epoch = 1;
  int max_delay_us = 0;  // a rank sleeps up to this long before a call
  uint32_t seed = 1;
  // A rank that has finished a call poisons its half. Nobody else accesses the half then: all
  // peers' data of this call have arrived, and their data of the call after next need this rank's
  // next call.
  bool poison = true;
  double deadline_s = 60;
  double deadline_of_rank_0_s = 0;                    // 0: as the other ranks'
  int absent = -1;                                    // this rank never calls
  std::function<void(int rank, size_t call)> before;  // before each call, if set
};

// Runs the calls in order on all ranks. Returns one error per rank, empty on success.
inline std::vector<std::string> RunRanks(PlainHeap& heap, const std::vector<AnyCall*>& calls,
                                         const RunOptions& options = {}) {
  std::vector<std::string> errors(heap.world());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < heap.world(); ++rank) {
    if (rank == options.absent) continue;
    threads.emplace_back([&, rank] {
      std::mt19937 random(options.seed * 8 + rank);
      uint64_t epoch = options.first_epoch;
      for (size_t i = 0; i < calls.size() && errors[rank].empty(); ++i) {
        if (options.before) options.before(rank, i);
        if (options.max_delay_us > 0 && random() % 2 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % options.max_delay_us));
        }
        Fault fault{};
        uint64_t stop = 0;
        const double seconds = rank == 0 && options.deadline_of_rank_0_s > 0
                                   ? options.deadline_of_rank_0_s
                                   : options.deadline_s;
        const uint64_t deadline = NowNs() + static_cast<uint64_t>(seconds * 1e9);
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

// Like the CTAs of a kernel: runs body(id) for each dynamic id, on threads that take ids in the
// order in which they start. At most `running` of them run at a time.
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
