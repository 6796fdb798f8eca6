// What several verbs share: formats, flags of layouts and of a place in a job, the terminal.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

#include "answers/case_flags.h"
#include "cases/case_process.h"
#include "cases/job_place.h"
#include "cases/local_machine.h"
#include "cli/namespaces.h"
#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/keys.h"
#include "reports/table.h"

namespace shardlab::cli {

/// Adds `--format table|json|csv|markdown`, and `--wide`, under which `terminal_width` is 0.
void add_format(CLI::App& verb, std::string& format);
/// The format of that name, or a usage error.
Result<TableFormat> parse_format(const std::string& name);
/// Prints a table to stdout, as wide as the terminal.
void print(const Table& table, TableFormat format);

/// For options that are numbers: refuses in words what lies outside, and what is no number.
CLI::Validator number_in(double least, double most);

/// The flags that name what is asked about: a model, a machine, and what `local` means.
void add_subject_flags(CLI::App& verb, std::string& model, std::string& machine, std::string& machine_file);
/// Adds the flags, asked on this machine.
void add_case_flags(CLI::App& verb, CaseFlags& flags);
/// What `--help` says of a key's flag: what it is, and its words.
std::string flag_help(const CaseKey& key);
/// A flag for each key that has one for these verbs; `values` are the keys, with what was given or nothing.
void add_key_flags(CLI::App& verb, std::vector<std::pair<std::string, std::string>>& values, Flag least);
/// `group`: the heading of the help under which they stand; empty: not shown.
void add_job_place_flags(CLI::App& verb, JobPlaceFlags& flags, const std::string& group = "Place in a job");
/// --restarts, --elastic and --least-dp.
void add_restart_flags(CLI::App& verb, Restarts& restarts);
/// Refuses flags of restarts that mean nothing without another.
Result<void> check_restarts(const Restarts& restarts);

/// Columns of the reader of stdout: $COLUMNS if it is set, else the terminal's width, or 120 where stdout is none. 0: lines are not broken.
int terminal_width();
bool stderr_is_terminal();

}  // namespace shardlab::cli
