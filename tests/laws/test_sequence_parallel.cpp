// What Korthikanti et al. (2022) say of sequence parallelism, evaluated from the configuration, against plans.
#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "plan/program.h"
#include "plan/trace.h"
#include "plan/wire.h"
#include "plan/work.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/timeline.h"
#include "strategies/lower.h"
#include "tests/laws/equal.h"
#include "tests/laws/replay.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

Case base_case(Family family, int t, int64_t b) {
  Case c;
  c.name = "sequence-parallel";
  c.model = {.name = "small",
             .family = family,
             .layers = 3,
             .hidden = 64,
             .heads = 8,
             .kv_heads = family == Family::kLlama ? 4 : 8,
             .head_dim = 8,
             .ffn = 96,
             .vocab = 128,
             .max_positions = 48};
  c.train.seq_len = 48;
  c.train.micro_batch = b;
  c.train.grad_accumulation = 2;
  c.train.global_batch_tokens = 2 * b * 48;
  c.layout.tp = t;
  c.layout.sequence_parallel = t > 1;
  return c;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const int t : {2, 4})
      for (const int64_t b : {1, 2, 3})
        for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
          Case c = base_case(family, t, b);
          c.layout.recompute = recompute;
          all.push_back(std::move(c));
        }
  return all;
}

std::string line(const Case& c) {
  return std::string(name_of(c.model.family)) + " tp " + std::to_string(c.layout.tp) + " b " + std::to_string(c.train.micro_batch) +
         " " + std::string(name_of(c.layout.recompute));
}

int64_t sent_over_tp(const Case& c) {
  int64_t sent = 0;
  for (const auto& [comm, bytes] : total_wire_bytes(plan_of(c)))
    if (comm.starts_with("tp")) sent += bytes;
  return sent;
}

/// Bytes that forward leaves for the backward of one layer and micro-batch: the layer's input, and what it saves.
int64_t kept_by_a_layer(const Plan& plan) {
  int64_t bytes = 0;
  for (const Segment& segment : plan.segments) {
    if (segment.name != "layer.F") continue;
    for (const Slot& slot : segment.slots)
      if (slot.kind == SlotKind::kBound && slot.cls == BufferClass::kActivation && !slot.view && slot.name != "y")
        bytes += slot.type.bytes();
  }
  return bytes;
}

/// Collectives of a kind in a segment, those of loss and gradients left out.
int64_t count_of(const Plan& plan, std::string_view segment_name, CollectiveKind kind, size_t rank = 3) {
  int64_t n = 0;
  for (const Segment& segment : plan.segments) {
    if (segment.name != segment_name) continue;
    for (const Step& step : segment.steps) {
      const Op* op = std::get_if<Op>(&step);
      const auto* c = op != nullptr ? std::get_if<Collective>(&op->work) : nullptr;
      if (c == nullptr || c->kind != kind) continue;
      const Type& type = segment.slots[op->reads[0].index()].type;
      n += type.shape.rank == static_cast<int>(rank) && type.shape[1] > 1;
    }
  }
  return n;
}

}  // namespace

TEST_CASE("sequence parallelism sends what tensor parallelism sends, each input gathered once more, and b h a norm or bias") {
  // Section 4.2.2: an all-reduce is a reduce-scatter and an all-gather, (t - 1)/t each of the 2 (t - 1)/t. Backward gathers the inputs of
  // column-parallel products once more, because only the rank's tokens are kept.
  for (const Case& c : cases()) {
    INFO(line(c));
    const Model& m = c.model;
    const int64_t t = c.layout.tp, b = c.train.micro_batch, tokens = b * c.train.seq_len, micro_batches = c.train.grad_accumulation;
    const bool again = c.layout.recompute == Recompute::kFull;
    // Of a layer: 2 sums of forward and 2 of backward are scattered; 2 inputs and 2 gradients of outputs are gathered, and 2 inputs once
    // more. Full recompute repeats one of forward's sums, and its gathers are the second ones.
    const int64_t scatters = again ? 5 : 4, gathers = 6;
    const int64_t parts = m.layers * (scatters + gathers) + 2 /* embedding */ + 3 /* head */;
    const int64_t vectors = m.is_llama() ? 2 * m.layers + 1 : 6 * m.layers + 2;
    const int64_t gradients = vectors * b * m.hidden, loss = 3 * tokens;
    CHECK(sent_over_tp(c) == micro_batches * (t - 1) * 4 * (parts * tokens * m.hidden + 2 * (gradients + loss)));

    Case whole = c;
    whole.layout.sequence_parallel = false;
    const int64_t second_gathers = m.layers * (again ? 1 : 2) + 1;
    CHECK(sent_over_tp(c) - sent_over_tp(whole) ==
          micro_batches * (t - 1) * 4 * (second_gathers * tokens * m.hidden + 2 * gradients));
    const Plan plan = plan_of(c);
    CHECK(count_of(plan, "layer.F", CollectiveKind::kReduceScatter) == 2);
    CHECK(count_of(plan, "layer.F", CollectiveKind::kAllGather) == 2);
    CHECK(count_of(plan, "layer.F", CollectiveKind::kAllReduce) == 0);
    CHECK(count_of(plan, "layer.B", CollectiveKind::kReduceScatter) == scatters - 2);
    CHECK(count_of(plan, "layer.B", CollectiveKind::kAllGather) == 4);
    CHECK(count_of(plan, "layer.B", CollectiveKind::kAllReduce) == 0);
  }
}

