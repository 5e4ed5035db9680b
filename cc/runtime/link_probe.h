// Probe of the links between the GPUs of a node, when the heap is made. It answers three questions:
// do writes of a peer reach the memory that the device itself reads, do a peer's data arrive before
// the flag that announces them, and how fast is a link?
//
// The probe uses a workspace of its own, over all devices of the node. Copies are numbered by the
// devices' order, and device i writes slot i of each peer's copy:
//
//   +--------+--------+-----+---------+--------+--------+--------+-----+
//   | slot 0 | slot 1 | ... | pattern | pulled | talk 0 | talk 1 | ... |   pattern, pulled: its own
//   +--------+--------+-----+---------+--------+--------+--------+-----+
//
// Steps, each by all devices of the node, with a barrier of all processes after each:
//
//   copies  Each device copies its pattern to its slot at every peer, and the peer's pattern back.
//           One device after the other, with a barrier after each process: three that copy to a
//           fourth at the same time find a third of what its links carry.
//   check   Each device looks at its slots through its own address: a mapping that leads to other
//           memory shows here, and not where the writer reads back what it wrote.
//   talk    Every two devices exchange data and a flag, kTurns times. Each checks the data when it
//           sees the flag.
//
//   writes  slots and talks of peers
//   waits   in `talk`, for the peer's flag, with a deadline
//   order   flags are written with release and read with acquire at system scope. Data of a turn
//           lie in half turn % 2: a device writes turn t when it has seen the peer's flag t - 1, so
//           the peer has checked turn t - 2
//   reset   never: the workspace is freed after the probe
#ifndef JFLUX_RUNTIME_LINK_PROBE_H_
#define JFLUX_RUNTIME_LINK_PROBE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace jflux {

// One device's measurements of its link to another.
struct Link {
  int64_t from, to;  // global device ids
  double push_gbps;  // this device writes to the peer with its copy engine; 1e9 bytes a second
  double pull_gbps;  // this device reads from the peer, likewise
  double signal_us;  // the two devices exchange 1 KiB and a flag
};

enum class ProbeStep { kCopies = 0, kCheck = 1, kTalk = 2 };

int64_t ProbeBytes(int devices);

// A device of this process that takes part.
struct ProbedDevice {
  int64_t id;
  int ordinal;
  int index;                  // among all devices of the node
  std::vector<char*> copies;  // of the probe's workspace, by index, as this device addresses them
};

// One step of all devices of this process. `ids`: of all devices of the node. Fills in `links`.
// False if a link cannot be trusted, or if the probe itself failed; *error says which.
bool RunProbe(ProbeStep step, const std::vector<ProbedDevice>& devices,
              const std::vector<int64_t>& ids, std::vector<Link>* links, std::string* error);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_LINK_PROBE_H_
