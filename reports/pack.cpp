#include "reports/pack.h"

#include <zlib.h>

#include <vector>

#include "plan/base/check.h"

namespace shardlab::reports {

std::string packed(std::string_view text) {
  uLongf size = compressBound(static_cast<uLong>(text.size()));
  std::vector<unsigned char> bytes(size);
  const int code = compress2(bytes.data(), &size, reinterpret_cast<const Bytef*>(text.data()), static_cast<uLong>(text.size()), 9);
  SHARDLAB_CHECK(code == Z_OK, "zlib says {} to {} bytes", code, text.size());
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((size + 2) / 3 * 4);
  for (uLongf i = 0; i < size; i += 3) {
    const auto byte = [&](uLongf k) { return k < size ? static_cast<unsigned>(bytes[k]) : 0u; };
    const unsigned three = byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
    for (uLongf k = 0; k < 4; ++k) out += i + k <= size ? kDigits[three >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

}  // namespace shardlab::reports
