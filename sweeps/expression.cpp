#include "sweeps/expression.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <optional>
#include <utility>

#include "plan/base/limits.h"
#include "plan/base/values.h"
#include "sweeps/yaml.h"

namespace shardlab::sweeps {

struct Expression::Node {
  enum class Kind : uint8_t {
    kLiteral,
    kKey,
    kNot,
    kNegate,
    kAnd,
    kOr,
    kEqual,
    kUnequal,
    kLess,
    kLessEqual,
    kGreater,
    kGreaterEqual,
    kAdd,
    kSubtract,
    kMultiply,
    kDivide,
    kRemainder
  };
  Kind kind = Kind::kLiteral;
  int column = 1;
  ExpressionValue literal;
  std::string key;
  std::shared_ptr<const Node> left, right;  ///< a unary operator has `left` only
};

namespace {

using Node = Expression::Node;
using Kind = Node::Kind;
using NodePtr = std::shared_ptr<const Node>;

struct Token {
  enum class Kind : uint8_t { kEnd, kWord, kText, kSymbol };
  Kind kind = Kind::kEnd;
  std::string text;
  int column = 1;
};

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.'; }

/// Cuts the text into tokens. A word is a run of letters, digits, '_' and '.': numbers, keys and values alike; "1e-3" is one too.
std::variant<std::vector<Token>, ExpressionError> tokens_of(std::string_view text) {
  std::vector<Token> tokens;
  size_t i = 0;
  while (true) {
    while (i < text.size() && std::isspace(static_cast<unsigned char>(text[i]))) ++i;
    const int column = static_cast<int>(i) + 1;
    if (i == text.size()) {
      tokens.push_back({Token::Kind::kEnd, "the end", column});
      return tokens;
    }
    const size_t begin = i;
    const char c = text[i];
    if (is_word(c)) {
      const bool number = std::isdigit(static_cast<unsigned char>(c));
      while (i < text.size() &&
             (is_word(text[i]) || (number && (text[i] == '-' || text[i] == '+') && text[i - 1] == 'e' && i + 1 < text.size() &&
                                   std::isdigit(static_cast<unsigned char>(text[i + 1])))))
        ++i;
      tokens.push_back({Token::Kind::kWord, std::string(text.substr(begin, i - begin)), column});
    } else if (c == '\'' || c == '"') {
      const size_t end = text.find(c, i + 1);
      if (end == std::string_view::npos) return ExpressionError{column, "a quote that is not closed"};
      tokens.push_back({Token::Kind::kText, std::string(text.substr(i + 1, end - i - 1)), column});
      i = end + 1;
    } else {
      const std::string_view two = text.substr(i, 2);
      const bool pair = two == "==" || two == "!=" || two == "<=" || two == ">=";
      if (!pair && std::string_view("<>+-*/%()").find(c) == std::string_view::npos)
        return ExpressionError{
            column, c == '=' ? "`=` is not a comparison: write `==`" : fmt::format("`{}` is not part of the language", c)};
      i += pair ? 2 : 1;
      tokens.push_back({Token::Kind::kSymbol, std::string(text.substr(begin, i - begin)), column});
    }
  }
}

/// Recursive descent over the tokens. The first error stops it.
class Parser {
 public:
  Parser(std::vector<Token> tokens, const Vocabulary& vocabulary) : tokens_(std::move(tokens)), vocabulary_(vocabulary) {}

  std::variant<NodePtr, ExpressionError> parse() {
    NodePtr root = disjunction(0);
    if (!error_ && next().kind != Token::Kind::kEnd)
      fail(next().column, fmt::format("`{}` after the end of the expression", next().text));
    if (error_) return *error_;
    return root;
  }

 private:
  const Token& next() const { return tokens_[position_]; }
  bool next_is(Token::Kind kind, std::string_view text) const { return next().kind == kind && next().text == text; }

  NodePtr fail(int column, std::string message) {
    if (!error_) error_ = ExpressionError{column, std::move(message)};
    return nullptr;
  }

  NodePtr node(Kind kind, int column, NodePtr left, NodePtr right) {
    if (error_) return nullptr;
    return std::make_shared<Node>(Node{kind, column, {}, {}, std::move(left), std::move(right)});
  }

