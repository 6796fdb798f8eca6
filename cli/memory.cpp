// memory: the what-if memory calculator. Exact bytes of the plan that shardlab would run, or those of a framework by its profile.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "answers/words.h"
#include "cases/environment.h"
#include "cases/interrupt.h"
#include "cli/common.h"
#include "cli/memory_report.h"
#include "cli/memory_screen.h"
#include "cli/namespaces.h"
#include "cli/terminal.h"
#include "cli/verbs.h"
#include "plan/base/values.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

struct MemoryFlags : MemoryWords {
  CaseFlags words;
  std::string profile, format, what_if;
  bool interactive = false;
};

/// Rows of a table of several values.
constexpr size_t kMostVariants = 4096;

ExitCode code_of(bool fits) { return fits ? ExitCode::kDone : ExitCode::kNo; }

// ---- one layout ----------------------------------------------------------------------------------------------------------------

ExitCode print_one(const ToldMemory& told, TableFormat format) {
  if (format == TableFormat::kJson)
    fmt::print("{}\n", memory_json(told).dump(2));
  else if (format == TableFormat::kTable)
    fmt::print("{}", memory_page(told, terminal_width()));
  else
    print(stage_table(told.answer), format);
  return code_of(told.answer.fits());
}

// ---- several values of a flag --------------------------------------------------------------------------------------------------

/// Sizes that a range of a flag stands for: divisors of the devices where they are known, else powers of two.
std::vector<int64_t> sizes_of(const std::string& key, int64_t devices) {
  if (key == "zero") return {0, 1, 2, 3};
  const bool of_devices = devices > 0 && (key == "dp" || key == "tp" || key == "pp" || key == "cp" || key == "ep");
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= (of_devices ? devices : int64_t{1} << 20); n = of_devices ? n + 1 : 2 * n)
    if (!of_devices || devices % n == 0) sizes.push_back(n);
  return sizes;
}

/// The values of a flag: "0,1,2,3", or the sizes in a range. Lists of sub-layers, projections or modules and a map of offloads have
/// commas of their own.
Result<std::vector<std::string>> values_of(const std::string& key, const std::string& text, int64_t devices) {
  const CaseKey* const known = find_key(key);
  const bool list = known != nullptr && known->form == Form::kText;
  if (key == "offload" || list || text.starts_with('[') || text.starts_with('{')) return std::vector<std::string>{text};
  std::vector<std::string> values;
  for (const std::string& part : split(text, ',')) {
    if (!is_range(part)) {
      values.push_back(part);
      continue;
    }
    const auto sizes = numbers_of(key, part, sizes_of(key, devices));
    if (!sizes.ok()) return sizes.error();
    for (const int64_t size : *sizes) values.push_back(fmt::to_string(size));
  }
  return values;
}

/// Flags with several values, and every combination of them, the last varying fastest.
struct Variants {
  std::vector<std::string> keys;
  std::vector<std::vector<std::string>> values;
};

Result<Variants> variants_of(const CaseFlags& flags) {
  Variants v{{}, {{}}};
  for (const auto& [key, text] : flags.layout) {
    const auto found = values_of(key, text, flags.devices);
    if (!found.ok()) return found.error();
    const std::vector<std::string>& values = *found;
    if (values.size() < 2 && !is_range(text)) continue;
    for (const std::string& value : values)
      if (value.empty())
        return Error{
            ExitCode::kUsage, fmt::format("--{} {}: a value is empty", key, text), "separate values by one comma: 0,1,2", {}};
    if (v.values.size() * values.size() > kMostVariants)
      return Error{ExitCode::kUsage,
                   fmt::format("the values of {} and of the flags before it make more than {} rows", key, kMostVariants),
                   "ask for fewer values, or use a sweep file",
                   {}};
    v.keys.push_back(key);
    std::vector<std::vector<std::string>> longer;
    for (const auto& row : v.values)
      for (const std::string& value : values) longer.push_back(row), longer.back().push_back(value);
    v.values = std::move(longer);
  }
  return v;
}

