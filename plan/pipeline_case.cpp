#include "plan/pipeline_case.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <numeric>
#include <optional>

#include "plan/base/check.h"

namespace shardlab {
namespace {

PipelineShape shape_of(const Case& c) {
  return {c.layout.schedule, c.layout.pp, c.layout.vpp, static_cast<int>(c.train.grad_accumulation)};
}

/// "3,4,4,1" as numbers; none where it is no such list.
std::optional<std::vector<int>> read_list(std::string_view text) {
  std::vector<int> list;
  while (true) {
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || value < 0) return std::nullopt;
    list.push_back(value);
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    if (text.empty()) return list;
    if (text.front() != ',') return std::nullopt;
    text.remove_prefix(1);
  }
}

Result<PipelineSchedule> table_of(const Case& c) { return from_csv(c.layout.schedule_table, "schedule"); }

Result<void> check_table(const Case& c) {
  const auto table = table_of(c);
  if (!table) return table.error();
  if (table->stages != c.layout.pp)
    return refusal(fmt::format("schedule has {} {}, but pp is {}: a schedule has one row for each stage", table->stages,
                               table->stages == 1 ? "row" : "rows", c.layout.pp),
                   fmt::format("give it {} {}, or set pp: {}", c.layout.pp, c.layout.pp == 1 ? "row" : "rows", table->stages));
  if (table->micro_batches != c.train.grad_accumulation)
    return refusal(fmt::format("schedule has {} {}, but grad_accumulation is {}", table->micro_batches,
                               table->micro_batches == 1 ? "micro-batch" : "micro-batches", c.train.grad_accumulation),
                   fmt::format("set grad_accumulation: {}", table->micro_batches));
  if (c.layout.vpp != 1)
    return refusal(fmt::format("vpp={} with schedule=table: the table says what parts a stage has", c.layout.vpp), "leave vpp out");
  return {};
}

bool is_dealt(const Case& c) { return c.layout.stage_layers != kBalanced && c.layout.stage_layers != kMeasured; }

/// Refuses `stage_layers: measured` where nothing has been measured, or where it is not known of how many parts.
Result<void> check_measured(const Case& c) {
  if (c.layout.stage_layers != kMeasured) return {};
  if (c.checkpoint.resume.empty())
    return refusal("stage_layers=measured in a run that begins from its seed: nothing has been measured",
                   "set checkpoint.resume to a checkpoint of a measured run, or stage_layers: balanced", ErrorKind::kNotMeasured);
  if (c.layout.schedule == Schedule::kAuto)
    return refusal("stage_layers=measured with schedule=auto: the number of parts is not known",
                   "name a schedule, or leave stage_layers out: schedule=auto deals layers out by predicted time");
  return {};
}

Result<void> check_layers(const Case& c) {
  SHARDLAB_TRY(check_measured(c));
  const int parts = parts_of(c);
  const int64_t layers = c.model.layers;
  const std::string& listed = c.layout.stage_layers;
  if (listed.empty() || !is_dealt(c)) {
    if (parts <= layers) return {};
    if (parts == c.layout.pp)
      return refusal(fmt::format("pp={} stages for {} layers: a stage would be empty", parts, layers),
                     fmt::format("set pp to {} or less", layers));
    return refusal(fmt::format("schedule={} cuts {} layers in {} parts, {} for each of pp={} stages: some would be empty",
                               name_of(c.layout.schedule), layers, parts, parts / c.layout.pp, c.layout.pp),
                   "set a lower pp or vpp, or another schedule");
  }
  const auto list = read_list(listed);
  if (!list)
    return refusal(fmt::format("stage_layers={}: no list of numbers", listed), "write the layers of each part, as 3,4,4,1");
  if (std::ssize(*list) != parts)
    return refusal(fmt::format("stage_layers={} has {} numbers for {} parts", listed, list->size(), parts),
                   "write the layers of each part of the model, in model order");
  if (const int64_t sum = std::accumulate(list->begin(), list->end(), int64_t{0}); sum != layers)
    return refusal(fmt::format("stage_layers={} sums to {} of {} layers", listed, sum, layers), "deal out all layers");
  for (size_t i = 1; i + 1 < list->size(); ++i)
    if ((*list)[i] == 0)
      return refusal(fmt::format("stage_layers={}: part {} has no layer", listed, i),
                     "only the first part, with the embedding, and the last, with the head, do without");
  return {};
}

}  // namespace

bool is_pipeline_decided(const Case& c) { return c.layout.schedule != Schedule::kAuto && is_dealt(c); }

bool ends_share_stage(const Case& c) {
  if (c.layout.schedule != Schedule::kTable)
    return c.layout.pp == 1 || is_folded(c.layout.schedule) || is_mirrored(c.layout.schedule);
  const PipelineSchedule table = *table_of(c);
  return table.stage_of(0, 0) == table.stage_of(table.parts - 1, 0);
}

int parts_of(const Case& c) {
  if (c.layout.schedule != Schedule::kTable) return parts_of(shape_of(c));
  return table_of(c)->parts;
}

std::vector<int> first_layers(const Case& c) {
  SHARDLAB_CHECK(is_dealt(c), "the layers of the stages of `{}` have not been dealt out", c.name);
  const int parts = parts_of(c), layers = static_cast<int>(c.model.layers);
  std::vector<int> first{0};
  if (const auto list = read_list(c.layout.stage_layers))
    for (const int n : *list) first.push_back(first.back() + n);
  else
    for (int part = 0; part < parts; ++part) first.push_back(first.back() + layers / parts + (part < layers % parts ? 1 : 0));
  return first;
}

PipelineSchedule schedule_of(const Case& c) {
  SHARDLAB_CHECK(c.layout.schedule != Schedule::kAuto, "the schedule of `{}` has not been decided", c.name);
  return c.layout.schedule == Schedule::kTable ? *table_of(c) : make_schedule(shape_of(c));
}

Result<void> check_pipeline(const Case& c) {
  if (c.layout.schedule == Schedule::kTable)
    SHARDLAB_TRY(check_table(c));
  else
    SHARDLAB_TRY(check(shape_of(c)));
  return check_layers(c);
}

}  // namespace shardlab
