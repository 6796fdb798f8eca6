#include "answers/search_json.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

#include "answers/namespaces.h"
#include "plan/base/values.h"
#include "simulator/estimator/analytic/doubt.h"

namespace shardlab::answers {

using analytic::TimePart;
using search::Candidate;

Value typed(const std::string& word) {
  if (const auto truth = parse_bool(word)) return *truth;
  const bool digits = !word.empty() && std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (const auto count = digits ? parse_count(word) : std::nullopt) return *count;
  return word;
}

Value mfu(const SearchTask& task, const Candidate& c) {
  const auto& peaks = task.machine.device.peak_flops;
  const Precision precision = c.point.precision;
  auto peak = peaks.find(std::string(name_of(precision)));
  if (peak == peaks.end() && precision == Precision::kFp16) peak = peaks.find("bf16");
  if (peak == peaks.end() || peak->second <= 0) return {};
  return c.estimate.model_flops / (c.device_seconds() * peak->second);
}

namespace {

double seconds_in(const Candidate& c, std::initializer_list<TimePart> parts) {
  double sum = 0;
  for (const TimePart part : parts) sum += c.estimate.part(part);
  return sum;
}

}  // namespace

std::vector<Figure> figures_of(const SearchTask& task, const Candidate& c) {
  const analytic::Estimate& e = c.estimate;
  std::vector<Figure> figures{
      {"predicted_step_s", Unit::kSeconds, "step", e.step_s},
      {"predicted_tokens_per_s", Unit::kTokensPerSecond, "tokens/s", e.tokens_per_s(c.point)},
      {"predicted_mfu", Unit::kFraction, "MFU", mfu(task, c)},
      {"predicted_peak_bytes", Unit::kBytes, "live peak", e.memory.live()},
      {"predicted_reserved_bytes", Unit::kBytes, "reserved", e.memory.reserved()},
      {"predicted_device_bytes", Unit::kBytes, "device", e.memory.device()},
      {"predicted_verdict", Unit::kNone, "fits", std::string(name_of(verdict_of(e.memory, task.options)))},
      {"predicted_wire_bytes", Unit::kBytes, "wire", e.wire_total()},
      {"predicted_compute_s", Unit::kSeconds, "compute",
       seconds_in(c, {TimePart::kForward, TimePart::kBackward, TimePart::kRecompute, TimePart::kUpdate})},
      {"predicted_exposed_comm_s", Unit::kSeconds, "exposed comm",
       seconds_in(c, {TimePart::kTensorParallel, TimePart::kContextParallel, TimePart::kExpertParallel, TimePart::kDataParallel}) +
           e.sends_s},
      {"predicted_bubble_fraction", Unit::kFraction, "bubble", e.bubble_s() / e.step_s},
      {"predicted_device_s", Unit::kSeconds, "device time", c.device_seconds()}};
  const analytic::Between range = analytic::step_between(task.study_of(c.point).prepared, c.point, e);
  figures.push_back({"step_low_s", Unit::kSeconds, "step, low", range.low});
  figures.push_back({"step_high_s", Unit::kSeconds, "step, high", range.high});
  if (task.tokens <= 0) return figures;
  const analytic::RunBill bill = analytic::bill(task.study_of(c.point).prepared, c.point, e, task.tokens, task.price);
  figures.push_back({"predicted_days", Unit::kNone, "days", bill.days});
  figures.push_back({"predicted_device_hours", Unit::kCount, "device hours", bill.device_hours});
  figures.push_back({"predicted_usd", Unit::kCount, "USD", task.price.device_hour_usd > 0 ? Value(bill.usd) : Value()});
  figures.push_back({"predicted_kwh", Unit::kCount, "kWh", bill.kwh});
  figures.push_back({"predicted_kg_co2", Unit::kCount, "kg CO2", bill.kg_co2});
  return figures;
}

namespace {

nlohmann::ordered_json json_of(const Value& value) {
  if (const auto* truth = std::get_if<bool>(&value)) return *truth;
  if (const auto* count = std::get_if<int64_t>(&value)) return *count;
  if (const auto* number = std::get_if<double>(&value)) return *number;
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  return nullptr;
}

nlohmann::ordered_json layout_json(const search::Point& point) {
  nlohmann::ordered_json json;
  for (const auto& [key, word] : words_of(point)) json[key] = json_of(typed(word));
  return json;
}

nlohmann::ordered_json candidate_json(const SearchTask& task, const Candidate& c) {
  nlohmann::ordered_json json = layout_json(c.point);
  for (const Figure& f : figures_of(task, c)) json[f.name] = json_of(f.value);
  for (size_t i = 0; i < analytic::kTimeParts; ++i)
    json["predicted_parts_s"][std::string(name_of(static_cast<TimePart>(i)))] = c.estimate.parts[i];
  for (size_t i = 0; i < analytic::kMemoryParts; ++i)
    json["predicted_memory_bytes"][std::string(name_of(static_cast<analytic::MemoryPart>(i)))] = c.estimate.memory.bytes[i];
  if (c.point.ep > 1) json["predicted_expert_rank_imbalance"] = c.point.expert_skew;
  json["worst_stage"] = c.estimate.worst_stage;
  json["transferred"] = c.estimate.transferred;
  return json;
}

nlohmann::ordered_json loser_json(const search::Loser& l) {
  nlohmann::ordered_json json{{"reason", l.reason()}, {"points", l.points}, {"nearest", layout_json(l.nearest)}};
  json["predicted_step_s"] = l.seconds > 0 ? nlohmann::ordered_json(l.seconds) : nlohmann::ordered_json();
  json["predicted_device_bytes"] = l.bytes > 0 ? nlohmann::ordered_json(l.bytes) : nlohmann::ordered_json();
  json["is_bound"] = l.is_bound;
  return json;
}

}  // namespace

bool equal_to_first(const SearchTask& task, const Candidate& first, const Candidate& c) {
  if (task.options.objective == search::Objective::kMemory) return false;
  const bool cost = task.options.objective == search::Objective::kCost;
  const double ratio = cost ? c.device_seconds() / first.device_seconds() : c.seconds() / first.seconds();
  const auto doubt = [&](const Candidate& of) {
    return analytic::step_doubt(task.study_of(of.point).prepared, of.point, of.estimate);
  };
  return std::log(ratio) <= analytic::spread_apart(analytic::published_learnt().step, doubt(first), doubt(c));
}

nlohmann::ordered_json to_json(const SearchTask& task, const search::Found& found, double seconds) {
  nlohmann::ordered_json json{{"model", task.model_name},
                              {"machine", task.machine.id},
                              {"objective", std::string(name_of(task.options.objective))},
                              {"points", found.counts.points},
                              {"evaluated", found.counts.evaluated},
                              {"bounded", found.counts.bounded},
                              {"seconds", seconds},
                              {"complete", !found.stopped}};
  for (const auto& [key, list] : {std::pair{"layouts", &found.best}, {"pareto", &found.front}}) {
    json[key] = nlohmann::ordered_json::array();
    for (const Candidate& c : *list) {
      json[key].push_back(candidate_json(task, c));
      if (!found.best.empty()) json[key].back()["equal_to_first"] = equal_to_first(task, found.best.front(), c);
    }
  }
  if (found.nearest) {
    json["nearest"] = candidate_json(task, *found.nearest);
    json["nearest"]["lost_because"] = found.nearest_loss == search::Loss::kLate ? "late" : "too large";
  }
  json["refused"] = nlohmann::ordered_json::object();
  json["lost"] = nlohmann::ordered_json::array();
  for (const search::Loser& l : found.losers) {
    const bool refused = l.loss == search::Loss::kIllegal || l.loss == search::Loss::kUndivided ||
                         l.loss == search::Loss::kTooLarge || l.loss == search::Loss::kTight || l.loss == search::Loss::kLate;
    if (refused) json["refused"][l.reason()] = l.points;
    json["lost"].push_back(loser_json(l));
  }
  return json;
}

}  // namespace shardlab::answers
