// What several verbs share: formats, layout flags, the calibrated machine file, run directories.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

#include "answers/case_flags.h"
#include "cli/namespaces.h"
#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/keys.h"
#include "reports/table.h"
#include "sweeps/sweep.h"

namespace shardlab::cli {

/// Adds `--format table|json|csv|markdown`.
void add_format(CLI::App& verb, std::string& format);
/// The format of that name, or a usage error.
Result<TableFormat> parse_format(const std::string& name);
/// Prints a table to stdout, as wide as the terminal.
void print(const Table& table, TableFormat format);

/// For options that are numbers: refuses in words what lies outside, and what is no number.
CLI::Validator number_in(double least, double most);

/// Where `calibrate` leaves this machine's file when no other place is named: shardlab/machine.yaml under $XDG_CONFIG_HOME or
/// ~/.config.
std::string default_machine_file();
/// Where a verb looks for this machine's calibration, the first file that is there: `named` (--machine-file) and no other; the
/// machine.yaml of the run directory that `case_file` lies in, where one is given; runs/local.yaml of the current directory;
/// `default_machine_file()`.
std::vector<std::string> local_machine_files(const std::string& named, const std::string& case_file = "");
/// Loads a calibrated machine file, and warns on stderr when it was made on another processor, on other cores or with other
/// kernels.
Result<Machine> load_local_machine(const std::string& path);
/// The first of `local_machine_files` with a calibration, which is said on stderr unless it was named. Where there is none: this
/// machine by its cores and memory, without a calibration. Refuses a named file that is not there.
Result<Machine> find_local_machine(const std::string& named, const std::string& case_file = "");
/// Refuses a local machine without a calibration: `what` cannot be told without one.
Result<void> check_calibrated(const Machine& machine, const std::string& what);

/// The flags that name what is asked about: a model, a machine, and what `local` means.
void add_subject_flags(CLI::App& verb, std::string& model, std::string& machine, std::string& machine_file);
/// Adds the flags, asked on this machine.
void add_case_flags(CLI::App& verb, CaseFlags& flags);
/// What `--help` says of a key's flag: what it is, and its words.
std::string flag_help(const CaseKey& key);
/// A flag for each key that has one for these verbs; `values` are the keys, with what was given or nothing.
void add_key_flags(CLI::App& verb, std::vector<std::pair<std::string, std::string>>& values, Flag least);
/// Options for loading files that may say `machine: {local: true}`, which `find_local_machine` answers.
LoadOptions load_options(const std::string& machine_file, std::vector<std::string> overrides = {},
                         const std::string& case_file = "");

/// Reads a whole file; a usage error when it cannot be read.
Result<std::string> read_file(const std::string& path);

}  // namespace shardlab::cli