  /// operand (operator operand)*, for operators of one strength; `depth` also bounds the length of a chain, as the tree is as deep.
  template <class Operand>
  NodePtr chain(int depth, Token::Kind token, std::initializer_list<std::pair<std::string_view, Kind>> operators,
                const Operand& operand) {
    NodePtr left = operand(depth);
    for (int length = 0; !error_; ++length) {
      const auto op = std::find_if(operators.begin(), operators.end(), [&](const auto& o) { return next_is(token, o.first); });
      if (op == operators.end()) break;
      const int column = next().column;
      if (length == limits::kExpressionDepth) return fail(column, "too many operators: use several constraints");
      ++position_;
      NodePtr right = operand(depth);
      left = node(op->second, column, std::move(left), std::move(right));
    }
    return left;
  }

  NodePtr disjunction(int depth) {
    if (depth > limits::kExpressionDepth) return fail(next().column, "nested too deeply");
    return chain(depth, Token::Kind::kWord, {{"or", Kind::kOr}}, [this](int d) { return conjunction(d); });
  }
  NodePtr conjunction(int depth) {
    return chain(depth, Token::Kind::kWord, {{"and", Kind::kAnd}}, [this](int d) { return negation(d); });
  }
  NodePtr negation(int depth) {
    if (depth > limits::kExpressionDepth) return fail(next().column, "nested too deeply");
    if (!next_is(Token::Kind::kWord, "not")) return comparison(depth);
    const int column = next().column;
    ++position_;
    NodePtr operand = negation(depth + 1);
    return node(Kind::kNot, column, std::move(operand), nullptr);
  }
  NodePtr comparison(int depth) {
    constexpr std::array<std::pair<std::string_view, Kind>, 6> kComparisons = {{{"==", Kind::kEqual},
                                                                                {"!=", Kind::kUnequal},
                                                                                {"<", Kind::kLess},
                                                                                {"<=", Kind::kLessEqual},
                                                                                {">", Kind::kGreater},
                                                                                {">=", Kind::kGreaterEqual}}};
    NodePtr left = sum(depth);
    if (error_ || next().kind != Token::Kind::kSymbol) return left;
    const auto find = [&] {
      return std::find_if(kComparisons.begin(), kComparisons.end(), [&](const auto& o) { return o.first == next().text; });
    };
    const auto op = find();
    if (op == kComparisons.end()) return left;
    const int column = next().column;
    ++position_;
    NodePtr right = sum(depth);
    if (!error_ && next().kind == Token::Kind::kSymbol && find() != kComparisons.end())
      return fail(next().column, "comparisons do not chain: write `a < b and b < c`");
    return node(op->second, column, std::move(left), std::move(right));
  }
  NodePtr sum(int depth) {
    return chain(depth, Token::Kind::kSymbol, {{"+", Kind::kAdd}, {"-", Kind::kSubtract}}, [this](int d) { return product(d); });
  }
  NodePtr product(int depth) {
    return chain(depth, Token::Kind::kSymbol, {{"*", Kind::kMultiply}, {"/", Kind::kDivide}, {"%", Kind::kRemainder}},
                 [this](int d) { return unary(d); });
  }
  NodePtr unary(int depth) {
    if (depth > limits::kExpressionDepth) return fail(next().column, "nested too deeply");
    const Token token = next();
    if (token.kind == Token::Kind::kEnd) return fail(token.column, "the expression ends where a value is expected");
    ++position_;
    if (token.kind == Token::Kind::kText) return literal(token.column, token.text);
    if (token.kind == Token::Kind::kWord) return word(token);
    if (token.text == "-") {
      NodePtr operand = unary(depth + 1);
      return node(Kind::kNegate, token.column, std::move(operand), nullptr);
    }
    if (token.text != "(") return fail(token.column, fmt::format("`{}` where a value is expected", token.text));
    NodePtr inside = disjunction(depth + 1);
    if (error_) return nullptr;
    if (!next_is(Token::Kind::kSymbol, ")")) return fail(next().column, fmt::format("expected `)`, found {}", next().text));
    ++position_;
    return inside;
  }

