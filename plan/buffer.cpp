#include "plan/buffer.h"

namespace shardlab {

std::string_view name_of(Space space) {
  static constexpr std::array<std::string_view, kSpaces> kNames{"device", "host", "nvme"};
  return kNames[static_cast<size_t>(space)];
}

std::string_view name_of(BufferClass c) {
  static constexpr std::array<std::string_view, kBufferClasses> kNames{"parameter", "gradient", "master", "moment", "activation",
                                                                       "temporary", "buffer",   "input",  "metric", "workspace", "other"};
  return kNames[static_cast<size_t>(c)];
}

}  // namespace shardlab
