// What the runtime's tests share: crews of bare tasks, and sessions of plans given as text.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plan/base/world_error.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// Runs `body` once on each of ranks * streams tasks and returns when all are through. Throws the crew's failure.
void run_tasks(Scheduler& scheduler, double timeout_s, int ranks, int streams, const std::function<void(Task&)>& body);
/// The same, freely scheduled.
void run_tasks(int ranks, int streams, const std::function<void(Task&)>& body);

/// What `body` throws as a WorldError, as text; empty when it throws nothing.
std::string world_error(const std::function<void()>& body);

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

/// A clock that a test sets.
class ManualClock final : public Clock {
 public:
  double now() const override { return now_.load(); }
  void set(double seconds) { now_.store(seconds); }

 private:
  std::atomic<double> now_{0};
};

/// A plan in execution with everything it needs. `text` is a plan; what does not parse or bind fails the test.
struct Rig {
  explicit Rig(const std::string& text, RunOptions options = {}, const BatchSource* source = nullptr, bool dry = false);

  const Plan& plan() const { return *placed.plan; }
  PlacedPlan placed;
  std::unique_ptr<ThreadTransport> transport;
  std::unique_ptr<Session> session;
};

/// "shardlab plan 1 ..." up to and with the strategies line, for a mesh of these sizes.
std::string plan_head(int pp, int dp, int tp, const std::string& streams = "compute comm");

/// Values in [-1, 1), the same for equal arguments.
std::vector<float> noise(uint64_t seed, uint32_t tensor, int64_t n);

/// Equal sizes and bits: no zero of another sign, no other NaN.
bool same_bits(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace shardlab::testing
