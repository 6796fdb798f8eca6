#include "tests/simulator/plans.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

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

namespace {

constexpr const char* kPipelineSegments = R"(
segment F
  bound %x activation f32[16]
  bound %y activation f32[16]

  copy F (%x) -> (%y)

segment B
  bound %dy activation f32[16]
  bound %dx activation f32[16]

  copy B (%dy) -> (%dx)

segment send.y
  bound %x activation f32[16]

  send send.y (%x) -> () comm=fwd @fwd.out

segment recv.x
  bound %x activation f32[16]

  recv recv.x () -> (%x) comm=fwd @fwd.in

segment send.dx
  bound %x activation f32[16]

  send send.dx (%x) -> () comm=bwd hop=-1 @bwd.out

segment recv.dy
  bound %x activation f32[16]

  recv recv.dy () -> (%x) comm=bwd hop=1 @bwd.in
)";

std::string forward(int stage, int stages, int micro) {
  std::string out;
  if (stage > 0) out += fmt::format("  call recv.x m={0} (x=%x{0})\n", micro);
  out += fmt::format("  call F m={0} (x=%x{0}, y=%y{0})\n", micro);
  if (stage + 1 < stages) out += fmt::format("  call send.y m={0} (x=%y{0})\n", micro);
  return out;
}

std::string backward(int stage, int stages, int micro) {
  std::string out;
  if (stage + 1 < stages) out += fmt::format("  call recv.dy m={0} (x=%dy{0})\n", micro);
  out += fmt::format("  call B m={0} (dy=%{1}{0}, dx=%dx{0})\n", micro, stage + 1 < stages ? "dy" : "y");
  if (stage > 0) out += fmt::format("  call send.dx m={0} (x=%dx{0})\n", micro);
  return out;
}

std::string stage_text(int stage, int stages, int micro_batches, bool one_f_one_b) {
  std::string out = fmt::format("\nrole {}\n", stage);
  for (int m = 0; m < micro_batches; ++m)
    for (const char* name : {"x", "y", "dx", "dy"}) out += fmt::format("  %{}{} activation f32[16] persistent\n", name, m);
  const int warmup = one_f_one_b ? std::min(stages - 1 - stage, micro_batches) : micro_batches;
  for (int m = 0; m < warmup; ++m) out += forward(stage, stages, m);
  for (int m = warmup; m < micro_batches; ++m) out += forward(stage, stages, m) + backward(stage, stages, m - warmup);
  for (int m = micro_batches - warmup; m < micro_batches; ++m) out += backward(stage, stages, m);
  return out;
}

}  // namespace

Expanded pipeline(int stages, int micro_batches, bool one_f_one_b) {
  std::string text =
      fmt::format("shardlab plan 1\nname pipeline\nmesh pp={}\nstreams compute fwd.in fwd.out bwd.in bwd.out\n", stages);
  text += "comm fwd axes pp\ncomm bwd axes pp\n";
  text += kPipelineSegments;
  for (int s = 0; s < stages; ++s) text += stage_text(s, stages, micro_batches, one_f_one_b);
  return expanded(text);
}

Machine shared_cores(int cores) {
  Machine m;
  m.local = true;
  m.cores = cores;
  return m;
}

Machine own_devices() { return Machine{}; }

std::string timeline(const Expanded& e, const Trace& trace) {
  std::string out;
  for (const TraceEvent& event : trace.events) {
    const Instruction& i =
        e.programs[static_cast<size_t>(e.plan->mesh.role_of(event.rank))].instructions[static_cast<size_t>(event.instruction)];
    const std::string label = i.op != nullptr ? i.op->label : i.kind == Instruction::Kind::kFree ? "free" : "alloc";
    out += fmt::format("rank {} {} {:.6g} {:.6g} {}", event.rank, e.plan->streams[static_cast<size_t>(event.stream)], event.begin,
                       event.end, event.kind == TraceEvent::Kind::kWait ? "(" + label + ")" : label);
    if (event.peer_wait > 0) out += fmt::format(" peers {:.6g}", event.peer_wait);
    out += "\n";
  }
  return out;
}

}  // namespace shardlab::testing
