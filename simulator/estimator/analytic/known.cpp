// What the estimate makes of a case's layout, training and data keys. A key is refused unless its row says that it is estimated: one that
// comes later cannot be left out of a prediction without a word.
#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/base/check.h"
#include "plan/keys.h"
#include "simulator/estimator/analytic/known.h"

namespace shardlab::simulator::analytic {
namespace {

/// Keys of layout, train and data that no estimate has a form for, with the texts of their defaults.
std::vector<std::pair<const CaseKey*, std::string>> not_estimated() {
  std::vector<std::pair<const CaseKey*, std::string>> keys;
  for (const CaseKey& key : case_keys())
    if (!key.is_estimated && key.get != nullptr &&
        (key.path.starts_with("layout.") || key.path.starts_with("train.") || key.path.starts_with("data.")))
      keys.emplace_back(&key, key.get(Case()));
  return keys;
}

struct Own {
  std::string_view key;
  bool (*set)(const Case& c);
};

/// Keys of shardlab's executor, of which a framework's profile says nothing.
constexpr Own kOwn[] = {
    {"canonical", [](const Case& c) { return c.canonical; }},
    {"guard", [](const Case& c) { return c.train.guard.any(); }},
};

const std::vector<std::pair<const CaseKey*, std::string>>& unknown_keys() {
  static const auto keys = not_estimated();
  return keys;
}

}  // namespace

void clear_unpriced(Train& train) {
  const Train plain;
  train.loss_scale_start = plain.loss_scale_start, train.loss_scale_interval = plain.loss_scale_interval;
  train.learning_rate = plain.learning_rate, train.weight_decay = plain.weight_decay;
  train.beta1 = plain.beta1, train.beta2 = plain.beta2, train.epsilon = plain.epsilon, train.seed = plain.seed;
}

void clear_unknown(Case& c) {
  for (const auto& [key, neutral] : unknown_keys())
    if (key->get(c) != neutral) SHARDLAB_CHECK(key->set(c, neutral), "{}: {} is no default", key->path, neutral);
}

Result<void> check_known(const Case& c) {
  // Other frameworks are estimated in closed forms alone.
  const std::string instead =
      c.profile == "shardlab" ? "leave it out, or resolution: timeline" : "leave it out, or profile: shardlab, which has a plan";
  for (const auto& [key, neutral] : unknown_keys())
    if (key->get(c) != neutral) return Error{ExitCode::kUsage, fmt::format("{} has no closed form", key->word()), instead, {}};
  if (c.layout.schedule >= Schedule::kNaive)  // naive, a table
    return Error{ExitCode::kUsage, "schedule has no closed form", instead, {}};
  for (const Own& key : kOwn)
    if (c.profile != "shardlab" && key.set(c))
      return Error{ExitCode::kUsage, fmt::format("{} is not estimated by the profile {}", key.key, c.profile), "leave it out", {}};
  return {};
}

}  // namespace shardlab::simulator::analytic
