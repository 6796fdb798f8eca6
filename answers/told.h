// Answers as JSON: what the command line prints with `--format json`.
#pragma once

#include <string>
#include <string_view>

#include "answers/namespaces.h"
#include "plan/base/result.h"

namespace shardlab::answers {

/// An answer as text, and the exit code that the command line would have.
struct Told {
  ExitCode code = ExitCode::kDone;
  std::string json;
};
Told told(const Error& error);

/// `machine: local` is the machine of `machine_file`, and refused where none is named.
Told tell_memory_json(std::string_view question);
Told tell_search_json(std::string_view question);
/// {"models", "machines", "profiles"}: names that ship with the library.
Told tell_names_json();

}  // namespace shardlab::answers