TEST_CASE("sequence parallelism keeps 1/t of all activations of a layer") {
  // Equations 1, 2 and 4: tensor parallelism alone leaves 10 of the 34 s b h bytes whole; with sequence parallelism all are 1/t.
  for (const Case& c : cases()) {
    INFO(line(c));
    const int64_t t = c.layout.tp;
    Case one = c, whole = c;
    one.layout.tp = 1, one.layout.sequence_parallel = whole.layout.sequence_parallel = false;
    const int64_t kept = kept_by_a_layer(plan_of(c));
    CHECK(kept * t == kept_by_a_layer(plan_of(one)));
    CHECK(kept < kept_by_a_layer(plan_of(whole)));
    if (c.layout.recompute == Recompute::kFull) CHECK(kept * t == kept_by_a_layer(plan_of(whole)));
  }
}

TEST_CASE("ranks that share kv heads gather rows in forward and gradients by head in backward, and send as much for all else") {
  for (const int64_t kv_heads : {1, 2})
    for (const bool sequence_parallel : {false, true})
      for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
        Case c = base_case(Family::kLlama, 4, 2);
        c.layout.sequence_parallel = sequence_parallel;
        c.layout.recompute = recompute;
        Case whole = c;  // as many kv heads as ranks
        c.model.kv_heads = kv_heads;
        INFO(line(c) << " kv heads " << kv_heads);
        const Model& m = c.model;
        const int64_t t = c.layout.tp, tokens = c.train.micro_batch * c.train.seq_len, d = m.head_dim;
        const int64_t forward = (m.heads + 2 * m.kv_heads) * d, backward = (m.heads + 2 * t) * d;
        const int64_t runs = recompute == Recompute::kFull ? 2 : 1;
        CHECK(sent_over_tp(c) - sent_over_tp(whole) ==
              m.layers * c.train.grad_accumulation * (t - 1) * 4 * tokens * (runs * forward + backward));
        CHECK(kept_by_a_layer(plan_of(c)) == kept_by_a_layer(plan_of(whole)));  // a rank has one kv head either way
        CHECK(difference_from_replay(plan_of(c, true)) == "");
      }
}

TEST_CASE("collective matmul sends what sequence parallelism sends, in messages of a strip") {
  // Wang et al. (2023), section 3: a gather and a scatter of n ranks are n - 1 messages of a shard from each.
  for (const Case& plain : cases()) {
    Case c = plain;
    c.layout.tensor_overlap = true;
    INFO(line(c));
    const Plan plan = plan_of(c);
    const int64_t t = c.layout.tp, tokens = c.train.micro_batch * c.train.seq_len;
    const int64_t whole = 4 * tokens * c.model.hidden, layers = c.model.layers * c.train.grad_accumulation;
    // Under full recompute the second gathers are gathers, and the repeated products bring their input beside them.
    const int64_t again = c.layout.recompute == Recompute::kFull ? 2 : 0;
    CHECK(sent_over_tp(c) - sent_over_tp(plain) == layers * again * (t - 1) * whole);
    CHECK(kept_by_a_layer(plan) == kept_by_a_layer(plan_of(plain)));
    CHECK(count_of(plan, "layer.F", CollectiveKind::kAllGather) == 0);
    CHECK(count_of(plan, "layer.F", CollectiveKind::kReduceScatter) == 0);
    CHECK(count_of(plan, "layer.B", CollectiveKind::kAllGather) == 2);  // for gradients of weights
    CHECK(count_of(plan, "layer.B", CollectiveKind::kReduceScatter) == 0);
    for (const Segment& segment : plan.segments)
      for (const Step& step : segment.steps)
        if (const Op* op = std::get_if<Op>(&step); op != nullptr && op->strategy == "tensor-overlap")
          if (std::holds_alternative<Send>(op->work)) CHECK(segment.slots[op->reads[0].index()].type.bytes() * t == whole);
  }
}

