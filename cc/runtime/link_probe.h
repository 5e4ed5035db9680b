// Probe of the link to a peer, run once when the heap is created: is the peer's memory mapped
// correctly, and how fast is the link?
//
//   writes  The probing device writes a pattern and then a flag into its own area of the peer's
//           heap. Up to kProbeAreas devices have an area each.
//   waits   The probing device, for its own flag, for at most one second. The peer takes no part.
//   order   The flag is written with release and read with acquire at system scope.
//   reset   never: nothing else uses the areas
#ifndef JFLUX_RUNTIME_LINK_PROBE_H_
#define JFLUX_RUNTIME_LINK_PROBE_H_

#include <cstdint>
#include <string>

namespace jflux {

// What one device measured of its link to another's heap.
struct Link {
  int64_t from, to;   // global device ids
  double push_gbps;   // this device writes to the peer with its copy engine; 1e9 bytes a second
  double pull_gbps;   // this device reads from the peer, likewise
  double signal_us;   // round trip of a flag written to the peer and read back
  std::string fault;  // empty: the link works
};

// Every heap ends with an area for each rank that may probe it.
inline constexpr int64_t kProbeAreaBytes = 4 << 20;
inline constexpr int kProbeAreas = 16;
inline constexpr int64_t kProbeBytes = kProbeAreaBytes * kProbeAreas;

// Copies a pattern to the peer's area and back and compares it, sets a flag there and reads it
// back, and times both. `local` and `remote` are the same area of this device's and the peer's
// heap. The current device must be `from`'s. Takes a few milliseconds.
Link ProbeLink(int64_t from, int64_t to, char* local, char* remote);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_LINK_PROBE_H_
