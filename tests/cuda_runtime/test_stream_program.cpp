// Plans to stream programs: the same order as the plan's between whatever works, with no wait or event too many.
#include <fmt/format.h>

#include <vector>

#include "plan/text.h"
#include "runtime/session.h"
#include "runtime/stream_program.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

using Kind = StreamAction::Kind;

/// reach[a][b]: `a` must have ended before `b` begins.
using Order = std::vector<std::vector<bool>>;

struct Edge {
  int32_t from, to;
};

/// Everything that follows from the streams' own order and `edges`, which lead forward in issue order. What does not work passes
/// order on but cannot be waited for by itself: rows and columns of it are left empty in the end.
Order closure(const Program& program, const std::vector<Edge>& edges) {
  const size_t n = program.instructions.size();
  std::vector<std::vector<int32_t>> before(n);
  for (const auto& stream : program.streams)
    for (size_t i = 1; i < stream.size(); ++i) before[static_cast<size_t>(stream[i])].push_back(stream[i - 1]);
  for (const Edge& e : edges) before[static_cast<size_t>(e.to)].push_back(e.from);
  Order reach(n, std::vector<bool>(n));
  for (size_t b = 0; b < n; ++b)
    for (const int32_t a : before[b]) {
      reach[static_cast<size_t>(a)][b] = true;
      for (size_t c = 0; c < b; ++c)
        if (reach[c][static_cast<size_t>(a)]) reach[c][b] = true;
    }
  return reach;
}

int32_t at(const Program& program, int stream, int count) {
  return program.streams[static_cast<size_t>(stream)][static_cast<size_t>(count - 1)];
}

std::vector<Edge> edges_of_plan(const Program& program) {
  std::vector<Edge> edges;
  for (const Instruction& i : program.instructions)
    for (const Wait& w : program.waits_of(i)) edges.push_back({at(program, w.stream, w.count), i.id});
  return edges;
}

std::vector<Edge> edges_of_streams(const Program& program, const StreamProgram& streams) {
  std::vector<Edge> edges;
  for (const Instruction& i : program.instructions)
    for (const EventWait& w : streams.waits_of(streams.actions[static_cast<size_t>(i.id)]))
      edges.push_back({at(program, w.stream, w.count), i.id});
  return edges;
}

/// How many pairs of working instructions are ordered, and whether all that `other` orders are.
struct Compared {
  int64_t pairs = 0;
  bool covers = true, equal = true;
};
Compared compare(const StreamProgram& streams, const Order& own, const Order& other) {
  Compared result;
  const auto works = [&](size_t i) { return streams.actions[i].kind != Kind::kNothing; };
  for (size_t a = 0; a < own.size(); ++a)
    for (size_t b = a + 1; b < own.size(); ++b) {
      if (!works(a) || !works(b)) continue;
      result.pairs += own[a][b];
      if (other[a][b] && !own[a][b]) result.covers = false;
      if (other[a][b] != own[a][b]) result.equal = false;
    }
  return result;
}

std::vector<std::pair<std::string, Case>> cases() {
  std::vector<std::pair<std::string, Case>> all;
  all.emplace_back("single", tiny_case(Family::kLlama));
  Case dp = tiny_case(Family::kLlama);
  dp.layout.dp = 2;
  dp.layout.bucket_bytes = 16384;
  all.emplace_back("dp2-overlap", dp);
  dp.layout.zero = 1;
  dp.train.grad_norm = true;
  all.emplace_back("dp2-zero1-norm", dp);
  dp.layout.overlap = false;
  all.emplace_back("dp2-zero1-no-overlap", dp);
  Case tp = tiny_case();
  tp.layout.tp = 2;
  all.emplace_back("tp2", tp);
  all.emplace_back("pp2-1f1b", with_pipeline(tiny_case(Family::kLlama), 2, Schedule::k1F1B, 3));
  all.emplace_back("pp2-afab", with_pipeline(tiny_case(), 2, Schedule::kAfab, 2));
  Case tied = with_pipeline(tiny_case(), 2, Schedule::k1F1B, 2);
  tied.model.tied_embeddings = true;
  tied.layout.dp = 2;
  tied.layout.tp = 2;
  tied.layout.zero = 1;
  tied.layout.bucket_bytes = 65536;
  all.emplace_back("dp2-tp2-pp2-zero1-tied", tied);
  return all;
}

