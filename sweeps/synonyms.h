// Words that people bring from other programs, and ours.
#pragma once

#include <span>
#include <string_view>

namespace shardlab::sweeps {

/// A word that is none of ours, in lower case with '_' between its parts, and what it means here: a key by its path, or a value.
struct Synonym {
  std::string_view said, meant;
};

/// ONE table, for every `did you mean`.
std::span<const Synonym> synonyms();

/// What `word` means; empty where the table does not have it. Case, leading hyphens and '-' for '_' do not matter.
std::string_view meant_by(std::string_view word);

}  // namespace shardlab::sweeps
