// export CASE --to FRAMEWORK and import FILE: a layout carried to the framework that will train it, and back.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>

#include "answers/model_shape.h"
#include "cases/environment.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/one_point.h"
#include "cli/verbs.h"
#include "interop/frameworks.h"
#include "plan/base/files.h"
#include "plan/base/pending_file.h"
#include "plan/base/values.h"
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

/// A file of settings, and what the launch script beside it says.
struct Source {
  std::string file, text, framework, model;
  int64_t devices = 0;
};

/// The file that was named, or, for the launch script of an export, the settings that it starts with.
Result<Source> source_of(const ImportFlags& flags) {
  auto text = read_file(flags.file);
  if (!text.ok()) return text.error();
  Source source{.file = flags.file,
                .text = std::move(*text),
                .framework = flags.from.empty() ? framework_of(flags.file) : flags.from,
                .model = flags.model,
                .devices = flags.devices};
  const auto launch = interop::launch_of(source.text);
  if (!launch) return source;
  const std::filesystem::path folder = std::filesystem::path(flags.file).parent_path();
  source.file = (folder / launch->settings).string();
  auto settings = read_file(source.file);
  if (!settings.ok())
    return refusal(fmt::format("{} starts {} with the settings of {}: {}", flags.file, launch->framework, source.file,
                               settings.error().message),
                   "name a launch script in the folder of its export, or the file of settings");
  source.text = std::move(*settings);
  source.framework = launch->framework;
  if (source.devices == 0) source.devices = launch->devices;
  if (const auto model = folder / "model/config.json"; source.model.empty() && std::filesystem::exists(model))
    source.model = std::filesystem::absolute(model).string();
  return source;
}

/// Ranks of the smallest mesh with the sizes that were read.
int64_t least_ranks(const interop::Imported& imported) {
  constexpr int64_t kMost = 1 << 20;
  const auto size = [&](std::string_view path) {
    const auto found = std::ranges::find(imported.settings, path, &std::pair<std::string, std::string>::first);
    return found == imported.settings.end() ? int64_t{1} : std::clamp<int64_t>(std::atoll(found->second.c_str()), 1, kMost);
  };
  const int64_t tp = size("layout.tp"), dense = std::min(std::min(size("layout.dp") * size("layout.cp"), kMost) * tp, kMost);
  const bool cut = std::ranges::any_of(imported.settings, [](const auto& s) { return s.first == "layout.expert_tp"; });
  const int64_t ep = size("layout.ep"), expert = ep == 1 ? 1 : std::min(ep * (cut ? size("layout.expert_tp") : tp), kMost);
  return std::min(std::min(std::lcm(dense, expert), kMost) * size("layout.pp"), kMost);
}

/// Sequences of another length than the file says, and as many in a step.
Result<void> set_sequence(const std::string& text, interop::Imported& imported) {
  const auto tokens = parse_count(text);
  if (!tokens || *tokens < 1 || *tokens > 1 << 27)
    return refusal(fmt::format("--seq-len {}", text), "a number of tokens from 1 to 2^27");
  const auto find = [&](std::string_view path) {
    return std::ranges::find(imported.settings, path, &std::pair<std::string, std::string>::first);
  };
  const auto said = find("train.seq_len"), batch = find("train.global_batch_tokens");
  if (said != imported.settings.end() && batch != imported.settings.end()) {
    const int64_t sequences = parse_count(batch->second).value_or(0) / std::max<int64_t>(parse_count(said->second).value_or(1), 1);
    batch->second = fmt::to_string(std::min(sequences, (int64_t{1} << 62) / *tokens) * *tokens);
  }
  if (said != imported.settings.end())
    said->second = text;
  else
    imported.settings.insert(imported.settings.begin(), {"train.seq_len", text});
  return {};
}

