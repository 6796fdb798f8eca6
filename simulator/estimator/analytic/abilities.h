// The techniques that a framework has, whatever they cost: one `can:` table a profile, each line with its source.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"

namespace YAML {
class Node;
struct Mark;
}  // namespace YAML

namespace shardlab::simulator::analytic {

struct Point;

/// Sets of words, a bit each, in the order of the words. Without a table everything is allowed.
struct Abilities {
  uint32_t axes = ~0U;          ///< tp sequence_parallel pp cp ep hybrid_shard: above 1, or true
  uint32_t schedules = ~0U;     ///< of more than one stage
  uint32_t zero = ~0U;          ///< stages, where ranks share a replica
  uint32_t zero_with_pp = ~0U;  ///< and in a pipeline
  uint32_t offload = ~0U;       ///< "optimizer=cpu", ...
  uint32_t offload_with_pp = ~0U;
  uint32_t cp_kind = ~0U;
  uint32_t recompute = ~0U;  ///< modules, "selective" and "full"
  uint32_t precision = ~0U;
  uint32_t compression = ~0U;
  uint32_t bucket_bytes = ~0U;  ///< stages of ZeRO under which the size of buckets of gradients can be chosen
  friend bool operator==(const Abilities&, const Abilities&) = default;
};

/// One thing that a point asks for and a framework has not.
struct Missing {
  std::string_view key;              ///< of the table
  std::string word;                  ///< "zb-h1"
  std::vector<std::string> allowed;  ///< the values of that kind that the framework has
};

bool has(const Abilities& can, const Point& point);
/// The first thing that is missing; an empty key where nothing is.
Missing missing(const Abilities& can, const Point& point);

/// Words of one key of the table, in the order of their bits. Empty for an unknown key.
std::vector<std::string> ability_words(std::string_view key);
/// The set of a key.
uint32_t abilities_of(const Abilities& can, std::string_view key);

/// Reads a `can:` table over `can`: keys that it names are replaced. `where` is the file in messages.
Result<void> read_abilities(const YAML::Node& table, const std::string& where, Abilities& can);

/// A refusal of the entry at `mark` in the file `where`.
Error refusal_at(const std::string& where, const YAML::Mark& mark, std::string message, std::string hint = {});

}  // namespace shardlab::simulator::analytic
