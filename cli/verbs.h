// The verbs of the program: each adds itself to the command line and runs with what was typed.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <vector>

#include "cli/namespaces.h"
#include "plan/base/result.h"

namespace shardlab::cli {

/// What a verb is given besides its own options.
struct Invocation {
  std::vector<std::string> words;  ///< the whole command line, as typed
  std::string program;             ///< path of the running executable, for the processes that measured cases run in
  std::string command() const;     ///< `words` as one line
};

/// What the chosen verb does; set by the verb's parser callback.
using Action = std::function<Result<ExitCode>()>;

void add_run(CLI::App& app, Action& action, const Invocation& invocation);
void add_measure_case(CLI::App& app, Action& action, const Invocation& invocation);
void add_launch(CLI::App& app, Action& action, const Invocation& invocation);
void add_comm(CLI::App& app, Action& action, const Invocation& invocation);
void add_merge(CLI::App& app, Action& action, const Invocation& invocation);
void add_report(CLI::App& app, Action& action, const Invocation& invocation);
void add_memory(CLI::App& app, Action& action, const Invocation& invocation);
void add_plan(CLI::App& app, Action& action, const Invocation& invocation);
void add_compare(CLI::App& app, Action& action, const Invocation& invocation);
void add_export(CLI::App& app, Action& action, const Invocation& invocation);
void add_import(CLI::App& app, Action& action, const Invocation& invocation);
void add_what_if(CLI::App& app, Action& action, const Invocation& invocation);
void add_trace(CLI::App& app, Action& action, const Invocation& invocation);
void add_weights(CLI::App& app, Action& action, const Invocation& invocation);
void add_diff(CLI::App& app, Action& action, const Invocation& invocation);
void add_explain(CLI::App& app, Action& action, const Invocation& invocation);
void add_calibrate(CLI::App& app, Action& action, const Invocation& invocation);
void add_model(CLI::App& app, Action& action, const Invocation& invocation);
void add_machine(CLI::App& app, Action& action, const Invocation& invocation);
void add_validate(CLI::App& app, Action& action, const Invocation& invocation);
void add_search(CLI::App& app, Action& action, const Invocation& invocation);
void add_strategies(CLI::App& app, Action& action, const Invocation& invocation);
void add_keys(CLI::App& app, Action& action, const Invocation& invocation);
void add_schema(CLI::App& app, Action& action, const Invocation& invocation);
void add_completions(CLI::App& app, Action& action, const Invocation& invocation);
void add_man(CLI::App& app, Action& action, const Invocation& invocation);
void add_doctor(CLI::App& app, Action& action, const Invocation& invocation);

}  // namespace shardlab::cli
