// What several verbs share: formats, layout flags, the calibrated machine file, run directories.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

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

/// The words of a case on the command line: model, machine, devices, the layout flags of ARCHITECTURE.md section 3, and
/// `--set key=value` for every other key.
struct CaseFlags {
  std::string model, machine, machine_file, assume;
  int64_t devices = 0;
  std::vector<std::pair<std::string, std::string>> layout;  ///< key and value, in the words of the sweep file
  std::vector<std::string> set;
};
void add_case_flags(CLI::App& verb, CaseFlags& flags);
/// Whether the flags set the key, as a flag of its own or by `--set`.
bool given(const CaseFlags& flags, std::string_view key);
/// A key as flags spell it: "micro-batch".
std::string hyphenated(std::string key);
/// What `--help` says of a key's flag: what it is, and its words.
std::string flag_help(const CaseKey& key);
/// A flag for each key that has one for these verbs; `values` are the keys, with what was given or nothing.
void add_key_flags(CLI::App& verb, std::vector<std::pair<std::string, std::string>>& values, Flag least);
/// The flags as words of the sweep file ("model=gpt2", "tp=8"), with dp and the machine's nodes as the devices ask.
Result<std::vector<std::string>> words_from_flags(const CaseFlags& flags);
/// The case that the flags name; what they leave out has the sweep file's defaults. One sequence is the default batch.
Result<Case> case_from_flags(const CaseFlags& flags);

/// Options for loading files that may say `machine: {local: true}`, which `find_local_machine` answers.
LoadOptions load_options(const std::string& machine_file, std::vector<std::string> overrides = {},
                         const std::string& case_file = "");

/// Reads a whole file; a usage error when it cannot be read.
Result<std::string> read_file(const std::string& path);

}  // namespace shardlab::cli
