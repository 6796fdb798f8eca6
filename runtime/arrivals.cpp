#include "runtime/arrivals.h"

#include <fmt/format.h>

#include <charconv>

namespace shardlab::runtime {
namespace {

constexpr std::string_view kHead = "shardlab arrivals 1";

Error bad_line(size_t number, std::string_view line) {
  return {ExitCode::kUsage, fmt::format("line {} of a log of arrivals is `{}`", number, line.substr(0, 60)),
          "give a file that a run with parameter_server.staleness wrote", ""};
}

/// Takes what comes before `separator` off the front of `text`, or all of it.
std::string_view take(std::string_view& text, char separator) {
  const size_t end = std::min(text.find(separator), text.size());
  const std::string_view front = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return front;
}

template <class T>
bool read(std::string_view text, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && *value >= 0;
}

bool read_update(std::string_view text, std::vector<Arrival>* update) {
  while (!text.empty()) {
    std::string_view pair = take(text, ',');
    Arrival a;
    if (!read(take(pair, ':'), &a.worker) || !read(pair, &a.step)) return false;
    update->push_back(a);
  }
  return !update->empty();
}

bool read_bucket(std::string_view line, BucketArrivals* bucket) {
  bucket->bucket = take(line, ' ');
  while (!line.empty())
    if (!read_update(take(line, ' '), &bucket->updates.emplace_back())) return false;
  return !bucket->bucket.empty();
}

/// "server 2 workers 4 staleness 1"
bool read_sizes(std::string_view line, ArrivalLog* log) {
  for (const auto& [word, value] :
       {std::pair<std::string_view, int*>{"server", &log->server}, {"workers", &log->workers}, {"staleness", &log->staleness}})
    if (take(line, ' ') != word || !read(take(line, ' '), value)) return false;
  return line.empty();
}

}  // namespace

std::string print(const ArrivalLog& log) {
  std::string text = fmt::format("{}\nserver {} workers {} staleness {}\n", kHead, log.server, log.workers, log.staleness);
  for (const BucketArrivals& bucket : log.buckets) {
    text += bucket.bucket;
    for (const auto& update : bucket.updates) {
      char separator = ' ';
      for (const Arrival& a : update) {
        text += fmt::format("{}{}:{}", separator, a.worker, a.step);
        separator = ',';
      }
    }
    text += '\n';
  }
  return text;
}

Result<ArrivalLog> parse_arrivals(std::string_view text) {
  ArrivalLog log;
  for (size_t number = 1; !text.empty(); ++number) {
    const std::string_view line = take(text, '\n');
    const bool good = number == 1   ? line == kHead
                      : number == 2 ? read_sizes(line, &log)
                                    : read_bucket(line, &log.buckets.emplace_back());
    if (!good) return bad_line(number, line);
  }
  if (log.workers == 0) return bad_line(1, "");
  return log;
}

}  // namespace shardlab::runtime