  NodePtr literal(int column, ExpressionValue value) {
    return std::make_shared<Node>(Node{Kind::kLiteral, column, std::move(value), {}, nullptr, nullptr});
  }

  NodePtr word(const Token& token) {
    if (token.text == "and" || token.text == "or" || token.text == "not")
      return fail(token.column, fmt::format("`{}` where a value is expected", token.text));
    if (const auto number = parse_number(token.text)) return literal(token.column, *number);
    if (const auto truth = parse_bool(token.text)) return literal(token.column, *truth);
    const auto in = [&](const std::vector<std::string>& list) {
      return std::find(list.begin(), list.end(), token.text) != list.end();
    };
    if (in(vocabulary_.keys) || (vocabulary_.figures && token.text.find('.') != std::string::npos))
      return std::make_shared<Node>(Node{Kind::kKey, token.column, {}, token.text, nullptr, nullptr});
    if (in(vocabulary_.values)) return literal(token.column, token.text);
    std::vector<std::string> all = vocabulary_.keys;
    all.insert(all.end(), vocabulary_.values.begin(), vocabulary_.values.end());
    const std::string close = nearest_word(token.text, all);
    return fail(token.column, close.empty() ? fmt::format("unknown word `{}`; put text in quotes", token.text)
                                            : fmt::format("unknown word `{}`, did you mean `{}`?", token.text, close));
  }

  std::vector<Token> tokens_;
  const Vocabulary& vocabulary_;
  size_t position_ = 0;
  std::optional<ExpressionError> error_;
};

/// An operator that takes numbers, as it is written.
std::string_view sign_of(Kind kind) {
  switch (kind) {
    case Kind::kLess: return "<";
    case Kind::kLessEqual: return "<=";
    case Kind::kGreater: return ">";
    case Kind::kGreaterEqual: return ">=";
    case Kind::kAdd: return "+";
    case Kind::kMultiply: return "*";
    case Kind::kDivide: return "/";
    case Kind::kRemainder: return "%";
    default: return "-";
  }
}

/// Walks the tree; the first error stops it.
class Evaluator {
 public:
  Evaluator(const Expression::Lookup& lookup, const Expression::Compared& compared) : lookup_(lookup), compared_(compared) {}

  ExpressionValue value(const Node& n) {
    switch (n.kind) {
      case Kind::kLiteral: return n.literal;
      case Kind::kKey: return key(n);
      case Kind::kNot: return !truth(*n.left);
      case Kind::kNegate: return -number(*n.left, n);
      case Kind::kAnd: return truth(*n.left) && truth(*n.right);
      case Kind::kOr: return truth(*n.left) || truth(*n.right);
      case Kind::kEqual: return equal(n);
      case Kind::kUnequal: return !equal(n);
      default: return arithmetic(n);
    }
  }
  const std::optional<ExpressionError>& error() const { return error_; }

 private:
  void fail(const Node& n, std::string message) {
    if (!error_) error_ = ExpressionError{n.column, std::move(message)};
  }

