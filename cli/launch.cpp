// launch: runs the cases of a sweep with their ranks in several processes.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "cases/case_process.h"
#include "cases/job_place.h"
#include "cli/common.h"
#include "cli/namespaces.h"
#include "cli/verbs.h"
#include "plan/base/world_error.h"

namespace shardlab::cli {
namespace {

struct LaunchFlags {
  int processes = 0, ranks_per_process = 0;
  JobPlaceFlags placement;
  Restarts restarts;
  std::vector<std::string> command;
};

/// Becomes `run` or `comm` with what `launch` was told and, in a job that something else has started, with this process's place in it: so
/// there is one way to run a sweep.
Result<ExitCode> launch(const LaunchFlags& flags, const Invocation& invocation) {
  const bool measures = !flags.command.empty() && flags.command.front() == "comm";
  if (flags.command.empty() || (flags.command.front() != "run" && !measures))
    return Error{ExitCode::kUsage,
                 "`launch` needs `run` or `comm` after its options" +
                     (flags.command.empty() ? std::string() : fmt::format(", not `{}`", flags.command.front())),
                 "for example: shardlab launch -n 4 run SWEEP.yaml",
                 {}};
  SHARDLAB_TRY(check_restarts(flags.restarts));
  if (measures && flags.restarts.most > 0)
    return refusal("--restarts of `comm`, which keeps nothing that it could go on from", "leave it out");
  std::optional<JobPlace> placement;
  if (flags.processes == 0) {
    auto found = find_job_place(flags.placement, process_environment());
    if (!found.ok()) return found.error();
    placement = std::move(*found);
  } else if (flags.placement.any()) {
    return refusal("-n with a place in a job: -n starts processes, and --rank is one of those that something else has started",
                   "leave one of them out");
  }
  const bool joins = placement && placement->world_size > 1;
  std::vector<std::string> words{invocation.program};
  words.insert(words.end(), flags.command.begin(), flags.command.end());
  const bool named = std::ranges::any_of(
      flags.command, [](const std::string& word) { return word.starts_with("--transport") || word.starts_with("transport="); });
  if (!named) words.insert(words.end(), {"--transport", joins && !placement->together ? "tcp" : "processes"});
  if (joins) {
    const std::vector<std::string> place = words_of(*placement);
    words.insert(words.end(), place.begin(), place.end());
    setenv(kGroupToken, placement->token.c_str(), 1);
  }
  if (flags.processes > 0) words.insert(words.end(), {"--processes", std::to_string(flags.processes)});
  if (flags.ranks_per_process > 0 && measures) {
    const int processes = joins ? placement->world_size : flags.processes;
    if (processes == 0) return refusal("--ranks-per-process without processes", "give -n, or comm --ranks");
    words.insert(words.end(), {"--ranks", std::to_string(processes * flags.ranks_per_process)});
  } else if (flags.ranks_per_process > 0)
    words.insert(words.end(), {"--ranks-per-process", std::to_string(flags.ranks_per_process)});
  if (flags.restarts.most > 0) words.insert(words.end(), {"--restarts", std::to_string(flags.restarts.most)});
  if (flags.restarts.elastic) words.insert(words.end(), {"--elastic", "--least-dp", std::to_string(flags.restarts.least_dp)});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(invocation.program.c_str(), arguments.data());
  throw WorldError(fmt::format("{} cannot be started: {}", invocation.program, std::strerror(errno)), "run it by its full path");
}

}  // namespace

void add_launch(CLI::App& app, Action& action, const Invocation& invocation) {
  auto* verb = app.add_subcommand("launch",
                                  "launch -n N run SWEEP.yaml ...: runs a sweep with the ranks of each case in several processes; "
                                  "without -n, under torchrun, srun or mpirun, in theirs");
  auto flags = std::make_shared<LaunchFlags>();
  verb->add_option("-n,--processes", flags->processes,
                   "processes to start, that a case's ranks are shared out to; one a rank by default")
      ->check(number_in(1, 4096));
  verb->add_option("--ranks-per-process", flags->ranks_per_process, "ranks of each process")->check(number_in(1, 4096));
  add_restart_flags(*verb, flags->restarts);
  add_job_place_flags(*verb, flags->placement);
  verb->prefix_command();
  verb->callback([&action, &invocation, flags, verb] {
    for (const std::string& word : verb->remaining()) flags->command.push_back(word);
    action = [flags, &invocation] { return launch(*flags, invocation); };
  });
}

}  // namespace shardlab::cli
