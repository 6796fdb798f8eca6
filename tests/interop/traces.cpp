#include "tests/interop/traces.h"

#include <algorithm>

#include "plan/text.h"
#include "tests/golden_plans.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

bool communicates(const Op& op) {
  return std::holds_alternative<Collective>(op.work) || std::holds_alternative<Send>(op.work) ||
         std::holds_alternative<Recv>(op.work);
}

/// The events of one rank in one step, and the end of the last.
double add_step(const Program& program, int rank, int step, Trace& trace) {
  std::vector<double> done(program.instructions.size(), 0);
  double end = 0;
  for (const Instruction& i : program.instructions) {
    const auto& stream = program.streams[static_cast<size_t>(i.stream)];
    const double free = i.sequence > 0 ? done[static_cast<size_t>(stream[static_cast<size_t>(i.sequence - 1)])] : 0;
    double begin = free;
    for (const Wait& w : program.waits_of(i))
      if (w.count > 0)
        begin = std::max(
            begin, done[static_cast<size_t>(program.streams[static_cast<size_t>(w.stream)][static_cast<size_t>(w.count - 1)])]);
    double& at = done[static_cast<size_t>(i.id)];
    at = begin;
    if (begin > free) trace.events.push_back({TraceEvent::Kind::kWait, rank, i.id, i.stream, step, free, begin, 0, 0, -1});
    if (i.kind != Instruction::Kind::kRun) continue;
    const double length = 1e-6 * (1 + i.id % 7);
    at = begin + length;
    const bool waits = communicates(*i.op) && rank % 2 == 1;
    trace.events.push_back({TraceEvent::Kind::kOp, rank, i.id, i.stream, step, begin, at, waits ? 0.6 * length : 0, 64 * i.id, -1});
    end = std::max(end, at);
  }
  return end;
}

uint64_t varint(std::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    REQUIRE_FALSE(bytes.empty());
    const auto byte = static_cast<unsigned char>(bytes.front());
    bytes.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  FAIL("a number has more than ten bytes");
  return 0;
}

std::string_view taken(std::string_view& bytes, uint64_t count) {
  REQUIRE(count <= bytes.size());
  const std::string_view part = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return part;
}

}  // namespace

TracedPlan golden_trace(const std::string& name) {
  auto plan = parse_plan(golden_plan(name), name);
  INFO((plan.ok() ? name : to_string(plan.error())));
  REQUIRE(plan.ok());
  TracedPlan t{std::move(*plan), {}, {}, {}};
  for (size_t role = 0; role < t.plan.roles.size(); ++role) {
    t.programs.push_back(expand_program(t.plan, static_cast<int>(role)));
    t.arenas.push_back(place_arena(t.plan, t.programs.back()));
  }
  t.trace.producer = "rule";
  t.trace.world_size = t.plan.mesh.world_size(), t.trace.steps = 2;
  for (const auto& stream : t.plan.streams) t.trace.streams.push_back(stream);
  t.trace.step_interval.resize(2 * static_cast<size_t>(t.trace.world_size));
  for (int rank = 0; rank < t.trace.world_size; ++rank)
    for (int step = 0; step < 2; ++step) {
      const double end = add_step(t.programs[static_cast<size_t>(t.plan.mesh.role_of(rank))], rank, step, t.trace);
      t.trace.step_interval[static_cast<size_t>(step * t.trace.world_size + rank)] = {0, end};
    }
  std::ranges::stable_sort(t.trace.events, [](const TraceEvent& a, const TraceEvent& b) {
    return std::tuple(a.rank, a.step, a.begin) < std::tuple(b.rank, b.step, b.begin);
  });
  return t;
}

std::vector<WireField> wire_fields(std::string_view message) {
  std::vector<WireField> fields;
  while (!message.empty()) {
    const uint64_t tag = varint(message);
    WireField field{static_cast<int>(tag >> 3), static_cast<int>(tag & 7), 0, {}};
    REQUIRE(field.number > 0);
    if (field.type == 0)
      field.value = varint(message);
    else if (field.type == 2)
      field.bytes = taken(message, varint(message));
    else
      FAIL("wire type " << field.type << " of field " << field.number);
    fields.push_back(field);
  }
  return fields;
}

std::vector<std::string_view> delimited_messages(std::string_view bytes) {
  std::vector<std::string_view> messages;
  while (!bytes.empty()) messages.push_back(taken(bytes, varint(bytes)));
  return messages;
}

WireField only_field(const std::vector<WireField>& fields, int number) {
  WireField found;
  int count = 0;
  for (const WireField& f : fields)
    if (f.number == number) found = f, ++count;
  INFO("field " << number);
  REQUIRE(count <= 1);
  return found;
}

}  // namespace shardlab::testing
