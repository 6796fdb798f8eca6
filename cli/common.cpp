#include "cli/common.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "answers/words.h"
#include "cases/pipeline.h"
#include "cli/namespaces.h"
#include "cli/verbs.h"
#include "plan/base/values.h"

namespace shardlab::cli {

namespace {

constexpr int kPipeWidth = 120;  ///< columns of a line that goes into a file or to another program
bool asked_wide = false;         ///< --wide on this process's command line

}  // namespace

void add_format(CLI::App& verb, std::string& format) {
  verb.add_option("--format", format, fmt::format("one of {}", kTableFormats))->default_val("table");
  verb.add_flag_callback(
      "--wide", [] { asked_wide = true; },
      fmt::format("lines as long as what they say; else as wide as the terminal or COLUMNS says, {} characters in "
                  "a file or a pipe",
                  kPipeWidth));
}

Result<TableFormat> parse_format(const std::string& name) {
  if (const auto format = table_format_named(name)) return *format;
  return Error{ExitCode::kUsage, fmt::format("--format {} is unknown", name), fmt::format("use one of {}", kTableFormats), {}};
}

void print(const Table& table, TableFormat format) { fmt::print("{}", print_table(table, format, terminal_width())); }

CLI::Validator number_in(double least, double most) {
  const std::string range = fmt::format("from {} to {}", least, most);
  const auto check = [least, most, range](std::string& text) {
    const auto value = parse_number(text);
    return value && *value >= least && *value <= most ? std::string() : fmt::format("`{}` is not a number {}", text, range);
  };
  return CLI::Validator(check, range);
}

int terminal_width() {
  if (asked_wide) return 0;
  const char* columns = std::getenv("COLUMNS");
  const auto asked = columns != nullptr ? parse_count(columns) : std::nullopt;
  if (asked && *asked >= 20 && *asked <= 10'000) return static_cast<int>(*asked);
  winsize size{};
  if (!isatty(STDOUT_FILENO) || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kPipeWidth;
  return size.ws_col;
}

bool stderr_is_terminal() { return isatty(STDERR_FILENO) != 0; }

std::string flag_help(const CaseKey& key) {
  std::string_view words = key.holds.empty() ? key.words : key.holds;
  std::string list(key.form == Form::kBool ? "true or false" : words);
  if (key.form == Form::kWord && key.holds.empty())
    list = fmt::format("{}", fmt::join(words_of(key), ", "));
  else if (key.path == "layout.schedule")
    list = "none, afab, 1f1b, ...";
  else if (key.form == Form::kMap)
    list = "none, or optimizer=cpu,activations=cpu";
  if (list.empty()) return std::string(key.help);
  // What a number or a text can hold here is what it is where nobody says it.
  const bool value = key.form == Form::kInteger || key.form == Form::kCount || key.form == Form::kNumber || key.form == Form::kText;
  return value ? fmt::format("{}; by default {}", key.help, list) : fmt::format("{}: {}", key.help, list);
}

void add_key_flags(CLI::App& verb, std::vector<std::pair<std::string, std::string>>& values, Flag least) {
  values.reserve(case_keys().size());  // options keep references
  for (const CaseKey& key : case_keys()) {
    if (key.has_flag < least) continue;
    const std::string word(key.word()), name = "--" + hyphenated(word);
    values.emplace_back(word, "");
    verb.add_option(hyphenated(word) == word ? name : name + ",--" + word, values.back().second, flag_help(key));
  }
}

void add_subject_flags(CLI::App& verb, std::string& model, std::string& machine, std::string& machine_file) {
  verb.add_option("--model", model, "a preset (`shardlab model list`) or the path of a Hugging Face config.json")->required();
  verb.add_option("--machine", machine, "a preset (`shardlab machine list`), a machine file, or `local`")->required();
  verb.add_option("--machine-file", machine_file, "calibrated machine file that `local` means");
}

void add_case_flags(CLI::App& verb, CaseFlags& flags) {
  flags.around = surroundings();
  add_subject_flags(verb, flags.model, flags.machine, flags.machine_file);
  verb.add_option("--devices", flags.devices, "devices to use, 1 by default; dp is what tp, pp and cp leave of them")
      ->check(number_in(1, 1 << 20));
  verb.add_option("--assume", flags.assume, "read a config.json of an unknown model_type as this one: llama");
  add_key_flags(verb, flags.layout, Flag::kCase);
  verb.add_option("--set", flags.set, "any other key of the sweep file, as key=value; may be repeated");
}

std::string Invocation::command() const {
  std::string line = "shardlab";
  for (size_t i = 1; i < words.size(); ++i) line += " " + shell_word(words[i]);
  return line;
}

void add_restart_flags(CLI::App& verb, Restarts& restarts) {
  verb.add_option("--restarts", restarts.most,
                  "times that a measured case which lost a process goes on from its newest checkpoint (checkpoint.save_every); 0 "
                  "by default")
      ->check(number_in(0, 1000));
  verb.add_flag("--elastic", restarts.elastic,
                "with --restarts: lost processes are missed, so that fewer data-parallel ranks go on, with more grad_accumulation");
  verb.add_option("--least-dp", restarts.least_dp,
                  "with --elastic: data-parallel ranks without which no case goes on; 1 by default")
      ->check(number_in(1, 1 << 20));
}

Result<void> check_restarts(const Restarts& restarts) {
  if (restarts.elastic && restarts.most == 0)
    return refusal("--elastic without --restarts: nothing is restarted", "add --restarts 3");
  if (restarts.least_dp > 1 && !restarts.elastic)
    return refusal("--least-dp without --elastic: restarts keep the data-parallel ranks", "add --elastic, or leave --least-dp out");
  return {};
}

void add_job_place_flags(CLI::App& verb, JobPlaceFlags& flags, const std::string& group) {
  constexpr double kMost = 1 << 20;
  const auto number = [&](const char* name, int& value, double least, double most, const char* help) {
    verb.add_option(name, value, help)->check(number_in(least, most))->group(group);
  };
  number("--rank", flags.rank, 0, kMost,
         "this process among those of the job, from 0; by default what torchrun, srun or mpirun say");
  number("--world-size", flags.world_size, 1, kMost, "processes of the job");
  number("--local-rank", flags.local_rank, 0, kMost, "this process among those of its node");
  number("--node", flags.node, 0, kMost, "the node that it is on, from 0");
  verb.add_option("--master-addr", flags.master_addr, "host of the first process, as the others reach it; MASTER_ADDR by default")
      ->group(group);
  number("--master-port", flags.master_port, 1, 65535, "port at which the first process listens; MASTER_PORT by default");
}

}  // namespace shardlab::cli
