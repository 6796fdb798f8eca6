#include "tests/profiler_gpu/hand_made.h"

#include "plan/text.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

Expanded expanded(const std::string& text) {
  Result<Plan> plan = parse_plan(text);
  INFO(text);
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  Expanded e{std::make_unique<Plan>(std::move(plan).value()), {}};
  for (size_t role = 0; role < e.plan->roles.size(); ++role) e.programs.push_back(expand_program(*e.plan, static_cast<int>(role)));
  return e;
}

Expanded reduce_plan() {
  return expanded(R"(shardlab plan 1
name reduce
mesh dp=2
streams compute comm
comm dp axes dp
segment s
  bound %x other f32[6] dp:P
  local %y other f32[6] view %x
  fill one () -> (%x) value=1
  all_reduce sum (%x) -> (%y) comm=dp @comm
  add twice (%y, %y) -> (%x)
role 0
  %x other f32[6] dp:P persistent
  call s (x=%x)
)");
}

Expanded pipeline_plan() {
  return expanded(R"(shardlab plan 1
name pipeline
mesh pp=2
streams compute in
comm fwd axes pp
segment out
  bound %x activation f32[16]
  copy make (%x) -> (%x)
  send send (%x) -> () comm=fwd
segment work
  bound %x activation f32[16]
  bound %y activation f32[16]
  recv recv () -> (%x) comm=fwd @in
  copy first (%y) -> (%y)
  copy second (%x) -> (%y)
role 0
  %x activation f32[16] persistent
  call out (x=%x)
role 1
  %x activation f32[16] persistent
  %y activation f32[16] persistent
  call work (x=%x, y=%y)
)");
}

uint32_t LogWriter::add(const std::string& name, int64_t launch, int64_t begin, int64_t end, uint32_t stream) {
  ++correlation;
  log.calls.push_back({origin_ns + launch, origin_ns + launch + 2, correlation, 1, log.names.number("cudaLaunchKernel_v7000")});
  DeviceWork work;
  work.begin_ns = origin_ns + begin;
  work.end_ns = origin_ns + end;
  work.correlation = correlation;
  work.stream = stream;
  work.name = log.names.number(name);
  log.work.push_back(work);
  return correlation;
}

uint32_t LogWriter::kernel(const OpKey& op, const std::string& name, int64_t launch, int64_t begin, int64_t end, uint32_t stream) {
  add(name, launch, begin, end, stream);
  log.links.push_back({correlation, op_id(op)});
  return correlation;
}

uint32_t LogWriter::stray(const std::string& name, int64_t launch, int64_t begin, int64_t end) {
  return add(name, launch, begin, end, 7);
}

HostSide::Step host_step(int number, double begin, double length, int ranks) {
  HostSide::Step step;
  step.number = number;
  step.begin = begin;
  step.interval.assign(static_cast<size_t>(ranks), {0, length});
  return step;
}

bool balanced(const TraceAccounting& a) {
  return a.launches == a.recorded + a.lost && a.device_records == a.timed + a.zero_timestamp + a.out_of_range + a.unclaimed;
}

}  // namespace shardlab::testing
