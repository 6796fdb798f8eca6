// The catalogue of strategies: an explicit table from which `lower` takes its passes and their order, `shardlab` its lists, the
// documentation its table and the tests their rows. Adding a strategy is one file and one row.
#pragma once

#include <span>
#include <string_view>

#include "plan/techniques.h"

namespace shardlab::strategies {

struct Draft;

/// How equal to the single-rank reference a strategy is (ARCHITECTURE.md, "How equal is equal").
enum class Tier : uint8_t { kE0, kE1, kE2, kE3 };
std::string_view name_of(Tier tier);

struct Strategy {
  std::string_view name;  ///< as in provenance and `plan --after`, and the id of its technique
  std::string_view title;
  Tier tier;
  std::string_view keys;  ///< the layout keys that turn it on
  std::string_view adds;  ///< collectives and bytes, in the notation of facts: Psi parameters, N ranks
  std::string_view memory;
  std::string_view paper;
  void (*pass)(Draft&);
  bool shapes_forward = false;  ///< also applied where no gradient is computed (`lower_validation`)

  /// Whether the case uses the technique, by the row of that id (plan/techniques.h).
  bool applies(const Case& c) const { return technique(name).on(c); }
};

/// Every strategy, in the canonical order in which `lower` applies them.
std::span<const Strategy> catalogue();

}  // namespace shardlab::strategies
