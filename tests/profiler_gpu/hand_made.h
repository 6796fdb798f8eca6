// Runs of a GPU made by hand: a small plan, and the records of a device that ran it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/program.h"
#include "profiler/gpu/activity_source.h"
#include "profiler/gpu/assemble.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

/// A clock that a test sets.
class SetClock final : public Clock {
 public:
  double now() const override { return time; }
  double time = 0;
};

/// A parsed plan with its programs; pointers stay valid when it is moved.
struct Expanded {
  std::unique_ptr<Plan> plan;
  std::vector<Program> programs;
};
Expanded expanded(const std::string& text);

/// Two ranks of dp: instruction 0 "one" fills on stream 0, 1 "sum" reduces on stream 1, 2 "twice" adds on stream 0 what came of it.
Expanded reduce_plan();
/// Two stages: rank 0 makes (0) and sends (1) on stream 0; rank 1 receives (0) on stream 1, copies once (1) and then what it
/// received (2) on stream 0.
Expanded pipeline_plan();

/// Writes a log as a CUPTI would have: every launch a host call, a link and a record of the device. Times are nanoseconds after
/// `origin_ns`.
struct LogWriter {
  ActivityLog log;
  int64_t origin_ns = 0;
  uint32_t correlation = 0;

  /// A kernel of `op` that the host launched at `launch`; returns its correlation.
  uint32_t kernel(const OpKey& op, const std::string& name, int64_t launch, int64_t begin, int64_t end, uint32_t stream = 7);
  /// The same without an op.
  uint32_t stray(const std::string& name, int64_t launch, int64_t begin, int64_t end);

 private:
  uint32_t add(const std::string& name, int64_t launch, int64_t begin, int64_t end, uint32_t stream);
};

/// One step of each rank, from 0 to `length` seconds after `begin`.
HostSide::Step host_step(int number, double begin, double length, int ranks);

/// Both identities of TraceAccounting.
bool balanced(const TraceAccounting& accounting);

/// A source that hands out a log given beforehand, and notes what it is told.
struct FakeSource final : ActivitySource {
  struct Told {
    ActivityLog log;
    std::vector<uint64_t> pushed;
    int depth = 0;
    bool on = false;
    int64_t ns = 0;
  };
  explicit FakeSource(std::shared_ptr<Told> told) : told_(std::move(told)) {}
  void set_on(bool on) override { told_->on = on; }
  void push(uint64_t id) override { told_->pushed.push_back(id), ++told_->depth; }
  void pop() override { --told_->depth; }
  int64_t now_ns() override { return told_->ns; }
  ActivityLog drain() override { return std::move(told_->log); }

 private:
  std::shared_ptr<Told> told_;
};

}  // namespace shardlab::testing
