#include "tests/reports/sample.h"

#include <fmt/format.h>

#include <cmath>

#include "plan/base/hash.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

namespace {

/// A number in [0, 1) that depends on the two keys only.
double noise(uint64_t a, uint64_t b = 0) { return static_cast<double>(mix(a * 7919 + b) >> 11) * 0x1.0p-53; }

Machine sample_machine() {
  Machine m;
  m.id = "local";
  m.local = true;
  m.cores = 2;
  m.devices_per_node = 2;
  m.device.id = "local-cpu";
  m.device.memory_bytes = int64_t{256} << 20;
  m.device.memory_bytes_per_s = 11e9;
  m.device.peak_flops["fp32"] = 250e9;
  m.device.provenance["peak_flops"] = Provenance::kMeasured;
  Calibration calibration;
  calibration.id = "2026-05-04-91ac";
  calibration.kernel_variant = "avx2";
  calibration.points.push_back({"linear.F", {512, 1024, 256}, 1, 0.00312, 0.04, 40});
  m.calibration = std::make_shared<const Calibration>(std::move(calibration));
  return m;
}

Case sample_case(const std::string& name, const Layout& layout) {
  Case c;
  c.name = name;
  c.model = Model{"quick-gpt", Family::kGpt, 4, 192, 6, 6, 32, 768, 256, 128, true};
  c.layout = layout;
  c.train.seq_len = 128;
  c.train.global_batch_tokens = 4096;
  c.train.micro_batch = 2;
  c.train.grad_accumulation = 16 / layout.dp;
  c.data.text = "docs";
  c.machine = sample_machine();
  return c;
}

struct OpShape {
  const char *label, *kind;
  int count;
  double flops, bytes, payload, share;
};

constexpr OpShape kOps[] = {
    {"layer.F attn.qkv", "linear.F", 64, 226e6, 1.6e6, 0, 0.09},    {"layer.F attn.core", "attention.F", 64, 13e6, 0.9e6, 0, 0.06},
    {"layer.F attn.out", "linear.F", 64, 75e6, 0.9e6, 0, 0.04},     {"layer.F mlp.up", "linear.F", 64, 302e6, 1.9e6, 0, 0.10},
    {"layer.F mlp.act", "activation.F", 64, 6e6, 1.6e6, 0, 0.02},   {"layer.F mlp.down", "linear.F", 64, 302e6, 1.9e6, 0, 0.10},
    {"layer.B mlp.down", "linear.I", 64, 302e6, 1.9e6, 0, 0.10},    {"layer.B mlp.down", "linear.W", 64, 302e6, 2.4e6, 0, 0.11},
    {"layer.B mlp.up", "linear.I", 64, 302e6, 1.9e6, 0, 0.10},      {"layer.B mlp.up", "linear.W", 64, 302e6, 2.4e6, 0, 0.11},
    {"layer.B attn.core", "attention.I", 64, 32e6, 1.6e6, 0, 0.11}, {"layer.B norm1", "norm.I", 64, 2e6, 0.8e6, 0, 0.02},
    {"head.F loss", "cross_entropy", 16, 2e6, 0.3e6, 0, 0.01},      {"update adamw", "adamw", 38, 20e6, 28e6, 0, 0.02},
    {"grads all_reduce", "all_reduce", 6, 0, 14e6, 7.1e6, 0.01},    {"layer.F tp.out", "all_reduce", 64, 0, 0.4e6, 196608, 0.01},
};

void add_ops(CaseOutcome& o, uint64_t key) {
  for (const OpShape& shape : kOps) {
    const bool reduction = shape.payload > 0;
    if (reduction && (o.config.layout.dp == 1 || shape.label[0] != 'g') && (o.config.layout.tp == 1 || shape.label[0] != 'l'))
      continue;
    const double predicted = shape.share * o.predicted->compute_s;
    const double measured =
        predicted * (1 + 0.16 * (noise(key, static_cast<uint64_t>(shape.flops) + static_cast<uint64_t>(shape.count)) - 0.45));
    for (int stage = 0; stage < o.config.layout.pp; ++stage)
      o.ops.push_back({stage, shape.label, shape.kind, shape.count, shape.flops * shape.count, shape.bytes * shape.count,
                       shape.payload * shape.count, predicted / o.config.layout.pp, measured / o.config.layout.pp});
  }
}

MemoryByClass memory_of(const Layout& l) {
  MemoryByClass m;
  const int64_t parameters = int64_t{7'500'800} / (l.tp * l.pp) / 64 * 64;
  const auto set = [&](BufferClass c, int64_t bytes) { m.bytes[static_cast<size_t>(c)] = bytes; };
  set(BufferClass::kParameter, parameters);
  set(BufferClass::kGradient, parameters);
  set(BufferClass::kMoment, 2 * parameters / (l.zero > 0 ? l.dp : 1) / 64 * 64);
  set(BufferClass::kActivation, (l.recompute == Recompute::kFull ? int64_t{6} : int64_t{31}) * (1 << 20) / (l.tp * l.pp));
  set(BufferClass::kTemporary, 2'359'296 / l.tp);
  set(BufferClass::kBuffer, l.dp > 1 ? 1 << 20 : 0);
  set(BufferClass::kInput, 8192);
  set(BufferClass::kMetric, 128);
  return m;
}

CaseOutcome ok_outcome(const std::string& name, const Layout& layout) {
  CaseOutcome o;
  o.config = sample_case(name, layout);
  const uint64_t key = hash_text(name);
  o.case_id = fmt::format("{:016x}", key);
  o.parameters = 1'875'200;
  const int ranks = layout.world_size();
  const double cost = 0.412 / std::min(2, ranks) * (1 + 0.04 * (ranks - 1)) * (layout.recompute == Recompute::kFull ? 1.31 : 1);

  Prediction& p = o.predicted.emplace();
  p.step_s = cost;
  p.bubble_fraction = layout.pp > 1 ? (layout.pp - 1.0) / static_cast<double>(o.config.train.grad_accumulation + layout.pp - 1) : 0;
  p.exposed_comm_s = ranks > 1 ? cost * 0.03 * layout.tp : 0;
  p.compute_s = cost * (0.97 - p.bubble_fraction) - p.exposed_comm_s;
  p.memory = memory_of(layout);
  for (const int64_t bytes : p.memory.bytes) p.peak_bytes += bytes;
  p.arena_bytes = p.peak_bytes + 4096;
  p.wire_bytes = layout.dp > 1 ? 2 * (layout.dp - 1) * 7'500'800LL : 0;
  p.wire_bytes += (layout.tp - 1) * 50'331'648LL + (layout.pp - 1) * 6'291'456LL;
  p.calibration_id = "2026-05-04-91ac";
  p.extrapolated = ranks == 8;

  Measurement& m = o.measured.emplace();
  m.step_s = cost * (1 + (ranks <= 2 ? 0.13 : 0.34) * (noise(key) - 0.4));
  m.step_spread = 0.02 + 0.05 * noise(key, 1);
  m.samples = 30;
  m.repeats = 3;
  m.compute_s = p.compute_s * m.step_s / p.step_s;
  m.exposed_comm_s = p.exposed_comm_s * 1.1;
  m.bubble_fraction = p.bubble_fraction * 1.05;
  m.unplanned_time_s = m.step_s * (ranks <= 2 ? 0.012 : 0.06);
  // Idle is what neither compute nor half of the communication, whose other half waits, fills.
  p.idle.idle_s = p.step_s - p.compute_s - 0.5 * p.exposed_comm_s;
  p.idle.peer_s = 0.75 * p.idle.idle_s, p.idle.other_s = 0.25 * p.idle.idle_s;
  m.idle.idle_s = std::max(m.step_s - m.compute_s - 0.5 * m.exposed_comm_s, 1.25 * m.unplanned_time_s);
  m.idle.peer_s = 0.25 * m.idle.idle_s, m.idle.dependency_s = 0.625 * m.idle.idle_s, m.idle.tail_s = 0.125 * m.idle.idle_s;
  m.peak_bytes = p.peak_bytes;
  m.arena_bytes = p.arena_bytes;
  m.resident_bytes = p.arena_bytes * ranks + (38 << 20);
  m.unplanned_memory_bytes = 1'204'224;
  m.wire_bytes = p.wire_bytes;
  for (int step = 0; step < 60; ++step)
    m.losses.push_back(2.15 + 3.42 * std::exp(-step / 11.0) + 0.05 * noise(99, static_cast<uint64_t>(step)) +
                       (ranks > 1 ? 2e-6 * (1 + step / 6.0) * noise(key, static_cast<uint64_t>(step)) : 0));
  m.loss_unigram = 3.2187;
  m.val_loss = 2.31;
  m.recorder_overhead_s = 61e-9;
  m.kernel_variant = "avx2";
  m.peak_by_rank.assign(static_cast<size_t>(ranks), p.peak_bytes);
  add_ops(o, key);
  return o;
}

CaseOutcome unlucky(const std::string& name, const Layout& layout, Status status, const std::string& reason) {
  CaseOutcome o;
  o.config = sample_case(name, layout);
  o.case_id = fmt::format("{:016x}", hash_text(name));
  o.parameters = 1'875'200;
  o.status = status;
  o.reason = reason;
  return o;
}

/// A stage of a pipeline that fills, and memory that rises with every forward and falls with every backward.
void add_row(const CaseOutcome& o, int rank, int stage, Timeline& t) {
  TimelineRow row{rank, stage, {}, {}};
  LiveCurve live;
  live.rank = rank, live.stage = stage;
  MemoryByClass bytes = o.predicted->memory;
  const double slot = o.predicted->compute_s / 24;
  for (int k = 0; k < 8; ++k) {
    const double at = slot * (stage + 3 * k);
    for (auto* side : {&row.predicted, &row.measured}) {
      const double slower = side == &row.measured ? 1.08 : 1;
      side->push_back({'F', k, stage, slower * at, slower * (at + slot)});
      side->push_back({'B', k, stage, slower * (at + slot), slower * (at + 3 * slot)});
    }
    live.points.push_back({at, bytes});
    bytes.bytes[static_cast<size_t>(BufferClass::kActivation)] += k % 2 == 0 ? 5 << 20 : -(5 << 20);
  }
  live.items = {{"layers*.wqkv", BufferClass::kParameter, 9 << 20}, {"layer*.qkv", BufferClass::kActivation, 5 << 20}};
  live.peak_bytes = o.predicted->peak_bytes;
  t.rows.push_back(std::move(row));
  t.live.push_back(std::move(live));
}

/// Lanes of back-to-back ops, the predicted ones a little shorter.
Timeline sample_timeline(const CaseOutcome& o) {
  Timeline t;
  t.case_id = o.case_id;
  t.label = o.config.name;
  t.measured_step = 17;
  for (const OpShape& s : kOps) t.ops.push_back({fmt::format("layers.1 m0 {}", s.label), s.kind, s.flops, s.bytes, s.payload});
  const auto collective = static_cast<int32_t>(t.ops.size()) - 2;
  for (int rank = 0; rank < o.config.layout.world_size(); ++rank) {
    const int stage = rank / (o.config.layout.dp * o.config.layout.tp);
    TimelineLane compute{rank, stage, "compute", {}, {}}, comm{rank, stage, "comm", {}, {}};
    double measured = 0, predicted = 0;
    for (int repeat = 0; repeat < 16; ++repeat)
      for (int32_t op = 0; op < collective; ++op) {
        const double seconds = kOps[op].share * o.predicted->compute_s / 16,
                     real = seconds * (0.94 + 0.15 * noise(static_cast<uint64_t>(rank * 1000 + repeat), static_cast<uint64_t>(op)));
        if (op == 12) compute.measured.push_back({collective, measured, measured + 0.0004, 0, true}), measured += 0.0004;
        compute.measured.push_back({op, measured, measured + real, 0, false});
        compute.predicted.push_back({op, predicted, predicted + seconds, 0, false});
        measured += real;
        predicted += seconds;
        if (op == 9 && o.config.layout.dp > 1 && repeat >= 12) {
          comm.measured.push_back({collective, measured, measured + 0.0031, 0.0012, false});
          comm.predicted.push_back({collective, predicted, predicted + 0.0019, 0, false});
        }
      }
    t.lanes.push_back(compute);
    if (!comm.measured.empty()) t.lanes.push_back(comm);
    if (rank == 0 || t.rows.back().stage != stage) add_row(o, rank, stage, t);
  }
  return t;
}

constexpr int kOpsOfCall = 30;

Layout with(int dp, int tp, int pp, int zero = 0, bool recompute = false, Schedule schedule = Schedule::k1F1B) {
  Layout l;
  l.dp = dp;
  l.tp = tp;
  l.pp = pp;
  l.zero = zero;
  l.schedule = pp > 1 ? schedule : Schedule::kNone;
  l.recompute = recompute ? Recompute::kFull : Recompute::kNone;
  return l;
}

}  // namespace

