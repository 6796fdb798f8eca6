#include "answers/memory_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "answers/namespaces.h"
#include "plan/routing.h"

namespace shardlab::answers {
namespace {

using Json = nlohmann::ordered_json;
using whatif::Answer;
using whatif::ItemGroup;
using whatif::StageAnswer;

Json items_json(std::span<const whatif::Item> items) {
  Json json = Json::array();
  for (const whatif::Item& item : items)
    json.push_back({{"group", std::string(name_of(item.group))}, {"name", item.name}, {"bytes", item.bytes}});
  return json;
}

Json stage_json(const StageAnswer& s) {
  Json json{{"stage", s.stage}};
  for (size_t g = 0; g < whatif::kLiveGroups; ++g) {
    const auto group = static_cast<ItemGroup>(g);
    json[std::string(name_of(group))] = s.of(group);
  }
  if (!s.device_id.empty()) json["device_id"] = s.device_id, json["capacity"] = s.capacity > 0 ? Json(s.capacity) : Json(nullptr);
  json["reserved"] = s.reserved();
  json["peak"] = s.live();
  json["device"] = s.device();
  json["host"] = s.host_bytes;
  json["nvme"] = s.nvme_bytes;
  json["host_items"] = items_json(s.host_items);
  json["nvme_items"] = items_json(s.nvme_items);
  json["moment"] = s.moment;
  json["op"] = s.op;
  json["items"] = items_json(s.items);
  return json;
}

Json words_json(const whatif::Words& words) {
  Json json = Json::object();
  for (const auto& [key, value] : words) json[key] = value;
  return json;
}

Json change_json(const whatif::Change& c) {
  return {{"set", words_json(c.words)},
          {"device", c.device_bytes},
          {"host", c.host_bytes},
          {"predicted_step_s", c.step_s},
          {"slowdown", c.slowdown}};
}

/// The list where layers differ.
std::string recompute_text(const Case& c) {
  return c.layout.recompute == Recompute::kByLayer ? c.layout.recompute_options.layers : std::string(name_of(c.layout.recompute));
}

}  // namespace

nlohmann::ordered_json layout_json(const MemoryQuestion& q) {
  const analytic::Point& p = q.point;
  const Case& c = q.config;
  return {{"dp", p.dp},
          {"tp", p.tp},
          {"pp", p.pp},
          {"vpp", p.vpp},
          {"cp", p.cp},
          {"ep", p.ep},
          {"expert_tp", p.expert_tp},
          {"zero", p.zero},
          {"schedule", std::string(name_of(p.schedule))},
          {"sequence_parallel", p.sequence_parallel},
          {"recompute", q.exact ? recompute_text(c) : name_of(p.recompute)},
          {"offload", offload_text(c.layout.offload)},
          {"precision", name_of(c.train.precision)},
          {"micro_batch", p.micro_batch},
          {"grad_accumulation", p.grad_accumulation},
          {"seq_len", p.seq_len}};
}

nlohmann::ordered_json memory_json(const ToldMemory& told) {
  const MemoryQuestion& q = told.question;
  const Answer& a = told.answer;
  const auto range = [](whatif::Interval i) { return Json{{"low", i.low}, {"high", i.high}}; };
  Json json;
  json["parameters"] = parameter_count(q.shape);
  json["trained_parameters"] = trained_count(q.shape);
  json["devices"] = q.point.world_size();
  json["layout"] = layout_json(q);
  json["stages"] = Json::array();
  int64_t peak = 0;
  for (const StageAnswer& s : a.stages) json["stages"].push_back(stage_json(s)), peak = std::max(peak, s.live());
  json["peak"] = peak;
  // Where nobody said what the machine has, nobody can say that it fits: null, not true.
  json["capacity"] = a.capacity > 0 ? Json(a.capacity) : Json(nullptr);
  json["fits"] = a.capacity > 0 ? Json(a.fits()) : Json(nullptr);
  json["assumptions"] = memory_assumptions(q, a);
  json["profile"] = q.config.profile;
  json["exact"] = a.exact;
  json["worst_stage"] = a.worst().stage;
  json["reserved"] = a.worst().reserved();
  json["device"] = a.worst().device();
  json["interval"] = {{"live", range(a.live())}, {"device", range(a.Answer::device())}};
  json["verdict"] = std::string(name_of(a.verdict()));
  json["headroom"] = a.capacity > 0 ? Json(a.headroom()) : Json(nullptr);
  json["predicted_step_s"] = a.step_s > 0 ? Json(a.step_s) : Json(nullptr);
  if (a.step_s > 0 && a.step.high > 0) json["interval"]["step_s"] = {{"low", a.step.low}, {"high", a.step.high}};
  if (const auto routing = routing_of(q.config); q.config.model.is_mixture() && routing.ok()) {
    const auto imbalance = [&](int64_t parts) { return expected_imbalance(*routing, q.config.model, parts); };
    json["expert_imbalance"] = imbalance(q.config.model.experts.count);
    const auto placements = placements_of(q.config, *routing, q.point.ep);
    json["expert_rank_imbalance"] =
        q.point.ep > 1 ? Json(expected_imbalance(*routing, q.config.model, q.point.ep, placements)) : Json(nullptr);
    if (!placements.empty()) json["expert_rank_imbalance_contiguous"] = imbalance(q.point.ep);
  }
  if (told.run) {
    const bool priced = !told.run->price_note.empty();
    json["run"] = {{"tokens", told.run->tokens}, {"days", told.run->bill.days}, {"device_hours", told.run->bill.device_hours}};
    json["run"]["usd"] = priced ? Json(told.run->bill.usd) : Json(nullptr);
    json["run"]["price"] = priced ? Json(told.run->price_note) : Json(nullptr);
    json["run"]["usd_per_million_tokens"] = priced ? Json(1e6 * told.run->bill.usd / told.run->tokens) : Json(nullptr);
    json["run"]["kwh_per_million_tokens"] = 1e6 * told.run->bill.kwh / told.run->tokens;
    if (const auto& g = told.run->goodput)
      json["run"]["goodput"] = {
          {"share", g->share},           {"checkpoints", g->checkpoints}, {"lost", g->lost},
          {"interval_s", g->interval_s}, {"job_mtbf_s", g->job_mtbf_s},   {"failures_a_day", g->failures_a_day}};
    json["run"]["kwh"] = told.run->bill.kwh, json["run"]["kg_co2"] = told.run->bill.kg_co2;
  }
  json["changes"] = Json::array();
  for (const whatif::Change& c : told.advice.changes) json["changes"].push_back(change_json(c));
  json["least"] = told.advice.looked_at > 0 ? change_json(told.advice.least) : Json(nullptr);
  return json;
}

}  // namespace shardlab::answers
