// Local SGD and DiLoCo: data-parallel ranks are workers that train apart for H steps, each with its own sequences, gradients and
// optimizer state; then an outer optimizer moves what all of them began with by the mean of how far they came, and they begin
// again from there.
//
// The plan's period is the H inner steps and the outer one. `local_workers` gives every worker a view of the parameters that is
// its own: along dp everything that a worker makes is local, and no gradient travels. `outer_step` repeats the timetable of one
// step H times, each with a place of its own for its loss, between a copy of the parameters and the outer step:
//
//   delta    = mean over workers of (start - own): a gradient that points uphill, as the optimizers of inner steps take them.
//              It lies in the parameter's own storage, and is summed there by one all-reduce a parameter
//   velocity = momentum * velocity + delta
//   value    = start - learning_rate * (delta + momentum * velocity)            (Nesterov; delta alone without momentum)
//
// Learning rate 1 without momentum is the mean of the workers: local SGD. Where parameters have fp32 copies, these are what moves.
// Losses too are summed over the workers when the period ends, all H at once, so that no worker waits for another before.
//
// Shapes   as the parameters; losses [H]
// Adds     an all-reduce of the parameters every H steps: 2 Psi (N-1)/N elements sent by each rank, 2 Psi (N-1)/(N H) a step
// Memory   the parameters as the period began, 4 bytes each; as much for the outer momentum, where there is one
// Refuses  dp = 1; ZeRO, compression, optimizer offload; fp16 and guards, whose skipped steps workers would not share; the norm
//          as a metric (each worker clips by its own); buckets; checkpoints, in which no other layout would find the moments
//          (`check`)
// Paper    Stich, "Local SGD Converges Fast and Communicates Little" (2019); Douillard et al., "DiLoCo" (2023), algorithm 1
#include "strategies/diloco.h"

#include <fmt/format.h>

#include <map>

#include "plan/named_kernels.h"
#include "plan/text.h"
#include "strategies/buckets.h"
#include "strategies/draft.h"
#include "strategies/repeated_step.h"
#include "strategies/state.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kDilocoName = "diloco";

int inner_steps(const Draft& draft) { return draft.config.layout.diloco.steps; }

class OuterStep {
 public:
  OuterStep(Draft& draft, StageDraft& stage)
      : draft_(draft), stage_(stage), options_(draft.config.layout.diloco), dp_(draft.plan.mesh.axis("dp")) {}

  void run() {
    const std::vector<Event> step = std::move(stage_.events);
    stage_.events.clear();
    for (const Update& update : stage_.updates) begin(update);
    for (int i = 0; i < options_.steps; ++i) repeat(step, i);
    report_losses();
    share_ = number("share", 1.0f / static_cast<float>(draft_.plan.mesh.size("dp")));
    learning_rate_ = number("learning_rate", options_.learning_rate);
    if (options_.momentum != 0) momentum_ = number("momentum", options_.momentum);
    for (Moved& moved : moved_) reduce(moved);
    for (const Moved& moved : moved_) move(moved);
  }

 private:
  /// One parameter of the outer step.
  struct Moved {
    const Update* update;
    BufferId whole, start;  ///< what moves, the same on all workers; and what it was
    BufferId delta;         ///< the mean's summands, then their sum
  };

  Buffer& buffer(BufferId id) { return stage_.role.buffers[id.index()]; }

  /// Appends a call of one op. Buffers of one type and class share a segment.
  void append(const std::string& what, const std::vector<BufferId>& buffers, Work work, const std::vector<int>& reads,
              const std::vector<int>& writes, StreamId stream = StreamId(0)) {
    std::string key = what;
    for (const BufferId id : buffers)
      key += fmt::format(" {} {}", name_of(buffer(id).kind), print(buffer(id).type, draft_.plan.mesh));
    const SegmentId segment = draft_.cached(key, [&] {
      Op op;
      op.work = std::move(work);
      op.stream = stream;
      op.label = what;
      op.strategy = kDilocoName;
      return one_op_segment(what, stage_, buffers, std::move(op), reads, writes);
    });
    stage_.events.push_back(call_event(bind(segment, buffers)));
  }

  BufferId number(const std::string& name, float value) {
    Buffer b;
    b.name = "outer." + name;
    b.type.shape = {1};
    b.kind = BufferClass::kOther;
    const BufferId id = add_buffer(stage_, std::move(b));
    stage_.whole_step.push_back(id);
    append("outer." + name, {id}, Fill{value}, {}, {0});
    return id;
  }

  /// Begins the period: a copy of the parameters that all workers share.
  void begin(const Update& update) {
    const BufferId whole(buffer(update.value).view->base);
    Buffer start = buffer(whole);
    start.name += ".start";
    start.kind = BufferClass::kMaster;
    start.persistent = false;
    const BufferId copy = add_buffer(stage_, std::move(start));
    stage_.whole_step.push_back(copy);
    append("outer.start", {whole, copy}, Copy{}, {0}, {1});
    moved_.push_back({&update, whole, copy, {}});
  }

  /// The timetable of inner step number `i`, which leaves its loss in a place of its own.
  void repeat(const std::vector<Event>& step, int i) {
    const auto sums = stage_.named.find("loss.sums");
    std::map<BufferId, BufferId> instead;
    if (sums != stage_.named.end() && i > 0) instead[stage_.named.at("loss")] = element_of(stage_, sums->second, i);
    repeat_step(stage_, step, i, instead);
  }

