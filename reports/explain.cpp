#include "reports/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <map>
#include <numeric>

#include "plan/op_fields.h"
#include "plan/pipeline_case.h"
#include "plan/stage_memory.h"
#include "reports/columns.h"
#include "reports/format.h"

namespace shardlab::reports {

namespace {

/// The time by which ops are ranked and shared out: measured where the case was measured.
double seconds_of(const OpComparison& op, bool measured) { return measured ? op.measured_s : op.predicted_s; }

/// Rounded: ops that are alike on several stages tie, whatever the order of their sums.
double five_digits(double seconds) {
  if (seconds <= 0) return seconds;
  const double unit = std::pow(10.0, std::floor(std::log10(seconds)) - 4);
  return std::round(seconds / unit) * unit;
}

/// The least share of the step for which a figure is mentioned.
constexpr double kWorthSaying = 0.02;

bool is_communication(const std::string& kind) {
  for (const std::string_view word : {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send", "recv"})
    if (kind.rfind(word, 0) == 0) return true;
  return false;
}

std::string headline(const CaseOutcome& o) {
  std::string text = fmt::format("{}: {}", case_title(o.config), name_of(o.status));
  if (!o.reason.empty()) text += ", " + o.reason;
  return text;
}

/// The named columns of `table`, in their order.
Table selected(const Table& table, std::initializer_list<std::string_view> names) {
  std::vector<size_t> columns;
  for (const std::string_view name : names)
    for (size_t c = 0; c < table.columns.size(); ++c)
      if (table.columns[c].name == name) columns.push_back(c);
  Table out;
  for (const size_t c : columns) out.columns.push_back(table.columns[c]);
  for (const auto& row : table.rows) {
    auto& cells = out.rows.emplace_back();
    for (const size_t c : columns) cells.push_back(row[c]);
  }
  return out;
}

void step_reason(const CaseOutcome& o, std::vector<std::string>& out) {
  if (o.measured && o.predicted) {
    const double error = *step_error_pct(o);
    out.push_back(fmt::format("A step takes {} (spread {}, {} samples); {} were predicted, {} too {}.",
                              seconds_text(o.measured->step_s), percent_text(o.measured->step_spread), o.measured->samples,
                              seconds_text(o.predicted->step_s), percent_text(std::abs(error) / 100),
                              error < 0 ? "little" : "much"));
    if (std::abs(error) / 100 < o.measured->step_spread / 2)
      out.push_back("The error is within half the spread of the measurement: a closer prediction could not be told from this one.");
  } else if (o.measured) {
    out.push_back(fmt::format("A step takes {} (spread {}, {} samples); nothing was predicted.", seconds_text(o.measured->step_s),
                              percent_text(o.measured->step_spread), o.measured->samples));
  } else if (o.predicted) {
    out.push_back(fmt::format("A step is predicted to take {}; it was not measured.", seconds_text(o.predicted->step_s)));
  }
}

/// Whether exchanges of experts' rows take more than half of the time of all collectives of the step.
bool is_mostly_of_experts(const CaseOutcome& o) {
  constexpr std::string_view kCollectives[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"};
  double all = 0, experts = 0;
  for (const OpComparison& op : o.ops) {
    if (std::ranges::find(kCollectives, op.kind) == std::end(kCollectives)) continue;
    const double seconds = o.measured ? op.measured_s : op.predicted_s;
    all += seconds;
    if (op.kind == "all_to_all" && op.label.find(" moe.") != std::string::npos) experts += seconds;
  }
  return experts > all / 2;
}

/// The sentence of all parts, whose shares add up to 100.0 %, and what could be done about each.
void share_reasons(const CaseOutcome& o, std::vector<std::string>& out) {
  const bool measured = o.measured.has_value();
  const double step = measured ? o.measured->step_s : o.predicted->step_s;
  const double bubble = measured ? o.measured->bubble_fraction : o.predicted->bubble_fraction;
  const Layout& l = o.config.layout;
  const std::vector<StepPart> parts = step_parts(o);
  if (parts.empty()) return;
  std::string text;
  for (const StepPart& part : parts)
    if (part.tenths > 0)
      text += fmt::format("{}{} {}.{} % ({})", text.empty() ? "" : ", ", part.name, part.tenths / 10, part.tenths % 10,
                          seconds_text(part.seconds));
  out.push_back(fmt::format("{} step is made of {}.", measured ? "A" : "The predicted", text));
  const auto worth = [&](StepPart::Kind kind) { return parts[static_cast<size_t>(kind)].tenths > 1000 * kWorthSaying; };
  if (worth(StepPart::kCommunication)) {
    if (l.ep > 1 && is_mostly_of_experts(o))
      out.push_back(l.expert_overlap == ExpertOverlap::kNone
                        ? std::string("Rows go to experts and back in every layer: try expert_overlap: layer, or a smaller ep.")
                        : fmt::format("Rows go to experts and back in every layer: try an ep below {}.", l.ep));
    else if (l.tp > 1)
      out.push_back(fmt::format("tp {} communicates inside every layer: try a smaller tp.", l.tp));
    else if (l.dp > 1 && !l.overlap)
      out.push_back("Gradients are reduced with nothing beside: try overlap: true with bucket_bytes.");
    else if (l.dp > 1)
      out.push_back("Less communication of gradients: try another bucket_bytes, or more grad_accumulation for the same reduction.");
  }
  if (worth(StepPart::kCopies)) {
    std::string copies = "Copies of what is offloaded";
    if (measured && o.predicted && o.predicted->step_s > 0)
      copies += fmt::format(" were predicted to take {}", seconds_text(o.predicted->exposed_copy_s)) + (l.overlap ? "; a" : "; o");
    else
      copies += l.overlap ? ": a" : ": o";
    out.push_back(copies +
                  (l.overlap ? " larger micro_batch computes longer beside the same state." : "verlap is off: try overlap: true."));
  }
  if (bubble > kWorthSaying && l.pp > 1) {
    // The schedule's own, of parts that are alike and gradients that take as long as forward.
    const PipelineSchedule schedule = schedule_of(o.config);
    const double end = play(schedule, SlotCosts::uniform(schedule.parts, 1, 1, 1)).value().end;
    const double busy = 3.0 * schedule.parts * schedule.micro_batches / schedule.stages;
    out.push_back(fmt::format(
        "The pipeline's bubble, in which compute waits for another stage, whatever else runs meanwhile, is {}, {} of the "
        "step; that of schedule {} with even stages and slots of equal length is {}: more grad_accumulation makes it "
        "smaller.",
        seconds_text(bubble * step), percent_text(bubble), schedule_words(o.config), percent_text((end - busy) / end)));
  }
  if (measured) {
    const double unplanned = o.measured->unplanned_time_s;
    out.push_back(fmt::format("Unplanned, in no op and no wait, are {} of the idle time{}", seconds_text(unplanned),
                              unplanned / step > 0.05
                                  ? ", above 5 % of the step: the host or other programs took the cores, or ops are too small."
                                  : "."));
  }
}

/// Why nothing ran on the slowest rank, the largest causes first, with the prediction's figures beside where both are known.
void idle_reason(const CaseOutcome& o, std::vector<std::string>& out) {
  const IdleBreakdown* measured = o.measured ? &o.measured->idle : nullptr;
  const IdleBreakdown* predicted = o.predicted ? &o.predicted->idle : nullptr;
  const IdleBreakdown& idle = measured ? *measured : *predicted;
  const double step = measured ? o.measured->step_s : o.predicted->step_s;
  if (step <= 0 || idle.idle_s / step <= kWorthSaying) return;
  struct Cause {
    double IdleBreakdown::*part;
    std::string_view says;
  };
  std::vector<Cause> causes = {{&IdleBreakdown::peer_s, "because a peer was not there yet"},
                               {&IdleBreakdown::dependency_s, "because an op of another stream had to end first"},
                               {&IdleBreakdown::host_s, "because the host had not launched the next op"},
                               {&IdleBreakdown::latency_s, "because the device had not begun what was launched"},
                               {&IdleBreakdown::tail_s, "while the host ended the step"},
                               {&IdleBreakdown::other_s, "between ops"}};
  std::ranges::stable_sort(causes, std::greater(), [&](const Cause& c) { return idle.*c.part; });
  // Means over the recorded steps, as shares of the idle time that the step is said to be made of.
  const double whole = step_parts(o).at(StepPart::kIdle).seconds, scale = whole > 0 ? whole / idle.idle_s : 1;
  std::string text;
  for (const Cause& c : causes) {
    if (idle.*c.part / step <= kWorthSaying / 2) break;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", seconds_text(scale * idle.*c.part), c.says);
    if (measured && predicted && predicted->idle_s > 0) text += fmt::format(" (predicted {})", seconds_text(predicted->*c.part));
  }
  if (!text.empty())
    out.push_back(
        fmt::format("{} for {}: {}.", measured ? "Idle" : "Predicted to be idle", seconds_text(scale * idle.idle_s), text));
}

/// How unevenly the rows of experts fell, and are predicted to fall by a routing that the case names.
void balance_reason(const CaseOutcome& o, std::vector<std::string>& out) {
  const DataSource& data = o.config.data;
  if (o.predicted && o.predicted->expert_imbalance && !(data.routing.empty() && data.routes.empty())) {
    const Prediction& p = *o.predicted;
    std::string text = fmt::format("By {} the fullest expert of a layer has {:.2f} times the mean of rows",
                                   data.routes.empty() ? "data.routing=" + data.routing : "data.routes", *p.expert_imbalance);
    if (p.expert_rank_imbalance)
      text += fmt::format(", and the fullest of the ranks that share the experts {:.2f} times", *p.expert_rank_imbalance);
    if (p.expert_rank_imbalance_contiguous)
      text += fmt::format(" ({:.2f} times if experts were contiguous)", *p.expert_rank_imbalance_contiguous);
    if (p.expert_exchange_bytes)
      text += fmt::format("; ranks send each other {} of rows a step", bytes_text(*p.expert_exchange_bytes));
    out.push_back(text + ".");
  }
  if (!o.measured || !o.measured->expert_imbalance) return;
  const Measurement& m = *o.measured;
  std::string text = fmt::format("The fullest expert of a layer had {:.2f} times the mean of rows ({:.2f} times in the last step)",
                                 *m.expert_imbalance, *m.expert_imbalance_last);
  if (m.expert_rank_imbalance)
    text += fmt::format(
        "; of the ranks that share the experts the fullest had {:.2f} times the mean ({:.2f} times), and the others "
        "wait for it in the exchange",
        *m.expert_rank_imbalance, *m.expert_rank_imbalance_last);
  if (m.expert_rank_imbalance_contiguous)
    text += fmt::format("; contiguous experts would have given it {:.2f} times", *m.expert_rank_imbalance_contiguous);
  if (m.expert_rank_imbalance_peak)
    text +=
        fmt::format("; in one micro-batch of a layer a rank had up to {:.2f} times its even share", *m.expert_rank_imbalance_peak);
  if (m.expert_reruns > 0) text += ". " + rerun_text(o.config, m);
  if (m.expert_dropped)
    text += fmt::format(". Experts had no room for {:.1f} % of the rows that tokens chose ({:.1f} % in the last step)",
                        100 * *m.expert_dropped, 100 * *m.expert_dropped_last);
  out.push_back(text + ".");
}

/// The items that take a device's memory beside the arenas, the largest first.
void memory_reason(const CaseOutcome& o, std::vector<std::string>& out) {
  if (!o.measured || o.measured->unplanned_memory.empty()) return;
  std::vector<MemoryItem> items = o.measured->unplanned_memory;
  std::ranges::stable_sort(items, std::greater(), &MemoryItem::bytes);
  std::string text;
  for (const MemoryItem& item : items) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", bytes_text(item.bytes), item.name);
  out.push_back(fmt::format("Memory that no plan has, {}: {}.", bytes_text(o.measured->unplanned_memory_bytes), text));
}

/// What each stage of a mixed machine lies on, and its need of that.
void stage_reason(const CaseOutcome& o, std::vector<std::string>& out) {
  if (!o.predicted || o.predicted->stages.empty()) return;
  std::string text = stages_text(o.predicted->stages, [](int64_t bytes) { return bytes_text(bytes); });
  text.front() = 'S';
  out.push_back(text + ".");
}

void trace_reasons(const CaseOutcome& o, std::vector<std::string>& out) {
  if (!o.measured) return;
  for (const std::string& gap : o.measured->trace_gaps) out.push_back(fmt::format("The trace is not complete: {}.", gap));
}

void contention_reason(const CaseOutcome& o, std::vector<std::string>& out) {
  const Machine& m = o.config.machine;
  const int threads = o.config.layout.world_size() * std::max(1, o.config.threads_per_rank);
  if (m.runs_on_cores() && m.cores > 0 && threads > m.cores)
    out.push_back(fmt::format(
        "{} compute threads share {} cores: ranks take turns, and a wait for a peer may be a wait for a core.", threads, m.cores));
  if (o.predicted && o.predicted->extrapolated && o.config.canonical && (m.runs_on_cores() || !m.local))
    out.push_back(
        "canonical multiplies matrices in its own fixed order, and calibration knows the library's faster matmul: the prediction "
        "is a "
        "lower bound; for one to hold against, set canonical: false.");
  else if (o.predicted && o.predicted->extrapolated && o.config.threads_per_rank != 1)
    out.push_back(fmt::format("Calibration measured one thread a rank, and this case has {}: the prediction is that of one thread.",
                              o.config.threads_per_rank));
  else if (o.predicted && o.predicted->extrapolated)
    out.push_back(o.predicted->calibration_id.empty()
                      ? "The prediction comes from data sheets, the peak rates that a device's maker publishes, of which programs "
                        "reach a stated share; not "
                        "from a measured machine."
                      : "Some ops lie outside what the calibration measured: the prediction extrapolates there.");
}

struct KindSum {
  double predicted = 0, measured = 0;
};

/// The kinds of op that lose most against the prediction, and those that are much faster than predicted.
void residual_reasons(const CaseOutcome& o, std::vector<std::string>& out) {
  if (!o.measured || !o.predicted || o.ops.empty()) return;
  std::map<std::string, KindSum> kinds;
  double total = 0, missing = 0;
  for (const OpComparison& op : o.ops) {
    kinds[op.kind].predicted += op.predicted_s;
    kinds[op.kind].measured += op.measured_s;
    total += op.measured_s;
    if (op.predicted_s > 0 && op.measured_s == 0) missing += op.predicted_s;
  }
  std::vector<std::pair<std::string, KindSum>> sorted(kinds.begin(), kinds.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return std::abs(a.second.measured - a.second.predicted) > std::abs(b.second.measured - b.second.predicted);
  });
  int said = 0;
  for (const auto& [kind, sum] : sorted) {
    const double residual = sum.measured - sum.predicted;
    if (said == 3 || total <= 0 || std::abs(residual) / total < kWorthSaying / 2) break;
    out.push_back(fmt::format("{} ops take {} {} than predicted ({} against {}){}", kind, seconds_text(std::abs(residual)),
                              residual > 0 ? "longer" : "less", seconds_text(sum.measured), seconds_text(sum.predicted),
                              is_communication(kind) ? "; the wait for peers is not counted here." : "."));
    ++said;
  }
  if (said == 0) out.push_back("No kind of op is off by more than 1 % of the ops' time.");
  if (missing > 0)
    out.push_back(fmt::format("{} were predicted for ops that the measurement does not have: the recorder may have dropped events.",
                              seconds_text(missing)));
}

}  // namespace

Table op_table(const CaseOutcome& outcome, int rows) {
  const bool measured = outcome.measured.has_value(), predicted = outcome.predicted.has_value();
  Table table;
  table.columns = {{"stage", Unit::kNone},
                   {"op", Unit::kNone, "", true},
                   {"kind", Unit::kNone},
                   {"count", Unit::kNone},
                   {"flops", Unit::kFlops},
                   {"memory_bytes", Unit::kBytes, "memory"},
                   {"payload_bytes", Unit::kBytes, "payload"},
                   {"predicted_s", Unit::kSeconds, "predicted"},
                   {"measured_s", Unit::kSeconds, "measured"},
                   {"residual_s", Unit::kSeconds, "residual"},
                   {"residual_pct", Unit::kPercent, "of predicted"},
                   {"share", Unit::kFraction},
                   {"flops_per_s", Unit::kCount, "flop/s"}};
  double whole = 0;
  std::vector<const OpComparison*> ops;
  for (const OpComparison& op : outcome.ops) {
    whole += seconds_of(op, measured);
    ops.push_back(&op);
  }
  std::stable_sort(ops.begin(), ops.end(), [&](const OpComparison* a, const OpComparison* b) {
    const double left = five_digits(seconds_of(*a, measured)), right = five_digits(seconds_of(*b, measured));
    return left != right ? left > right : a->stage < b->stage;
  });
  if (rows > 0 && ops.size() > static_cast<size_t>(rows)) ops.resize(static_cast<size_t>(rows));
  for (const OpComparison* op : ops) {
    const double seconds = seconds_of(*op, measured);
    auto& row = table.rows.emplace_back(std::vector<Value>{int64_t{op->stage}, op->label, op->kind, int64_t{op->count}, op->flops,
                                                           op->memory_bytes, op->payload_bytes});
    row.push_back(predicted ? Value(op->predicted_s) : Value());
    row.push_back(measured ? Value(op->measured_s) : Value());
    row.push_back(predicted && measured ? Value(op->measured_s - op->predicted_s) : Value());
    row.push_back(predicted && measured && op->predicted_s > 0 ? Value(100 * (op->measured_s - op->predicted_s) / op->predicted_s)
                                                               : Value());
    row.push_back(whole > 0 ? Value(seconds / whole) : Value());
    row.push_back(op->flops > 0 && seconds > 0 ? Value(op->flops / seconds) : Value());
  }
  return table;
}

std::vector<StepPart> step_parts(const CaseOutcome& o) {
  if (!o.measured && !o.predicted) return {};
  const auto of = [](const auto& figures) {
    // The parts are of one set of steps and add up; the sums below may be of different ones.
    if (const StepParts& p = figures.parts; p.total() > 0) {
      const double communication = p.tensor_s + p.context_s + p.expert_s + p.data_s + p.pipeline_s + p.communication_s;
      const bool apart = figures.idle.idle_s <= 0;  // of closed forms
      return std::array{p.compute_s + p.recompute_s + p.update_s, communication, p.copies_s, apart ? p.bubble_s : 0.0,
                        p.wait_s + p.launch_s + p.unplanned_s + (apart ? 0.0 : p.bubble_s)};
    }
    const double compute = figures.compute_s, copies = figures.exposed_copy_s, idle = figures.idle.idle_s;
    const double bubble = figures.bubble_fraction * figures.step_s;
    // Idle time has the waits of collectives in it, which `exposed_comm_s` has too: what is left is bytes on their way. Closed
    // forms have no idle time by cause: there the bubble and the communication are apart.
    if (idle > 0) return std::array{compute, std::max(0.0, figures.step_s - compute - copies - idle), copies, 0.0, idle};
    const double known = compute + figures.exposed_comm_s + copies + bubble;
    return std::array{compute, figures.exposed_comm_s, copies, bubble, std::max(0.0, figures.step_s - known)};
  };
  const std::array seconds = o.measured ? of(*o.measured) : of(*o.predicted);
  const double whole = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  if (whole <= 0) return {};
  constexpr std::array<std::string_view, 5> kNames = {"compute", "exposed communication", "exposed copies", "the pipeline's bubble",
                                                      "idle time"};
  std::vector<StepPart> parts;
  int left = 1000;
  for (size_t i = 0; i < seconds.size(); ++i) {
    parts.push_back({kNames[i], seconds[i], static_cast<int>(1000 * seconds[i] / whole)});
    left -= parts.back().tenths;
  }
  // Rounded by largest remainder, so that what is printed adds up too.
  std::vector<size_t> order{0, 1, 2, 3, 4};
  std::ranges::stable_sort(order, std::greater(),
                           [&](size_t i) { return 1000 * seconds[i] / whole - static_cast<double>(parts[i].tenths); });
  for (int i = 0; i < left; ++i) ++parts[order[static_cast<size_t>(i)]].tenths;
  return parts;
}

std::vector<std::string> reasons(const CaseOutcome& o) {
  std::vector<std::string> out;
  if (!o.predicted && !o.measured) {
    out.push_back(o.reason.empty() ? "The case was neither predicted nor measured."
                                   : fmt::format("The case did not run: {}.", o.reason));
    return out;
  }
  if (o.status != Status::kOk && !o.reason.empty()) out.push_back(fmt::format("The case is {}: {}.", name_of(o.status), o.reason));
  step_reason(o, out);
  share_reasons(o, out);
  idle_reason(o, out);
  balance_reason(o, out);
  stage_reason(o, out);
  memory_reason(o, out);
  trace_reasons(o, out);
  residual_reasons(o, out);
  contention_reason(o, out);
  return out;
}

std::string_view origin_of(const PricedCollective& c, const Case& config) {
  const bool exchange = c.kind.starts_with("all_to_all");
  if (config.canonical && !exchange) return "canonical order";
  const AlgorithmChoice asked = config.layout.collective_algorithm;
  if (asked != AlgorithmChoice::kAuto)
    return name_of(asked) == kAlgorithms[static_cast<size_t>(c.algorithm)] ? "asked for" : "its strategy needs it";
  if (c.prices.empty() || (exchange && c.prices.size() == 1)) return "rule by kind and ranks";
  return c.prices.front().algorithm == c.algorithm ? "least predicted time" : "its strategy needs it";
}

namespace {

std::string_view text_of(Algorithm algorithm) { return kAlgorithms[static_cast<size_t>(algorithm)]; }

/// "layer.B gradients, all_reduce of 4.000 MiB among 16 ranks on 2 nodes (dp.grads), 24 times a step: hierarchical (least predicted time),
/// 1.200 ms; direct 1.500 ms, ring 3.000 ms".
std::string collective_text(const PricedCollective& c, const Case& config) {
  std::string text =
      fmt::format("{}, {} of {} among {} ranks{} ({}), {} a step: {} ({})", c.op, c.kind, bytes_text(c.bytes), c.ranks,
                  c.nodes > 1 ? fmt::format(" on {} nodes", c.nodes) : "", c.comm,
                  c.runs == 1 ? std::string("once") : fmt::format("{} times", c.runs), text_of(c.algorithm), origin_of(c, config));
  std::string others;
  for (const PricedCollective::Price& price : c.prices) {
    if (price.algorithm == c.algorithm)
      text += ", " + seconds_text(price.seconds);
    else
      others += fmt::format("{}{} {}", others.empty() ? "" : ", ", text_of(price.algorithm), seconds_text(price.seconds));
  }
  return text + (others.empty() ? "" : "; " + others);
}

}  // namespace

std::vector<std::string> collective_reasons(std::span<const PricedCollective> collectives, const Case& config, size_t most) {
  std::vector<std::string> out;
  for (const PricedCollective& c : collectives.first(std::min(most, collectives.size())))
    out.push_back(collective_text(c, config) + ".");
  if (collectives.size() > most) {
    const size_t rest = collectives.size() - most;
    out.push_back(fmt::format("{} more {} not shown.", rest, rest == 1 ? "collective is" : "collectives are"));
  }
  return out;
}

namespace {

/// The share of ops after the first `rows` in the time of all ops.
double share_below(const CaseOutcome& outcome, int rows) {
  const Table all = op_table(outcome);
  const size_t column = static_cast<size_t>(std::ranges::find(all.columns, "share", &TableColumn::name) - all.columns.begin());
  double sum = 0;
  for (size_t r = static_cast<size_t>(rows); r < all.rows.size(); ++r)
    if (const double* share = std::get_if<double>(&all.rows[r][column])) sum += *share;
  return sum;
}

}  // namespace

std::string explain(const CaseOutcome& outcome, const ExplainOptions& options) {
  std::string out = headline(outcome) + "\n\n";
  if (!outcome.ops.empty()) {
    const Table ops = without_empty_columns(selected(
        op_table(outcome, options.rows),
        {"stage", "op", "kind", "count", "predicted_s", "measured_s", "residual_s", "residual_pct", "share", "flops_per_s"}));
    out += print_aligned(ops, options.width);
    if (options.rows > 0 && outcome.ops.size() > static_cast<size_t>(options.rows))
      out += fmt::format("({} more ops take {}; --rows 0 shows all)\n", outcome.ops.size() - static_cast<size_t>(options.rows),
                         percent_text(share_below(outcome, options.rows)));
    std::string legend =
        "Seconds are summed over a step of one rank of the stage; shares are of all ops of all stages; a wait for peers belongs to "
        "no "
        "op. F: forward; I: gradient of the input; W: gradient of the weights; B: both; accumulate: added to what earlier "
        "micro-batches gave.";
    if (outcome.predicted && outcome.measured) legend += " Residual: measured minus predicted.";
    out += wrapped(legend, options.width) + "\n\n";
  }
  for (const std::string& reason : reasons(outcome)) out += wrapped("- " + reason, options.width, 2) + "\n";
  const std::vector<std::string> collectives = collective_reasons(options.collectives, outcome.config);
  if (collectives.empty()) return out;
  out +=
      "\nAlgorithms of collectives, with the predicted time of one run alone on the machine, and what the others would take:\n\n";
  for (const std::string& line : collectives) out += wrapped("- " + line, options.width, 2) + "\n";
  return out;
}

}  // namespace shardlab::reports
