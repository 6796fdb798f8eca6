#include "cli/common.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "answers/words.h"
#include "cli/environment.h"
#include "cli/namespaces.h"
#include "cli/pipeline.h"
#include "cli/verbs.h"
#include "kernels/kernels.h"
#include "plan/base/files.h"
#include "plan/base/values.h"
#include "runtime/cuda/api.h"
#include "sweeps/machines.h"

namespace shardlab::cli {

void add_format(CLI::App& verb, std::string& format) {
  verb.add_option("--format", format, fmt::format("one of {}", kTableFormats))->default_val("table");
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

std::string default_machine_file() {
  const char* configured = std::getenv("XDG_CONFIG_HOME");
  if (configured != nullptr && *configured != '\0') return std::string(configured) + "/shardlab/machine.yaml";
  const char* home = std::getenv("HOME");
  return std::string(home != nullptr ? home : ".") + "/.config/shardlab/machine.yaml";
}

std::vector<std::string> local_machine_files(const std::string& named, const std::string& case_file) {
  if (!named.empty()) return {named};
  std::vector<std::string> files;
  if (!case_file.empty()) {  // RUN/CASE/case.yaml
    const std::filesystem::path run = std::filesystem::absolute(case_file).lexically_normal().parent_path().parent_path();
    if (is_there(run / "results.sqlite")) files.push_back((run / "machine.yaml").string());
  }
  files.emplace_back("runs/local.yaml");
  files.push_back(default_machine_file());
  return files;
}

Result<Machine> load_local_machine(const std::string& path) {
  auto machine = load_machine(path);
  if (!machine.ok() || !machine->calibration) return machine;
  const Calibration& c = *machine->calibration;
  if (c.kernel_variant.starts_with("cuda ")) return machine;  // a GPU's file: `doctor` says which one is here
  const std::string kernels = description(kernels::kernels_for_this_processor());
  if (c.processor != processor_name() || c.kernel_variant != kernels)
    fmt::print(stderr, "warning: {} was calibrated on {} with {}; this is {} with {}. Run `shardlab calibrate` again.\n", path,
               c.processor, c.kernel_variant, processor_name(), kernels);
  else if (machine->cores != usable_cores())
    fmt::print(stderr, "warning: {} was calibrated with {} cores; this process may use {}. Run `shardlab calibrate` again.\n", path,
               machine->cores, usable_cores());
  return machine;
}

namespace {

/// This machine by what the system says of it: enough to plan, to fit and to measure. Where there are GPUs a rank's memory may be
/// theirs or the processor's, which the case says and not the machine: then it is not known, and nothing is refused for it.
Machine uncalibrated_machine() {
  Machine m;
  m.local = true;
  m.cores = m.devices_per_node = usable_cores();
  m.device.id = "local-cpu";
  m.device.memory_bytes = cuda::presence().usable() ? 0 : total_memory() / m.cores;
  return m;
}

}  // namespace

Result<Machine> find_local_machine(const std::string& named, const std::string& case_file) {
  if (!named.empty()) {
    if (is_there(named)) return load_local_machine(named);
    return Error{ExitCode::kUsage,
                 fmt::format("--machine-file {}: there is no such file", named),
                 fmt::format("write it with `shardlab calibrate -o {}` (about a minute)", named),
                 {}};
  }
  for (const std::string& file : local_machine_files(named, case_file)) {
    if (!is_there(file)) continue;
    auto machine = load_local_machine(file);
    if (machine.ok() && !machine->calibration) continue;  // of a run that only measured
    if (machine.ok()) fmt::print(stderr, "this machine as {} has it: calibrated {}\n", file, machine->calibration->date);
    return machine;
  }
  return uncalibrated_machine();
}

Result<void> check_calibrated(const Machine& machine, const std::string& what) {
  if (!machine.local || machine.calibration) return {};
  return Error{ExitCode::kUsage,
               fmt::format("this machine is not calibrated, and {} needs its speed", what),
               fmt::format("run `shardlab calibrate` (about a minute), or name a machine file with --machine-file; looked for: {}",
                           fmt::join(local_machine_files(""), ", ")),
               {}};
}

LoadOptions load_options(const std::string& machine_file, std::vector<std::string> overrides, const std::string& case_file) {
  LoadOptions options;
  options.overrides = std::move(overrides);
  options.local_machine = [machine_file, case_file] { return find_local_machine(machine_file, case_file); };
  return options;
}

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

Result<std::string> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return Error{ExitCode::kUsage,
                 fmt::format("{} cannot be read", path),
                 "check the path; a relative one begins at the current folder",
                 {}};
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace shardlab::cli
