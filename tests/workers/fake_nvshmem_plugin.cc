// An NVSHMEM plugin without NVSHMEM, for tests of what loads and starts it: memory of the host, one
// process. FAKE_VERSION, FAKE_FAILURE and FAKE_SECONDS say what goes wrong.
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "nvshmem/node_exchange.h"
#include "nvshmem/plugin.h"

namespace {

const char* UniqueId(unsigned char* id) {
  std::memset(id, 0xa5, jflux::NvshmemPlugin::kIdBytes);
  return nullptr;
}

const char* Start(const unsigned char* id, int, int, int, int64_t bytes, char** arena) {
  if (id[0] != 0xa5) return "another id";
  if (const char* seconds = std::getenv("FAKE_SECONDS")) sleep(std::atoi(seconds));
  if (const char* failure = std::getenv("FAKE_FAILURE")) return failure;
  *arena = static_cast<char*>(std::calloc(bytes, 1));
  return nullptr;
}

char* PeerAddress(const char*, int) { return nullptr; }
const char* Exchange(const jflux::NodeExchangeArgs*, void*) { return "no GPU"; }

}  // namespace

const jflux::NvshmemPlugin* jflux_nvshmem_plugin(void) {
  const char* version = std::getenv("FAKE_VERSION");
  static const jflux::NvshmemPlugin plugin = {
      version == nullptr ? jflux::NvshmemPlugin::kVersion : std::atoi(version),
      sizeof(jflux::NodeExchangeArgs),
      UniqueId,
      Start,
      PeerAddress,
      Exchange,
  };
  return &plugin;
}
