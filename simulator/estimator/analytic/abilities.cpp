#include "simulator/estimator/analytic/abilities.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <set>

#include "simulator/estimator/analytic/analytic.h"
#include "simulator/estimator/analytic/schedule.h"

namespace shardlab::simulator::analytic {
namespace {

struct Key {
  std::string_view name;
  uint32_t Abilities::*set;
  std::array<std::string_view, 12> words;  ///< of the bits
};

constexpr std::array<std::string_view, 12> kOffloads{"activations=cpu", "activations=nvme", "optimizer=cpu",
                                                     "optimizer=nvme",  "parameters=cpu",   "parameters=nvme"};
constexpr std::array<std::string_view, 12> kStages{"0", "1", "2", "3"};
constexpr std::array<Key, 11> kKeys{{
    {"axes", &Abilities::axes, {"tp", "sequence_parallel", "pp", "cp", "ep", "hybrid_shard"}},
    {"schedules", &Abilities::schedules, {}},  // words_of names them
    {"zero", &Abilities::zero, kStages},
    {"zero_with_pp", &Abilities::zero_with_pp, kStages},
    {"offload", &Abilities::offload, kOffloads},
    {"offload_with_pp", &Abilities::offload_with_pp, kOffloads},
    {"cp_kind", &Abilities::cp_kind, {"ring", "zigzag", "striped", "all-gather", "ulysses"}},
    {"recompute",
     &Abilities::recompute,
     {"norms", "attention-core", "qkv", "attention-out", "activation", "up", "experts", "alternate", "full", "selective"}},
    {"precision", &Abilities::precision, {"fp32", "bf16", "fp16", "fp8", "fp4"}},
    {"compression", &Abilities::compression, {"none", "powersgd", "top-k", "one-bit", "int8"}},
    {"bucket_bytes", &Abilities::bucket_bytes, kStages},
}};

constexpr uint32_t bit(int i) { return 1U << i; }

/// The medium of one kind of state as its bit among `kOffloads`.
uint32_t offload_bit(int kind, Medium medium) {
  return medium == Medium::kDevice ? 0 : bit(2 * kind + static_cast<int>(medium) - 1);
}

uint32_t offloads_of(const Point& p) {
  return offload_bit(0, p.offload_activations) | offload_bit(1, p.offload_optimizer) | offload_bit(2, p.offload_parameters);
}

uint32_t precision_bit(Precision precision) {
  const auto& words = kKeys[8].words;
  return bit(static_cast<int>(std::ranges::find(words, name_of(precision)) - words.begin()));
}

/// The techniques that a point asks for, under the keys of the table.
struct Asked {
  std::string_view key;
  uint32_t bits;
};
std::array<Asked, 11> asked(const Point& p) {
  const bool shared = int64_t{p.dp} * p.cp > 1, pipelined = p.pp > 1;
  const uint32_t axes = (p.tp > 1 ? bit(0) : 0) | (p.sequence_parallel && p.tp > 1 ? bit(1) : 0) | (pipelined ? bit(2) : 0) |
                        (p.cp > 1 ? bit(3) : 0) | (p.ep > 1 ? bit(4) : 0) | (p.hybrid_shard > 0 ? bit(5) : 0);
  const uint32_t offloads = offloads_of(p), none = static_cast<int>(Compression::kNone);
  const auto compression = static_cast<uint32_t>(p.compression);
  return {{{"axes", axes},
           {"schedules", pipelined && p.schedule != Schedule::kNone ? bit(static_cast<int>(p.schedule)) : 0},
           {"zero", shared ? bit(p.zero) : 0},
           {"zero_with_pp", shared && pipelined ? bit(p.zero) : 0},
           {"offload", offloads},
           {"offload_with_pp", pipelined ? offloads : 0},
           {"cp_kind", p.cp > 1 ? bit(static_cast<int>(p.cp_kind)) : 0},
           {"recompute", p.recompute.modules},
           {"precision", precision_bit(p.precision)},
           {"compression", compression == none ? 0 : bit(static_cast<int>(compression))},
           {"bucket_bytes", shared && p.bucket_bytes >= 0 ? bit(p.zero) : 0}}};
}

/// All words of a key, in the order of their bits. Those of `schedules` are the schedules that have a closed form.
std::vector<std::string> words_of(const Key& key) {
  std::vector<std::string> words;
  if (key.set == &Abilities::schedules) words.assign(schedule_words().begin(), schedule_words().end());
  for (const std::string_view word : key.words)
    if (!word.empty()) words.emplace_back(word);
  return words;
}

std::vector<std::string> words_of(const Key& key, uint32_t set) {
  std::vector<std::string> words = words_of(key);
  for (size_t i = words.size(); i-- > 0;)
    if (!(set & bit(static_cast<int>(i)))) words.erase(words.begin() + static_cast<std::ptrdiff_t>(i));
  return words;
}

}  // namespace

Error refusal_at(const std::string& where, const YAML::Mark& mark, std::string message, std::string hint) {
  return {.message = std::move(message),
          .hint = std::move(hint),
          .where = fmt::format("{}:{}:{}", where, mark.line + 1, mark.column + 1)};
}

bool has(const Abilities& can, const Point& p) {
  if (p.zero < 0 || p.zero > 3) return true;  // refused as a size
  const std::array<Asked, 11> all = asked(p);
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i].bits & ~(can.*(kKeys[i].set))) return false;
  return true;
}

