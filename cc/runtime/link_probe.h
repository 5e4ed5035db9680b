// Is a peer's memory what it claims to be, and how fast is it? Asked once, when the heap is made.
#ifndef JFLUX_RUNTIME_LINK_PROBE_H_
#define JFLUX_RUNTIME_LINK_PROBE_H_

#include <cstdint>
#include <string>

namespace jflux {

// What one device found out about another's heap.
struct Link {
  int64_t from, to;   // global device ids
  double push_gbps;   // this device writes to the peer, by its copy engine; 1e9 bytes a second
  double pull_gbps;   // this device reads from the peer, likewise
  double signal_us;   // a flag written to the peer and read back
  std::string fault;  // empty: the link can be trusted
};

// Every heap ends with this much room for probes: one area for each rank that may probe it.
inline constexpr int64_t kProbeAreaBytes = 4 << 20;
inline constexpr int kProbeAreas = 16;
inline constexpr int64_t kProbeBytes = kProbeAreaBytes * kProbeAreas;

// Copies a pattern to the peer's area and back and compares, sets a flag there and reads it, and
// times both. `local` and `remote` are the same area of this device's and the peer's heap; the
// current device is `from`'s. Takes a few milliseconds.
Link ProbeLink(int64_t from, int64_t to, char* local, char* remote);

}  // namespace jflux

#endif  // JFLUX_RUNTIME_LINK_PROBE_H_