Result<ExitCode> print_variants(const MemoryFlags& flags, MemoryAnswerOptions options, const Variants& variants,
                                TableFormat format) {
  options.planned_layer_runs /= static_cast<int64_t>(variants.values.size());
  std::vector<Result<ToldMemory>> told;
  for (const auto& row : variants.values) {
    CaseFlags words = flags.words;
    for (size_t i = 0; i < row.size(); ++i) set_word(words, variants.keys[i], row[i]);
    told.push_back(tell_memory(words, options, false));
  }
  const bool any = std::ranges::any_of(told, [](const auto& t) { return t.ok(); });
  if (!any) return told.front().error();
  const bool fits = std::ranges::any_of(told, [](const auto& t) { return t.ok() && t->answer.fits(); });
  if (format != TableFormat::kJson) {
    const bool people = format == TableFormat::kTable || format == TableFormat::kMarkdown;
    const Table table = variant_table(variants.keys, variants.values, told, people);
    print(people ? without_empty_columns(table) : table, format);
    if (format == TableFormat::kTable) fmt::print("{}", untimed_text(told, terminal_width()));
    return code_of(fits);
  }
  nlohmann::ordered_json json{{"variants", nlohmann::ordered_json::array()}};
  for (size_t i = 0; i < told.size(); ++i) {
    nlohmann::ordered_json set;
    for (size_t k = 0; k < variants.keys.size(); ++k) set[variants.keys[k]] = variants.values[i][k];
    nlohmann::ordered_json one{{"set", set}};
    if (told[i].ok())
      one.update(memory_json(*told[i]));
    else
      one["refused"] = told[i].error().message;
    json["variants"].push_back(std::move(one));
  }
  fmt::print("{}\n", json.dump(2));
  return code_of(fits);
}

// ---- what if -------------------------------------------------------------------------------------------------------------------

/// "zero=3,offload=optimizer=cpu,activations=cpu": a comma begins a new key where a key of a case follows it.
Result<whatif::Words> what_if_words(const std::string& text) {
  whatif::Words words;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string piece = text.substr(at, end - at);
    const size_t sign = piece.find('=');
    const std::string key = piece.substr(0, sign);
    const bool of_offload = key == "activations" || key == "optimizer" || key == "parameters";
    const bool continues = !words.empty() && words.back().first == "offload" && of_offload && sign != std::string::npos;
    if (!continues && (sign == std::string::npos || sign == 0 || sign + 1 == piece.size()))
      return Error{
          ExitCode::kUsage, fmt::format("--what-if: `{}` is not key=value", piece), "write --what-if zero=3,recompute=full", {}};
    if (continues)
      words.back().second += "," + piece;
    else
      words.emplace_back(key, piece.substr(sign + 1));
    at = end + 1;
  }
  return words;
}

Result<ExitCode> print_what_if(const MemoryFlags& flags, MemoryAnswerOptions options, TableFormat format) {
  const auto words = what_if_words(flags.what_if);
  if (!words.ok()) return words.error();
  CaseFlags changed = flags.words;
  for (const auto& [key, value] : *words) set_word(changed, key, value);
  options.planned_layer_runs /= 2;
  const auto before = tell_memory(flags.words, options, false);
  if (!before.ok()) return before.error();
  const auto after = tell_memory(changed, options, true);
  if (!after.ok()) return after.error();
  if (format == TableFormat::kJson) {
    nlohmann::ordered_json json = memory_json(*before);
    json["what_if"] = memory_json(*after);
    json["difference"] = nlohmann::ordered_json::array();
    for (const whatif::Difference& d : differences(before->answer, after->answer))
      json["difference"].push_back({{"name", d.name}, {"before", d.before}, {"after", d.after}});
    fmt::print("{}\n", json.dump(2));
    return code_of(after->answer.fits());
  }
  const Table table = difference_table(*before, *after);
  if (format != TableFormat::kTable) {
    print(table, format);
    return code_of(after->answer.fits());
  }
  fmt::print(
      "{} on {} of {}\n  now      {}\n  what if  {}\n\nbytes of the rank that needs most: what saves most first, what costs most "
      "last\n",
      before->question.config.model.name, devices_text(before->question.point.world_size()), before->question.config.machine.id,
      layout_line(before->question.point), layout_line(after->question.point));
  print(table, format);
  fmt::print("\nnow      {}what if  {}", verdict_text(before->answer), verdict_text(after->answer));
  for (const auto& [name, told] : {std::pair{"now", &*before}, {"what if", &*after}})
    if (const std::string run = run_text(*told); !run.empty()) fmt::print("{:8} {}\n", name, run);
  if (before->answer.step_s > 0 && after->answer.step_s > 0)
    fmt::print("step     {} now, {} what if\n", seconds_text(before->answer.step_s), seconds_text(after->answer.step_s));
  fmt::print("{}", assumptions_text(*after, terminal_width()));
  return code_of(after->answer.fits());
}

