// What is wrong with a text that is no YAML, in words for who wrote it.
#pragma once

#include <string>
#include <string_view>

#include "sweeps/yaml.h"

namespace shardlab::sweeps {

struct YamlFault {
  Mark mark;
  std::string message, hint;
};

/// The fault that the library calls `said` and found at `mark`. Where the text tells more than the library does (which bracket is
/// open, where a quote begins), the fault names it.
YamlFault yaml_fault(std::string_view text, std::string_view said, Mark mark);

}  // namespace shardlab::sweeps
