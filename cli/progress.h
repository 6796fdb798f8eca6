// Progress of a sweep on stderr: one line that is rewritten on a terminal, one line a case elsewhere.
#pragma once

#include "cli/namespaces.h"
#include "sweeps/driver.h"

namespace shardlab::cli {

class ProgressPrinter final : public ProgressSink {
 public:
  explicit ProgressPrinter(bool terminal) : terminal_(terminal) {}
  void started(const Point& point, const Progress& progress) override;
  void finished(const CaseOutcome& outcome, const Progress& progress) override;
  /// Leaves the terminal's line behind.
  void end();

 private:
  bool terminal_;
  bool line_open_ = false;
};

}  // namespace shardlab::cli
