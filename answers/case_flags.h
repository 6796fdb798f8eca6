// A case in the words of flags.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "answers/namespaces.h"
#include "answers/surroundings.h"
#include "plan/base/result.h"
#include "plan/case.h"
#include "sweeps/sweep.h"

namespace shardlab::answers {

/// The words of a case on the command line: model, machine, devices, the layout flags of ARCHITECTURE.md section 3, and
/// `--set key=value` for every other key.
struct CaseFlags {
  std::string model, machine, machine_file, assume;
  int64_t devices = 0;
  std::vector<std::pair<std::string, std::string>> layout;  ///< key and value, in the words of the sweep file
  std::vector<std::string> set;
  Surroundings around;
};
/// Whether the flags set the key, as a flag of its own or by `--set`.
bool given(const CaseFlags& flags, std::string_view key);
/// A key as flags spell it: "micro-batch".
std::string hyphenated(std::string key);
/// The flags as words of the sweep file ("model=gpt2", "tp=8"), with dp and the machine's nodes as the devices ask.
Result<std::vector<std::string>> words_from_flags(const CaseFlags& flags);
/// The case that the flags name; what they leave out has the sweep file's defaults. One sequence is the default batch.
Result<Case> case_from_flags(const CaseFlags& flags);

/// Options for loading what may say `machine: {local: true}`, whose calibration is in `machine_file` if that is named.
LoadOptions options_around(const Surroundings& around, const std::string& machine_file, std::vector<std::string> overrides);

}  // namespace shardlab::answers
