// plan CASE.yaml and diff A.yaml B.yaml: the program's own text, and what a strategy changes in it.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "cases/environment.h"
#include "cases/pipeline.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/run_directory.h"
#include "cli/shipped.h"
#include "cli/verbs.h"
#include "plan/base/files.h"
#include "plan/base/limits.h"
#include "plan/pipeline_case.h"
#include "plan/text.h"
#include "plan/text_places.h"
#include "plan/verify.h"
#include "plan/wire.h"
#include "plan/work.h"
#include "reports/columns.h"
#include "reports/format.h"
#include "simulator/interpreter/collective_choice.h"
#include "strategies/lower.h"
#include "strategies/warm_up.h"

namespace shardlab::cli {
namespace {

struct PlanFlags {
  std::string file, after, machine_file, format;
  bool warm_up = false, grid = false;
  std::vector<std::string> set;
};

/// Every op of the plan's segments with its work on one rank; `runs` counts its runs in a step, summed over the roles.
Table ops_of(const Plan& plan) {
  Table table{{{"segment"},
               {"op"},
               {"kind"},
               {"stream"},
               {"strategy"},
               {"runs"},
               {"flops", Unit::kFlops},
               {"memory_bytes", Unit::kBytes},
               {"payload_bytes", Unit::kBytes}},
              {}};
  std::vector<int64_t> runs(plan.segments.size());
  for (const Role& role : plan.roles)
    for (const Item& item : role.program)
      if (const auto* call = std::get_if<Call>(&item)) ++runs[call->segment.index()];
  for (size_t s = 0; s < plan.segments.size(); ++s)
    for (const Step& step : plan.segments[s].steps) {
      const auto* op = std::get_if<Op>(&step);
      if (op == nullptr) continue;
      const WorkAmount work = work_of(plan.segments[s], *op, plan.mesh, plan.token_order);
      table.rows.push_back({plan.segments[s].name, op->label, std::string(kind_of(op->work)), plan.streams[op->stream.index()],
                            op->strategy, runs[s], work.flops.value, work.memory.value, work.payload.value});
    }
  return table;
}

constexpr std::string_view kOps = "ops of kind ";

/// The figures of a plan, as rows that can stand beside another plan's.
std::map<std::string, std::pair<int64_t, Unit>> figures(const PlacedPlan& placed) {
  std::map<std::string, std::pair<int64_t, Unit>> rows;
  const Plan& plan = *placed.plan;
  rows["ranks"] = {plan.mesh.world_size(), Unit::kNone};
  rows["stages with a program of their own"] = {static_cast<int64_t>(plan.roles.size()), Unit::kNone};
  for (const auto& [comm, bytes] : total_wire_bytes(plan)) rows[fmt::format("sent by all ranks, {}", comm)] = {bytes, Unit::kBytes};
  for (int role = 0; role < static_cast<int>(plan.roles.size()); ++role) {
    const MemoryPeak peak = memory_peak(plan, role)[0];
    auto& most = rows["live peak of the largest rank"];
    most = {std::max(most.first, peak.peak_bytes), Unit::kBytes};
    auto& kept = rows["held all the step by the largest rank"];
    kept = {std::max(kept.first, peak.persistent_bytes), Unit::kBytes};
    for (const Instruction& i : placed.programs[static_cast<size_t>(role)].instructions)
      if (i.kind == Instruction::Kind::kRun) rows[std::string(kOps) + std::string(kind_of(i.op->work))].first += 1;
  }
  return rows;
}

/// The file's text where it is a plan's, as `print` writes it and `run` leaves it in plan.txt; nothing for any other file.
std::optional<std::string> plan_text(const std::string& path) {
  auto text = read_file_within(path, limits::kPlanBytes);
  if (!text.ok() || !is_plan_text(*text)) return std::nullopt;
  return std::move(*text);
}

/// "layer.F attn.qkv linear.F" of "layers.3 m2 layer.F attn.qkv linear.F".
std::string_view without_call(std::string_view op) {
  for (const std::string_view prefix : {"layers.", "m"}) {
    const size_t end = std::min(op.find(' '), op.size());
    const std::string_view number = op.substr(std::min(prefix.size(), end), end - std::min(prefix.size(), end));
    const bool counts = !number.empty() && number.find_first_not_of("0123456789") == std::string_view::npos;
    if (op.starts_with(prefix) && counts) op.remove_prefix(std::min(end + 1, op.size()));
  }
  return op;
}

/// Where the op stands that a finding names; else the slot, buffer or parameter that its message names first, its segment, its role.
TextPlace place_of(const Finding& finding, const PlanPlaces& places) {
  const std::string op(without_call(finding.op));
  if (const auto found = places.ops.find(op); found != places.ops.end()) return found->second;
  const std::string segment = op.substr(0, op.find(' ')), named = op + " " + finding.message;
  for (size_t at = named.find('%'); at != std::string::npos; at = named.find('%', at + 1)) {
    std::string entry = named.substr(at, named.find_first_of(" ,;:()`", at) - at);
    while (entry.ends_with('.')) entry.pop_back();
    for (const std::string& owner : {segment + " ", fmt::format("{} ", finding.role), std::string()})
      if (const auto found = places.entries.find(owner + entry); found != places.entries.end()) return found->second;
  }
  if (const auto found = places.segments.find(segment); found != places.segments.end()) return found->second;
  const auto role = places.roles.find(finding.role);
  return role == places.roles.end() ? TextPlace() : role->second;
}

/// Prints the findings of `verify` in a plan written by hand or left by a run; the figures of a good plan.
Result<ExitCode> check_text(const PlanFlags& flags, const std::string& text, TableFormat format) {
  if (!flags.after.empty() || !flags.set.empty() || flags.grid)
    return Error{ExitCode::kUsage, "--after, --set and --grid are of a case, and this is a plan's text", "name the case file",
                 flags.file};
  PlanPlaces places;
  auto plan = parse_plan(text, flags.file, places);
  if (!plan.ok()) return plan.error();
  for (size_t role = 0; role < plan->roles.size(); ++role)
    if (plan->roles[role].program.empty())
      return Error{ExitCode::kUsage, fmt::format("role {} has no program", role),
                   "the text is cut off, or lacks the calls of what its ranks do: print the plan again", flags.file};
  std::vector<Finding> findings = find_faults(*plan);
  if (findings.empty())
    for (size_t role = 0; role < plan->roles.size(); ++role) {
      const auto unordered = find_unordered(*plan, expand_program(*plan, static_cast<int>(role)));
      findings.insert(findings.end(), unordered.begin(), unordered.end());
    }
  if (!findings.empty()) {
    Table table{{{"line"}, {"column"}, {"rule"}, {"role"}, {.name = "op", .wraps = true}, {.name = "finding", .wraps = true}}, {}};
    for (const Finding& f : findings) {
      const TextPlace place = place_of(f, places);
      const auto number = [](int n, int least) { return n < least ? Value() : Value(int64_t{n}); };
      table.rows.push_back(
          {number(place.line, 1), number(place.column, 1), std::string(name_of(f.rule)), number(f.role, 0), f.op, f.message});
    }
    print(format == TableFormat::kTable ? without_empty_columns(table) : table, format);
    fmt::print(stderr, "{}: the plan is refused: {} {}. {}", flags.file, findings.size(), findings.size() == 1 ? "fault" : "faults",
               with_shipped_paths("docs/verify.md explains the rules; `shardlab plan CASE.yaml` prints a correct plan.\n"));
    return ExitCode::kNo;
  }
  if (format != TableFormat::kTable) {
    print(ops_of(*plan), format);
    return ExitCode::kDone;
  }
  const PlacedPlan placed = place(std::move(*plan));
  fmt::print("{}: verify finds nothing wrong\n", flags.file);
  for (const auto& [name, figure] : figures(placed))
    fmt::print("  {}: {}\n", name, figure.second == Unit::kBytes ? bytes_text(figure.first) : fmt::format("{}", figure.first));
  return ExitCode::kDone;
}

/// "0-4, 13-16": the layers of a stage's parts.
std::string layers_text(const PipelineSchedule& schedule, int stage, const std::vector<int>& first) {
  std::string text;
  for (const int part : schedule.parts_of(stage)) {
    const int begin = first[static_cast<size_t>(part)], end = first[static_cast<size_t>(part) + 1];
    if (begin == end) continue;
    text += (text.empty() ? "" : ", ") + (end - begin == 1 ? fmt::format("{}", begin) : fmt::format("{}-{}", begin, end - 1));
  }
  return text.empty() ? "none" : text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (end > at) lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

/// The drawing in blocks that are no wider than `width`, each of whole slots.
std::string folded_grid(const PipelineSchedule& schedule, const std::string& grid, int width) {
  size_t slot = 2;
  for (const auto& order : schedule.order)
    for (const PipelineSlot& s : order) slot = std::max(slot, print(s).size() + 1);
  const size_t label = fmt::format("stage {} ", schedule.stages - 1).size(), most = static_cast<size_t>(width);
  const std::vector<std::string> rows = lines_of(grid);
  size_t longest = 0;
  for (const std::string& row : rows) longest = std::max(longest, row.size());
  if (width <= 0 || longest <= most || most < label + slot) return grid;
  const size_t part = (most - label) / slot * slot;
  std::string text;
  for (size_t begin = label; begin < longest; begin += part) {
    if (begin > label) text += fmt::format("\nfrom time {} on\n", (begin - label) / slot);
    for (const std::string& row : rows) {
      std::string line = row.substr(0, label) + (begin < row.size() ? row.substr(begin, part) : std::string());
      line.erase(line.find_last_not_of(' ') + 1);
      text += line + "\n";
    }
  }
  return text;
}

/// The schedule of a case's pipeline: its slots against time, where each takes one unit, and what each stage holds. As csv the
/// slots themselves, which `schedule` takes.
ExitCode print_schedule(const Case& config, TableFormat format) {
  const PipelineSchedule schedule = schedule_of(config);
  if (format == TableFormat::kCsv) {
    fmt::print("{}", to_csv(schedule));
    return ExitCode::kDone;
  }
  const SlotCosts costs = SlotCosts::uniform(schedule.parts, 1, 1, 1);
  const ScheduleTimes times = play(schedule, costs).value();
  const std::vector<int> first = first_layers(config);
  Table table{{{"stage"}, {"parts"}, {"layers"}, {"slots"}, {"idle", Unit::kFraction}, {"held"}}, {}};
  double idle = 0;
  for (int stage = 0; stage < schedule.stages; ++stage) {
    double busy = 0;
    for (const SlotTime& slot : times.slots[static_cast<size_t>(stage)]) busy += slot.end - slot.begin;
    std::string parts;
    for (const int part : schedule.parts_of(stage)) parts += (parts.empty() ? "" : ", ") + std::to_string(part);
    idle += (times.end - busy) / times.end / schedule.stages;
    table.rows.push_back({int64_t{stage}, parts, layers_text(schedule, stage, first),
                          std::ssize(schedule.order[static_cast<size_t>(stage)]), (times.end - busy) / times.end,
                          most_held(schedule, stage)});
  }
  if (format != TableFormat::kTable) {
    print(table, format);
    return ExitCode::kDone;
  }
  fmt::print(
      "{}: {} stages, {} parts, {} {}. F: forward, I: gradient of the part's input, W: of its weights, B: both.\n"
      "With one unit of time a slot, two for B, stages idle for {} of the step.\n\n{}\n",
      schedule_words(config), schedule.stages, schedule.parts, schedule.micro_batches,
      schedule.micro_batches == 1 ? "micro-batch" : "micro-batches", percent_text(idle),
      folded_grid(schedule, print_grid(schedule, costs), terminal_width()));
  print(table, format);
  fmt::print("\nheld: activations between a forward and its W or B, in those of a micro-batch on a whole stage\n");
  return ExitCode::kDone;
}

Result<ExitCode> plan_verb(PlanFlags flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  const auto named = case_file(flags.file);
  if (!named.ok()) return named.error();
  flags.file = *named;
  if (const auto text = plan_text(flags.file)) return check_text(flags, *text, *format);
  const auto loaded = load_case(flags.file, load_options(flags.machine_file, flags.set, flags.file));
  if (!loaded.ok()) return loaded.error();
  if (flags.grid) {
    SHARDLAB_TRY(check(*loaded));
    return print_schedule(*loaded, *format);
  }
  const auto config = decide(*loaded);
  if (!config.ok()) return config.error();
  LowerOptions options;
  options.after = flags.after;
  if (flags.warm_up && warm_up_steps(*config) == 0)
    return Error{ExitCode::kUsage, "--warm-up of a case whose steps all have one plan", "leave --warm-up out", flags.file};
  if (flags.warm_up && !flags.after.empty())
    return Error{ExitCode::kUsage, "--warm-up with --after: passes are left out of the plan that `run` reports",
                 "give one of the two", flags.file};
  const auto plan =
      with_chosen_collectives(*config, flags.warm_up ? lower_warm_up(*config) : lower(*config, options), flags.after.empty());
  if (!plan.ok()) return plan.error();
  if (*format != TableFormat::kTable)
    print(ops_of(*plan), *format);
  else
    fmt::print("{}", print(*plan));
  return ExitCode::kDone;
}

/// Lines of `a` that are not in `b` and the other way round, in order, by longest common subsequence.
std::string line_difference(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  std::vector<std::vector<int>> common(a.size() + 1, std::vector<int>(b.size() + 1, 0));
  for (size_t i = a.size(); i-- > 0;)
    for (size_t j = b.size(); j-- > 0;)
      common[i][j] = a[i] == b[j] ? common[i + 1][j + 1] + 1 : std::max(common[i + 1][j], common[i][j + 1]);
  std::string text;
  size_t i = 0, j = 0;
  while (i < a.size() || j < b.size()) {
    if (i < a.size() && j < b.size() && a[i] == b[j]) {
      ++i, ++j;
    } else if (j == b.size() || (i < a.size() && common[i + 1][j] >= common[i][j + 1])) {
      text += "  - " + a[i++] + "\n";
    } else {
      text += "  + " + b[j++] + "\n";
    }
  }
  return text;
}

std::map<std::string, std::vector<std::string>> segments_of(const Plan& plan) {
  std::map<std::string, std::vector<std::string>> segments;
  for (const Segment& s : plan.segments) segments[s.name] = lines_of(print(plan, s));
  return segments;
}

/// Prints the segments that one plan has and the other lacks, and the lines in which segments of equal name differ.
void print_segment_differences(const Plan& a, const Plan& b) {
  const auto in_a = segments_of(a), in_b = segments_of(b);
  std::set<std::string> names;
  for (const auto& [name, lines] : in_a) names.insert(name);
  for (const auto& [name, lines] : in_b) names.insert(name);
  for (const std::string& name : names) {
    const auto left = in_a.find(name), right = in_b.find(name);
    const std::string text = line_difference(left == in_a.end() ? std::vector<std::string>{} : left->second,
                                             right == in_b.end() ? std::vector<std::string>{} : right->second);
    if (!text.empty()) fmt::print("\nsegment {}\n{}", name, text);
  }
}

struct DiffFlags {
  std::string a, b, machine_file, format;
  std::vector<std::string> set;
};

Result<ExitCode> diff(const DiffFlags& flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  std::vector<PlacedPlan> placed;
  for (const std::string& words : {flags.a, flags.b}) {
    const auto file = case_file(words);
    if (!file.ok()) return file.error();
    const auto loaded = load_case(*file, load_options(flags.machine_file, flags.set, *file));
    if (!loaded.ok()) return loaded.error();
    const auto config = decide(*loaded);
    if (!config.ok()) return config.error();
    auto prepared = prepare(*config);
    if (!prepared.ok()) return prepared.error();
    placed.push_back(std::move(*prepared));
  }
  const auto a = figures(placed[0]), b = figures(placed[1]);
  Table table{{{"what", Unit::kNone, "", false, true},
               {.name = "a", .heading = flags.a, .right = true},
               {.name = "b", .heading = flags.b, .right = true},
               {.name = "change", .right = true}},
              {}};
  std::set<std::string> names;
  for (const auto& [name, value] : a) names.insert(name);
  for (const auto& [name, value] : b) names.insert(name);
  int64_t equal = 0, equal_kinds = 0;
  const auto text = [](int64_t v, Unit unit) { return unit == Unit::kBytes ? bytes_text(v) : fmt::format("{}", v); };
  for (const std::string& name : names) {
    const auto left = a.find(name), right = b.find(name);
    const Unit unit = (left != a.end() ? left : right)->second.second;
    const int64_t x = left == a.end() ? 0 : left->second.first, y = right == b.end() ? 0 : right->second.first;
    if (x == y && *format == TableFormat::kTable) {  // people are shown differences
      ++(name.starts_with(kOps) ? equal_kinds : equal);
      continue;
    }
    const std::string change = x == y ? "" : fmt::format("{}{}", y > x ? "+" : "-", text(std::abs(y - x), unit));
    table.rows.push_back({name, text(x, unit), text(y, unit), change});
  }
  if (!table.rows.empty() || *format != TableFormat::kTable) print(table, *format);
  if (equal + equal_kinds > 0)
    fmt::print("{}The same in both: {}{} {} and the number of ops of {} {}; --format csv has them.\n",
               table.rows.empty() ? "" : "\n", equal, table.rows.empty() ? "" : " other", equal == 1 ? "figure" : "figures",
               equal_kinds, equal_kinds == 1 ? "kind" : "kinds");
  if (*format == TableFormat::kTable) print_segment_differences(*placed[0].plan, *placed[1].plan);
  return ExitCode::kDone;
}

}  // namespace

void add_plan(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand(
      "plan", "prints the plan of a case: what each rank does, in which order; of a plan's own text, what verify finds");
  auto flags = std::make_shared<PlanFlags>();
  verb->add_option("case", flags->file, "the case file, DIR/CASE of a run, or a plan's text")->required();
  verb->add_option("--after", flags->after,
                   "leave out the strategies that follow this pass (`shardlab strategies` lists them in order)");
  verb->add_flag("--grid", flags->grid,
                 "the pipeline's schedule instead: slots by stage and time; --format csv writes a file that `schedule` takes");
  verb->add_flag("--warm-up", flags->warm_up, "of a run of two phases (compression: one-bit-adam) the plan of the first");
  verb->add_option("--machine-file", flags->machine_file, "calibrated machine file that `machine: {local: true}` means");
  verb->add_option("--set", flags->set, "key=value instead of what the file says; may be repeated");
  add_format(*verb, flags->format);
  verb->callback([&action, flags] { action = [flags] { return plan_verb(*flags); }; });
}

void add_diff(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("diff", "what differs between the plans of two cases: ops, memory, wire bytes, segments");
  auto flags = std::make_shared<DiffFlags>();
  verb->add_option("a", flags->a, "a case file, or DIR/CASE of a run")->required();
  verb->add_option("b", flags->b, "a second case: its file, or DIR/CASE of a run")->required();
  verb->add_option("--machine-file", flags->machine_file, "calibrated machine file that `machine: {local: true}` means");
  verb->add_option("--set", flags->set, "key=value instead of what both files say; may be repeated");
  add_format(*verb, flags->format);
  verb->callback([&action, flags] { action = [flags] { return diff(*flags); }; });
}

}  // namespace shardlab::cli
