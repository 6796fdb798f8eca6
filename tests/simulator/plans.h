// Small plans given as text, and timelines as text, for tests of the simulator.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plan/machine.h"
#include "plan/plan.h"
#include "plan/program.h"
#include "plan/trace.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

/// A parsed plan with its programs; pointers stay valid when it is moved.
struct Expanded {
  std::unique_ptr<Plan> plan;
  std::vector<Program> programs;
};
Expanded expanded(const std::string& text);

/// a produces a bucket that is reduced on its own stream while b computes; c needs the sum.
///
///   compute   a --> b ------> c
///              \             /
///   comm        `-> reduce -'
inline constexpr const char* kOverlap = R"(shardlab plan 1
name overlap
mesh dp=2
streams compute comm
comm grads axes dp

segment s
  bound %x activation f32[16]
  bound %g gradient f32[16] dp:P
  bound %z activation f32[16]
  local %sum gradient f32[16] view %g

  copy a (%x) -> (%g)
  all_reduce reduce (%g) -> (%sum) comm=grads @comm
  copy b (%x) -> (%z)
  copy c (%sum) -> (%z)

role 0
  %x activation f32[16] persistent
  %g gradient f32[16] dp:P persistent
  %z activation f32[16] persistent
  call s (x=%x, g=%g, z=%z)
)";

/// p stages, m micro-batches; ops "F" and "B", messages on streams of their own. `one_f_one_b`, else all forwards first.
Expanded pipeline(int stages, int micro_batches, bool one_f_one_b);

/// A machine whose ranks share `cores`, and one whose ranks have a device each.
Machine shared_cores(int cores);
Machine own_devices();

/// One line an event: "rank 0 compute 0 2 f", waits as "(b)", peer waits as "peers 1".
std::string timeline(const Expanded& e, const Trace& trace);

}  // namespace shardlab::testing
