#include "cli/memory_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/namespaces.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

using whatif::Answer;
using whatif::ItemGroup;
using whatif::StageAnswer;

double share(int64_t part, int64_t whole) { return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0; }

Value seconds(double s) { return s > 0 ? Value(s) : Value(); }

}  // namespace

std::string_view group_words(ItemGroup group) {
  return group == ItemGroup::kReserved ? "allocator slack" : group == ItemGroup::kDevice ? "driver, NCCL" : name_of(group);
}

std::string verdict_words(const Answer& a) {
  if (a.verdict() == whatif::Verdict::kUnknown) return "unknown";
  const bool unsure = a.verdict() == whatif::Verdict::kTight || (a.verdict() == whatif::Verdict::kUnlikely && a.fits_outside());
  return fmt::format("{}{}", unsure ? "likely " : "", a.fits() ? "fits" : "does not fit");
}

std::string signed_bytes(int64_t bytes) { return (bytes < 0 ? "-" : "+") + bytes_text(bytes < 0 ? -bytes : bytes); }

std::string layout_line(const analytic::Point& p) {
  std::string out;
  const auto add = [&](std::string_view part) { out += (out.empty() ? "" : " ") + std::string(part); };
  for (const auto& [key, size] : {std::pair{"dp", p.dp}, {"tp", p.tp}, {"pp", p.pp}, {"vpp", p.vpp}, {"cp", p.cp}, {"ep", p.ep}})
    if (size > 1) add(fmt::format("{}{}", key, size));
  if (p.cuts_experts_apart()) add(fmt::format("expert-tp{}", p.expert_tp));
  if (out.empty()) out = "1 rank";
  if (p.zero > 0) add(fmt::format("zero{}", p.zero));
  if (p.schedule != analytic::Schedule::kNone) add(name_of(p.schedule));
  if (p.sequence_parallel) add("sequence-parallel");
  if (p.recompute.modules != 0) add("recompute-" + name_of(p.recompute));
  for (const auto& [key, value] : whatif::words_of(p))
    if (key == "offload" && value != "none") add("offload " + value);
  add(name_of(p.precision));
  return out;
}

