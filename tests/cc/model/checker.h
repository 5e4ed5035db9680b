// An explicit-state model checker for the protocols of cc/core, whose own code it runs.
//
// A program is what one thread does. It reaches the shared memory through the atomic functions of
// model/atomics.h alone, so what it does next depends only on the values that it has read. The
// checker keeps these values as the thread's log, and runs the program again from its start to
// find the next access: a thread needs no stack of its own, and a state can be copied and compared.
//
// Memory: as C++ orders atomic accesses, in terms of views.
//
//   message  each store appends one to its location: (time, value, view)
//   view     of a thread: for each location the oldest message that it may still read
//   load     any message that is not older than the view: each is another step of the search. An
//            acquire load takes over the message's view
//   store    a release store, or a relaxed one after a release fence, carries the thread's view.
//            Any other store carries nothing, so its reader may read old data afterwards
//   RMW      reads the newest message, and passes on what that one carries
//
// Not modelled: a load that is delayed past a later store of the same thread, the proxies of TMA,
// and timeouts (no poll loop reaches its 64th attempt). Two threads that store into one word are an
// error, unless both add or compare and exchange.
//
// A poll loop that has found nothing goes back to where it began: what it read in that attempt
// leaves the log, so that waiting is a cycle of states, not an endless path. The checker finds
// where an attempt begins by letting the loop run once more with the same values; it stops with an
// error if the two attempts differ.
//
// Found: what a program reports (Fail), and states from which no schedule ends all programs.
#ifndef JFLUX_TESTS_CC_MODEL_CHECKER_H_
#define JFLUX_TESTS_CC_MODEL_CHECKER_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model/state.h"

namespace model {

class Checker {
 public:
  // program(thread, call) runs a thread's part of a call, from its start. Each thread makes `calls`
  // calls one after the other. Nothing goes from one to the next but what is in the memory.
  Checker(int threads, int calls, std::function<void(int, int)> program, Weakened weakened = {})
      : threads_(threads), calls_(calls), program_(std::move(program)), weakened_(weakened) {}

  // The word at `address` is `value` before anything runs. Otherwise it is 0.
  void Initialize(const void* address, uint64_t value) {
    initial_[reinterpret_cast<uintptr_t>(address)] = value;
  }

  // Looks at all orders, also where others are known to have the same outcome: to test the checker.
  void ExploreAllOrders() { reduces_ = false; }

  struct Result {
    int64_t states = 0, steps = 0;
    double seconds = 0;
    std::string error;               // empty: all schedules end, and no program has failed
    std::vector<std::string> trace;  // of the schedule that shows it
    bool complete = true;            // false: stopped at `most_states`
  };

  // Runs all schedules.
  Result Run(int64_t most_states = 3'000'000) {
    const auto start = std::chrono::steady_clock::now();
    result_ = {};
    nodes_.assign(1, Node{0, 0, 0});
    seen_.clear();
    edges_.clear();
    finals_.clear();
    Search(most_states);
    if (result_.error.empty() && result_.complete) FindStuck();
    result_.states = static_cast<int64_t>(nodes_.size());
    result_.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return result_;
  }

  // ---- What the atomic functions call ----------------------------------------------------------

  static Checker*& Current() {
    static Checker* current = nullptr;
    return current;
  }
  uint64_t Do(Kind kind, Order order, const void* address, uint64_t value, uint64_t expected = 0) {
    const uint8_t location = address == nullptr ? 0 : Location(address);
    if (replay_.probing) return Probe(kind, location);
    if (replay_.position < replay_.log->size()) {
      const Read& read = (*replay_.log)[replay_.position++];
      if (read.location != location) throw Failed{"model: a program does not repeat itself"};
      return read.value;
    }
    throw Pending{Access{kind, order, location, value, expected}};
  }
  // The end of an attempt of a poll loop.
  void Pause() {
    if (!replay_.probing) {
      replay_.probing = true;
      return;
    }
    const size_t reads = replay_.probe.size();
    std::vector<Read>& log = *replay_.log;
    for (size_t i = 0; i < reads; ++i) {
      const Read* read = reads <= log.size() ? &log[log.size() - reads + i] : nullptr;
      if (read == nullptr || !read->is_load || read->location != replay_.probe[i]) {
        throw Failed{"model: two attempts of a poll loop read different words"};
      }
    }
    log.resize(log.size() - reads);
    replay_.restart = true;
    throw Pending{};
  }

 private:
  struct Node {
    uint32_t parent;
    uint8_t thread, choice;
  };
  struct KeyHash {
    size_t operator()(const std::pair<uint64_t, uint64_t>& key) const { return key.first; }
  };

  uint8_t Location(const void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    const auto [found, is_new] = locations_.try_emplace(at, static_cast<uint8_t>(names_.size()));
    if (is_new) {
      if (names_.size() == kMaxLocations) throw Failed{"model: more words than kMaxLocations"};
      names_.push_back(at);
    }
    return found->second;
  }
  uint64_t Initial(uint8_t location) const {
    const auto found = initial_.find(names_[location]);
    return found == initial_.end() ? 0 : found->second;
  }

