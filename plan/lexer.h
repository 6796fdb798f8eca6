// Tokens of plan text. Used by plan/parse.cpp only.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace shardlab {

struct Token {
  enum class Kind : uint8_t {
    kWord,      ///< bare or quoted name, number, keyword
    kOperand,   ///< %name
    kStream,    ///< @name
    kStrategy,  ///< #name
    kMark,      ///< one of ( ) [ ] , = : ->
    kLineEnd,
    kFileEnd,
    kBad,  ///< a character that starts no token, or a string without its end
  } kind = Kind::kFileEnd;
  std::string text;  ///< without %, @, # and quotes
  bool quoted = false;
  int line = 1;
  int column = 1;
};

/// Tokens of `text`; line ends within parentheses and comments ("// ..." at the start of a token) are left out. Ends with kFileEnd.
std::vector<Token> lex(std::string_view text);

/// "`word`", "the end of the line": how messages name what they found.
std::string describe(const Token& token);

}  // namespace shardlab
