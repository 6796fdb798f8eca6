#include "plan/lexer.h"

#include "plan/limits.h"
#include "plan/text_names.h"

namespace shardlab {
namespace {

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  std::vector<Token> run() {
    while (at_ < text_.size() && static_cast<int64_t>(tokens_.size()) <= kMaxPlanTokens) step();
    start();
    finish(Token::Kind::kFileEnd);
    return std::move(tokens_);
  }

 private:
  char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  void start() {
    token_ = Token{};
    token_.line = line_;
    token_.column = static_cast<int>(at_ - line_begin_) + 1;
  }
  void finish(Token::Kind kind) {
    token_.kind = kind;
    tokens_.push_back(std::move(token_));
  }

  void step() {
    start();
    const char c = peek();
    if (c == '\n') return end_line();
    if (c == ' ' || c == '\t' || c == '\r') return void(++at_);
    if (c == '/' && peek(1) == '/') return skip_comment();
    if (c == '-' && peek(1) == '>') {
      token_.text = "->";
      at_ += 2;
      return finish(Token::Kind::kMark);
    }
    if (std::string_view("()[],=:").find(c) != std::string_view::npos) return mark(c);
    if (c == '%' || c == '@' || c == '#') {
      ++at_;
      return name(c == '%' ? Token::Kind::kOperand : c == '@' ? Token::Kind::kStream : Token::Kind::kStrategy);
    }
    name(Token::Kind::kWord);
  }

  void end_line() {
    if (depth_ == 0) finish(Token::Kind::kLineEnd);
    ++at_;
    ++line_;
    line_begin_ = at_;
  }

  void skip_comment() {
    while (at_ < text_.size() && peek() != '\n') ++at_;
  }

  void mark(char c) {
    if (c == '(') ++depth_;
    if (c == ')' && depth_ > 0) --depth_;
    token_.text = c;
    ++at_;
    finish(Token::Kind::kMark);
  }

  void name(Token::Kind kind) {
    if (peek() == '"') return quoted(kind);
    while (at_ < text_.size() && is_bare(peek())) token_.text += text_[at_++];
    if (!token_.text.empty()) return finish(kind);
    if (at_ < text_.size()) {
      token_.text = text_[at_];
      if (peek() != '\n') ++at_;
    }
    finish(Token::Kind::kBad);
  }

  void quoted(Token::Kind kind) {
    token_.quoted = true;
    for (++at_; at_ < text_.size() && peek() != '"' && peek() != '\n'; ++at_) {
      if (peek() == '\\' && at_ + 1 < text_.size()) {
        ++at_;
        token_.text += peek() == 'n' ? '\n' : peek();
      } else {
        token_.text += peek();
      }
    }
    if (peek() != '"') return finish(Token::Kind::kBad);
    ++at_;
    finish(kind);
  }

  std::string_view text_;
  size_t at_ = 0;
  size_t line_begin_ = 0;
  int line_ = 1;
  int depth_ = 0;  ///< open parentheses
  Token token_;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> lex(std::string_view text) { return Lexer(text).run(); }

std::string describe(const Token& token) {
  switch (token.kind) {
    case Token::Kind::kOperand: return "`%" + token.text + "`";
    case Token::Kind::kStream: return "`@" + token.text + "`";
    case Token::Kind::kStrategy: return "`#" + token.text + "`";
    case Token::Kind::kLineEnd: return "the end of the line";
    case Token::Kind::kFileEnd: return "the end of the text";
    case Token::Kind::kBad: return token.quoted ? "a string without its closing quote" : "`" + token.text + "`";
    default: return "`" + token.text + "`";
  }
}

}  // namespace shardlab