CaseOutcome small_outcome() {
  CaseOutcome o;
  o.case_id = "00000000000000a1";
  o.program_version = "0.1.0";
  o.config = sample_case("one", Layout{});
  o.parameters = 1'875'200;
  Prediction& p = o.predicted.emplace();
  p.step_s = 0.09;
  p.compute_s = 0.088;
  p.peak_bytes = 50'000'000;
  p.arena_bytes = 50'004'096;
  p.calibration_id = "2026-05-04-91ac";
  p.memory.bytes[0] = 50'000'000;
  Measurement& m = o.measured.emplace();
  m.step_s = 0.1;
  m.step_spread = 0.03;
  m.samples = 30;
  m.repeats = 3;
  m.compute_s = 0.097;
  m.unplanned_time_s = 0.001;
  m.peak_bytes = 50'000'000;
  m.arena_bytes = 50'004'096;
  m.wire_bytes = 0;
  m.losses = {5.5, 4.25, 3.5, 3.0, 2.75};
  m.loss_unigram = 3.25;
  m.kernel_variant = "avx2";
  m.peak_by_rank = {50'000'000};
  o.ops = {{0, "layer.F mlp.up", "linear.F", 64, 3e8, 1.9e6, 0, 0.05, 0.06},
           {0, "layer.F norm1", "norm.F", 64, 2e6, 8e5, 0, 0.01, 0.01},
           {0, "update adamw", "adamw", 38, 2e7, 2.8e7, 0, 0.028, 0.027}};
  return o;
}

