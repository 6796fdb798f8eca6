// The expression language: values, precedence, errors with their column, and that no input can break it.
#include "sweeps/expression.h"

#include <random>

#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

const Vocabulary& vocabulary() {
  static const Vocabulary v = {{"tp", "pp", "dp", "schedule", "overlap", "model.layers"}, {"none", "1f1b", "afab"}};
  return v;
}

ExpressionValue value_of_key(std::string_view key) {
  if (key == "tp") return 4.0;
  if (key == "pp") return 2.0;
  if (key == "schedule") return std::string("1f1b");
  if (key == "overlap") return true;
  if (key == "model.layers") return 32.0;
  return std::monostate{};
}

/// The value as text, or "column: message".
std::string run(std::string_view text) {
  const auto parsed = Expression::parse(text, vocabulary());
  const auto error_text = [](const ExpressionError& e) { return std::to_string(e.column) + ": " + e.message; };
  if (const auto* e = std::get_if<ExpressionError>(&parsed)) return error_text(*e);
  const auto value = std::get<Expression>(parsed).evaluate(value_of_key);
  if (const auto* e = std::get_if<ExpressionError>(&value)) return error_text(*e);
  const auto& v = std::get<ExpressionValue>(value);
  if (const bool* b = std::get_if<bool>(&v)) return *b ? "true" : "false";
  if (const double* d = std::get_if<double>(&v)) return std::to_string(*d);
  return std::get<std::string>(v);
}

}  // namespace

TEST_CASE("expressions compute") {
  const std::pair<const char*, const char*> table[] = {
      {"tp == 4", "true"},
      {"tp != 4", "false"},
      {"tp <= 3 or pp == 2", "true"},
      {"not tp == 4", "false"},
      {"not (tp == 4 and pp == 1)", "true"},
      {"tp * pp == 8 and model.layers % pp == 0", "true"},
      {"1 + 2 * 3", "7.000000"},
      {"(1 + 2) * 3", "9.000000"},
      {"10 - 4 - 3", "3.000000"},
      {"-tp + 1", "-3.000000"},
      {"7 % 4", "3.000000"},
      {"1 / 4", "0.250000"},
      {"4Ki == 4096", "true"},
      {"1e-3 < 1", "true"},
      {"1e3 - 1", "999.000000"},
      {"schedule == 1f1b", "true"},
      {"schedule == 'zb-h1'", "false"},
      {"schedule != none and overlap", "true"},
      {"overlap == true", "true"},
      {"true or false and false", "true"},
      {"schedule", "1f1b"},
      {"tp==4 and(pp==2)", "true"},
  };
  for (const auto& [text, value] : table) {
    INFO(text);
    CHECK(run(text) == value);
  }
}

TEST_CASE("expressions say where they are wrong") {
  const std::pair<const char*, const char*> table[] = {
      {"", "1: the expression ends where a value is expected"},
      {"tp ==", "6: the expression ends where a value is expected"},
      {"tp = 4", "4: `=` is not a comparison: write `==`"},
      {"tpp == 4", "1: unknown word `tpp`, did you mean `tp`?"},
      {"tp == 4and", "7: unknown word `4and`; put text in quotes"},
      {"bananas == 4", "1: unknown word `bananas`; put text in quotes"},
      {"(tp == 4", "9: expected `)`, found the end"},
      {"tp == 4)", "8: `)` after the end of the expression"},
      {"1 < tp < 8", "8: comparisons do not chain: write `a < b and b < c`"},
      {"tp ; 4", "4: `;` is not part of the language"},
      {"schedule == 'x", "13: a quote that is not closed"},
      {"and", "1: `and` where a value is expected"},
      {"* 3", "1: `*` where a value is expected"},
      {"tp and pp", "1: expected a condition here, found a value: compare it with something"},
      {"schedule + 1", "1: `schedule` is text, and `+` takes numbers"},
      {"overlap * 2", "1: `overlap` is true or false, and `*` takes numbers"},
      {"schedule == 4", "10: the two sides are of different kinds (number, text, true or false) and never equal"},
      {"2 < 'x'", "5: `x` is text, and `<` compares numbers: compare it with == or !="},
      {"tp / (pp - 2)", "4: division by zero where pp=2: a condition before it, with `and` or `or`, can exclude that case"},
      {"tp % 0 == 0", "4: division by zero"},
      {"dp == 1", "1: `dp` has no value here: it is derived later; give it, or use a constraint"},
  };
  for (const auto& [text, message] : table) {
    INFO(text);
    CHECK(run(text) == message);
  }
  CHECK(std::get<ExpressionError>(std::get<Expression>(Expression::parse("tp + 1", vocabulary())).holds(value_of_key)).column == 1);
}

TEST_CASE("no input breaks the expression language") {
  // Nesting and length have bounds, so that recursion ends before the stack does.
  const auto is_error = [](const std::string& text) {
    return std::holds_alternative<ExpressionError>(Expression::parse(text, vocabulary()));
  };
  CHECK(is_error(std::string(3000, '(')));
  CHECK(is_error(std::string(3000, '-') + "1"));
  std::string nots;
  for (int i = 0; i < 1000; ++i) nots += "not ";
  CHECK(is_error(nots + "true"));
  std::string sum = "1";
  for (int i = 0; i < 1000; ++i) sum += "+1";
  CHECK(is_error(sum));
  CHECK(is_error(std::string(100'000, '1')));
  CHECK(run(std::string(90, '(') + "1" + std::string(90, ')')) == "1.000000");

  // Random texts of its own tokens, and random bytes: each parses or is an error whose column is in the text.
  std::mt19937 random(7);
  const std::vector<std::string> words = {"tp",  "pp", "dp",  "schedule", "overlap", "1f1b", "1",  "0",  "2.5", "4Ki", "(", ")",
                                          "and", "or", "not", "==",       "!=",      "<",    "<=", ">=", ">",   "+",   "-", "*",
                                          "/",   "%",  "'a'", "\"",       "=",       "$",    ".",  " ",  "e",   "1e"};
  int parsed = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    const int length = static_cast<int>(random() % 12);
    for (int k = 0; k < length; ++k) {
      if (i % 2 == 0)
        text += words[random() % words.size()] + " ";
      else
        text += static_cast<char>(random() % 256);
    }
    const auto result = Expression::parse(text, vocabulary());
    if (const auto* error = std::get_if<ExpressionError>(&result)) {
      INFO(text);
      REQUIRE(error->column >= 1);
      REQUIRE(error->column <= static_cast<int>(text.size()) + 1);
      REQUIRE_FALSE(error->message.empty());
    } else {
      ++parsed;
      (void)std::get<Expression>(result).evaluate(value_of_key);
    }
  }
  CHECK(parsed > 100);
}
