#include "runtime/nvshmem.h"

#include <dlfcn.h>

#include "core/platform.h"
#include "nvshmem/node_exchange.h"
#include "runtime/hex.h"

namespace jflux {

int64_t Arena::Take(int64_t bytes) {
  const int64_t size = RoundUp(Max<int64_t>(bytes, 1), kAlign);
  int64_t begin = 0;
  for (const auto& [offset, taken] : taken_) {
    if (offset - begin >= size) break;
    begin = offset + taken;
  }
  if (bytes_ - begin < size) return -1;
  taken_[begin] = size;
  return begin;
}

void Arena::Give(int64_t offset) { taken_.erase(offset); }

int64_t Arena::free_bytes() const {
  int64_t free = bytes_;
  for (const auto& [offset, taken] : taken_) free -= taken;
  return free;
}

Nvshmem& Nvshmem::Get() {
  static auto* one = new Nvshmem;  // outlives XLA's threads on purpose
  return *one;
}

bool Nvshmem::Load(const std::string& host_library, const std::string& plugin, std::string* error) {
  if (plugin_ != nullptr) return true;
  if (!host_library.empty() && dlopen(host_library.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    *error = std::string("NVSHMEM does not load: ") + dlerror();
    return false;
  }
  void* library = dlopen(plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *error = std::string("jflux's NVSHMEM plugin does not load: ") + dlerror();
    return false;
  }
  using Entry = const NvshmemPlugin* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(library, NvshmemPlugin::kSymbol));
  const NvshmemPlugin* found = entry == nullptr ? nullptr : entry();
  if (found == nullptr || found->version != NvshmemPlugin::kVersion ||
      found->args_bytes != static_cast<int32_t>(sizeof(NodeExchangeArgs))) {
    *error = plugin + " belongs to another build of jflux: reinstall jflux";
    return false;
  }
  plugin_ = found;
  return true;
}

bool Nvshmem::UniqueId(std::string* hex, std::string* error) {
  unsigned char id[NvshmemPlugin::kIdBytes];
  const char* why = plugin_ == nullptr ? "NVSHMEM is not loaded" : plugin_->unique_id(id);
  if (why != nullptr) {
    *error = why;
    return false;
  }
  *hex = HexOf(id, sizeof(id));
  return true;
}

bool Nvshmem::Start(const std::string& id_hex, int rank, int world, int ordinal, int64_t bytes,
                    std::string* error) {
  unsigned char id[NvshmemPlugin::kIdBytes];
  if (plugin_ == nullptr || arena_bytes() != 0) {
    *error = plugin_ == nullptr ? "NVSHMEM is not loaded" : "NVSHMEM has been started already";
    return false;
  }
  if (!ParseHex(id_hex, id, sizeof(id))) {
    *error = "malformed NVSHMEM id: " + id_hex;
    return false;
  }
  char* arena = nullptr;
  if (const char* why = plugin_->start(id, rank, world, ordinal, bytes, &arena)) {
    *error = why;
    return false;
  }
  pe_ = rank;
  world_ = world;
  arena_ = arena;
  places_ = Arena(bytes);
  started_.store(bytes, std::memory_order_release);
  return true;
}

char* Nvshmem::Take(int64_t bytes, int64_t* free_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t offset = places_.Take(bytes);
  *free_bytes = places_.free_bytes();
  return offset < 0 ? nullptr : arena_ + offset;
}

void Nvshmem::Give(const char* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  places_.Give(OffsetOf(address));
}

}  // namespace jflux