  void report_losses() {
    const auto sums = stage_.named.find("loss.sums");
    if (sums == stage_.named.end()) return;
    const Case& c = draft_.config;
    const BufferId whole = reduced(sums->second, "metrics.dp", "losses", StreamId(0));
    Buffer losses = buffer(whole);
    losses.name = "loss";
    losses.persistent = true;
    losses.view.reset();
    const BufferId report = add_buffer(stage_, std::move(losses));
    for (int i = 0; i < options_.steps; ++i)
      append("loss.mean", {element_of(stage_, whole, i), element_of(stage_, report, i)},
             SumScalars{Rational(1, c.sequences_per_step() * c.train.seq_len)}, {0}, {1});
  }

  /// The sum of the workers' summands, in the summand's own storage.
  BufferId reduced(BufferId part, const std::string& comm, const std::string& label, StreamId stream) {
    Buffer sum = buffer(part);
    sum.name += ".sum";
    sum.type = placed(sum.type, dp_, Placement::replicate());
    if (!sum.view) sum.view = View{part.value, 0, {}};
    const BufferId whole = add_buffer(stage_, std::move(sum));
    append(label, {part, whole},
           Collective{CollectiveKind::kAllReduce, ReduceOp::kSum, draft_.comm(comm, AxisSet::of(dp_)), draft_.algorithm()}, {0},
           {1}, stream);
    return whole;
  }

  void reduce(Moved& moved) {
    Buffer delta = buffer(moved.whole);
    delta.name += ".delta";
    delta.type = placed(delta.type, dp_, Placement::partial());
    delta.persistent = false;
    delta.view = View{moved.whole.value, 0, {}};
    const BufferId summand = add_buffer(stage_, std::move(delta));
    append("outer.delta", {moved.start, moved.update->value, summand}, named("subtract"), {0, 1}, {2});
    moved.delta = reduced(summand, "dp.parameters", "outer.reduce", reduction_stream(draft_));
  }

  void move(const Moved& moved) {
    std::vector<BufferId> buffers{moved.delta, moved.start, share_, learning_rate_};
    std::vector<int> reads{0, 1, 2, 3}, writes{4};
    if (momentum_) {
      Buffer velocity = buffer(moved.whole);
      velocity.name += ".outer";
      velocity.kind = BufferClass::kMoment;
      buffers = {moved.delta, moved.start, share_, learning_rate_, momentum_, add_buffer(stage_, std::move(velocity))};
      reads = {0, 1, 2, 3, 4, 5};
      writes = {6, 5};
    }
    buffers.push_back(moved.whole);
    append("outer.update", buffers, named("outer_step"), reads, writes);
    if (!moved.update->stored) return;
    const BufferId stored(buffer(moved.update->stored).view->base);
    append("outer.round", {moved.whole, stored}, Copy{}, {0}, {1});
  }

  Draft& draft_;
  StageDraft& stage_;
  const Diloco& options_;
  const int dp_;
  std::vector<Moved> moved_;
  BufferId share_, learning_rate_, momentum_;
};

}  // namespace

bool trains_apart(const Draft& draft) { return draft.training && draft.config.layout.diloco.steps > 0; }

BufferId worker_view(Draft& draft, StageDraft& stage, BufferId whole) {
  const int dp = draft.plan.mesh.axis("dp");
  Buffer& all = stage.role.buffers[whole.index()];
  all.type = placed(all.type, dp, Placement::replicate());
  Buffer own = all;
  own.name += ".worker";
  own.type = placed(own.type, dp, Placement::local());
  own.persistent = false;
  own.view = View{whole.value, 0, {}};
  return add_buffer(stage, std::move(own));
}

BufferId worker_loss(Draft& draft, StageDraft& stage) {
  Buffer sums;
  sums.name = "loss.sums";
  sums.type = stage.role.buffers[stage.losses.front().index()].type;
  sums.type.shape = {inner_steps(draft)};
  sums.type.micro = Micro::kSum;
  sums.type = placed(sums.type, draft.plan.mesh.axis("dp"), Placement::partial());
  sums.kind = BufferClass::kMetric;
  const BufferId all = stage.named["loss.sums"] = add_buffer(stage, std::move(sums));
  stage.whole_step.push_back(all);
  std::vector<BufferId> buffers = stage.losses;
  std::vector<int> reads(buffers.size());
  for (size_t i = 0; i < reads.size(); ++i) reads[i] = static_cast<int>(i);
  buffers.push_back(element_of(stage, all, 0));
  const SegmentId segment = draft.cached("loss.sum", [&] {
    Op op;
    op.work = SumScalars{};
    op.label = "loss.sum";
    op.strategy = "metrics";
    return one_op_segment("loss.sum", stage, buffers, std::move(op), reads, {static_cast<int>(reads.size())});
  });
  stage.events.push_back(call_event(bind(segment, buffers)));
  return buffers.back();
}

void local_workers(Draft& draft) {
  for (StageDraft& stage : draft.stages) {
    std::map<BufferId, BufferId> views;
    for (auto& unit : stage.state)
      for (ParameterState& state : unit) {
        if (!views.contains(state.value)) views[state.value] = worker_view(draft, stage, state.value);
        state.value = views.at(state.value);
      }
  }
}

void outer_step(Draft& draft) {
  for (StageDraft& stage : draft.stages) OuterStep(draft, stage).run();
  draft.plan.period = inner_steps(draft);
}

}  // namespace shardlab::strategies
