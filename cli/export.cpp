// export CASE --to FRAMEWORK and import FILE: a layout carried to the framework that will train it, and back.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "cases/environment.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/one_point.h"
#include "cli/verbs.h"
#include "interop/frameworks.h"
#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "sweeps/machines.h"
#include "sweeps/resolution.h"
#include "sweeps/sweep.h"
#include "sweeps/yaml.h"

namespace shardlab::cli {
namespace {

struct ExportFlags {
  PointWords point;
  std::string out, entry_point, account;
  std::vector<std::string> to;
};

struct ImportFlags {
  std::string file, from, model, machine, seq_len, out;
  int64_t devices = 0;
};

constexpr std::string_view kSlurm = "sbatch";

std::string framework_list(bool that_are_read) {
  std::string list;
  for (const interop::Framework& f : interop::frameworks())
    if (!that_are_read || f.imports) list += (list.empty() ? "" : ", ") + fmt::format("{} ({})", f.id, f.version);
  return list;
}

/// Refuses what no export could say, as the case itself lost it.
Result<void> check_whole(const sweeps::Point& point) {
  if (point.refusal) return *point.refusal;
  std::string lost;
  for (const auto& [key, value] : point.unheld) lost += fmt::format("{}{}={}", lost.empty() ? "" : ", ", key, value);
  if (!lost.empty())
    return refusal(fmt::format("{} is only estimated, and is not exported", lost),
                   "leave it out, and set it in the framework's own files");
  if (point.model)
    return refusal(fmt::format("{} is only estimated ({}), and is not exported", point.config.model.name, point.model->unexecuted),
                   "export a dense model of the families gpt and llama");
  return {};
}

Result<ExitCode> export_case(const ExportFlags& flags) {
  std::vector<std::string> frameworks = flags.to;
  interop::ExportOptions options;
  options.slurm = std::erase(frameworks, std::string(kSlurm)) > 0;
  if (frameworks.size() != 1)
    return Error{ExitCode::kUsage,
                 frameworks.empty() ? "sbatch starts a framework, and none is named" : "one framework at a time is exported to",
                 fmt::format("--to FRAMEWORK or --to FRAMEWORK,sbatch with one of {}", framework_list(false)),
                 {}};
  const auto point = point_of(flags.point, sweeps::Resolution::kAnalytic);
  if (!point.ok()) return point.error();
  SHARDLAB_TRY(check_whole(*point));
  options.program = version_line();
  options.case_id = point->id;
  options.entry_point = flags.entry_point;
  options.slurm_account = flags.account;
  Case config = point->config;
  if (config.name.empty()) config.name = point->name;
  if (interop::find_framework(frameworks.front()) == nullptr) {
    std::vector<std::string> names;
    for (const interop::Framework& f : interop::frameworks()) names.emplace_back(f.id);
    if (const std::string close = sweeps::nearest_word(frameworks.front(), names); !close.empty())
      return refusal(fmt::format("no framework is called `{}`, did you mean `{}`?", frameworks.front(), close),
                     fmt::format("one of: {}", framework_list(false)));
  }
  const auto exported = interop::export_case(config, frameworks.front(), options);
  if (!exported.ok()) return exported.error();
  const std::string folder = flags.out.empty() ? "export-" + frameworks.front() : flags.out;
  for (const interop::File& file : exported->files) {
    const std::filesystem::path path = std::filesystem::path(folder) / file.name;
    std::filesystem::create_directories(path.parent_path());
    write_output(path.string(), file.text);
    if (file.executable)
      std::filesystem::permissions(
          path, std::filesystem::perms::owner_exec | std::filesystem::perms::group_exec | std::filesystem::perms::others_exec,
          std::filesystem::perm_options::add);
    fmt::print("{}\n", path.string());
  }
  for (const std::string& line : exported->by_script) fmt::print(stderr, "the training script sets {}\n", line);
  for (const std::string& line : exported->notes) fmt::print(stderr, "note: {}\n", line);
  return ExitCode::kDone;
}

/// The framework that a file's name speaks of.
std::string framework_of(const std::string& file) {
  return file.ends_with(".json") ? "deepspeed" : file.ends_with(".toml") ? "torchtitan" : "megatron";
}

Result<ExitCode> import_case(const ImportFlags& flags) {
  const auto text = read_file(flags.file);
  if (!text.ok()) return text.error();
  const std::string framework = flags.from.empty() ? framework_of(flags.file) : flags.from;
  const auto imported = interop::import_file(*text, flags.file, framework, flags.devices);
  if (!imported.ok()) return imported.error();
  const auto machine_name = sweeps::machine_name(flags.machine);
  const std::string machine = machine_name.ok() ? *machine_name : flags.machine;
  const auto machine_read = sweeps::load_machine(machine);
  if (!machine_read.ok()) return machine_read.error();
  int64_t ranks = 1;
  for (const auto& [path, value] : imported->settings)
    for (const std::string_view axis : {"layout.dp", "layout.tp", "layout.pp", "layout.cp"})
      if (path == axis) ranks = std::min<int64_t>(ranks * std::clamp<int64_t>(std::atoll(value.c_str()), 1, 1 << 20), 1 << 20);
  if (flags.devices == 0 && std::ranges::none_of(imported->settings, [](const auto& s) { return s.first == "layout.dp"; }))
    fmt::print(stderr,
               "note: {} does not say how many ranks train: the case is of as few whole nodes as hold one copy of the model; "
               "--devices N says how many\n",
               flags.file);
  const int64_t per_node = std::max(1, machine_read->devices_per_node);
  std::string more = fmt::format("# Read from {} by {}.\nversion: 1\nprofile: {}\n",
                                 std::filesystem::path(flags.file).filename().string(), version_line(), imported->profile);
  std::ranges::replace_if(
      more, [](char c) { return (static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7f; }, '?');
  more += machine_name.ok() ? fmt::format("machine: {{preset: {}, nodes: {}}}\n", machine, (ranks + per_node - 1) / per_node)
                            : fmt::format("machine: {{file: {}, nodes: {}}}\n", std::filesystem::absolute(machine).string(),
                                          (ranks + per_node - 1) / per_node);
  more +=
      "mode: simulate\nresolution: analytic  # as the framework runs it; a plan is of shardlab's own executor (profile: "
      "shardlab)\n";
  interop::Imported settings = *imported;
  if (!flags.model.empty()) {
    std::erase_if(settings.settings, [](const auto& s) { return s.first.starts_with("model."); });
    more += fmt::format("model: {}\n", flags.model);
  }
  if (std::ranges::none_of(settings.settings, [](const auto& s) { return s.first.starts_with("model."); }) && flags.model.empty())
    return refusal(fmt::format("{} does not say the model", flags.file),
                   "add --model NAME (`shardlab model list`) or --model CONFIG.JSON");
  if (!flags.seq_len.empty()) settings.settings.insert(settings.settings.begin(), {"train.seq_len", flags.seq_len});
  const std::string yaml = interop::case_text(settings, more);
  const auto sweep = sweeps::load_sweep_text(yaml, flags.out.empty() ? "the case" : flags.out, load_options(""));
  if (!imported->unread.empty())
    fmt::print(stderr, "{}: left out, as a case has no such settings:\n  {}\n", flags.file, fmt::join(imported->unread, "\n  "));
  if (!sweep.ok()) return sweep.error();
  const auto expansion = sweeps::expand(*sweep, sweeps::Resolution::kAnalytic);
  if (!expansion.ok()) return expansion.error();
  for (const sweeps::Point& point : expansion->points)
    if (point.refusal) fmt::print(stderr, "warning: as it stands the case is refused: {}\n", to_string(*point.refusal));
  if (flags.out.empty())
    fmt::print("{}", yaml);
  else
    write_output(flags.out, yaml);
  return ExitCode::kDone;
}

}  // namespace

void add_export(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("export", "writes a layout as the files of the framework that will train it");
  auto flags = std::make_shared<ExportFlags>();
  add_point_words(*verb, flags->point);
  verb->add_option("--to", flags->to, fmt::format("{}; with ,sbatch a job script for Slurm too", framework_list(false)))
      ->required()
      ->delimiter(',');
  verb->add_option("--out", flags->out, "folder of the files; export-FRAMEWORK by default");
  verb->add_option("--entry-point", flags->entry_point,
                   "the training script that is launched, instead of the framework's own or train.py");
  verb->add_option("--account", flags->account, "Slurm account of the job script");
  verb->footer(
      "Keys are those of the version that stands beside each framework. A setting that the framework cannot express is refused by "
      "name.");
  verb->callback([&action, flags] { action = [flags] { return export_case(*flags); }; });
}

void add_import(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("import", "reads a framework's settings as a case file");
  auto flags = std::make_shared<ImportFlags>();
  verb->add_option("file", flags->file,
                   "a DeepSpeed config.json, a script or file with Megatron-LM arguments, or a torchtitan TOML file")
      ->required();
  verb->add_option(
      "--from", flags->from,
      fmt::format("{}; by default .json is DeepSpeed, .toml torchtitan, and anything else Megatron-LM", framework_list(true)));
  verb->add_option("--machine", flags->machine, "a preset (`shardlab machine list`) or a machine file")->required();
  verb->add_option("--model", flags->model, "the model, where the file does not say it or another is meant");
  verb->add_option("--devices", flags->devices, "ranks, where the file does not say it")->check(number_in(1, 1 << 20));
  verb->add_option("--seq-len", flags->seq_len, "tokens of a sequence, which DeepSpeed's file does not say");
  verb->add_option("-o,--out", flags->out, "write the case to this file instead of printing it");
  verb->callback([&action, flags] { action = [flags] { return import_case(*flags); }; });
}

}  // namespace shardlab::cli
