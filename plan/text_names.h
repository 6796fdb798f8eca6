// Spelling that the printer and the parser of plan text share.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace shardlab {

inline constexpr std::string_view kPlanMagic = "shardlab plan";
inline constexpr std::array<std::string_view, 3> kInitialNames{"zeros", "ones", "normal"};

/// Characters of a name that needs no quotes.
constexpr bool is_bare(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("_.+-/'*@").find(c) != std::string_view::npos;
}

/// `name` as plan text spells it: bare, or in double quotes with \" and \\ and \n where it holds anything else.
std::string name_text(std::string_view name);

}  // namespace shardlab
