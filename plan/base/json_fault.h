// Why a text is no JSON object, in the words of a message.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "plan/base/utf8.h"

namespace shardlab {

/// The place ":line:column" behind the name of a file (characters, counted from 1), empty where the whole file is meant; and what is
/// wrong there.
struct JsonFault {
  std::string place;
  std::string message;
};

/// Precondition: `text` is no JSON object, and no deeper than a reader can take.
inline JsonFault json_fault(std::string_view text, bool ignore_comments = false) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) return {"", "the file is empty"};
  try {
    const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/true, ignore_comments);
    return {"", fmt::format("the file is {}", json.is_array()    ? "a list"
                                              : json.is_string() ? "a text in quotes"
                                                                 : fmt::format("the single value {}", json.dump()))};
  } catch (const nlohmann::json::parse_error& e) {
    // "[...] parse error at line 8, column 2: syntax error while parsing object - unexpected '}'; last read: '...'"
    std::string why = e.what();
    if (const size_t dash = why.find(" - "); dash != std::string::npos) why.erase(0, dash + 3);
    if (const size_t last = why.find("; last read:"); last != std::string::npos) {
      const size_t end = why.rfind("; expected");
      why.erase(last, end == std::string::npos || end < last ? end : end - last);
    }
    // A string that is never closed, as the library sees it.
    if (why.find("U+000A") != std::string::npos || why.find("missing closing quote") != std::string::npos)
      why = "the string is not closed before the end of its line";
    return {place_in(text, e.byte > 0 ? e.byte - 1 : 0), "not JSON: " + why};
  } catch (const nlohmann::json::exception&) { return {"", "a number of the file is too large"}; }
}

}  // namespace shardlab
