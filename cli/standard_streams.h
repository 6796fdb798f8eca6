// The program's three standard streams. Output is text, and output that could not be written is known.
#pragma once

#include <string>

namespace shardlab::cli {

/// For the life of this object `stdout` and `stderr` are filters. Names that others chose may hold control characters and marks of
/// direction; none reaches a terminal. They are written as `\u001b` (plan/base/utf8.h), which JSON reads as the same character.
/// Only the program's own "\r\033[K", which rewrites a line of progress, passes. A stream that is closed when the program begins is
/// opened on /dev/null, so that no file of the program takes its number.
///
/// Chatter that cannot be written to stderr is lost and ends nothing. An answer that cannot be written to stdout is remembered for
/// `finish`. A pipe that nobody reads ends no run either: SIGPIPE is ignored.
class StandardStreams {
 public:
  StandardStreams();
  StandardStreams(const StandardStreams&) = delete;
  ~StandardStreams();

  /// Flushes the streams. Returns the error number of the first write to stdout that failed, or 0.
  int finish();
};

}  // namespace shardlab::cli
