// Mutations of a corpus of texts, for fuzz_*_test.cc. Such a test defines
//
//   extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
//
// which aborts if the parser does what it must not, and calls FuzzMain with its corpus, which runs
// a fixed number of mutations, or the files that it is given. With clang, -fsanitize=fuzzer and
// -DJFLUX_LIBFUZZER make it a libFuzzer program, which brings its own main:
//
//   clang++ -std=c++17 -g -fsanitize=fuzzer,address,undefined -DJFLUX_LIBFUZZER -Icc -Itests/cc
//     -pthread tests/cc/fuzz_handle_test.cc cc/runtime/{heap,heap_cpu,workspace_table}.cc
//     -o fuzz_handle
#ifndef JFLUX_TESTS_CC_FUZZ_H_
#define JFLUX_TESTS_CC_FUZZ_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace jflux {

// Not assert, which a release build leaves out.
#define FUZZ_EXPECT(condition, text)                                               \
  if (!(condition)) {                                                              \
    std::fprintf(stderr, "%s:%d: %s\non \"%s\"\n", __FILE__, __LINE__, #condition, \
                 std::string(text).c_str());                                       \
    std::abort();                                                                  \
  }

inline std::string Mutated(const std::vector<std::string>& corpus, std::mt19937& random) {
  static const std::vector<std::string> tokens{"-",
                                               "-1",
                                               "0",
                                               ":",
                                               "::",
                                               ",",
                                               ",,",
                                               " ",
                                               "\n",
                                               "x",
                                               "1e9",
                                               "0x10",
                                               "+1",
                                               "9223372036854775807",
                                               "9223372036854775808",
                                               "99999999999999999999",
                                               std::string(1, '\0'),
                                               "\xff",
                                               "1,1,1",
                                               "2048"};
  const auto pick = [&](size_t count) { return static_cast<size_t>(random() % count); };
  std::string text = corpus[pick(corpus.size())];
  for (size_t edits = pick(4) + (random() % 8 != 0); edits > 0; --edits) {
    const size_t at = pick(text.size() + 1), length = pick(4);
    switch (random() % 4) {
      case 0:
        text.insert(at, tokens[pick(tokens.size())]);
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.replace(at, length, tokens[pick(tokens.size())]);
        break;
      default:
        text = text.substr(0, at) + corpus[pick(corpus.size())];
    }
  }
  return text;
}

inline int RunOne(const std::string& text) {
  return LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

// Runs the files, or so many mutations.
inline int FuzzMain(int argc, char** argv, const std::vector<std::string>& corpus, int count) {
  for (int i = 1; i < argc; ++i) {
    std::ifstream in(argv[i], std::ios::binary);
    RunOne(std::string(std::istreambuf_iterator<char>(in), {}));
  }
  if (argc > 1) return 0;
  std::mt19937 random(1);
  for (const std::string& text : corpus) RunOne(text);
  for (int i = 0; i < count; ++i) RunOne(Mutated(corpus, random));
  std::printf("%d mutations of %zu texts\n", count, corpus.size());
  return 0;
}

}  // namespace jflux

#endif  // JFLUX_TESTS_CC_FUZZ_H_
