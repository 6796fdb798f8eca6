#include "cli/progress.h"

#include <fmt/format.h>

#include "cli/namespaces.h"
#include "plan/base/utf8.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

std::string counts(const Progress& p) {
  std::string text = fmt::format("[{}/{}]", p.done, p.total);
  if (p.failed + p.timeout > 0) text += fmt::format(" {} failed", p.failed + p.timeout);
  if (p.oom > 0) text += fmt::format(" {} oom", p.oom);
  return text;
}

/// "; 3.1 s left", at the end of a line.
std::string time_left(const Progress& p) {
  return p.remaining_s && *p.remaining_s > 0 ? fmt::format("; {} left", brief_seconds(*p.remaining_s)) : std::string();
}

std::string figures(const CaseOutcome& outcome) {
  std::string text(name_of(outcome.status));
  if (outcome.status != Status::kOk) return text + ": " + outcome.reason;
  if (outcome.predicted) text += fmt::format(", predicted {}", seconds_text(outcome.predicted->step_s));
  if (outcome.measured) text += fmt::format(", measured {}", seconds_text(outcome.measured->step_s));
  if (!outcome.reason.empty()) text += "; " + outcome.reason;
  return text;
}

}  // namespace

void ProgressPrinter::started(const Point& point, const Progress& progress) {
  if (!terminal_) return;
  fmt::print(stderr, "\r\033[K{} {}{}", counts(progress), visible_line(point.name), time_left(progress));
  std::fflush(stderr);
  line_open_ = true;
}

void ProgressPrinter::finished(const CaseOutcome& outcome, const Progress& progress) {
  const bool news =
      !terminal_ ? outcome.status != Status::kRefused : outcome.status != Status::kOk && outcome.status != Status::kRefused;
  if (!news) return;
  if (terminal_) fmt::print(stderr, "\r\033[K");
  fmt::print(stderr, "{} {}: {}{}\n", counts(progress), visible_line(outcome.config.name), visible_line(figures(outcome)),
             time_left(progress));
  line_open_ = false;
}

void ProgressPrinter::end() {
  if (line_open_) fmt::print(stderr, "\r\033[K");
  line_open_ = false;
}

}  // namespace shardlab::cli
