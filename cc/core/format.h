// Formats: the element types of operands, of results, and of what travels between ranks.
//
// A format is a row of JFLUX_FORMATS, and whoever needs to know something of one asks its row. A
// new one is a row, its arithmetic in core/numbers.h, what it multiplies (kProducts), and on GPUs
// its type in gpu/types.cuh and the instruction that multiplies it (gpu/wgmma.cuh). Then ops add it
// to the formats that their kernels take (OpFormats).
#ifndef JFLUX_CORE_FORMAT_H_
#define JFLUX_CORE_FORMAT_H_

#include <cstdint>
#include <string>
#include <type_traits>

#include "core/platform.h"

namespace jflux {

// The columns, as fields of Format:
//
//   portable, hopper   the tensor cores' instruction that multiplies two operands of the format, in
//                      portable code and in Hopper's (gpu/machine.h); null: none
//   from               the least architecture of such portable code; 0: none
//   k_major            whether that instruction takes only operands whose k is contiguous
//   scale_block        elements of a row that share a scale; 0: they have none
//   stored             where elements may be stored (kOperand and so on)
//
// The first column is the name in XLA's FFI.
inline constexpr char kMmaK8[] = "mma.sync.m16n8k8", kMmaK16[] = "mma.sync.m16n8k16",
                      kMmaK32[] = "mma.sync.m16n8k32";
inline constexpr char kWgmmaK16[] = "wgmma.m64k16", kWgmmaK32[] = "wgmma.m64k32";
// clang-format off
#define JFLUX_FORMATS(ROW)                                                                        \
/*       name        bits sums portable from hopper      k_major scale stored */                  \
  ROW(F16,  "float16",  16, F32, kMmaK16, 80, kWgmmaK16, false, 0, kStoredAnywhere)               \
  ROW(BF16, "bfloat16", 16, F32, kMmaK16, 80, kWgmmaK16, false, 0, kStoredAnywhere)               \
  ROW(F32,  "float32",  32, F32, kMmaK8,  80, nullptr,   false, 0, kStoredAnywhere)               \
  ROW(F64,  "float64",  64, F64, nullptr,  0, nullptr,   false, 0, kStoredAnywhere)               \
  ROW(F8E4M3FN, "float8_e4m3fn", 8, F32, kMmaK32, 89, kWgmmaK32, true, 0, kOperand | kWire)       \
  ROW(F8E5M2,   "float8_e5m2",   8, F32, kMmaK32, 89, kWgmmaK32, true, 0, kOperand | kWire)       \
  ROW(S8,   "int8",      8, S32, kMmaK32, 80, kWgmmaK32, true,  0, kOperand | kWire)              \
  ROW(S32,  "int32",    32, S32, nullptr,  0, nullptr,   false, 0, kResult)
// clang-format on

// The number of a format's row, which calls and plans carry.
enum class DType : int32_t {
#define JFLUX_NUMBER(ID, ...) k##ID,
  JFLUX_FORMATS(JFLUX_NUMBER)
#undef JFLUX_NUMBER
};

// Where elements may be stored: in an operand, in a result, in a peer's memory.
inline constexpr uint32_t kOperand = 1, kResult = 2, kWire = 4;
inline constexpr uint32_t kStoredAnywhere = kOperand | kResult | kWire;

struct Format {
  const char* name;   // as numpy and Python name it
  int32_t bits;       // of an element
  DType accumulator;  // of sums
  const char* portable;
  int32_t from;
  const char* hopper;
  bool k_major;
  int32_t scale_block;
  uint32_t stored;
};

// In the order of DType.
inline constexpr Format kFormats[] = {
#define JFLUX_ROW(ID, NAME, BITS, SUMS, PORTABLE, FROM, HOPPER, K_MAJOR, SCALE, STORED) \
  {NAME, BITS, DType::k##SUMS, PORTABLE, FROM, HOPPER, K_MAJOR, SCALE, STORED},
    JFLUX_FORMATS(JFLUX_ROW)
#undef JFLUX_ROW
};
inline constexpr int32_t kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);
inline constexpr const Format& FormatOf(DType t) { return kFormats[static_cast<int32_t>(t)]; }

// ---- Sets of formats ---------------------------------------------------------------------------

enum class FormatSet : uint32_t {};
template <typename... DTypes>
constexpr FormatSet SetOf(DTypes... t) {
  return static_cast<FormatSet>((0u | ... | (1u << static_cast<int32_t>(t))));
}
constexpr FormatSet operator&(FormatSet a, FormatSet b) {
  return static_cast<FormatSet>(static_cast<uint32_t>(a) & static_cast<uint32_t>(b));
}
constexpr FormatSet operator|(FormatSet a, FormatSet b) {
  return static_cast<FormatSet>(static_cast<uint32_t>(a) | static_cast<uint32_t>(b));
}
constexpr bool Has(FormatSet set, DType t) { return (set & SetOf(t)) != FormatSet{}; }

// The formats whose rows pass a test.
template <typename Test>
constexpr FormatSet FormatsWith(Test&& test) {
  uint32_t set = 0;
  for (int32_t i = 0; i < kFormatCount; ++i) {
    if (test(kFormats[i])) set |= 1u << i;
  }
  return static_cast<FormatSet>(set);
}
inline constexpr FormatSet kAllFormats = FormatsWith([](const Format&) { return true; });
// Formats of 16 bits or more that are operands and results: those of ops that name no others.
inline constexpr FormatSet kWideFormats =
    FormatsWith([](const Format& f) { return f.stored == kStoredAnywhere; });
inline constexpr FormatSet kHalves = SetOf(DType::kF16, DType::kBF16);
// What the tensor cores multiply: by portable code, by that for an architecture, and by Hopper's.
inline constexpr FormatSet kMmaFormats = FormatsWith([](const Format& f) { return f.portable; });
constexpr FormatSet MmaFormats(int32_t arch) {
  return FormatsWith([arch](const Format& f) { return f.portable && f.from <= arch; });
}
inline constexpr FormatSet kWgmmaFormats = FormatsWith([](const Format& f) { return f.hopper; });

// Calls visit(t) for each format of a set, until it returns false. Whether all returned true.
template <typename F>
bool ForFormats(FormatSet set, F&& visit) {
  for (int32_t i = 0; i < kFormatCount; ++i) {
    const auto t = static_cast<DType>(i);
    if (Has(set, t) && !visit(t)) return false;
  }
  return true;
}

// "float16, bfloat16, float32"
inline std::string NamesOf(FormatSet set) {
  std::string names;
  ForFormats(set, [&](DType t) {
    names += (names.empty() ? "" : ", ") + std::string(FormatOf(t).name);
    return true;
  });
  return names;
}

// Bytes of an element. Device code that gets t while it runs names the formats that it may be.
template <FormatSet kAmong = kAllFormats>
JFLUX_HD constexpr int64_t SizeOf(DType t) {
  switch (t) {
#define JFLUX_SIZE(ID, NAME, BITS, ...)                       \
  case DType::k##ID:                                          \
    if constexpr (Has(kAmong, DType::k##ID)) return BITS / 8; \
    break;
    JFLUX_FORMATS(JFLUX_SIZE)
#undef JFLUX_SIZE
  }
  Trap();  // a number that is no DType: whoever made one of it has not checked it
  return 0;
}

// ---- Blocks and vectors ------------------------------------------------------------------------

// A k-block: so many bytes of a row of an operand are one step of the GEMM main loop. They are a
// row of a box that TMA swizzles, and one instruction of the tensor cores multiplies
// kMultiplyBytes.
inline constexpr int kBlockBytes = 128, kMultiplyBytes = 32;
inline constexpr int32_t BlockElements(DType t) {
  return static_cast<int32_t>(kBlockBytes / SizeOf(t));
}
// A vector: what a thread, or TMA, moves at least. Rows of operands and results are whole vectors.
inline constexpr int kVectorBytes = 16;

// ---- Which formats multiply, and what an op takes ----------------------------------------------

// A product of x and w, of which y is the format unless the call names one of `others`. An op with
// one operand is a product with itself.
struct ProductFormats {
  DType x, w, y;
  FormatSet others;

  constexpr bool Gives(DType t) const { return t == y || Has(others, t); }
};
inline constexpr ProductFormats kProducts[] = {
    {DType::kF16, DType::kF16, DType::kF16, SetOf(DType::kF32)},
    {DType::kBF16, DType::kBF16, DType::kBF16, SetOf(DType::kF32)},
    {DType::kF32, DType::kF32, DType::kF32, {}},
    {DType::kF64, DType::kF64, DType::kF64, SetOf(DType::kF32)},
    {DType::kF8E4M3FN, DType::kF8E4M3FN, DType::kBF16, SetOf(DType::kF16, DType::kF32)},
    {DType::kF8E5M2, DType::kF8E4M3FN, DType::kBF16, SetOf(DType::kF16, DType::kF32)},
    {DType::kS8, DType::kS8, DType::kS32, SetOf(DType::kBF16, DType::kF16, DType::kF32)},
};

// The formats that an op's kernels take, and give.
struct OpFormats {
  FormatSet operands = {};
  FormatSet results = {};  // beside x's own

  constexpr bool Takes(const ProductFormats& p) const {
    return Has(operands, p.x) && Has(operands, p.w);
  }
  constexpr FormatSet ResultsOf(const ProductFormats& p) const {
    return FormatsWith([&](const Format& f) {
      const auto t = static_cast<DType>(&f - kFormats);
      return p.Gives(t) && (t == p.x || Has(results, t));
    });
  }
};
// Of ops that move bytes, whatever they stand for; and of the CPU's products.
inline constexpr OpFormats kMovesBytes{};
inline constexpr OpFormats kCpuFormats{kWideFormats, SetOf(DType::kF32)};

// Why kernels do not take x and w of these formats and give y of another, by their names; empty if
// they do. `machine`: the formats of its architecture (gpu/machine.h). All refusals of types come
// from here.
inline std::string WhyNotFormats(const OpFormats& op, FormatSet machine, const std::string& x,
                                 const std::string& w, const std::string& y) {
  const OpFormats taken{op.operands & machine, op.results};
  FormatSet partners{}, given{};
  for (const ProductFormats& p : kProducts) {
    if (x != FormatOf(p.x).name || !taken.Takes(p)) continue;
    partners = partners | SetOf(p.w);
    if (w == FormatOf(p.w).name) given = taken.ResultsOf(p);
  }
  if (partners == FormatSet{}) {
    return "operands are " + x + ", the kernels take " + NamesOf(taken.operands);
  }
  if (given == FormatSet{}) {
    return "x is " + x + " and w is " + w + ", the kernels multiply " + x + " by " +
           NamesOf(partners);
  }
  const bool gives = !ForFormats(given, [&](DType t) { return y != FormatOf(t).name; });
  return gives ? "" : "results are " + y + ", the kernels give " + NamesOf(given);
}
inline std::string WhyNotFormats(const OpFormats& op, FormatSet machine, DType x, DType w,
                                 DType y) {
  return WhyNotFormats(op, machine, FormatOf(x).name, FormatOf(w).name, FormatOf(y).name);
}
inline std::string WhyNotFormats(const OpFormats& op, FormatSet machine, DType operands,
                                 DType results) {
  return WhyNotFormats(op, machine, operands, operands, results);
}

// ---- From a number to a C++ type ---------------------------------------------------------------

// Calls f(format) for a t of kAmong, which f is compiled for. A `format` is a constant:
// Number<format> (core/numbers.h) and CudaType<format> (gpu/types.cuh) are its types.
template <FormatSet kAmong = kWideFormats, typename F>
auto WithFormat(DType t, F&& f) {
  switch (t) {
#define JFLUX_CASE(ID, ...)                                    \
  case DType::k##ID:                                           \
    if constexpr (Has(kAmong, DType::k##ID)) {                 \
      return f(std::integral_constant<DType, DType::k##ID>{}); \
    }                                                          \
    break;
    JFLUX_FORMATS(JFLUX_CASE)
#undef JFLUX_CASE
  }
  Trap();  // the caller has refused all other formats
  __builtin_unreachable();
}

}  // namespace jflux

#endif  // JFLUX_CORE_FORMAT_H_
