// Bytes as text: handles that processes exchange.
#ifndef JFLUX_RUNTIME_HEX_H_
#define JFLUX_RUNTIME_HEX_H_

#include <cstddef>
#include <string>

namespace jflux {

inline std::string HexOf(const void* bytes, size_t count) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (size_t i = 0; i < count; ++i) {
    const unsigned char byte = static_cast<const unsigned char*>(bytes)[i];
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

// False if it is not the text of so many bytes.
inline bool ParseHex(const std::string& hex, void* bytes, size_t count) {
  if (hex.size() != 2 * count || hex.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return false;
  }
  for (size_t i = 0; i < count; ++i) {
    static_cast<unsigned char*>(bytes)[i] =
        static_cast<unsigned char>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  return true;
}

}  // namespace jflux

#endif  // JFLUX_RUNTIME_HEX_H_