  uint64_t Probe(Kind kind, uint8_t location) {
    if (kind != Kind::kLoad) throw Failed{"model: a poll loop stores"};
    replay_.probe.push_back(location);
    for (size_t i = replay_.log->size(); i-- > 0;) {
      if ((*replay_.log)[i].location == location) return (*replay_.log)[i].value;
    }
    throw Failed{"model: an attempt of a poll loop reads other words than the one before"};
  }

  // Runs the thread's program up to its next access. False if it has failed.
  bool Advance(State* state, int thread) {
    Thread& own = state->threads[thread];
    waits_ = false;
    bool again;
    do {
      again = false;
      replay_ = Replay{};
      replay_.log = &own.log;
      Current() = this;
      try {
        program_(thread, own.call);
        own.log.clear();
        again = ++own.call < calls_;
        if (!again) own = Thread{};  // equal, however it came there
      } catch (const Pending& pending) {
        own.next = pending.access;
        again = replay_.restart;
        waits_ = waits_ || again;
      } catch (const Failed& failed) {
        result_.error = "thread " + std::to_string(thread) + ": " + failed.what;
        return false;
      }
    } while (again);
    return true;
  }

  // The messages that the thread's next access may read: their number, and the first one's time.
  static int Choices(const State& state, const Thread& own, uint8_t* first) {
    *first = 0;
    const Kind kind = own.next.kind;
    if (kind == Kind::kStore || kind == Kind::kReleaseFence || kind == Kind::kCount) return 1;
    uint8_t newest = 0;
    for (const Message& m : state.messages) {
      if (m.location == own.next.location) newest = std::max(newest, m.time);
    }
    const bool is_load = own.next.kind == Kind::kLoad;
    *first = is_load ? own.view[own.next.location] : newest;
    return newest - *first + 1;
  }

  void Append(State* state, int thread, bool release, const Message* continued) {
    Thread* own = &state->threads[thread];
    const uint8_t writer = continued != nullptr ? kAnyWriter : static_cast<uint8_t>(thread);
    Message m{own->next.location, 1, writer, own->next.value, own->fenced};
    for (const Message& other : state->messages) {
      if (other.location != m.location) continue;
      m.time = std::max<uint8_t>(m.time, other.time + 1);
      if (other.writer != writer) throw Failed{"model: two threads store into one word"};
    }
    own->view[m.location] = m.time;
    if (release) Join(&m.view, own->view);
    if (continued != nullptr) Join(&m.view, continued->view);
    m.view[m.location] = m.time;
    state->messages.push_back(m);
  }

  // Makes the thread's next access, which reads the message of that time. False if it has failed.
  bool Step(State* state, int thread, uint8_t time, std::string* text) {
    try {
      Make(state, thread, time, text);
    } catch (const Failed& failed) {
      result_.error = "thread " + std::to_string(thread) + ": " + failed.what;
      return false;
    }
    const Kind kind = state->threads[thread].next.kind;
    if (!Advance(state, thread)) return false;
    state->goes_on = reduces_ && kind == Kind::kLoad && !waits_ ? thread : -1;
    return true;
  }
  void Make(State* state, int thread, uint8_t time, std::string* text) {
    Thread& own = state->threads[thread];
    const Access access = own.next;
    const bool acquire =
        (access.order == Order::kAcquire || access.order == Order::kBoth) && !weakened_.acquire;
    const bool release =
        (access.order == Order::kRelease || access.order == Order::kBoth) && !weakened_.release;
    uint64_t value = 0;
    if (access.kind == Kind::kReleaseFence) {
      if (!weakened_.release) own.fenced = own.view;
    } else if (access.kind == Kind::kStore) {
      Append(state, thread, release, nullptr);
    } else if (access.kind == Kind::kCount) {
      if (!Count(state, access)) throw Failed{"more than " + std::to_string(access.expected)};
    } else {
      Message read{access.location, 0, kAnyWriter, Initial(access.location), {}};
      for (const Message& m : state->messages) {
        if (m.location == access.location && m.time == time) read = m;
      }
      value = read.value;
      own.view[access.location] = std::max(own.view[access.location], time);
      if (acquire) Join(&own.view, read.view);
      if (access.kind == Kind::kAdd) own.next.value += value;
      if (access.kind == Kind::kAdd ||
          (access.kind == Kind::kCompareExchange && value == access.expected)) {
        Append(state, thread, release, &read);
      }
    }
    if (text != nullptr) *text = Describe(thread, access, value, time);
    own.log.push_back(Read{access.location, access.kind == Kind::kLoad, value});
  }

  std::string Describe(int thread, const Access& access, uint64_t value, int time) const {
    static const char* const kKinds[] = {"loads",  "stores", "adds to", "compares",
                                         "fences", "counts", ""};
    static const char* const kOrders[] = {"", ", acquire", ", release", ", acquire and release"};
    const uint64_t shown = access.kind == Kind::kStore ? access.value : value;
    char text[160];
    std::snprintf(text, sizeof(text), "thread %d %s %#llx (message %d)%s: %#llx", thread,
                  kKinds[static_cast<int>(access.kind)],
                  static_cast<unsigned long long>(names_.empty() ? 0 : names_[access.location]),
                  time, kOrders[static_cast<int>(access.order)],
                  static_cast<unsigned long long>(shown));
    return text;
  }

