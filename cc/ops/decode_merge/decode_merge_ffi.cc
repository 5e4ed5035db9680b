// The plan and the FFI handlers of decode_merge.
#include <optional>
#include <string>

#include "ops/decode_merge/decode_merge.h"
#include "runtime/fault.h"
#include "runtime/handlers.h"

namespace jflux {
namespace {

// Fields of a call: world, rows, width. Of the plan: workspace_bytes.
bool PlanDecodeMerge(CallReader& call, const Machine&, Fields* plan, std::string* why_not) {
  DecodeMergeParams p{};
  p.world = static_cast<int32_t>(call.Get("world", 1, kMaxRanks));
  p.rows = call.Get("rows", 1, int64_t{1} << 31);
  p.width = call.Get("width", 1, int64_t{1} << 20);
  if (!call.Check(why_not)) return false;
  *plan = Fields{{"workspace_bytes", p.Workspace().TotalBytes()}};
  return true;
}

struct Attributes {
  CallAttributes call;
  void Read(AttributeReader& read) { call.Read(read); }
};

struct Call : CallOf<kDecodeMergeId, DecodeMergeCpu, LaunchDecodeMerge> {
  std::string Read(const Attributes& a, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
    if (x.dimensions().size() != 2) return kDoNotFit;
    const int64_t rows = x.dimensions()[0], columns = x.dimensions()[1];
    if (!Is(x, ffi::F32, {rows, columns}) || !Is(*y, ffi::F32, {rows, columns}) || rows < 1 ||
        columns < 2) {
      return kDoNotFit;
    }
    p = {static_cast<int32_t>(a.call.world), rows, columns - 1};
    arrays = {static_cast<const float*>(x.untyped_data()), static_cast<float*>(y->untyped_data())};
    return "";
  }
  int64_t WorkspaceBytes() const { return p.Workspace().TotalBytes(); }
};

}  // namespace

// Listed in cc/ops/registry.cc.
extern const Op kDecodeMergeOp;
const Op kDecodeMergeOp = {
    kDecodeMergeId,      "decode_merge",      OnCpu<Call>,    JFLUX_IF_CUDA(OnCuda<Call>),
    kDecodeMergeFormats, kDecodeMergeFormats, PlanDecodeMerge};

}  // namespace jflux
