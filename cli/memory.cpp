// memory: the what-if memory calculator. Exact bytes of the plan that would run.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "cli/pipeline.h"
#include "cli/verbs.h"
#include "plan/memory.h"
#include "reports/columns.h"
#include "reports/format.h"

namespace shardlab {
namespace {

/// Bytes of one rank of a stage at its peak, by what they are for. The parts add up to `peak`.
struct StageMemory {
  int stage = 0;
  int64_t parameters = 0, gradients = 0, optimizer = 0, activations = 0, buffers = 0, workspace = 0, reserved = 0, peak = 0;
  std::string moment;
};

StageMemory stage_memory(const PlacedPlan& placed, int role) {
  const MemoryPeak peak = memory_peak(*placed.plan, role)[static_cast<size_t>(Space::kDevice)];
  const auto of = [&](BufferClass c) { return peak.at_peak.bytes[static_cast<size_t>(c)]; };
  StageMemory m;
  m.stage = role;
  m.parameters = of(BufferClass::kParameter);
  m.gradients = of(BufferClass::kGradient);
  m.optimizer = of(BufferClass::kMoment) + of(BufferClass::kMaster);
  m.activations = of(BufferClass::kActivation) + of(BufferClass::kInput);
  m.buffers = of(BufferClass::kBuffer) + of(BufferClass::kMetric) + of(BufferClass::kOther);
  m.workspace = of(BufferClass::kTemporary) + of(BufferClass::kWorkspace);
  m.reserved = placed.arenas[static_cast<size_t>(role)].bytes[static_cast<size_t>(Space::kDevice)];
  m.peak = peak.peak_bytes;
  m.moment = peak.moment;
  return m;
}

std::vector<std::string> assumptions(const Case& c) {
  return {
      "bytes are those of the plan that `shardlab run` executes: every buffer rounded up to 64 bytes, summed over what is live at "
      "the peak",
      "reserved is what packing makes of the peak: one arena a rank, buffers at fixed offsets",
      fmt::format("{} everywhere: parameters, gradients, optimizer state and activations have {} bytes an element",
                  c.train.precision, 4),
      "attention keeps no S x S matrix; its output and one log-sum-exp a row are saved",
      "memory of the process itself, the driver and libraries is not included"};
}

Table stage_table(const std::vector<StageMemory>& stages) {
  Table table{{{"stage"},
               {"parameters", Unit::kBytes},
               {"gradients", Unit::kBytes},
               {"optimizer", Unit::kBytes},
               {"activations", Unit::kBytes},
               {"buffers", Unit::kBytes},
               {"workspace", Unit::kBytes},
               {"peak", Unit::kBytes},
               {"reserved", Unit::kBytes}},
              {}};
  for (const StageMemory& s : stages)
    table.rows.push_back(
        {int64_t{s.stage}, s.parameters, s.gradients, s.optimizer, s.activations, s.buffers, s.workspace, s.peak, s.reserved});
  return table;
}

nlohmann::ordered_json to_json(const Case& c, const std::vector<StageMemory>& stages, int64_t peak, int64_t capacity, bool fits) {
  const Layout& l = c.layout;
  nlohmann::ordered_json json;
  json["parameters"] = parameter_count(c.model);
  json["devices"] = l.world_size();
  json["layout"] = {{"dp", l.dp},
                    {"tp", l.tp},
                    {"pp", l.pp},
                    {"vpp", l.vpp},
                    {"cp", l.cp},
                    {"ep", l.ep},
                    {"zero", l.zero},
                    {"schedule", std::string(name_of(l.schedule))},
                    {"sequence_parallel", l.sequence_parallel},
                    {"recompute", std::string(name_of(l.recompute))},
                    {"offload", offload_text(l.offload)},
                    {"precision", c.train.precision},
                    {"micro_batch", c.train.micro_batch},
                    {"grad_accumulation", c.train.grad_accumulation},
                    {"seq_len", c.train.seq_len}};
  json["stages"] = nlohmann::ordered_json::array();
  for (const StageMemory& s : stages)
    json["stages"].push_back({{"stage", s.stage},
                              {"parameters", s.parameters},
                              {"gradients", s.gradients},
                              {"optimizer", s.optimizer},
                              {"activations", s.activations},
                              {"buffers", s.buffers},
                              {"workspace", s.workspace},
                              {"reserved", s.reserved},
                              {"peak", s.peak}});
  json["peak"] = peak;
  json["capacity"] = capacity;
  json["fits"] = fits;
  json["assumptions"] = assumptions(c);
  return json;
}

Result<ExitCode> memory(const CaseFlags& flags, const std::string& format_name) {
  const auto format = parse_format(format_name);
  if (!format.ok()) return format.error();
  const auto config = case_from_flags(flags);
  if (!config.ok()) return config.error();
  const auto placed = prepare(*config);
  if (!placed.ok()) return placed.error();
  std::vector<StageMemory> stages;
  for (int role = 0; role < static_cast<int>(placed->plan->roles.size()); ++role) stages.push_back(stage_memory(*placed, role));
  const auto worst = std::ranges::max_element(stages, {}, &StageMemory::peak);
  const int64_t capacity = memory_per_rank(*config);
  const bool fit = capacity <= 0 || largest_arena(*placed) <= capacity;
  if (*format == TableFormat::kJson) {
    fmt::print("{}\n", to_json(*config, stages, worst->peak, capacity, fit).dump(2));
    return fit ? ExitCode::kDone : ExitCode::kNo;
  }
  if (*format != TableFormat::kTable) {
    print(stage_table(stages), *format);
    return fit ? ExitCode::kDone : ExitCode::kNo;
  }
  fmt::print("{}, {} parameters, on {} of {}: {}\n\n", config->model.name,
             count_text(static_cast<double>(parameter_count(config->model))), config->layout.world_size(), config->machine.id,
             layout_text(*config));
  fmt::print("bytes of one rank at its peak, by stage\n");
  print(stage_table(stages), *format);
  fmt::print("\npeak {} on stage {}, at {}\n", bytes_text(worst->peak), worst->stage, worst->moment);
  if (capacity > 0)
    fmt::print("{}: needs {} of the {} that a rank may use ({:.1f} %)\n", fit ? "fits" : "does not fit",
               bytes_text(largest_arena(*placed)), bytes_text(capacity),
               100.0 * static_cast<double>(largest_arena(*placed)) / static_cast<double>(capacity));
  else
    fmt::print("the memory of {} is not known: whether this fits is not said\n", config->machine.id);
  for (const std::string& a : assumptions(*config)) fmt::print("  - {}\n", a);
  return fit ? ExitCode::kDone : ExitCode::kNo;
}

}  // namespace

void add_memory(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("memory", "what-if memory calculator: will it fit, and what takes the space");
  auto flags = std::make_shared<CaseFlags>();
  auto format = std::make_shared<std::string>();
  add_case_flags(*verb, *flags);
  add_format(*verb, *format);
  verb->callback([&action, flags, format] { action = [flags, format] { return memory(*flags, *format); }; });
}

}  // namespace shardlab