TEST_CASE("products in strips do the work of the whole product") {
  for (const int t : {2, 4}) {
    Case plain = base_case(Family::kGpt, t, 2), c = plain;
    c.layout.tensor_overlap = true;
    const auto flops = [](const Case& of) {
      const Plan plan = plan_of(of);
      std::map<std::string, int64_t> by_label;
      for (const Segment& segment : plan.segments)
        for (const Step& step : segment.steps)
          if (const Op* op = std::get_if<Op>(&step); op != nullptr && std::holds_alternative<Linear>(op->work)) {
            std::string label = op->label;
            if (std::get<Linear>(op->work).turn != 0) label.resize(label.rfind('.'));
            by_label[segment.name + " " + label] += work_of(segment, *op, plan.mesh).flops.value;
          }
      return by_label;
    };
    CHECK(flops(c) == flops(plain));
  }
}

TEST_CASE("in the timeline strips travel while others are multiplied") {
  for (const int t : {2, 4, 8}) {
    Case c = base_case(Family::kGpt, t, 1);
    c.model.hidden = 8192, c.model.heads = c.model.kv_heads = 64, c.model.head_dim = 128, c.model.ffn = 4 * 8192;
    c.model.max_positions = c.train.seq_len = 4096;
    c.train.precision = Precision::kBf16;
    c.train.global_batch_tokens = 2 * 4096;
    c.machine.nodes = 1, c.machine.devices_per_node = 8;
    Device& d = c.machine.device;
    d.id = "hopper-like", d.architecture = "hopper", d.memory_bytes = 80'000'000'000, d.memory_bytes_per_s = 3.35e12;
    d.link_bytes_per_s = 450e9, d.peak_flops = {{"fp32", 67e12}, {"bf16", 989.4e12}};
    const auto costs = cost_model_for(c.machine, c.train.precision);
    REQUIRE(costs.ok());
    double exposed[2] = {}, step[2] = {};
    for (const bool in_strips : {false, true}) {
      c.layout.tensor_overlap = in_strips;
      const Plan plan = plan_of(c);
      const std::vector<Program> programs{expand_program(plan, 0)};
      const Trace trace = simulate(plan, programs, c.machine, **costs, {.max_individual_ranks = 1});
      exposed[in_strips] = analyse(plan, programs, trace, 0, 0).exposed_comm_s, step[in_strips] = step_seconds(trace);
      if (!in_strips) continue;
      const auto op_of = [&](const TraceEvent& e) -> const Op& {
        return *programs[0].instructions[static_cast<size_t>(e.instruction)].op;
      };
      double arriving = 0, covered = 0;  // seconds of the messages of feed-forwards' first products; of them while one ran
      for (const TraceEvent& e : trace.events) {
        if (e.kind != TraceEvent::Kind::kOp || !op_of(e).label.starts_with("receive.mlp.up.strip")) continue;
        arriving += e.end - e.begin;
        for (const TraceEvent& other : trace.events)
          if (other.rank == e.rank && other.kind == TraceEvent::Kind::kOp && std::holds_alternative<Linear>(op_of(other).work))
            covered += std::max(0.0, std::min(e.end, other.end) - std::max(e.begin, other.begin));
      }
      INFO("tp " << t << ": " << covered << " of " << arriving);
      CHECK(arriving > 0);
      CHECK(covered > 0.9 * arriving);
    }
    INFO("tp " << t << ": step " << step[0] << " and " << step[1] << ", exposed " << exposed[0] << " and " << exposed[1]);
    CHECK(step[1] < step[0]);
    CHECK(exposed[1] < 0.7 * exposed[0]);
  }
}

TEST_CASE("peak, classes and wire bytes of collective matmul equal the plan's replay") {
  for (Case c : cases()) {
    c.layout.tensor_overlap = true;
    INFO(line(c));
    REQUIRE(difference_from_replay(plan_of(c, true)) == "");
    c.layout.pp = 3;
    c.layout.schedule = Schedule::kZbH1;
    REQUIRE(difference_from_replay(plan_of(c, true)) == "");
  }
}