Table stage_table(const Answer& answer) {
  const bool mixed = !answer.worst().device_id.empty();
  Table table{{{"stage"}}, {}};
  for (size_t g = 0; g < whatif::kLiveGroups; ++g)
    table.columns.push_back({std::string(name_of(static_cast<ItemGroup>(g))), Unit::kBytes});
  for (const char* column : {"peak", "reserved", "device"}) table.columns.push_back({column, Unit::kBytes});
  if (mixed) table.columns.insert(table.columns.end(), {{"device_id"}, {"capacity", Unit::kBytes}});
  for (const StageAnswer& s : answer.stages) {
    std::vector<Value> row{int64_t{s.stage}};
    for (size_t g = 0; g < whatif::kLiveGroups; ++g) row.emplace_back(s.of(static_cast<ItemGroup>(g)));
    row.insert(row.end(), {s.live(), s.reserved(), s.device()});
    if (mixed) row.insert(row.end(), {s.device_id, s.capacity > 0 ? Value(s.capacity) : Value()});
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table stage_summary(const Answer& answer) {
  struct Column {
    std::string heading;
    std::vector<int64_t> bytes;  ///< by stage
  };
  std::vector<Column> columns{{"needs", {}}, {"allocator holds", {}}, {"live peak", {}}};
  for (size_t g = 0; g < whatif::kLiveGroups; ++g) columns.push_back({std::string(name_of(static_cast<ItemGroup>(g))), {}});
  for (const StageAnswer& s : answer.stages) {
    columns[0].bytes.push_back(s.device()), columns[1].bytes.push_back(s.reserved()), columns[2].bytes.push_back(s.live());
    for (size_t g = 0; g < whatif::kLiveGroups; ++g) columns[3 + g].bytes.push_back(s.of(static_cast<ItemGroup>(g)));
  }
  if (columns[1].bytes == columns[2].bytes) columns.erase(columns.begin() + 1);  // nothing but what is live
  std::erase_if(columns, [](const Column& c) { return std::ranges::all_of(c.bytes, [](int64_t b) { return b == 0; }); });
  Table table{{{.name = "stage", .right = true}}, {}};
  const bool mixed = !answer.worst().device_id.empty();
  if (mixed) table.columns.push_back({.name = "on"});
  for (const Column& c : columns) table.columns.push_back({.name = c.heading, .right = true});
  const auto device_of = [&](size_t stage) {
    const StageAnswer& s = answer.stages[stage];
    return s.capacity > 0 ? fmt::format("{} of {}", s.device_id, brief_bytes(s.capacity)) : s.device_id;
  };
  const auto alike = [&](size_t a, size_t b) {
    return device_of(a) == device_of(b) && std::ranges::all_of(columns, [&](const Column& c) { return c.bytes[a] == c.bytes[b]; });
  };
  for (size_t first = 0, end = 0; first < answer.stages.size(); first = end) {
    end = first + 1;
    while (end < answer.stages.size() && alike(first, end)) ++end;
    std::vector<Value> row{end - first == 1 ? fmt::to_string(first) : fmt::format("{}..{}", first, end - 1)};
    if (mixed) row.emplace_back(device_of(first));
    for (const Column& c : columns) row.emplace_back(brief_bytes(c.bytes[first]));
    table.rows.push_back(std::move(row));
  }
  return table;
}

Table item_table(const StageAnswer& stage) {
  Table table{{{"class"}, {"item"}, {"bytes", Unit::kBytes}, {"share", Unit::kFraction, "of the need"}}, {}};
  for (const whatif::Item& item : stage.items)
    table.rows.push_back({std::string(group_words(item.group)), item.name, item.bytes, share(item.bytes, stage.device())});
  return table;
}

Table change_table(const whatif::Advice& advice) {
  Table table{{{.name = "change", .wraps = true},
               {"step_s", Unit::kSeconds, "step"},
               {"slowdown_pct", Unit::kPercent, "against now"},
               {"device", Unit::kBytes, "needs"},
               {"host", Unit::kBytes, "on the host"}},
              {}};
  for (const whatif::Change& c : advice.changes)
    table.rows.push_back({whatif::text_of(c.words), seconds(c.step_s), 100 * c.slowdown, c.device_bytes,
                          c.host_bytes > 0 ? Value(c.host_bytes) : Value()});
  return without_empty_columns(std::move(table));
}

Table difference_table(const ToldMemory& before, const ToldMemory& after) {
  Table table{{{"item"}, {"now", Unit::kBytes}, {"what_if", Unit::kBytes, "what if"}, {.name = "difference", .right = true}}, {}};
  const auto add = [&](const std::string& name, int64_t a, int64_t b) {
    table.rows.push_back({name, a, b, a == b ? Value() : Value(signed_bytes(b - a))});
  };
  for (const whatif::Difference& d : differences(before.answer, after.answer)) add(d.name, d.before, d.after);
  const StageAnswer &a = before.answer.worst(), &b = after.answer.worst();
  add("live peak", a.live(), b.live()), add("the allocator holds", a.reserved(), b.reserved());
  add("the rank needs", a.device(), b.device());
  if (a.host_bytes > 0 || b.host_bytes > 0) add("host memory of a rank", a.host_bytes, b.host_bytes);
  return table;
}

Table variant_table(const std::vector<std::string>& keys, std::span<const std::vector<std::string>> values,
                    std::span<const Result<ToldMemory>> told, bool people) {
  Table table;
  for (const std::string& key : keys) table.columns.push_back({key});
  const bool billed = std::ranges::any_of(told, [](const auto& t) { return t.ok() && t->run; });
  table.columns.insert(table.columns.end(), {{"verdict"},
                                             {"device", Unit::kBytes, "needs"},
                                             {"step_s", Unit::kSeconds, "step"},
                                             {"tokens_per_s", Unit::kTokensPerSecond, "tokens/s"}});
  if (billed) table.columns.insert(table.columns.end(), {{"days"}, {"usd", Unit::kCount, "USD"}});
  table.columns.insert(table.columns.end(), {{"headroom", Unit::kBytes},
                                             {"peak", Unit::kBytes, "live peak"},
                                             {"reserved", Unit::kBytes, "allocator holds"},
                                             {"stage"},
                                             {.name = "reason", .wraps = true}});
  for (size_t i = 0; i < told.size(); ++i) {
    std::vector<Value> row(values[i].begin(), values[i].end());
    if (!told[i].ok()) {
      row.resize(table.columns.size());
      row[keys.size()] = std::string("refused");
      row.back() = told[i].error().message;
      table.rows.push_back(std::move(row));
      continue;
    }
    const Answer& a = told[i]->answer;
    const StageAnswer& s = a.worst();
    row.insert(row.end(),
               {people ? verdict_words(a) : std::string(name_of(a.verdict())), s.device(), seconds(a.step_s),
                a.step_s > 0 ? Value(static_cast<double>(told[i]->question.point.tokens_per_step()) / a.step_s) : Value()});
    if (billed) {
      const auto& run = told[i]->run;
      row.push_back(run ? Value(run->bill.days) : Value());
      row.push_back(run && !run->price_note.empty() ? Value(run->bill.usd) : Value());
    }
    row.insert(row.end(), {a.capacity > 0 ? Value(a.headroom()) : Value(), s.live(), s.reserved(), int64_t{s.stage}, Value()});
    table.rows.push_back(std::move(row));
  }
  if (!people) return table;
  const auto at = static_cast<std::ptrdiff_t>(keys.size()) + 1;  // the reason beside what it is of: columns give way from the end
  std::rotate(table.columns.begin() + at, table.columns.end() - 1, table.columns.end());
  for (auto& row : table.rows) std::rotate(row.begin() + at, row.end() - 1, row.end());
  return table;
}

std::string verdict_text(const Answer& a) {
  if (a.capacity <= 0) return "";
  const int64_t needs = a.worst().device();
  const double percent = 100 * share(needs, a.capacity);
  const StageAnswer& worst = a.worst();
  const bool mixed = !worst.device_id.empty();
  std::string text =
      fmt::format("{}: a rank{} needs {} and may use {}{} ({:.1f} %), {} {}", verdict_words(a),
                  mixed ? fmt::format(" of stage {}", worst.stage) : "", bytes_text(needs), bytes_text(a.capacity),
                  mixed ? " of " + worst.device_id : "", percent, bytes_text(a.headroom() < 0 ? -a.headroom() : a.headroom()),
                  a.fits() ? "are left" : "are missing");
  const whatif::Interval range = a.device();
  if (!a.fits_outside())
    text += fmt::format("\nwhat is offloaded exceeds a rank's part of the node: {} of {} of host memory, {} of {} of NVMe",
                        bytes_text(a.worst().host_bytes), a.host_capacity > 0 ? bytes_text(a.host_capacity) : "an unknown size",
                        bytes_text(a.worst().nvme_bytes), a.nvme_capacity > 0 ? bytes_text(a.nvme_capacity) : "an unknown size");
  if (!a.exact)
    text += fmt::format("\nnine of ten runs like it would need {} to {}", bytes_text(range.low), bytes_text(range.high));
  return text + "\n";
}

namespace {

/// "  host memory: optimizer moments 1.2 GiB, activations 300 MiB"
std::string outside_text(const char* where, std::span<const whatif::Item> items) {
  std::string list;
  for (const whatif::Item& item : items)
    list += fmt::format("{}{} {}", list.empty() ? "" : ", ", item.name, bytes_text(item.bytes));
  return list.empty() ? "" : fmt::format("  {}: {}\n", where, list);
}

/// "40 s", "35.2 min", "4.16 h", "32.6 days".
std::string duration_text(double seconds) {
  if (seconds < 120) return fmt::format("{:.3g} s", seconds);
  if (seconds < 7200) return fmt::format("{:.3g} min", seconds / 60);
  return seconds < 48 * 3600 ? fmt::format("{:.3g} h", seconds / 3600) : fmt::format("{:.3g} days", seconds / 86400);
}

}  // namespace

std::string run_text(const ToldMemory& told) {
  if (!told.run) return "";
  const analytic::RunBill& bill = told.run->bill;
  std::string text = fmt::format("a run of {} tokens takes {} days", count_words(told.run->tokens),
                                 bill.days < 9.95 ? fmt::format("{:.1f}", bill.days) : fmt::format("{:.0f}", bill.days));
  if (told.run->price_note.empty())
    text += "; the price of a device is not known: --price USD";
  else
    text += fmt::format(" and {}, at {}; ${:.3g} a million tokens", money_text(bill.usd), told.run->price_note,
                        1e6 * bill.usd / told.run->tokens);
  if (!told.run->goodput) return text;
  const analytic::Goodput& g = *told.run->goodput;
  return text +
         fmt::format(
             "\nof that time {} is training that is kept, {} waits for checkpoints every {}, {} is lost to failures, of which "
             "one is expected every {}",
             percent_text(g.share), percent_text(g.checkpoints), duration_text(g.interval_s), percent_text(g.lost),
             duration_text(g.job_mtbf_s));
}

namespace {

/// "a step takes about 55.1 s: 76.1 k tokens/s, 1.19 k on each of 64 devices".
std::string step_text(const ToldMemory& told) {
  const double seconds = told.answer.step_s, tokens = static_cast<double>(told.question.point.tokens_per_step()) / seconds;
  const int64_t devices = told.question.point.world_size();
  std::string text = fmt::format("a step takes about {}: {} tokens/s", brief_seconds(seconds), brief_count(tokens));
  if (devices > 1) text += fmt::format(", {} on each of {} devices", brief_count(tokens / static_cast<double>(devices)), devices);
  if (const analytic::Between& range = told.answer.step; range.high > 0)
    text += fmt::format("; nine of ten runs like it would take {} to {}", brief_seconds(range.low), brief_seconds(range.high));
  return text;
}

/// "8 ranks", "1 rank".
std::string counted(int64_t n, const char* one, const char* many) { return fmt::format("{} {}", n, n == 1 ? one : many); }

/// "a step is 32768 tokens: 8 data-parallel ranks, each 1 micro-batch of 1 sequence of 4096 tokens (...)".
std::string batch_text(const analytic::Point& p) {
  return fmt::format("a step is {} tokens: {} {} {} (--grad-accumulation) of {} (--micro-batch) of {} tokens (--seq-len)",
                     p.tokens_per_step(), counted(p.dp, "data-parallel rank", "data-parallel ranks,"), p.dp == 1 ? "with" : "each",
                     counted(p.grad_accumulation, "micro-batch", "micro-batches"), counted(p.micro_batch, "sequence", "sequences"),
                     p.seq_len);
}

/// "70.6 billion parameters and 207 million of adapters", and what of them is trained.
std::string parameters_text(const analytic::ModelShape& shape) {
  const int64_t adapters = adapter_count(shape), trained = trained_count(shape);
  std::string text = count_words(static_cast<double>(parameter_count(shape))) + " parameters";
  if (adapters > 0) text += fmt::format(" and {} of adapters", count_words(static_cast<double>(adapters)));
  if (shape.trained.frozen == 0) return text;
  return text + (trained == adapters ? ", which alone are trained"
                                     : fmt::format(", {} trained", count_words(static_cast<double>(trained))));
}

/// The moment of a peak. That of a plan is an instruction, "m0 head.B alloc x": its segment and micro-batch are said in words too.
std::string moment_text(const StageAnswer& s, bool of_plan) {
  if (!of_plan) return s.moment + (s.op == s.moment ? "" : " (" + s.op + ")");
  const std::string plan = fmt::format("plan: {}", s.moment);
  const size_t blank = s.moment.find(' '), dot = s.moment.find('.', blank),
               end = std::min(s.moment.find(' ', dot), s.moment.size());
  if (!s.moment.starts_with('m') || blank == std::string::npos || dot == std::string::npos || end != dot + 2) return plan;
  const char way = s.moment[dot + 1];
  const char* words = way == 'F' ? "forward" : way == 'B' ? "backward" : nullptr;
  if (words == nullptr) return plan;
  return fmt::format("the {} of {}, micro-batch {} ({})", words, s.moment.substr(blank + 1, dot - blank - 1),
                     s.moment.substr(1, blank - 1), plan);
}

}  // namespace

std::string assumptions_text(const ToldMemory& told, int width) {
  std::string text = "\nassumptions and limits\n";
  for (const std::string& a : memory_assumptions(told.question, told.answer)) text += wrapped("  - " + a, width, 4) + "\n";
  return text;
}

std::string untimed_text(std::span<const Result<ToldMemory>> told, int width) {
  for (const auto& t : told)
    if (t.ok() && t->answer.step_s <= 0)
      return "\n" + wrapped("no step time, and so no days and no price: " + t->question.untimed, width) + "\n";
  return "";
}

std::string memory_page(const ToldMemory& told, int width) {
  const MemoryQuestion& q = told.question;
  const StageAnswer& worst = told.answer.worst();
  const auto line = [&](const std::string& text, int indent = 0) { return wrapped(text, width, indent) + "\n"; };
  std::string page;
  if (const std::string verdict = verdict_text(told.answer); !verdict.empty()) page += wrapped(verdict, width);
  if (told.answer.step_s > 0) page += line(step_text(told));
  if (const std::string run = run_text(told); !run.empty()) page += line(run);
  if (!page.empty()) page += "\n";
  page += line(fmt::format("{}, {}, on {} of {}: {}", q.config.model.name, parameters_text(q.shape),
                           devices_text(q.point.world_size()), q.config.machine.id, layout_line(q.point)));
  page += line(batch_text(q.point));
  page += "\nbytes of one rank at its peak, by stage\n" + print_table(stage_summary(told.answer), TableFormat::kTable, width);
  if (worst.reserved() != worst.live())
    page += line("needs = allocator holds + driver and NCCL; allocator holds = live peak + allocator slack");
  else if (worst.device() != worst.live())
    page += line("needs = live peak + driver and NCCL");
  page += fmt::format("\nstage {}, which needs most, item by item\n", worst.stage) +
          print_table(item_table(worst), TableFormat::kTable, width);
  page += "\n" +
          line(fmt::format("live peak {} on stage {}, at {}", bytes_text(worst.live()), worst.stage, moment_text(worst, q.exact)));
  if (worst.host_bytes + worst.nvme_bytes > 0)
    page += line(fmt::format("offloaded: {} of host memory and {} of NVMe a rank", bytes_text(worst.host_bytes),
                             bytes_text(worst.nvme_bytes))) +
            outside_text("host memory", worst.host_items) + outside_text("NVMe", worst.nvme_items);
  if (!told.answer.fits()) {
    if (!told.advice.changes.empty())
      page += fmt::format("\nwhat to change, the fastest first (of {} layouts looked at)\n", told.advice.looked_at) +
              print_table(change_table(told.advice), TableFormat::kTable, width) +
              (told.advice.scaled
                   ? line("steps of changes are estimates, in proportion to what a step of this layout takes by its plan")
                   : "");
    else if (told.advice.looked_at > 0)
      page += "\n" +
              line(fmt::format("no change of up to three keys makes it fit; {} comes nearest with {}: take more devices",
                               told.advice.least.words.empty() ? "the layout as it is" : whatif::text_of(told.advice.least.words),
                               bytes_text(told.advice.least.device_bytes)));
    else
      page += "\n" + line(fmt::format("what to change is not ranked: {}", why_not_ranked(q)));
  }
  return page + assumptions_text(told, width);
}

}  // namespace shardlab::cli
