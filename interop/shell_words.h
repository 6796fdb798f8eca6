// Arguments of a launch script: the words of a shell, and options among the words.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace shardlab::interop {

/// Words of a shell script as far as arguments need it: quotes, continued lines, comments, arrays, `NAME=value` and `$NAME`.
std::vector<std::string> shell_words(std::string_view text);

/// The values of each option, by its name without the leading hyphens.
using Options = std::map<std::string, std::vector<std::string>, std::less<>>;

/// "--name value value" and "--name=value" among the words. The last one of a name counts, as argparse has it.
Options options_of(const std::vector<std::string>& words);

}  // namespace shardlab::interop