std::vector<CaseOutcome> sweep_outcomes() {
  std::vector<CaseOutcome> all{ok_outcome("single", with(1, 1, 1)),
                               ok_outcome("single-recompute", with(1, 1, 1, 0, true)),
                               ok_outcome("dp2", with(2, 1, 1)),
                               ok_outcome("dp2-zero1", with(2, 1, 1, 1)),
                               ok_outcome("tp2", with(1, 2, 1)),
                               ok_outcome("pp2-afab", with(1, 1, 2, 0, false, Schedule::kAfab)),
                               ok_outcome("pp2-1f1b", with(1, 1, 2)),
                               ok_outcome("dp4", with(4, 1, 1)),
                               ok_outcome("dp4-zero1", with(4, 1, 1, 1)),
                               ok_outcome("dp2-tp2", with(2, 2, 1)),
                               ok_outcome("dp2-pp2", with(2, 1, 2)),
                               ok_outcome("tp2-pp2", with(1, 2, 2)),
                               ok_outcome("pp4-1f1b", with(1, 1, 4)),
                               ok_outcome("dp8-zero1", with(8, 1, 1, 1)),
                               ok_outcome("dp2-tp2-pp2-zero1", with(2, 2, 2, 1))};
  all.push_back(unlucky("tp5", with(1, 5, 1), Status::kRefused, "heads 6 is not divisible by tp 5; try tp 1, 2, 3 or 6"));
  all.push_back(unlucky("wide", with(1, 1, 1), Status::kOom,
                        "needs 312.4 MiB of 256 MiB; try recompute: full, zero: 1 or a smaller micro_batch"));
  all.back().predicted = all.front().predicted;
  all.back().predicted->memory.bytes[static_cast<size_t>(BufferClass::kActivation)] = int64_t{285} << 20;
  all.back().predicted->peak_bytes += int64_t{254} << 20;
  all.push_back(unlucky("slow", with(2, 1, 4), Status::kTimeout, "rank 3 waited 300 s for recv pp.fwd of layers.2 m5"));
  all.push_back(unlucky("broken </script><b>&", with(4, 1, 2), Status::kFailed,
                        "rank 1: killed by signal 9, \"out of memory\", says the system"));
  return all;
}

