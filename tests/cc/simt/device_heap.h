// A symmetric heap of simulated devices, one for each rank: device states, and workspaces as
// fresh memory leaves them.
#ifndef JFLUX_TESTS_CC_SIMT_DEVICE_HEAP_H_
#define JFLUX_TESTS_CC_SIMT_DEVICE_HEAP_H_

#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/packet.h"
#include "gpu/device_state.h"
#include "runtime/heap_cuda.h"
#include "simt/values.h"

namespace jflux::simt {

class DeviceHeap {
 public:
  DeviceHeap(int world, const WorkspaceLayout& layout, const TestHooks& hooks)
      : DeviceHeap(world, layout.DataOffset(0), layout.TotalBytes(), '\xff', hooks) {}
  DeviceHeap(int world, const PacketLayout& layout, const TestHooks& hooks)
      : DeviceHeap(world, layout.PacketOffset(0), layout.TotalBytes(), kPacketPoison, hooks) {}
  CudaDevice Device(int rank, int sm_count) {
    CudaDevice device{};
    device.ordinal = rank;
    device.id = rank;
    device.sm_count = sm_count;
    device.state = &states_[rank];
    device.records = &records_[rank];
    return device;
  }
  SymmetricView View(int rank, uint32_t launch) {
    SymmetricView view{};
    view.rank = rank;
    view.world = static_cast<int32_t>(memory_.size());
    view.launch = launch;
    for (int r = 0; r < view.world; ++r) view.base[r] = memory_[r].get();
    return view;
  }
  const Fault& FaultOf(int rank) const { return records_[rank].fault; }

 private:
  // Of each rank `total_bytes`: 0, and from `data_offset` on poison. No wait has a timeout: the
  // simulator finds what never comes.
  DeviceHeap(int world, int64_t data_offset, int64_t total_bytes, char poison,
             const TestHooks& hooks)
      : records_(world) {
    for (int rank = 0; rank < world; ++rank) {
      memory_.emplace_back(total_bytes);
      std::memset(memory_.back().get(), 0, data_offset);
      std::memset(memory_.back().get() + data_offset, poison, total_bytes - data_offset);
      DeviceState state{};
      state.hooks = hooks;
      state.limits.timeout_ns = uint64_t{1} << 60;
      state.limits.fault = &records_[rank].fault;
      state.limits.warning = &records_[rank].warning;
      state.limits.abort = &records_[rank].abort;
      states_.push_back(state);
    }
  }

  std::deque<Array<char>> memory_;
  std::vector<HostRecords> records_;
  std::vector<DeviceState> states_;
};

}  // namespace jflux::simt

#endif  // JFLUX_TESTS_CC_SIMT_DEVICE_HEAP_H_
