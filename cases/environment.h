// This program and this machine: what every result says of where it came from.
#pragma once

#include <cstdint>
#include <string>

#include "cases/namespaces.h"
#include "reports/metadata.h"

namespace shardlab::cases {

/// The identity of this program, for the key of `--resume`: "0.1.0+4f21c2a10f38", version and commit. A source tree that
/// differs from its commit, or has none, has an identity of its own: "0.1.0+4f21c2a10f38-dirty.9d3e01c7", with a hash of
/// the running executable.
std::string program_version();
/// The identity made from its parts; `executable` is read only if `commit` does not suffice.
std::string program_version(const std::string& version, const std::string& commit, const std::string& executable);
std::string version_line();  ///< "shardlab 0.1.0 (commit)"

/// Model name of the processor, and its logical cores that this process may use.
std::string processor_name();
int usable_cores();
/// Bytes of memory that programs can use: MemAvailable, or the control group's limit where that is less.
int64_t usable_memory();
/// Bytes of memory that this machine has: MemTotal, or the control group's limit where that is less. The same from run to run.
int64_t total_memory();
std::string today();  ///< date and time, UTC, ISO 8601

/// Everything but the calibration and the recorder's figures.
RunMetadata describe_environment(const std::string& command);

}  // namespace shardlab::cases
