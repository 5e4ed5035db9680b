// NVSHMEM, through the plugin that links to it (nvshmem/plugin.h): one per process.
//
//   writers   The thread that loads and starts it (jflux/_heap/_nvshmem.py, once). The heap takes
//             and gives places, under the arena's lock.
//   readers   Handlers, after the start.
//   waits     Start alone, for all processes. Its caller watches the time.
#ifndef JFLUX_RUNTIME_NVSHMEM_H_
#define JFLUX_RUNTIME_NVSHMEM_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "nvshmem/plugin.h"

namespace jflux {

// Places in a block of memory: the first that is large enough.
class Arena {
 public:
  static constexpr int64_t kAlign = 2 << 20;

  explicit Arena(int64_t bytes = 0) : bytes_(bytes) {}
  // -1 if there is no room.
  int64_t Take(int64_t bytes);
  void Give(int64_t offset);
  int64_t bytes() const { return bytes_; }
  int64_t free_bytes() const;

 private:
  int64_t bytes_;
  std::map<int64_t, int64_t> taken_;  // sizes by offset
};

class Nvshmem {
 public:
  static Nvshmem& Get();

  // `host_library`: libnvshmem_host.so.3 by its full path, which the plugin needs; empty: the
  // loader finds it.
  bool Load(const std::string& host_library, const std::string& plugin, std::string* error);
  bool UniqueId(std::string* hex, std::string* error);
  bool Start(const std::string& id_hex, int rank, int world, int ordinal, int64_t bytes,
             std::string* error);

  // Whether it has been started: 0 if not, else the bytes of the arena.
  int64_t arena_bytes() const { return started_.load(std::memory_order_acquire); }
  int pe() const { return pe_; }
  int world() const { return world_; }
  // Null before it is loaded.
  const NvshmemPlugin* plugin() const { return plugin_; }

  // Memory of the arena. Null, and how much is free, if there is no room.
  char* Take(int64_t bytes, int64_t* free_bytes);
  void Give(const char* address);
  int64_t OffsetOf(const char* address) const { return address - arena_; }
  char* AddressOf(int64_t offset) const { return arena_ + offset; }

 private:
  const NvshmemPlugin* plugin_ = nullptr;
  char* arena_ = nullptr;
  int pe_ = 0, world_ = 0;
  std::atomic<int64_t> started_{0};
  std::mutex mutex_;  // of what follows
  Arena places_;
};

}  // namespace jflux

#endif  // JFLUX_RUNTIME_NVSHMEM_H_
