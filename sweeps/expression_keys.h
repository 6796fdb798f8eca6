// Keys of a case in expressions: the words that `if` and `expr` know, and what a key is worth in them.
#pragma once

#include <string>

#include "plan/keys.h"
#include "sweeps/expression.h"

namespace shardlab::sweeps {

/// Every path and alias of a key that a case holds, and every word such a key may be.
const Vocabulary& expression_vocabulary();

/// The value of `key` in an expression: a number, a bool, or text. `text` has the key's form.
ExpressionValue expression_value(const CaseKey& key, const std::string& text);

}  // namespace shardlab::sweeps
