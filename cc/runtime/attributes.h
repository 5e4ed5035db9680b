// The attributes of a handler, read by name into a struct.
//
//   struct Attributes {
//     CallAttributes call;
//     bool chunked;
//     int64_t rows;
//
//     void Read(AttributeReader& read) {
//       call.Read(read);
//       read("chunked", &chunked)("rows", &rows);
//     }
//   };
//
// A handler binds all attributes at once, and reads them first:
//
//   ffi::Error Handler(ffi::Dictionary dictionary, ...) {
//     Attributes attributes;
//     if (auto refused = ReadAttributes(kFooBarId, dictionary, &attributes)) return *refused;
//
// An attribute that is missing, has another type than the member, or is not read at all is an
// error that names it.
#ifndef JFLUX_RUNTIME_ATTRIBUTES_H_
#define JFLUX_RUNTIME_ATTRIBUTES_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/layout.h"
#include "core/signal.h"
#include "runtime/fault.h"
#include "xla/ffi/api/ffi.h"

namespace jflux {

namespace ffi = xla::ffi;

using Int64s = ffi::Span<const int64_t>;

inline ffi::Error InvalidArgument(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jflux: " + message);
}

inline constexpr const char* TypeName(bool) { return "bool"; }
inline constexpr const char* TypeName(int64_t) { return "int64"; }
inline constexpr const char* TypeName(double) { return "float64"; }
inline constexpr const char* TypeName(Int64s) { return "array of int64"; }

class AttributeReader {
 public:
  explicit AttributeReader(const ffi::Dictionary& attributes) : attributes_(attributes) {}

  template <typename T>
  AttributeReader& operator()(std::string_view name, T* value) {
    if (count_ < names_.size()) names_[count_] = name;
    ++count_;
    if (const auto found = attributes_.get<T>(name); found.has_value()) {
      *value = *found;
    } else if (attributes_.contains(name)) {
      Refuse("is no " + std::string(TypeName(T{})), name);
    } else {
      Refuse("is missing", name);
    }
    return *this;
  }

  // Makes Check() fail. The first reason is the one that it tells.
  void Refuse(const std::string& why) {
    if (refused_.empty()) refused_ = why;
  }

  // Says what is wrong with the attributes; empty if nothing is. Called after the last one was
  // read.
  std::string Check() {
    // With nothing missing, equal numbers mean that the names are the same.
    if (!refused_.empty() || attributes_.size() == count_) return refused_;
    for (const std::string_view name : attributes_) {
      bool known = false;
      for (size_t i = 0; i < count_ && i < names_.size(); ++i) known |= names_[i] == name;
      if (!known) Refuse("is unknown", name);
    }
    return refused_;
  }

 private:
  void Refuse(const std::string& why, std::string_view name) {
    Refuse("attribute `" + std::string(name) + "` " + why);
  }

  const ffi::Dictionary& attributes_;
  std::array<std::string_view, 32> names_;  // of those that were read
  size_t count_ = 0;
  std::string refused_;
};

// Null if `attributes` has exactly the members of *result, of their types.
template <typename T>
std::optional<ffi::Error> ReadAttributes(OpId op, const ffi::Dictionary& attributes, T* result) {
  AttributeReader reader(attributes);
  result->Read(reader);
  const std::string refused = reader.Check();
  if (refused.empty()) return std::nullopt;
  return InvalidArgument(std::string(NameOf(op)) + ": " + refused);
}

inline constexpr int64_t kMostPlannedSms = 1 << 16;

// The attributes that every call has (jflux/_call/primitives.py).
struct CallAttributes {
  Int64s groups;     // [number of groups][world] global device ids, in rank order
  int64_t site = 0;  // unique in the module; on CPUs see runtime/cpu_call.h
  int64_t workspace_bytes = 0;
  int64_t world = 0;
  int64_t sm_count = 0;  // multiprocessors that the plan was made for; 0: the CPU back end

  void Read(AttributeReader& read) {
    read("groups", &groups)("site", &site)("sm_count", &sm_count)(
        "workspace_bytes", &workspace_bytes)("world", &world);
    if (world < 1 || world > kMaxRanks || groups.size() % world != 0) {
      read.Refuse("attribute `groups` is no table of up to " + std::to_string(kMaxRanks) +
                  " ranks");
    }
    if (sm_count < 0 || sm_count > kMostPlannedSms) {
      read.Refuse("attribute `sm_count` is no number of multiprocessors");
    }
  }
};

// The attributes that every product has (jflux/_ops/products/_product_plan.py). `choice` and
// `senders` are the plan of the product (runtime/product_plan.h), `outer` and `inner` say how its
// rows lie (core/rows.h).
struct ProductAttributes {
  CallAttributes call;
  Int64s choice;
  int64_t inner = 0, outer = 0;
  int64_t senders = 0;
  bool transpose_rhs = false;

  void Read(AttributeReader& read) {
    call.Read(read);
    read("choice", &choice)("inner", &inner)("outer", &outer)("senders", &senders)("transpose_rhs",
                                                                                   &transpose_rhs);
  }
};

// Of a product whose operands may have scales.
struct ScaledAttributes : ProductAttributes {
  int64_t scales = 0;  // number of a Scales

  void Read(AttributeReader& read) {
    ProductAttributes::Read(read);
    read("scales", &scales);
  }
};

// Of a product with an all-to-all: whether rows, not columns, are split and concatenated.
struct ShardAttributes : ScaledAttributes {
  bool concat_rows = false, split_rows = false;

  void Read(AttributeReader& read) {
    ScaledAttributes::Read(read);
    read("concat_rows", &concat_rows)("split_rows", &split_rows);
  }
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_ATTRIBUTES_H_
