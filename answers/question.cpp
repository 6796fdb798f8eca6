#include "answers/question.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "answers/namespaces.h"
#include "answers/trained_keys.h"
#include "plan/base/json_depth.h"
#include "plan/base/limits.h"
#include "plan/base/values.h"
#include "plan/keys.h"
#include "sweeps/machines.h"

namespace shardlab::answers {
namespace {

using Json = nlohmann::ordered_json;

/// Characters of a question: what a person or a program asks has some hundreds.
constexpr size_t kLongest = size_t{1} << 20;

Result<Json> object_of(std::string_view text) {
  if (text.size() > kLongest) return refusal("the question has more than 1 MiB", "ask for one layout or one search");
  Json json = json_depth(text) > limits::kJsonDepth ? Json() : Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_object()) return json;
  return refusal("the question is not a JSON object", R"(for example {"model": "llama-3.1-8b", "machine": "h100", "devices": 8})");
}

/// A value as a flag takes it; nothing where it has no such form.
std::optional<std::string> word_of(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_number_unsigned()) return fmt::to_string(value.get<uint64_t>());
  if (value.is_number_integer()) return fmt::to_string(value.get<int64_t>());
  if (value.is_number_float()) return to_text(value.get<double>());
  std::string text;
  if (!value.is_array() && !value.is_object()) return std::nullopt;
  for (const auto& [name, part] : value.items()) {
    if (part.is_structured()) return std::nullopt;
    const auto word = word_of(part);
    if (!word) return std::nullopt;
    text += (text.empty() ? "" : ",") + (value.is_object() ? name + "=" : "") + *word;
  }
  return text;
}

/// Where the values of keys go that are not keys of a case.
struct Place {
  std::string_view key;
  std::string* text = nullptr;
  double* number = nullptr;  ///< of a number in a range, else
  double least = 0, most = 0;
  bool needed = false;
  bool whole = false;
};

Result<void> put(const Place& place, const std::string& word) {
  if (place.text != nullptr) {
    *place.text = word;
    return {};
  }
  const auto number = parse_number(word);
  if (!number || *number < place.least || *number > place.most || (place.whole && *number != std::floor(*number)))
    return refusal(fmt::format("{} `{}` is not a{} number from {} to {}", place.key, word, place.whole ? " whole" : "", place.least,
                               place.most),
                   fmt::format("change {}", place.key));
  *place.number = *number;
  return {};
}

/// Gives every key of the question its place: that of `places`, else `keys` where a key of a case has such a flag, else `set`.
Result<void> deal(const Json& question, std::span<const Place> places, Flag least,
                  std::vector<std::pair<std::string, std::string>>& keys, std::vector<std::string>& set) {
  for (const auto& [name, value] : question.items()) {
    if (value.is_null()) continue;  // as if it were not there
    const auto word = word_of(value);
    if (!word) return refusal(fmt::format("{} is nested too deep", name), "give a number, a text, true, false, or a list of them");
    const auto place = std::ranges::find(places, name, &Place::key);
    if (place != places.end()) {
      SHARDLAB_TRY(put(*place, *word));
    } else if (const CaseKey* const key = find_key(name); key != nullptr && key->has_flag >= least) {
      keys.emplace_back(key->word(), *word);
    } else if (key != nullptr && std::ranges::find(kTrainedKeys, key->path) != kTrainedKeys.end()) {
      set.push_back(fmt::format("{}={}", key->path, *word));
    } else if (name.find('.') != std::string::npos || (key != nullptr && least == Flag::kCase)) {
      set.push_back(name + "=" + *word);
    } else {
      std::vector<std::string_view> known;
      for (const Place& p : places) known.push_back(p.key);
      for (const CaseKey& k : case_keys())
        if (k.has_flag >= least) known.push_back(k.word());
      return refusal(fmt::format("the question has no key `{}`", name),
                     fmt::format("use {}, or a key of a sweep file by its path, as model.layers", fmt::join(known, ", ")));
    }
  }
  for (const Place& place : places)
    if (place.needed && place.text->empty())
      return refusal(fmt::format("{} is missing", place.key), fmt::format("add {}", place.key));
  return {};
}

Surroundings without_program() {
  Surroundings around;
  around.local_machine = [](const std::string& file) -> Result<Machine> {
    if (!file.empty()) return load_machine(file);
    return refusal("machine local without machine_file",
                   "calibrate with `shardlab calibrate -o FILE`, and name FILE as machine_file");
  };
  return around;
}

}  // namespace

Result<MemoryAsked> memory_asked(std::string_view json) {
  const auto question = object_of(json);
  if (!question.ok()) return question.error();
  MemoryAsked asked;
  CaseFlags& f = asked.flags;
  f.around = without_program();
  std::string profile, plan;
  double devices = 0;
  const Place places[] = {{.key = "model", .text = &f.model, .needed = true},
                          {.key = "machine", .text = &f.machine, .needed = true},
                          {.key = "devices", .number = &devices, .least = 1, .most = 1 << 20, .whole = true},
                          {.key = "machine_file", .text = &f.machine_file},
                          {.key = "assume", .text = &f.assume},
                          {.key = "profile", .text = &profile},
                          {.key = "plan", .text = &plan},
                          {.key = "tokens", .text = &asked.words.tokens},
                          {.key = "price", .number = &asked.words.price_usd, .least = 0, .most = 1e6},
                          {.key = "device_mtbf", .text = &asked.words.mtbf},
                          {.key = "checkpoint_time", .text = &asked.words.checkpoint},
                          {.key = "restart_time", .text = &asked.words.restart},
                          {.key = "checkpoint_every", .text = &asked.words.interval}};
  SHARDLAB_TRY(deal(*question, places, Flag::kCase, f.layout, f.set));
  f.devices = static_cast<int64_t>(devices);
  if (!profile.empty()) f.set.push_back("profile=" + profile);
  if (!plan.empty()) {
    const auto whole = parse_bool(plan);
    if (!whole) return refusal(fmt::format("plan `{}` is neither true nor false", plan), "use true or false");
    asked.words.plan = *whole;
  }
  return asked;
}

Result<SearchFlags> search_asked(std::string_view json) {
  const auto question = object_of(json);
  if (!question.ok()) return question.error();
  SearchFlags f;
  f.around = without_program();
  double top = f.top;
  const Place places[] = {{.key = "model", .text = &f.model, .needed = true},
                          {.key = "machine", .text = &f.machine, .needed = true},
                          {.key = "devices", .text = &f.devices, .needed = true},
                          {.key = "global_batch_tokens", .text = &f.global_batch_tokens, .needed = true},
                          {.key = "seq_len", .text = &f.seq_len},
                          {.key = "machine_file", .text = &f.machine_file},
                          {.key = "profile", .text = &f.profile},
                          {.key = "assume", .text = &f.assume},
                          {.key = "objective", .text = &f.objective},
                          {.key = "top", .number = &top, .least = 1, .most = 100'000, .whole = true},
                          {.key = "tokens", .text = &f.tokens},
                          {.key = "margin", .text = &f.margin},
                          {.key = "price", .number = &f.price_usd, .least = 0, .most = 1e6},
                          {.key = "max_days", .number = &f.max_days, .least = 0, .most = 1e9},
                          {.key = "site_overhead", .number = &f.site_overhead, .least = 1, .most = 100},
                          {.key = "kg_co2_per_kwh", .number = &f.kg_co2_per_kwh, .least = 0, .most = 100}};
  SHARDLAB_TRY(deal(*question, places, Flag::kAxis, f.axes, f.set));
  f.top = static_cast<int>(top);
  return f;
}

}  // namespace shardlab::answers
