// One rank's part of a call on the CPU, in host memory: what the bodies of ops share.
#ifndef JFLUX_RUNTIME_RANK_CALL_H_
#define JFLUX_RUNTIME_RANK_CALL_H_

#include <cstdint>

#include "core/layout.h"
#include "core/signal.h"

namespace jflux {

template <typename Params, typename Arrays, typename Layout>
struct RankCall {
  const Params& p;
  const Arrays& arrays;
  const SymmetricView& view;
  const WaitContext& ctx;
  Layout layout;
  int64_t signals, data;  // offsets of this call's half of the workspace
  Signal signal;

  RankCall(const Params& p, const Arrays& arrays, const Layout& layout, const SymmetricView& view,
           uint64_t epoch, const WaitContext& ctx)
      : p(p),
        arrays(arrays),
        view(view),
        ctx(ctx),
        layout(layout),
        signals(layout.Workspace().SignalOffset(epoch)),
        data(layout.Workspace().DataOffset(epoch)),
        signal(MakeSignal(epoch, p.Signature())) {}
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_RANK_CALL_H_