Result<ExitCode> import_case(const ImportFlags& flags) {
  auto source = source_of(flags);
  if (!source.ok()) return source.error();
  const std::string& file = source->file;
  const auto imported = interop::import_file(source->text, file, source->framework, source->devices);
  if (!imported.ok()) return imported.error();
  const auto machine_name = sweeps::machine_name(flags.machine);
  const std::string machine = machine_name.ok() ? *machine_name : flags.machine;
  const auto machine_read = sweeps::load_machine(machine);
  if (!machine_read.ok()) return machine_read.error();
  const int64_t ranks = least_ranks(*imported);
  if (source->devices == 0 && std::ranges::none_of(imported->settings, [](const auto& s) { return s.first == "layout.dp"; }))
    fmt::print(stderr,
               "note: {} does not say how many ranks train: the case is of as few whole nodes as hold one copy of the model; "
               "--devices N says how many\n",
               file);
  const int64_t per_node = std::max(1, machine_read->devices_per_node);
  std::string more = fmt::format("# Read from {} by {}.\nversion: 1\nprofile: {}\n",
                                 std::filesystem::path(file).filename().string(), version_line(), imported->profile);
  for (const std::string& line : imported->differs) more += fmt::format("# {}\n", line);
  std::ranges::replace_if(
      more, [](char c) { return (static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7f; }, '?');
  more += machine_name.ok() ? fmt::format("machine: {{preset: {}, nodes: {}}}\n", machine, (ranks + per_node - 1) / per_node)
                            : fmt::format("machine: {{file: {}, nodes: {}}}\n", std::filesystem::absolute(machine).string(),
                                          (ranks + per_node - 1) / per_node);
  more +=
      "mode: simulate\nresolution: analytic  # as the framework runs it; a plan is of shardlab's own executor (profile: "
      "shardlab)\n";
  interop::Imported settings = *imported;
  if (!source->model.empty()) {
    std::erase_if(settings.settings, [](const auto& s) { return s.first.starts_with("model."); });
    more += fmt::format("model: {}\n", source->model);
  }
  if (std::ranges::none_of(settings.settings, [](const auto& s) { return s.first.starts_with("model."); }) && source->model.empty())
    return refusal(fmt::format("{} does not say the model", file),
                   "add --model NAME (`shardlab model list`) or --model CONFIG.JSON");
  if (!flags.seq_len.empty()) SHARDLAB_TRY(set_sequence(flags.seq_len, settings));
  const std::string yaml = interop::case_text(settings, more);
  const auto sweep = sweeps::load_sweep_text(yaml, flags.out.empty() ? "the case" : flags.out, load_options(""));
  if (!imported->unread.empty())
    fmt::print(stderr, "{}: left out, as a case has no such settings:\n  {}\n", file, fmt::join(imported->unread, "\n  "));
  if (!imported->differs.empty())
    fmt::print(stderr, "{}: said by the nearest settings of a case, which differ:\n  {}\n", file,
               fmt::join(imported->differs, "\n  "));
  if (!sweep.ok()) return sweep.error();
  const auto expansion = sweeps::expand(*sweep, sweeps::Resolution::kAnalytic);
  if (!expansion.ok()) return expansion.error();
  for (const sweeps::Point& point : expansion->points) {
    std::optional<Error> refusal = point.refusal;
    if (!refusal)
      if (const auto layout = answers::estimated_layout(point); !layout.ok()) refusal = layout.error();
    if (refusal) fmt::print(stderr, "warning: as it stands the case is refused: {}\n", to_string(*refusal));
  }
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
  verb->add_option(
          "file", flags->file,
          "a DeepSpeed config.json, a script or file with Megatron-LM arguments, a torchtitan TOML file, or launch.sh of an export")
      ->required();
  verb->add_option(
      "--from", flags->from,
      fmt::format("{}; by default .json is DeepSpeed, .toml torchtitan, and anything else Megatron-LM", framework_list(true)));
  verb->add_option("--machine", flags->machine, "a preset (`shardlab machine list`) or a machine file")->required();
  verb->add_option("--model", flags->model, "the model, where the file does not say it or another is meant");
  verb->add_option("--devices", flags->devices, "ranks, where the file does not say it")->check(number_in(1, 1 << 20));
  verb->add_option("--seq-len", flags->seq_len,
                   "tokens of a sequence, where the file does not say them (DeepSpeed) or others are meant");
  verb->add_option("-o,--out", flags->out, "write the case to this file instead of printing it");
  verb->callback([&action, flags] { action = [flags] { return import_case(*flags); }; });
}

}  // namespace shardlab::cli
