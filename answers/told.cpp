#include "answers/told.h"

#include <chrono>
#include <nlohmann/json.hpp>

#include "answers/memory_json.h"
#include "answers/namespaces.h"
#include "answers/question.h"
#include "answers/search_json.h"
#include "simulator/estimator/analytic/shipped.h"
#include "simulator/estimator/search/replayed.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"

namespace shardlab::answers {
namespace {

using Json = nlohmann::ordered_json;

/// UTF-8, whatever a path holds.
std::string text_of(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace); }

}  // namespace

Told told(const Error& error) {
  const Json json{{"error", error.where.empty() ? error.message : error.where + ": " + error.message}, {"hint", error.hint}};
  return {error.code, text_of(json)};
}

Told tell_memory_json(std::string_view question) {
  const auto asked = memory_asked(question);
  if (!asked.ok()) return told(asked.error());
  const auto options = memory_options(asked->words);
  if (!options.ok()) return told(options.error());
  const auto answer = tell_memory(asked->flags, *options, true);
  if (!answer.ok()) return told(answer.error());
  return {answer->answer.fits() ? ExitCode::kDone : ExitCode::kNo, text_of(memory_json(*answer))};
}

Told tell_search_json(std::string_view question) {
  const auto flags = search_asked(question);
  if (!flags.ok()) return told(flags.error());
  const auto task = search_task(*flags);
  if (!task.ok()) return told(task.error());
  const auto begin = std::chrono::steady_clock::now();
  const search::Ranked ranked = search::rank(task->studies, task->space, task->options);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return {ranked.found.best.empty() ? ExitCode::kNo : ExitCode::kDone, text_of(to_json(*task, ranked.found, seconds))};
}

Told tell_names_json() {
  Json json{{"models", list_models()}, {"machines", list_machines()}, {"profiles", Json::array()}};
  for (const analytic::ShippedProfile& profile : analytic::shipped_profiles())
    json["profiles"].push_back(std::string(profile.name));
  return {ExitCode::kDone, text_of(json)};
}

}  // namespace shardlab::answers
