// A tiny case in training, step by step, with faults where a test plants them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plan/case.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// In one step, on one rank, the first element of the first operand that the named kernel reads becomes `value`.
struct Plant {
  int rank = 0;
  int64_t step = 0;
  float value = 0;
  std::string kernel = "found_inf";
};

struct Ranks {
  int dp = 1, tp = 1, pp = 1, zero = 0;
  int64_t accumulation = 1;
  Recompute recompute = Recompute::kNone;
};

/// A GPT with a tied table in canonical mode, 8 sequences a step whatever the ranks.
Case stability_case(const Ranks& ranks, Optimizer optimizer = Optimizer::kAdamW);

/// "dp2 tp1 pp2 zero1 m2".
std::string line_of(const Ranks& ranks);

class Training {
 public:
  explicit Training(const Case& config, std::vector<Plant> plants = {});

  StepResult step(int64_t number) { return session->step(number); }
  /// Everything that the run keeps, put together over the ranks; replicas that differ in a bit fail the test.
  std::map<StateName, std::vector<float>> state() const;
  /// A number of the run.
  float number(const std::string& buffer) const { return state().at({std::string(kRunState), buffer}).front(); }

  Case config;
  PlacedPlan placed;
  std::unique_ptr<ThreadTransport> transport;
  std::unique_ptr<Session> session;
};

}  // namespace shardlab::testing
