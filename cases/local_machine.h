// This machine as its calibration has it: where its file lies, and what is known of it without one.
#pragma once

#include <string>
#include <vector>

#include "cases/namespaces.h"
#include "plan/base/result.h"
#include "plan/machine.h"
#include "sweeps/sweep.h"

namespace shardlab::cases {

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

/// Options for loading files that may say `machine: {local: true}`, which `find_local_machine` answers.
LoadOptions load_options(const std::string& machine_file, std::vector<std::string> overrides = {},
                         const std::string& case_file = "");

}  // namespace shardlab::cases
