// Text packed for a page: deflated, and written in 64 characters.
#pragma once

#include <string>
#include <string_view>

namespace shardlab::reports {

/// `text` as a zlib stream (RFC 1950) in base64 (RFC 4648): what a browser's DecompressionStream("deflate") unpacks. Equal texts give
/// equal packs.
std::string packed(std::string_view text);

}  // namespace shardlab::reports