  // ---- The search ------------------------------------------------------------------------------

  // A thread whose step is the only one to look at here, or -1: other orders have no other outcome.
  //
  //   after a load   the thread goes on, unless it begins to wait: others' steps between a load and
  //                  the access after it may as well come before both, since a load may read an
  //                  older message all the same
  //   stores         and fences come at once: a word has one writer, and a reader may take an older
  //                  message whatever is there
  int Eager(const State& state) const {
    if (!reduces_) return -1;
    const int same = state.goes_on;
    if (same >= 0 && state.threads[same].next.kind != Kind::kDone) return same;
    for (int t = 0; t < threads_; ++t) {
      const Kind kind = state.threads[t].next.kind;
      if (kind == Kind::kStore || kind == Kind::kReleaseFence) return t;
    }
    return -1;
  }

  void Search(int64_t most_states) {
    State first;
    first.threads.resize(threads_);
    for (int t = 0; t < threads_; ++t) {
      if (!Advance(&first, t)) return;
    }
    seen_.emplace(Key(first), 0);
    std::vector<std::pair<uint32_t, State>> stack;
    stack.emplace_back(0, std::move(first));
    while (!stack.empty()) {
      const auto [at, state] = std::move(stack.back());
      stack.pop_back();
      bool done = true;
      const int first_thread = Eager(state), end = first_thread < 0 ? threads_ : first_thread + 1;
      for (int t = std::max(first_thread, 0); t < end; ++t) {
        if (state.threads[t].next.kind == Kind::kDone) continue;
        done = false;
        uint8_t first_time;
        const int choices = Choices(state, state.threads[t], &first_time);
        for (int c = 0; c < choices; ++c) {
          State next = state;
          const auto time = static_cast<uint8_t>(first_time + c);
          ++result_.steps;
          const Node node{at, static_cast<uint8_t>(t), time};
          if (!Step(&next, t, time, nullptr)) {
            nodes_.push_back(node);
            result_.trace = TraceTo(static_cast<uint32_t>(nodes_.size() - 1));
            return;
          }
          const auto id = static_cast<uint32_t>(nodes_.size());
          const auto [found, is_new] = seen_.emplace(Key(next), id);
          edges_.emplace_back(at, found->second);
          if (!is_new) continue;
          nodes_.push_back(node);
          if (static_cast<int64_t>(nodes_.size()) > most_states) {
            result_.complete = false;
            return;
          }
          stack.emplace_back(id, std::move(next));
        }
      }
      if (done) finals_.push_back(at);
    }
  }

  // States from which no schedule ends all programs.
  void FindStuck() {
    std::vector<std::vector<uint32_t>> before(nodes_.size());
    for (const auto& [from, to] : edges_) before[to].push_back(from);
    std::vector<bool> ends(nodes_.size());
    std::vector<uint32_t> stack = finals_;
    while (!stack.empty()) {
      const uint32_t at = stack.back();
      stack.pop_back();
      if (ends[at]) continue;
      ends[at] = true;
      stack.insert(stack.end(), before[at].begin(), before[at].end());
    }
    for (uint32_t i = 0; i < nodes_.size(); ++i) {
      if (ends[i]) continue;
      result_.error = "threads wait for ever";
      result_.trace = TraceTo(i);
      return;
    }
  }

  std::vector<std::string> TraceTo(uint32_t node) {
    std::vector<Node> path;
    for (; node != 0; node = nodes_[node].parent) path.push_back(nodes_[node]);
    const std::string error = result_.error;  // Advance writes it again
    State state;
    state.threads.resize(threads_);
    for (int t = 0; t < threads_; ++t) Advance(&state, t);
    std::vector<std::string> trace;
    for (size_t i = path.size(); i-- > 0;) {
      std::string text;
      Step(&state, path[i].thread, path[i].choice, &text);
      trace.push_back(text);
    }
    result_.error = error;
    return trace;
  }

  const int threads_, calls_;
  const std::function<void(int, int)> program_;
  const Weakened weakened_;
  std::map<uintptr_t, uint64_t> initial_;
  std::unordered_map<uintptr_t, uint8_t> locations_;
  std::vector<uintptr_t> names_;  // address by location
  bool reduces_ = true;
  Replay replay_{};
  bool waits_ = false;  // the thread that has advanced is at the start of an attempt
  Result result_;
  std::vector<Node> nodes_;
  std::unordered_map<std::pair<uint64_t, uint64_t>, uint32_t, KeyHash> seen_;
  std::vector<std::pair<uint32_t, uint32_t>> edges_;
  std::vector<uint32_t> finals_;
};

// Ends the run of the program that calls it: the checker reports the schedule.
[[noreturn]] inline void Fail(const std::string& what) { throw Failed{what}; }

}  // namespace model

#endif  // JFLUX_TESTS_CC_MODEL_CHECKER_H_