PlacedPlan placed_of(const Case& config) {
  auto plan = lower(config);
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  return place(std::move(*plan));
}

}  // namespace

TEST_CASE("stream programs as text") {
  for (const auto& [name, config] : cases()) {
    if (name != "dp2-zero1-norm" && name != "pp2-1f1b") continue;
    const PlacedPlan placed = placed_of(config);
    std::string text;
    for (const Program& program : placed.programs) text += to_text(*placed.plan, program, stream_program(*placed.plan, program));
    REQUIRE_GOLDEN("streams/" + name + ".txt", text);
  }
}

TEST_CASE("a stream program orders what the plan orders, and not one wait or event is too many") {
  for (const auto& [name, config] : cases())
    for (const bool poison : {false, true}) {
      const PlacedPlan placed = placed_of(config);
      for (const Program& program : placed.programs) {
        INFO(name << " role " << program.role << (poison ? " poisoned" : ""));
        const StreamProgram streams = stream_program(*placed.plan, program, {.poison = poison});
        const Order plan_order = closure(program, edges_of_plan(program));
        const std::vector<Edge> edges = edges_of_streams(program, streams);
        const Order order = closure(program, edges);
        const Compared whole = compare(streams, order, plan_order);
        REQUIRE(whole.pairs > 0);
        REQUIRE(whole.equal);
        for (size_t left_out = 0; left_out < edges.size(); ++left_out) {
          std::vector<Edge> fewer = edges;
          fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(left_out));
          INFO("without the wait of #" << edges[left_out].to << " for #" << edges[left_out].from);
          REQUIRE_FALSE(compare(streams, closure(program, fewer), plan_order).covers);
        }
        std::vector<int> recorded(static_cast<size_t>(streams.events)), waited(recorded.size());
        for (const StreamAction& a : streams.actions) {
          if (a.record >= 0) ++recorded[static_cast<size_t>(a.record)];
          if (a.kind == Kind::kNothing) REQUIRE((a.record < 0 && a.waits == 0));
        }
        for (const EventWait& w : streams.waits) ++waited[static_cast<size_t>(w.event)];
        for (const int n : recorded) REQUIRE(n == 1);
        for (const int n : waited) REQUIRE(n >= 1);
      }
    }
}

TEST_CASE("book-keeping needs no event, and what a free waits for reaches who takes its storage") {
  // Stream `side` writes %a, which stream 0 frees; %b takes its place and is written by the third stream, and by stream 0.
  const auto parsed = parse_plan(R"(shardlab plan 1
name test
mesh pp=1 dp=1 cp=1 tp=1
micro_batches 1
sequences_per_micro_batch 1
period 1
streams compute side third
strategies test

segment write
  bound %x temporary f32[5]
  fill write () -> (%x) value=1 @side
segment take
  bound %x temporary f32[5]
  fill take () -> (%x) value=2 @third
segment mine
  bound %x temporary f32[5]
  fill mine () -> (%x) value=3

role 0
  %a temporary f32[5]
  %b temporary f32[5]
  %c temporary f32[5] persistent

  alloc %a
  call write (x=%a)
  free %a
  alloc %b
  call take (x=%b)
  free %b
  call mine (x=%c)
)");
  INFO((parsed.ok() ? std::string() : to_string(parsed.error())));
  REQUIRE(parsed.ok());
  const PlacedPlan placed = place(*parsed);
  const StreamProgram streams = stream_program(*placed.plan, placed.programs[0]);
  REQUIRE(to_text(*placed.plan, placed.programs[0], streams) == R"(role 0: 2 events
stream compute
  wait   e1 (third #4)
  launch #6 mine mine fill
stream side
  launch #1 write write fill
  record e0
stream third
  wait   e0 (side #1)
  launch #4 take take fill
  record e1
)");
}

}  // namespace shardlab::testing