Report sweep_report() {
  Report r;
  r.title = "quickstart: sixteen layouts of one model";
  r.cases = sweep_outcomes();
  r.metadata.program_version = "0.1.0";
  r.metadata.commit = "34f37e9";
  r.metadata.compiler = "GNU 12.2.0";
  r.metadata.libraries = "oneDNN 2.6.3, fmt 9.1.0";
  r.metadata.command = "shardlab run sweeps/quickstart.yaml --mode both --out runs/quickstart";
  r.metadata.date = "2026-05-04T10:11:12Z";
  r.metadata.host = "bench";
  r.metadata.processor = "Example CPU @ 2.60GHz";
  r.metadata.system = "Linux 6.1, Debian 12";
  r.metadata.cores = 2;
  r.metadata.memory_bytes = int64_t{8} << 30;
  r.metadata.calibration_id = "2026-05-04-91ac";
  r.metadata.recorder_overhead_s = 61e-9;
  r.timelines = {sample_timeline(r.cases[2]), sample_timeline(r.cases[7]), sample_timeline(r.cases[12])};
  CaseDetail& detail = r.details[r.cases[12].case_id];
  for (int stage = 0; stage < 4; ++stage)
    detail.stages.push_back({stage, 1, r.cases[12].predicted->memory, r.cases[12].predicted->peak_bytes,
                             "layers.0 m3 layer.F alloc %qkv", r.cases[12].measured->peak_bytes});
  detail.yaml = "version: 1\nname: pp4-1f1b\n";
  r.details[r.cases[9].case_id].collectives = {
      {"layer.B gradients", "all_reduce", "dp.grads", 2, 1, 4 << 20, 4, Algorithm::kRing, {}},
      {"layer.F attn.out",
       "all_reduce",
       "tp",
       2,
       2,
       1 << 20,
       16,
       Algorithm::kDirect,
       {{Algorithm::kDirect, 1e-3}, {Algorithm::kRing, 2e-3}, {Algorithm::kTree, 2.5e-3}}}};
  r.next = {
      "Not among these cases: micro_batch 4 (predicted: 80.0 ms a step, 12 % more tokens per second, 60.0 MiB of 256 MiB of "
      "memory)."};
  return r;
}

