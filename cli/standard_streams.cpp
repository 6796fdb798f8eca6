#include "cli/standard_streams.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string_view>

#include "cli/namespaces.h"
#include "plan/base/utf8.h"

namespace shardlab::cli {
namespace {

constexpr std::string_view kRewriteLine = "\r\033[K";
constexpr std::string_view kIsolates[] = {"\u2068", "\u2069"};  // visible_line's

/// One stream behind its `FILE`.
struct Filter {
  int descriptor;
  std::string held;  ///< the beginning of a code point or of `kRewriteLine`, whose end is yet to come
  int error = 0;     ///< of the first write that failed

  void write_out(std::string_view text) {
    while (!text.empty() && error == 0) {
      const ssize_t n = ::write(descriptor, text.data(), text.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) error = errno;
      if (n > 0) text.remove_prefix(static_cast<size_t>(n));
    }
  }

  void take(std::string_view text, bool last) {
    held += text;
    std::string_view rest = held;
    std::string out;
    const auto passes = [&](std::string_view word) {
      if (!rest.starts_with(word)) return false;
      out += word;
      rest.remove_prefix(word.size());
      return true;
    };
    while (!rest.empty()) {
      if (passes(kRewriteLine) || passes(kIsolates[0]) || passes(kIsolates[1])) continue;
      const CodePoint c = first_code_point(rest);
      if (!last && (c.bytes == 0 || kRewriteLine.starts_with(rest))) break;
      const size_t bytes = c.bytes == 0 ? 1 : static_cast<size_t>(c.bytes);
      out += visible(rest.substr(0, bytes));
      rest.remove_prefix(bytes);
    }
    held = std::string(rest);
    write_out(out);
  }
};

Filter out_filter{STDOUT_FILENO, {}}, error_filter{STDERR_FILENO, {}};

ssize_t write_filtered(void* filter, const char* text, size_t size) {
  static_cast<Filter*>(filter)->take({text, size}, false);
  return static_cast<ssize_t>(size);  // never short: nobody who prints has to handle what `finish` reports
}

FILE* filtered(Filter& filter, FILE* plain, int buffering) {
  cookie_io_functions_t functions{};
  functions.write = write_filtered;
  FILE* stream = fopencookie(&filter, "w", functions);
  if (stream == nullptr) return plain;
  setvbuf(stream, nullptr, buffering, buffering == _IONBF ? 0 : BUFSIZ);
  return stream;
}

FILE *plain_out = nullptr, *plain_error = nullptr;

}  // namespace

StandardStreams::StandardStreams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    // Closed: reading finds nothing, and writing to what is open for reading fails as it did before.
    if (fcntl(descriptor, F_GETFD) < 0 && errno == EBADF) (void)!open("/dev/null", O_RDONLY);
  signal(SIGPIPE, SIG_IGN);
  plain_out = stdout;
  plain_error = stderr;
  stdout = filtered(out_filter, stdout, isatty(STDOUT_FILENO) != 0 ? _IOLBF : _IOFBF);
  stderr = filtered(error_filter, stderr, _IONBF);
}

StandardStreams::~StandardStreams() {
  finish();
  stdout = plain_out;
  stderr = plain_error;
}

int StandardStreams::finish() {
  std::fflush(stdout);
  out_filter.take({}, true);
  error_filter.take({}, true);
  return out_filter.error;
}

}  // namespace shardlab::cli
