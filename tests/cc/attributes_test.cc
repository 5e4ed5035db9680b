// Attributes that a handler reads by name: what is missing, mistyped or unknown is named.
#include "runtime/attributes.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ops/all_gather_matmul/all_gather_matmul.h"
#include "testing.h"

namespace jflux {
namespace {

// A dictionary as XLA makes it: sorted by name.
class Dictionary {
 public:
  void Set(const std::string& name, int64_t value, XLA_FFI_DataType type = XLA_FFI_DataType_S64) {
    Value& v = values_[name];
    v.numbers = {value};
    v.scalar = {type, v.numbers.data()};
    v.is_array = false;
  }
  void Set(const std::string& name, std::vector<int64_t> values) {
    Value& v = values_[name];
    v.numbers = std::move(values);
    v.array = {XLA_FFI_DataType_S64, v.numbers.size(), v.numbers.data()};
    v.is_array = true;
  }
  void Drop(const std::string& name) { values_.erase(name); }

  // The reason why T cannot be read; empty if it has been.
  template <typename T>
  std::string Read(T* result) {
    std::vector<XLA_FFI_AttrType> types;
    std::vector<XLA_FFI_ByteSpan> spans;
    std::vector<XLA_FFI_ByteSpan*> names;
    std::vector<void*> values;
    for (auto& [name, v] : values_) {
      types.push_back(v.is_array ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR);
      spans.push_back({name.data(), name.size()});
      values.push_back(v.is_array ? static_cast<void*>(&v.array) : &v.scalar);
    }
    for (auto& span : spans) names.push_back(&span);
    XLA_FFI_Attrs attrs{};
    attrs.size = static_cast<int64_t>(values.size());
    attrs.types = types.data();
    attrs.names = names.data();
    attrs.attrs = values.data();
    const auto refused = ReadAttributes(kAllGatherMatmulId, ffi::Dictionary(&attrs), result);
    return refused ? refused->message() : "";
  }

 private:
  struct Value {
    std::vector<int64_t> numbers;
    XLA_FFI_Scalar scalar;
    XLA_FFI_Array array;
    bool is_array;
  };
  std::map<std::string, Value> values_;
};

Dictionary OfAProduct() {
  Dictionary d;
  d.Set("groups", {3, 1, 0, 2});
  d.Set("site", 11);
  d.Set("sm_count", 114);
  d.Set("workspace_bytes", 22);
  d.Set("world", 2);
  d.Set("choice", {5, 6, 7, 8});
  d.Set("inner", 33);
  d.Set("outer", 44);
  d.Set("senders", 55);
  d.Set("transpose_rhs", 1, XLA_FFI_DataType_PRED);
  return d;
}

std::string Refusal(Dictionary d) {
  ProductAttributes attributes;
  return d.Read(&attributes);
}

TEST(EachGoesToTheMemberOfItsName) {
  ProductAttributes a;
  Dictionary d = OfAProduct();
  EXPECT_EQ(d.Read(&a), "");
  EXPECT_EQ(a.call.groups.size(), 4u);
  EXPECT_EQ(a.call.groups.begin()[0], 3);
  EXPECT_EQ(a.call.site, 11);
  EXPECT_EQ(a.call.sm_count, 114);
  EXPECT_EQ(a.call.workspace_bytes, 22);
  EXPECT_EQ(a.call.world, 2);
  EXPECT_EQ(a.choice.begin()[3], 8);
  EXPECT_EQ(a.inner, 33);
  EXPECT_EQ(a.outer, 44);
  EXPECT_EQ(a.senders, 55);
  EXPECT(a.transpose_rhs);
}

TEST(AMissingOneIsNamed) {
  for (const char* name : {"choice", "groups", "inner", "world"}) {
    Dictionary d = OfAProduct();
    d.Drop(name);
    EXPECT_EQ(Refusal(d),
              std::string("jflux: all_gather_matmul: attribute `") + name + "` is missing");
    d.Set("another", 1);  // the number is right again
    EXPECT_EQ(Refusal(d),
              std::string("jflux: all_gather_matmul: attribute `") + name + "` is missing");
  }
}

TEST(AMistypedOneIsNamed) {
  Dictionary d = OfAProduct();
  d.Set("transpose_rhs", 1);
  EXPECT_EQ(Refusal(d), "jflux: all_gather_matmul: attribute `transpose_rhs` is no bool");
  d = OfAProduct();
  d.Set("inner", 33, XLA_FFI_DataType_S32);
  EXPECT_EQ(Refusal(d), "jflux: all_gather_matmul: attribute `inner` is no int64");
  d = OfAProduct();
  d.Set("groups", 3);
  EXPECT_EQ(Refusal(d), "jflux: all_gather_matmul: attribute `groups` is no array of int64");
  d = OfAProduct();
  d.Set("outer", std::vector<int64_t>{44});
  EXPECT_EQ(Refusal(d), "jflux: all_gather_matmul: attribute `outer` is no int64");
}

TEST(AnUnknownOneIsNamed) {
  for (const char* name : {"a", "rows", "zeta"}) {
    Dictionary d = OfAProduct();
    d.Set(name, 1);
    EXPECT_EQ(Refusal(d),
              std::string("jflux: all_gather_matmul: attribute `") + name + "` is unknown");
  }
}

TEST(GroupsAreATable) {
  for (int64_t world : {-1, 0, 3, kMaxRanks + 1}) {
    Dictionary d = OfAProduct();
    d.Set("world", world);
    EXPECT(Refusal(d).find("`groups` is no table") != std::string::npos) << Refusal(d);
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
