// Every reader of bytes that come from outside, each as one function of the bytes: what the fuzzer calls, and the test that replays
// its corpus.
#pragma once

#include <span>
#include <string_view>

namespace shardlab::testing::fuzz {

struct Reader {
  std::string_view name;  ///< of its folder in tests/fuzz/corpus
  /// Reads the bytes as a user's file, and does with what was read what every verb does next. Whatever is wrong with the bytes is a
  /// refusal; a crash, an uncaught exception or a broken promise (what is printed reads back) ends the process.
  void (*read)(std::string_view bytes);
};

std::span<const Reader> readers();

}  // namespace shardlab::testing::fuzz
