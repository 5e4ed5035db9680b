// What a state of the model checker is (model/checker.h): threads with what they have read, and the
// messages in the memory.
#ifndef JFLUX_TESTS_CC_MODEL_STATE_H_
#define JFLUX_TESTS_CC_MODEL_STATE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace model {

inline constexpr int kMaxLocations = 64;

// kCount is the checker's own: it adds to a number that no program reads, and fails above a limit.
enum class Kind : uint8_t { kLoad, kStore, kAdd, kCompareExchange, kReleaseFence, kCount, kDone };
enum class Order : uint8_t { kRelaxed, kAcquire, kRelease, kBoth };

struct Access {
  Kind kind = Kind::kDone;
  Order order = Order::kRelaxed;
  uint8_t location = 0;
  uint64_t value = 0, expected = 0;  // kCount: what is added, and the limit
};

// What the checker breaks in the atomic functions themselves.
struct Weakened {
  bool release = false;  // release stores and fences are relaxed
  bool acquire = false;  // acquire loads are relaxed
};

using View = std::array<uint8_t, kMaxLocations>;

inline void Join(View* view, const View& other) {
  for (int i = 0; i < kMaxLocations; ++i) (*view)[i] = std::max((*view)[i], other[i]);
}

struct Message {
  uint8_t location, time, writer;  // writer: a thread; kAnyWriter: RMWs
  uint64_t value;
  View view;
};

inline constexpr uint8_t kAnyWriter = 0xff;

struct Read {
  uint8_t location;
  bool is_load;
  uint64_t value;
};

struct Thread {
  int call = 0;
  std::vector<Read> log;  // of this call
  View view{}, fenced{};  // fenced: what its relaxed stores carry
  Access next;
};

struct State {
  std::vector<Thread> threads;
  std::vector<Message> messages;  // of one location in the order of their times
  int goes_on = -1;               // the thread whose turn it is still
};

struct Pending {
  Access access;
};
struct Failed {
  std::string what;
};

// The run of a program on a log.
struct Replay {
  std::vector<Read>* log = nullptr;
  size_t position = 0;
  bool probing = false;        // the second attempt of a poll loop is under way
  std::vector<uint8_t> probe;  // the locations that it has read
  bool restart = false;
};

// Makes a kCount. False: the number is above the limit.
inline bool Count(State* state, const Access& access) {
  for (Message& m : state->messages) {
    if (m.location != access.location) continue;
    m.value += access.value;
    return m.value <= access.expected;
  }
  state->messages.push_back(Message{access.location, 1, kAnyWriter, access.value, {}});
  return access.value <= access.expected;
}

// ---- Hashes
// --------------------------------------------------------------------------------------

inline uint64_t Mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdull;
  return hash ^ (hash >> 32);
}
inline uint64_t Mix(uint64_t hash, const View& view) {
  for (int i = 0; i < kMaxLocations; i += 8) {
    uint64_t part = 0;
    for (int j = 0; j < 8; ++j) part |= static_cast<uint64_t>(view[i + j]) << (8 * j);
    hash = Mix(hash, part);
  }
  return hash;
}
// Two states are taken for one if all 128 bits agree.
inline std::pair<uint64_t, uint64_t> Key(const State& state) {
  uint64_t hash[2] = {1, 2};
  for (uint64_t& h : hash) {
    h = Mix(h, static_cast<uint64_t>(state.goes_on));
    for (const Thread& thread : state.threads) {
      h = Mix(h, static_cast<uint64_t>(thread.next.kind) << 8 | thread.call);
      h = Mix(h, thread.log.size());
      for (const Read& read : thread.log) h = Mix(Mix(h, read.location), read.value);
      h = Mix(Mix(h, thread.view), thread.fenced);
    }
    // Of one location the order of messages counts, and between locations it does not.
    uint64_t sum = 0;
    for (const Message& m : state.messages) {
      sum += Mix(Mix(Mix(h, m.location * 256 + m.time), m.value), m.view);
    }
    h = Mix(h, sum);
  }
  return {hash[0], hash[1]};
}

}  // namespace model

#endif  // JFLUX_TESTS_CC_MODEL_STATE_H_
