// merge DIR...: the results of a sweep's shards in one run directory.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "cases/environment.h"
#include "cases/pipeline.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/verbs.h"
#include "plan/base/files.h"
#include "plan/base/world_error.h"
#include "reports/run_lock.h"
#include "reports/store.h"

namespace shardlab::cli {
namespace {

namespace fs = std::filesystem;

struct MergeFlags {
  std::vector<std::string> directories;
  std::string out;
};

/// A run directory that nobody writes while it is merged.
struct Part {
  RunLock lock;
  std::string directory;
  std::vector<RunMetadata> runs;
  std::vector<CaseOutcome> outcomes;
};

Result<Part> open_part(const std::string& directory, const std::string& command) {
  auto store = Store::open_existing(directory + "/results.sqlite");
  if (!store.ok()) return store.error();
  auto lock = RunLock::take(directory, command);
  if (!lock.ok()) return lock.error();
  Part part{std::move(*lock), directory, store->runs(), store->outcomes()};
  if (part.runs.empty())
    return Error{ExitCode::kUsage, fmt::format("{} holds no results", directory), "give directories that `run` has written", {}};
  return part;
}

/// Refuses parts that are not of one sweep by one build of the program, and a case that two of them have.
Result<void> check_parts(const std::vector<Part>& parts) {
  std::map<std::string, std::string> owners;
  const RunMetadata& first = parts.front().runs.back();
  for (const Part& part : parts) {
    const RunMetadata& run = part.runs.back();
    if (run.sweep != first.sweep)
      return refusal(
          fmt::format("{} is of the sweep `{}`, and {} of `{}`", part.directory, run.sweep, parts.front().directory, first.sweep),
          "merge the shards of one sweep");
    for (const CaseOutcome& outcome : part.outcomes) {
      if (outcome.program_version != parts.front().runs.back().program_version)
        return refusal(fmt::format("case {} of {} is by shardlab {}, and {} by {}", outcome.case_id, part.directory,
                                   outcome.program_version, parts.front().directory, first.program_version),
                       "run the older ones again with --resume, which takes what this build has done");
      const auto [owner, fresh] = owners.try_emplace(outcome.case_id, part.directory);
      if (!fresh)
        return refusal(fmt::format("case {} is in {} and in {}", outcome.case_id, owner->second, part.directory),
                       "merge shards of one count: --shard 1/N to N/N");
    }
  }
  return {};
}

/// A case's folder beside the others: its files as links to the same ones where the file system can, else as copies.
void take_files(const fs::path& from, const fs::path& to) {
  if (!fs::is_directory(from) || fs::is_symlink(from)) return;
  fs::remove_all(to);
  std::error_code failure;
  fs::copy(from, to, fs::copy_options::recursive | fs::copy_options::create_hard_links, failure);
  if (!failure) return;
  fs::remove_all(to);
  fs::copy(from, to, fs::copy_options::recursive);
}

/// The n-th case of every part, then the next: the order of the sweep, whose points shards take in turn.
std::vector<std::pair<const Part*, const CaseOutcome*>> in_turn(const std::vector<Part>& parts) {
  std::vector<std::pair<const Part*, const CaseOutcome*>> all;
  size_t most = 0;
  for (const Part& part : parts) most = std::max(most, part.outcomes.size());
  for (size_t i = 0; i < most; ++i)
    for (const Part& part : parts)
      if (i < part.outcomes.size()) all.emplace_back(&part, &part.outcomes[i]);
  return all;
}

Result<ExitCode> merge(const MergeFlags& flags, const Invocation& invocation) {
  std::vector<Part> parts;
  std::set<fs::path> seen;
  for (const std::string& directory : flags.directories) {
    if (!seen.insert(fs::weakly_canonical(directory)).second)
      return refusal(fmt::format("{} is named twice", directory), "name each once");
    auto part = open_part(directory, invocation.command());
    if (!part.ok()) return part.error();
    parts.push_back(std::move(*part));
  }
  if (seen.contains(fs::weakly_canonical(flags.out)))
    return refusal(fmt::format("{} is read and written", flags.out), "name another directory with -o");
  SHARDLAB_TRY(check_parts(parts));
  auto lock = RunLock::take(flags.out, invocation.command());
  if (!lock.ok()) return lock.error();
  auto into = RunDirectory::open(std::move(*lock));
  if (!into.ok()) return into.error();
  RunMetadata merged = describe_environment(invocation.command());
  const RunMetadata& run = parts.front().runs.back();
  if (const auto before = into->store().runs(); !before.empty() && before.back().sweep != run.sweep)
    return refusal(
        fmt::format("{} holds results of the sweep `{}`, and these are of `{}`", flags.out, before.back().sweep, run.sweep),
        "name another directory with -o");
  merged.program_version = run.program_version;
  merged.sweep = run.sweep, merged.traces = run.traces, merged.claims = run.claims, merged.loss_target = run.loss_target;
  merged.calibration_id = run.calibration_id;
  into->begin(merged);
  for (const auto& [part, outcome] : in_turn(parts)) {
    into->append(*outcome);
    take_files(fs::path(part->directory) / outcome->case_id, fs::path(flags.out) / outcome->case_id);
  }
  for (const Part& part : parts) {
    const std::string machine = part.directory + "/machine.yaml";
    if (is_there(machine)) fs::copy_file(machine, flags.out + "/machine.yaml", fs::copy_options::skip_existing);
  }
  into->finish();
  fmt::print("{}: {} {} of {} {}\n", flags.out, into->size(), into->size() == 1 ? "case" : "cases", parts.size(),
             parts.size() == 1 ? "directory" : "directories");
  return ExitCode::kDone;
}

}  // namespace

void add_merge(CLI::App& app, Action& action, const Invocation& invocation) {
  auto* verb = app.add_subcommand("merge", "puts the results of a sweep's shards (`run --shard`) in one run directory");
  auto flags = std::make_shared<MergeFlags>();
  verb->add_option("directories", flags->directories, "run directories")->required();
  verb->add_option("-o,--out", flags->out, "the run directory with all; one that merge has made is brought up to date")->required();
  verb->callback([&action, &invocation, flags] { action = [flags, &invocation] { return merge(*flags, invocation); }; });
}

}  // namespace shardlab::cli