// ---- a screen ------------------------------------------------------------------------------------------------------------------

/// Ends with the layout that was reached, as a command and its page's verdict.
Result<ExitCode> interact(const MemoryFlags& flags, const Variants& variants) {
  if (!variants.keys.empty() || !flags.what_if.empty() || flags.plan || flags.format != "table")
    return Error{ExitCode::kUsage,
                 "--interactive with --what-if, --plan, --format or several values of a flag",
                 "name one layout to begin with; everything else is done by keys",
                 {}};
  auto screen = MemoryScreen::create(flags.words);
  if (!screen.ok()) return screen.error();
  const auto goes_on = [&] { interrupt::ask_on_signal(screen->command() + " --interactive"); };
  goes_on();
  SHARDLAB_TRY(show(*screen));
  if (interrupt::asked()) {
    goes_on();  // from the layout that was reached
    interrupt::say_how_to_go_on();
    return ExitCode::kInterrupted;
  }
  fmt::print("{}\n{}", screen->command(), verdict_text(screen->told().answer));
  return code_of(screen->told().answer.fits());
}

Result<ExitCode> memory(MemoryFlags flags) {
  const auto format = parse_format(flags.format);
  if (!format.ok()) return format.error();
  if (!flags.profile.empty()) flags.words.set.push_back("profile=" + flags.profile);
  const auto options = memory_options(flags);
  if (!options.ok()) return options.error();
  const auto variants = variants_of(flags.words);
  if (!variants.ok()) return variants.error();
  if (flags.interactive) return interact(flags, *variants);
  if (!variants->keys.empty() && !flags.what_if.empty())
    return Error{ExitCode::kUsage, "--what-if with several values of a flag", "use one of the two", {}};
  if (!variants->keys.empty()) return print_variants(flags, *options, *variants, *format);
  if (!flags.what_if.empty()) return print_what_if(flags, *options, *format);
  const auto told = tell_memory(flags.words, *options, true);
  if (!told.ok()) return told.error();
  return print_one(*told, *format);
}

}  // namespace

void add_memory(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("memory", "what-if memory calculator: will it fit, what takes the space, what to change");
  auto flags = std::make_shared<MemoryFlags>();
  add_case_flags(*verb, flags->words);
  verb->add_option("--profile,--framework", flags->profile,
                   "whose run: shardlab (exact bytes of its plan), megatron, torchtitan, deepspeed, ...");
  verb->add_option("--what-if", flags->what_if, "changes to set beside it: zero=3,recompute=full");
  verb->add_option("--tokens", flags->tokens, "tokens of a whole training run: says its days and its price");
  verb->add_option("--price,--device-hour-usd", flags->price_usd,
                   "USD of one device for an hour; the machine file's list price where it has one")
      ->check(number_in(0, 1e6));
  verb->add_option("--device-mtbf", flags->mtbf,
                   "with --tokens: mean time between failures of one device, with its unit, as 50000h; days and price then have "
                   "what failures and "
                   "checkpoints cost");
  verb->add_option("--checkpoint-time", flags->checkpoint, "time for which a checkpoint holds up training, with its unit, as 40s");
  verb->add_option("--restart-time", flags->restart, "time from a failure to the next step, with its unit, as 10m");
  verb->add_option("--checkpoint-every", flags->interval,
                   "training between checkpoints, with its unit, as 30m; the best interval by default");
  verb->add_flag("--plan", flags->plan, "build the plan however large, for the op at the peak and the gaps of the arena");
  verb->add_flag("--interactive", flags->interactive, "a screen of fields that answers on each key");
  verb->footer(
      "Several values of a layout flag (--zero 0,1,2,3, --tp 1..8) print one row for each combination.\n"
      "--format csv has the bytes by stage; --format json has the verdict, the step time and days too.");
  add_format(*verb, flags->format);
  verb->callback([&action, flags] { action = [flags] { return memory(*flags); }; });
}

}  // namespace shardlab::cli
