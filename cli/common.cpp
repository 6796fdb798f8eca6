#include "cli/common.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "cli/environment.h"
#include "cli/namespaces.h"
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
    return value && *value >= least && *value <= most ? std::string() : fmt::format("`{}` is no number {}", text, range);
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
  return list.empty() ? std::string(key.help) : fmt::format("{}: {}", key.help, list);
}

std::string hyphenated(std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  return key;
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

bool given(const CaseFlags& flags, std::string_view key) {
  for (const auto& [k, v] : flags.layout)
    if (k == key && !v.empty()) return true;
  for (const std::string& s : flags.set)
    if (s.starts_with(std::string(key) + "=")) return true;
  return false;
}

namespace {

/// As many nodes of the machine as the devices need, unless the command line says how many there are.
Result<void> add_nodes(const CaseFlags& flags, int64_t devices, std::vector<std::string>& words) {
  if (flags.machine == "local" || given(flags, "machine.nodes")) return {};
  const auto machine = load_machine(flags.machine);
  if (!machine.ok()) return machine.error();
  devices = std::min<int64_t>(devices, 1 << 20);  // more ranks are refused in words when the case is read
  if (devices > machine->devices())
    words.push_back(fmt::format("machine.nodes={}", (devices + machine->devices_per_node - 1) / machine->devices_per_node));
  return {};
}

}  // namespace

void add_case_flags(CLI::App& verb, CaseFlags& flags) {
  verb.add_option("--model", flags.model, "a preset (`shardlab model list`) or the path of a Hugging Face config.json")->required();
  verb.add_option("--machine", flags.machine, "a preset (`shardlab machine list`), a machine file, or `local`")->required();
  verb.add_option("--machine-file", flags.machine_file, "calibrated machine file that `local` means");
  verb.add_option("--devices", flags.devices, "devices to use; dp is what tp, pp and cp leave of them")
      ->check(number_in(1, 1 << 20));
  verb.add_option("--assume", flags.assume, "read a config.json of an unknown model_type as this one: llama");
  add_key_flags(verb, flags.layout, Flag::kCase);
  verb.add_option("--set", flags.set, "any other key of the sweep file, as key=value; may be repeated");
}

Result<std::vector<std::string>> words_from_flags(const CaseFlags& flags) {
  std::vector<std::string> words{"model=" + flags.model, "machine=" + flags.machine};
  if (!flags.assume.empty()) words.push_back("model.assume=" + flags.assume);
  for (const auto& [key, value] : flags.layout)
    if (!value.empty()) words.push_back(key + "=" + value);
  // What is no rank count is 1 here, and refused in words when the case is read.
  const auto size = [&](const char* key) -> int64_t {
    for (const auto& [k, v] : flags.layout)
      if (k == key && !v.empty()) return std::clamp<int64_t>(parse_count(v).value_or(1), 1, 1 << 15);
    return 1;
  };
  if (flags.devices > 0 && !given(flags, "dp")) {
    const int64_t model_parallel = size("tp") * size("pp") * size("cp");
    if (flags.devices % model_parallel != 0)
      return Error{ExitCode::kUsage,
                   fmt::format("--devices {} is not a multiple of tp*pp*cp = {}", flags.devices, model_parallel),
                   fmt::format("set tp, pp and cp so that tp*pp*cp divides {}, or give dp in place of --devices", flags.devices),
                   {}};
    words.push_back(fmt::format("dp={}", flags.devices / model_parallel));
  } else if (!given(flags, "dp")) {
    words.emplace_back("dp=1");
  }
  SHARDLAB_TRY(add_nodes(flags, flags.devices > 0 ? flags.devices : size("dp") * size("tp") * size("pp") * size("cp"), words));
  words.insert(words.end(), flags.set.begin(), flags.set.end());
  return words;
}

Result<Case> case_from_flags(const CaseFlags& flags) {
  auto words = words_from_flags(flags);
  if (!words.ok()) return words.error();
  auto config = case_from_words(load_options(flags.machine_file, std::move(*words)));
  if (config.ok() && flags.devices > 0 && config->layout.world_size() != flags.devices)
    return Error{ExitCode::kUsage,
                 fmt::format("--devices {} and a layout of dp*tp*pp*cp = {} ranks", flags.devices, config->layout.world_size()),
                 "leave out --devices, or --dp, which then follows from it",
                 {}};
  return config;
}

Result<std::string> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Error{ExitCode::kUsage, fmt::format("cannot read {}", path), "check the path", {}};
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace shardlab::cli
