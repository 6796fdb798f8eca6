// Text that others wrote, before it is shown: bytes that are no UTF-8, control characters, marks of direction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace shardlab {

/// The code point at the beginning of a text, and how many bytes it takes. `value` is -1, of one byte, where these bytes are not
/// UTF-8; `bytes` is 0 where the text ends within a code point, or is empty.
struct CodePoint {
  int32_t value = -1;
  int bytes = 0;
};
CodePoint first_code_point(std::string_view text);

/// ":8:2": line and column, counted from 1, of the byte `at` of a text; a column is a character.
std::string place_in(std::string_view text, size_t at);

/// The text as UTF-8: each byte that is not is read as Latin-1.
std::string to_utf8(std::string_view text);

/// The text as it may be shown: control characters, marks and overrides of direction and bytes that are no UTF-8 as `\u001b`, the
/// notation of JSON. Line ends and tabs stay.
std::string visible(std::string_view text);

/// `visible` on one line, blanks in place of line ends and tabs. A text with letters that are written from right to left is
/// isolated (U+2068, U+2069), so that it does not turn around the numbers beside it.
std::string visible_line(std::string_view text);

}  // namespace shardlab