Missing missing(const Abilities& can, const Point& p) {
  const std::array<Asked, 11> all = asked(p);
  for (size_t i = 0; i < all.size(); ++i)
    if (const uint32_t lacks = all[i].bits & ~(can.*(kKeys[i].set)))
      return {kKeys[i].name, words_of(kKeys[i], lacks).front(), words_of(kKeys[i], can.*(kKeys[i].set))};
  return {};
}

std::vector<std::string> ability_words(std::string_view name) {
  for (const Key& key : kKeys)
    if (key.name == name) return words_of(key);
  return {};
}

uint32_t abilities_of(const Abilities& can, std::string_view name) {
  for (const Key& key : kKeys)
    if (key.name == name) return can.*(key.set);
  return 0;
}

Result<void> read_abilities(const YAML::Node& table, const std::string& where, Abilities& can) {
  if (!table.IsMap()) return refusal_at(where, table.Mark(), "`can` is not a map of lists", "for example can: {zero: [0, 1]}");
  std::set<std::string> seen;
  for (const auto& entry : table) {
    const std::string name = entry.first.as<std::string>();
    const auto key = std::ranges::find(kKeys, name, &Key::name);
    if (key == kKeys.end()) {
      std::string names;
      for (const Key& k : kKeys) names += (names.empty() ? "" : ", ") + std::string(k.name);
      return refusal_at(where, entry.first.Mark(), fmt::format("`can.{}` is not a key of a profile", name), "allowed: " + names);
    }
    if (!seen.insert(name).second)
      return refusal_at(where, entry.first.Mark(), fmt::format("`can.{}` is there twice", name), "keep one of the two");
    const std::vector<std::string> words = ability_words(name);
    if (!entry.second.IsSequence())
      return refusal_at(where, entry.second.Mark(), fmt::format("`can.{}` is not a list", name),
                        fmt::format("of: {}", fmt::join(words, ", ")));
    uint32_t set = 0;
    for (const auto& item : entry.second) {
      const std::string word = item.as<std::string>();
      const auto at = std::ranges::find(words, word);
      if (at == words.end())
        return refusal_at(where, item.Mark(), fmt::format("`{}` is nothing of `can.{}`", word, name),
                          fmt::format("allowed: {}", fmt::join(words, ", ")));
      set |= bit(static_cast<int>(at - words.begin()));
    }
    can.*(key->set) = set;
  }
  return {};
}

}  // namespace shardlab::simulator::analytic
