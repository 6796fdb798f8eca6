// The small language of `if` and `expr` in a sweep file: comparisons, and/or/not, arithmetic, parentheses, keys of the case.
//
//   or      := and ("or" and)*
//   and     := not ("and" not)*
//   not     := "not" not | compare
//   compare := sum (("==" | "!=" | "<" | "<=" | ">" | ">=") sum)?
//   sum     := product (("+" | "-") product)*
//   product := unary (("*" | "/" | "%") unary)*
//   unary   := "-" unary | number | word | 'text' | "text" | "(" or ")"
//
// A number may carry a suffix (k M G T, Ki Mi Gi Ti). A word is a key of the case (tp, model.layers), or one of the values keys
// can have (none, 1f1b, true); other text, and words with a hyphen, stand in quotes.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "plan/base/result.h"

namespace shardlab::sweeps {

/// The value of an expression. `monostate`: a key that has no value yet.
using ExpressionValue = std::variant<std::monostate, bool, double, std::string>;

/// The words an expression may use; nearest spellings are sought among both.
struct Vocabulary {
  std::vector<std::string> keys;    ///< identifiers
  std::vector<std::string> values;  ///< words that stand for themselves
  bool figures = false;             ///< a word with a dot is a key too: a figure of a case ("zero1.measured_step_s")
};

/// An error of an expression: `column` counts from 1 in its text.
struct ExpressionError {
  int column = 1;
  std::string message;
};

class Expression {
 public:
  using Lookup = std::function<ExpressionValue(std::string_view key)>;
  /// Called for each comparison of numbers as it is made, right after its sides were looked up: what stands in for its `truth`.
  /// `by_size` is true of `<` and so on, false of `==` and `!=`.
  using Compared = std::function<bool(double left, double right, bool by_size, bool truth)>;

  /// Parses once; the expression is then evaluated for any number of points.
  static std::variant<Expression, ExpressionError> parse(std::string_view text, const Vocabulary& vocabulary);

  /// The value, or what cannot be computed: a key without a value, unlike types, a division by zero.
  std::variant<ExpressionValue, ExpressionError> evaluate(const Lookup& lookup, const Compared& compared = {}) const;

  /// The value as a condition: an expression that is no bool is an error.
  std::variant<bool, ExpressionError> holds(const Lookup& lookup, const Compared& compared = {}) const;

  const std::string& text() const { return text_; }

  struct Node;  ///< of the syntax tree

 private:
  Expression(std::string text, std::shared_ptr<const Node> root) : text_(std::move(text)), root_(std::move(root)) {}
  std::string text_;
  std::shared_ptr<const Node> root_;
};

}  // namespace shardlab::sweeps
