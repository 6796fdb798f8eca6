// shardlab: a laboratory for LLM-training parallelism. Parses the command line and runs one verb.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>

#include <cstring>
#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "answers/words.h"
#include "cases/environment.h"
#include "cases/interrupt.h"
#include "cli/help.h"
#include "cli/namespaces.h"
#include "cli/shipped.h"
#include "cli/standard_streams.h"
#include "cli/verbs.h"
#include "plan/base/error_entries.h"
#include "plan/base/world_error.h"
#include "sweeps/yaml.h"

namespace {

using namespace shardlab;
using namespace shardlab::cli;

constexpr const char* kFooter =
    R"(Exit codes: 0 done, 1 a bug of ours, 2 usage or configuration error (nothing ran),
3 the answer is no, 4 some cases failed, 5 a --fail-if threshold was crossed,
6 environment not usable, 130 interrupted.)";

int report(const Error& error) {
  fmt::print(stderr, "shardlab: {}\n", with_shipped_paths(to_string(error)));
  if (const ErrorEntry* const entry = entry_of(error.kind)) fmt::print(stderr, "  more: shardlab explain {}\n", entry->code);
  return static_cast<int>(error.code);
}

/// Is the first word, where it is no option, one of the verbs?
Result<void> check_verb(CLI::App& app, std::string_view word) {
  std::vector<std::string> verbs;
  for (const CLI::App* verb : app.get_subcommands({})) {
    if (verb->get_name() == word) return {};
    if (!verb->get_group().empty()) verbs.push_back(verb->get_name());
  }
  const std::string close = sweeps::nearest_word(word, verbs);
  return Error{ExitCode::kUsage,
               fmt::format("there is no verb `{}`{}", word, close.empty() ? "" : fmt::format(", did you mean `{}`?", close)),
               fmt::format("verbs: {}", fmt::join(verbs, " ")),
               {}};
}

int run(int argc, char** argv) {
  Invocation invocation;
  invocation.words.assign(argv, argv + argc);
  std::error_code ignored;
  invocation.program = std::filesystem::read_symlink("/proc/self/exe", ignored).string();
  if (invocation.program.empty()) invocation.program = argv[0];

  interrupt::end_on_signal(invocation.command());

  CLI::App app{"A laboratory for LLM-training parallelism: run, predict and explain training layouts.", "shardlab"};
  app.set_version_flag("--version", version_line());
  app.require_subcommand(1);
  app.footer(kFooter);
  Action action;
  for (const auto add : {add_run,         add_merge,   add_report,  add_memory,   add_plan,       add_diff,        add_compare,
                         add_export,      add_import,  add_weights, add_what_if,  add_explain,    add_trace,       add_calibrate,
                         add_model,       add_machine, add_search,  add_validate, add_strategies, add_keys,        add_schema,
                         add_completions, add_man,     add_doctor,  add_launch,   add_comm,       add_measure_case})
    add(app, action, invocation);
  add_help(app);
  if (argc > 1 && argv[1][0] != '-')
    if (const auto known = check_verb(app, argv[1]); !known.ok()) return report(known.error());
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& end) {  // help and the version are such an end too
    if (end.get_exit_code() != 0) return report(usage_error(app, end, invocation.words));
    std::ostringstream out, err;
    app.exit(end, out, err);
    fmt::print("{}", with_shipped_paths(out.str()));
    return 0;
  }
  const Result<ExitCode> result = action();
  return result.ok() ? static_cast<int>(*result) : report(result.error());
}

int run_and_report(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const shardlab::WorldError& error) {
    return report({ExitCode::kEnvironment, error.what(), error.hint(), {}});
  } catch (const std::filesystem::filesystem_error& error) {
    return report({ExitCode::kEnvironment, error.what(), "check the path, its permissions and the room on its disk", {}});
  } catch (const std::bad_alloc&) {
    return report({ExitCode::kEnvironment, "out of memory", "close other programs, or ask for less at once", {}});
  } catch (const std::exception& error) {
    return report({ExitCode::kBug,
                   fmt::format("unexpected: {}", error.what()),
                   "this is a bug of shardlab's: please report the command",
                   {}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  StandardStreams streams;
  const int code = run_and_report(argc, argv);
  const int lost = streams.finish();
  if (lost == 0 || code == static_cast<int>(ExitCode::kInterrupted)) return code;
  if (lost == EPIPE) {  // the reader has had enough: ended as programs are that write on
    signal(SIGPIPE, SIG_DFL);
    raise(SIGPIPE);
  }
  return report({ExitCode::kEnvironment,
                 fmt::format("standard output: {}; the answer above is not whole", std::strerror(lost)),
                 "make room, or send the output elsewhere",
                 {}});
}
