// Names of models and machines as people write them.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plan/base/result.h"

namespace shardlab::sweeps {

/// A short name and the name that it stands for, in lower case: {"h100", "hgx-h100-ndr"}.
using Alias = std::pair<std::string_view, std::string_view>;

/// The one of `names` that `said` means. Case and punctuation do not matter ("Llama-3.1-8B", "llama3.1 8b"), nor do words of
/// published names that change no size (instruct, base, hf, ...). An alias comes first; else the name with the same letters and
/// digits; else the only one with all words of `said` ("4090"), or with `said` in it. The error begins "named `...`": with the
/// names that it could be, or the nearest one.
Result<std::string> name_meant(const std::string& said, const std::vector<std::string>& names, std::span<const Alias> aliases = {});

}  // namespace shardlab::sweeps