  ExpressionValue key(const Node& n) {
    ExpressionValue v = lookup_(n.key);
    if (std::holds_alternative<std::monostate>(v))
      fail(n, fmt::format("`{}` has no value here: it is derived later; give it, or use a constraint", n.key));
    return v;
  }
  bool truth(const Node& n) {
    const ExpressionValue v = value(n);
    if (const bool* b = std::get_if<bool>(&v)) return *b;
    fail(n, "expected a condition here, found a value: compare it with something");
    return false;
  }
  /// The value of an operand of `of`.
  double number(const Node& n, const Node& of) {
    const ExpressionValue v = value(n);
    if (const double* d = std::get_if<double>(&v)) return *d;
    const auto* text = std::get_if<std::string>(&n.literal);
    const std::string what = n.kind == Kind::kKey ? fmt::format("`{}`", n.key) : text ? fmt::format("`{}`", *text) : "this";
    const bool by_size =
        of.kind == Kind::kLess || of.kind == Kind::kLessEqual || of.kind == Kind::kGreater || of.kind == Kind::kGreaterEqual;
    fail(n, fmt::format("{} is {}, and `{}` {}", what, std::holds_alternative<bool>(v) ? "true or false" : "text", sign_of(of.kind),
                        by_size ? "compares numbers: compare it with == or !=" : "takes numbers"));
    return 1;
  }
  /// " where dp=1, tp=2": the keys below `n`; nothing where it has none.
  std::string values_in(const Node& n) {
    std::string list;
    const auto add = [&](const Node& part, const auto& again) -> void {
      if (part.kind == Kind::kKey && list.find(fmt::format(" {}=", part.key)) == std::string::npos)
        if (const ExpressionValue v = lookup_(part.key); const double* d = std::get_if<double>(&v))
          list += fmt::format("{} {}={}", list.empty() ? "" : ",", part.key, to_text(*d));
      if (part.left) again(*part.left, again);
      if (part.right) again(*part.right, again);
    };
    add(n, add);
    return list.empty() ? "" : " where" + list;
  }
  bool equal(const Node& n) {
    const ExpressionValue a = value(*n.left), b = value(*n.right);
    if (a.index() != b.index()) fail(n, "the two sides are of different kinds (number, text, true or false) and never equal");
    const double *x = std::get_if<double>(&a), *y = std::get_if<double>(&b);
    return x && y ? compared(*x, *y, false, a == b) : a == b;
  }
  ExpressionValue arithmetic(const Node& n) {
    const double a = number(*n.left, n), b = number(*n.right, n);
    if ((n.kind == Kind::kDivide || n.kind == Kind::kRemainder) && b == 0) {
      const std::string where = values_in(*n.right);
      fail(n, fmt::format("division by zero{}{}", where,
                          where.empty() ? "" : ": a condition before it, with `and` or `or`, can exclude that case"));
    }
    switch (n.kind) {
      case Kind::kLess: return compared(a, b, true, a < b);
      case Kind::kLessEqual: return compared(a, b, true, a <= b);
      case Kind::kGreater: return compared(a, b, true, a > b);
      case Kind::kGreaterEqual: return compared(a, b, true, a >= b);
      case Kind::kAdd: return a + b;
      case Kind::kSubtract: return a - b;
      case Kind::kMultiply: return a * b;
      case Kind::kDivide: return a / b;
      case Kind::kRemainder: return std::fmod(a, b);
      default: SHARDLAB_CHECK(false, "operator {} is no arithmetic", static_cast<int>(n.kind));
    }
    return {};
  }

  bool compared(double a, double b, bool by_size, bool truth) const { return compared_ ? compared_(a, b, by_size, truth) : truth; }

  const Expression::Lookup& lookup_;
  const Expression::Compared& compared_;
  std::optional<ExpressionError> error_;
};

}  // namespace

std::variant<Expression, ExpressionError> Expression::parse(std::string_view text, const Vocabulary& vocabulary) {
  if (text.size() > limits::kExpressionLength)
    return ExpressionError{1, fmt::format("the expression has {} characters, more than {}: use several constraints", text.size(),
                                          limits::kExpressionLength)};
  auto tokens = tokens_of(text);
  if (const auto* error = std::get_if<ExpressionError>(&tokens)) return *error;
  auto root = Parser(std::get<std::vector<Token>>(std::move(tokens)), vocabulary).parse();
  if (const auto* error = std::get_if<ExpressionError>(&root)) return *error;
  return Expression(std::string(text), std::get<NodePtr>(std::move(root)));
}

std::variant<ExpressionValue, ExpressionError> Expression::evaluate(const Lookup& lookup, const Compared& compared) const {
  Evaluator evaluator(lookup, compared);
  ExpressionValue value = evaluator.value(*root_);
  if (evaluator.error()) return *evaluator.error();
  return value;
}

std::variant<bool, ExpressionError> Expression::holds(const Lookup& lookup, const Compared& compared) const {
  auto value = evaluate(lookup, compared);
  if (const auto* error = std::get_if<ExpressionError>(&value)) return *error;
  if (const bool* b = std::get_if<bool>(&std::get<ExpressionValue>(value))) return *b;
  return ExpressionError{1, "the expression is a value, not a condition: compare it with something"};
}

}  // namespace shardlab::sweeps