TEST_CASE("peak, classes and wire bytes under sequence parallelism equal the plan's replay") {
  for (Case c : cases()) {
    INFO(line(c));
    REQUIRE(difference_from_replay(plan_of(c, true)) == "");
    c.layout.pp = 3;
    c.layout.schedule = Schedule::k1F1B;
    REQUIRE(difference_from_replay(plan_of(c, true)) == "");
    // A message between stages is the rank's tokens.
    const int64_t message = 4 * c.train.micro_batch * c.train.seq_len * c.model.hidden;
    int64_t hops = 0;
    for (const auto& [comm, bytes] : total_wire_bytes(plan_of(c)))
      if (comm.starts_with("pp.fwd") || comm.starts_with("pp.bwd")) hops += bytes;
    CHECK(hops == 2 * 2 * c.train.grad_accumulation * message);
  }
}

TEST_CASE("whole experts gather and scatter no tokens, exchange the rows of their own, and sum the router's gradient over tp") {
  // Liu et al. (2025): groups that share experts lie along tp too. Beside slices of experts sequence parallelism gathers tokens before
  // the router, their gradients behind the experts, and tokens once more for the router's gradient; it scatters two sums; and gradients of
  // weights, k a token, are added up.
  for (const int t : {2, 4})
    for (const int64_t shared : {0, 1})
      for (const int64_t b : {1, 3}) {
        Case slices = base_case(Family::kLlama, t, b);
        slices.model.experts = {.count = 8, .top_k = 2, .ffn = 16, .shared = shared};
        slices.layout.dp = slices.layout.ep = 2;
        slices.train.global_batch_tokens *= 2;
        Case whole = slices;
        whole.layout.ep = 2 * t, whole.layout.expert_tp = 1;
        INFO(t << " " << shared << " " << b);
        const Model& m = slices.model;
        const int64_t micro_batches = slices.train.grad_accumulation, tokens = b * slices.train.seq_len, h = m.hidden,
                      k = m.experts.top_k;
        const int64_t all_reduced = 2 * (tokens * k - m.experts.count * h);  // of slices less of whole experts
        // Shared experts stay slices: their sums are scattered, and their inputs gathered, as those of both are beside slices.
        const int64_t moved = shared > 0 ? 0 : 5 * tokens * h;
        CHECK(sent_over_tp(slices) - sent_over_tp(whole) == 2 * m.layers * micro_batches * 4 * (t - 1) * (moved + all_reduced));
        const auto exchanged = [&](const Case& c) { return total_wire_bytes(plan_of(c)).at("ep"); };
        // Counts before rows: n - 1 ranks get those of their experts, e/n each.
        const auto counts = [&](int64_t n) { return m.layers * micro_batches * 2 * t * 4 * m.experts.count / n * (n - 1); };
        const auto rows = [&](int64_t n, int64_t parts) {
          return m.layers * micro_batches * 2 * t * 4 * 4 * (tokens / parts * k * h / n) * (n - 1);
        };
        CHECK(exchanged(slices) == rows(2, 1) + counts(2));
        CHECK(exchanged(whole) == rows(2 * t, t) + counts(2 * t));
      }
}

TEST_CASE("whole experts: a rank keeps as many weights of experts, and the router's words and rows of its own tokens alone") {
  Case slices = base_case(Family::kLlama, 4, 2);
  slices.model.experts = {.count = 8, .top_k = 2, .ffn = 16};
  slices.layout.dp = slices.layout.ep = 2;
  slices.train.global_batch_tokens *= 2;
  Case whole = slices;
  whole.layout.ep = 8, whole.layout.expert_tp = 1;
  const auto elements = [](const Case& c, std::string_view name) {
    const Plan plan = plan_of(c);
    for (const Segment& segment : plan.segments)
      if (segment.name == "layer.F")
        for (const Slot& slot : segment.slots)
          if (slot.name == name) return slot.type.shape.elements();
    return int64_t{-1};
  };
  const int64_t tokens = 2 * 48, k = 2, h = 64, f = 16;
  for (const auto& [name, of_slices, of_whole] :
       {std::tuple<std::string_view, int64_t, int64_t>{"moe.wup", 4 * 2 * f / 4 * h, 2 * f * h},
        {"moe.wdown", 4 * h * f / 4, h * f},
        {"moe.logits", tokens * 8, tokens / 4 * 8},
        {"moe.choice", tokens * k, tokens / 4 * k},
        {"rows.out", tokens * k * h, tokens / 4 * k * h},
        {"rows.in.there", 2 * tokens * k * h, 8 * tokens / 4 * k * h},
        {"rows.u", 2 * tokens * k * 2 * f / 4, 8 * tokens / 4 * k * 2 * f}}) {
    INFO(name);
    CHECK(elements(slices, name) == of_slices);
    CHECK(elements(whole, name) == of_whole);
  }
}

}  // namespace shardlab::testing
