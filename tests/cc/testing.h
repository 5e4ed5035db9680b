// A one-page test harness. GPU hosts do not have GoogleTest, and these tests must build wherever
// the library does.
//
//   TEST(Name) { EXPECT_EQ(1 + 1, 2); EXPECT(x > 0) << "x is " << x; }
//   int main() { return jflux::RunAll(); }
//
// Expectations may be made on any thread. A failed one is counted and printed, and the test
// continues.
#ifndef JFLUX_TESTS_CC_TESTING_H_
#define JFLUX_TESTS_CC_TESTING_H_

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace jflux {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}
inline bool Register(const char* name, void (*body)()) {
  Tests().push_back({name, body});
  return true;
}

template <typename T>
void Print(std::ostream& text, const T& v) {
  if constexpr (std::is_enum_v<T>) {
    text << static_cast<std::underlying_type_t<T>>(v);
  } else {
    text << v;
  }
}

// A failed expectation. Text streamed into it explains the failure. The destructor prints it.
class Failure {
 public:
  Failure(const char* file, int line, const char* what) {
    text_ << file << ":" << line << ": " << what << " ";
  }
  ~Failure() {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (++Count() <= kMaxPrinted) std::fprintf(stderr, "%s\n", text_.str().c_str());
    if (Count() == kMaxPrinted) std::fprintf(stderr, "(no more of this test)\n");
  }
  template <typename T>
  Failure& operator<<(const T& v) {
    Print(text_, v);
    return *this;
  }
  static int& Count() {
    static int count = 0;
    return count;
  }

 private:
  static constexpr int kMaxPrinted = 20;  // exhaustive loops can fail thousands of times
  std::ostringstream text_;
};

// Empty if a == b, else both.
template <typename A, typename B>
std::string Difference(const A& a, const B& b) {
  bool equal;
  if constexpr (std::is_arithmetic_v<A> && std::is_arithmetic_v<B>) {
    using Common = std::common_type_t<A, B>;  // no warning of an int that is compared to a size
    equal = static_cast<Common>(a) == static_cast<Common>(b);
  } else {
    equal = a == b;
  }
  if (equal) return "";
  std::ostringstream text;
  Print(text, a);
  text << " vs ";
  Print(text, b);
  return text.str();
}

// `case`, so that an `else` after the macro cannot bind to its `if`.
#define JFLUX_FAIL_UNLESS(condition, what) \
  switch (0)                               \
  case 0:                                  \
  default:                                 \
    if (condition) {                       \
    } else                                 \
      ::jflux::Failure(__FILE__, __LINE__, what)

#define EXPECT(condition) JFLUX_FAIL_UNLESS(condition, "EXPECT(" #condition ")")
#define EXPECT_EQ(a, b)                                                                 \
  JFLUX_FAIL_UNLESS(const std::string jflux_difference = ::jflux::Difference((a), (b)); \
                    jflux_difference.empty(), "EXPECT_EQ(" #a ", " #b "):")             \
      << jflux_difference << " "

#define TEST(name)                                                                            \
  static void Test##name();                                                                   \
  [[maybe_unused]] static const bool registered##name = ::jflux::Register(#name, Test##name); \
  static void Test##name()

inline int RunAll() {
  int passed = 0, failed = 0;
  for (const Test& test : Tests()) {
    Failure::Count() = 0;
    test.body();
    const int failures = Failure::Count();
    ++(failures == 0 ? passed : failed);
    if (failures != 0) std::fprintf(stderr, "FAILED %s (%d)\n", test.name, failures);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

// Exit status of a program that cannot test anything in this build. Bazel has no skipped tests.
inline int Skip(const char* reason) {
  std::printf("skipped: %s\n", reason);
  return std::getenv("TEST_SRCDIR") != nullptr ? 0 : 77;
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_TESTING_H_