Plan plan_of_calls(int calls) {
  Plan plan;
  plan.name = "calls";
  plan.mesh.axes = {{"pp", 1}, {"dp", 2}};
  plan.streams = {"compute", "comm"};
  Slot slot;
  slot.name = "x";
  slot.type.shape = {16};
  slot.kind = SlotKind::kBound;
  Segment segment{"layer.F", {slot}, {}};
  for (int k = 0; k <= kOpsOfCall; ++k) {
    Op op;
    op.work = Fill{1.0f};
    op.writes = {SlotId(0)};
    op.label = k == kOpsOfCall ? "message" : fmt::format("op{}", k);
    op.stream = k == kOpsOfCall ? StreamId(1) : StreamId(0);
    segment.steps.emplace_back(op);
  }
  plan.segments = {segment};
  Role role;
  Buffer buffer;
  buffer.name = "x";
  buffer.type = slot.type;
  buffer.persistent = true;
  role.buffers = {buffer};
  for (int c = 0; c < calls; ++c) role.program.emplace_back(Call{SegmentId(0), c % 4, c / 4, {BufferId(0)}});
  plan.roles = {role};
  return plan;
}

Trace trace_of_calls(const Program& program) {
  Trace trace;
  trace.producer = "simulator";
  trace.world_size = 2;
  trace.steps = 1;
  double now = 0;
  for (const Instruction& i : program.instructions) {
    TraceEvent e{.instruction = i.id, .stream = i.stream, .begin = now, .end = now + 1e-6};
    const int k = i.id % (kOpsOfCall + 1);
    if (i.stream == 1) {
      e.kind = TraceEvent::Kind::kWait;
      trace.events.push_back(e);
      e.kind = TraceEvent::Kind::kOp;
      e.peer_wait = 1e-7 * i.call;
      e.begin = now + 1.25e-6;
      e.end = e.begin + 2e-6 + e.peer_wait;
      trace.events.push_back(e);
      continue;
    }
    if (k == 0 && i.call > 0) {
      TraceEvent wait = e;
      wait.kind = TraceEvent::Kind::kWait;
      wait.end = now += 4e-6 + 0.5e-9 * i.call;
      trace.events.push_back(wait);
    }
    e.begin = now;
    e.end = now += 1e-6 * (k + 1) + (k + 1 == kOpsOfCall && i.call % 10 == 9 ? 5e-6 : 0);
    trace.events.push_back(e);
  }
  const size_t count = trace.events.size();
  for (size_t n = 0; n < count; ++n) {
    trace.events.push_back(trace.events[n]);
    trace.events.back().rank = 1;
  }
  trace.step_interval = {{0, now}, {0, now}};
  return trace;
}

Report simulated_report() {
  Report report;
  report.title = "simulated";
  report.cases = {ok_outcome("dp2", with(2, 1, 1))};
  report.cases[0].measured.reset(), report.cases[0].ops.clear();
  const Plan plan = plan_of_calls(200);
  const std::vector<Program> programs{expand_program(plan, 0)};
  const Trace trace = trace_of_calls(programs[0]);
  Timeline& timeline = report.timelines.emplace_back(make_timeline(plan, programs, &trace, nullptr));
  timeline.case_id = report.cases[0].case_id;
  timeline.label = "dp2";
  timeline.made_anew = true;
  return report;
}

}  // namespace shardlab::testing
