// Pipeline parallelism: consecutive layers on each of p stages; micro-batches flow through them. With one stage it is the plain
// order.
//
// Each message travels as soon as it is made, on a stream of its own per direction and side, and each receive is posted one compute
// slot ahead. A communicator joins one directed edge: stages are paired even to odd and odd to even, so that what a stage
// receives from one neighbour never queues behind what it sends to the other.
//
// Shapes   a message is x[b,s,h] forward and d.x[b,s,h] backward
// Adds     per micro-batch and boundary one send each way of b*s*h
// Memory   layers and their states 1/p; activations of the micro-batches in flight: m (afab), min(m, p - stage) (1f1b), and
//          the messages under way
// Refuses  more stages than layers
// Paper    Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019) and "Megatron-LM" (2021), section 2.2
#include "strategies/pipeline.h"

#include <algorithm>
#include <string>

#include "strategies/draft.h"

namespace shardlab::strategies {

std::vector<PipelineSlot> pipeline_order(Schedule schedule, int stages, int stage, int micro_batches) {
  std::vector<PipelineSlot> order;
  const int warm_up = schedule == Schedule::kAfab ? micro_batches : std::min(micro_batches, stages - 1 - stage);
  for (int j = 0; j < warm_up; ++j) order.push_back({false, j});
  for (int j = warm_up; j < micro_batches; ++j) {
    order.push_back({false, j});
    order.push_back({true, j - warm_up});
  }
  for (int j = micro_batches - warm_up; j < micro_batches; ++j) order.push_back({true, j});
  return order;
}

int first_layer(int layers, int stages, int stage) { return stage * (layers / stages) + std::min(stage, layers % stages); }

namespace {

constexpr std::string_view kName = "pipeline";

/// What a stage alone holds is local to its coordinate on the pipeline axis. A tied table is on both ends of it: its value is
/// replicated, and its gradient the sum of what the two ends find.
void localise(Draft& draft) {
  const size_t axis = static_cast<size_t>(draft.plan.mesh.axis("pp"));
  const bool tied = draft.config.model.tied_embeddings;
  const auto placement = [&](std::string_view name) {
    if (tied && name == "embed.tokens") return Placement::replicate();
    if (tied && name == "d.embed.tokens") return Placement::partial();
    return Placement::local();
  };
  for (UnitTemplate& unit : draft.templates) {
    for (DraftSegment* segment : {&unit.forward, &unit.backward})
      for (size_t s = 0; s < segment->uses.size(); ++s) {
        if (segment->uses[s].use == Use::kNamed) continue;  // the same on every stage
        Slot& slot = segment->segment.slots[s];
        slot.type.place[axis] = placement(slot.name);
      }
    for (UnitParameter& p : unit.parameters) p.type.place[axis] = placement(p.name);
  }
  for (Parameter& p : draft.plan.parameters) p.type.place[axis] = placement(p.name);
}

void assign_stages(Draft& draft) {
  const int stages = draft.config.layout.pp, layers = static_cast<int>(draft.config.model.layers);
  for (int stage = 0; stage < stages; ++stage) {
    StageDraft s;
    s.role.stage = stage;
    s.first_unit = stage == 0 ? 0 : 1 + first_layer(layers, stages, stage);  // unit 0 is the embedding
    s.end_unit = stage == stages - 1 ? draft.unit_count() : 1 + first_layer(layers, stages, stage + 1);
    for (int unit = s.first_unit; unit < s.end_unit; ++unit)
      for (const ParameterId id : draft.units[static_cast<size_t>(unit)].parameters) {
        Parameter& p = draft.plan.parameters[id.index()];
        const bool tied = id.value == 0 && draft.units[static_cast<size_t>(unit)].kind == UnitKind::kHead;
        if (!tied) p.stages.clear();
        if (p.stages.empty() || p.stages.back() != stage) p.stages.push_back(stage);
      }
    draft.stages.push_back(std::move(s));
  }
}

/// The segment that sends or receives one boundary tensor over the directed edge between two stages.
SegmentId message_segment(Draft& draft, bool send, bool gradients, int lower_stage) {
  const std::string parity = lower_stage % 2 == 0 ? "even" : "odd";
  const std::string edge = std::string(gradients ? "pp.bwd." : "pp.fwd.") + parity;
  const std::string name = std::string(send ? "send." : "receive.") + edge.substr(3);
  return draft.cached(name, [&] {
    const CommId comm = draft.comm(edge, AxisSet::of(draft.plan.mesh.axis("pp")));
    const int hop = gradients ? -1 : 1;
    Op op;
    if (send)
      op.work = Send{comm, hop};
    else
      op.work = Recv{comm, -hop};
    (send ? op.reads : op.writes).emplace_back(0);
    op.stream = draft.stream(std::string(gradients ? "pp.bwd." : "pp.fwd.") + (send ? "send" : "receive"));
    op.label = send ? "send" : "receive";
    op.strategy = kName;
    const DraftSegment& layer = gradients ? draft.of(UnitKind::kLayer).backward : draft.of(UnitKind::kLayer).forward;
    Segment segment;
    segment.name = name;
    Slot slot = layer.slot(layer.find(gradients ? "d.y" : "x"));
    slot.name = gradients ? "d.x" : "x";
    segment.slots.push_back(std::move(slot));
    segment.steps.emplace_back(std::move(op));
    return segment;
  });
}

class Timetable {
 public:
  Timetable(Draft& draft, StageDraft& stage) : draft_(draft), stage_(stage), stages_(draft.config.layout.pp) {}

  void build() {
    const int m = draft_.micro_batches();
    std::vector<PipelineSlot> order;
    if (draft_.training)
      order = pipeline_order(draft_.config.layout.schedule, stages_, stage_.role.stage, m);
    else
      for (int j = 0; j < m; ++j) order.push_back({false, j});
    receive(order.front());
    for (size_t i = 0; i < order.size(); ++i) {
      if (i + 1 < order.size()) receive(order[i + 1]);
      compute(order[i]);
      send(order[i]);
    }
  }

 private:
  bool has_neighbour(bool before) const { return before ? stage_.role.stage > 0 : stage_.role.stage < stages_ - 1; }

  void message(Event::Kind kind, const PipelineSlot& slot, int unit, int lower_stage) {
    Event e;
    e.kind = kind;
    e.unit = unit;
    e.micro_batch = slot.micro_batch;
    e.gradients = slot.backward;
    e.call.segment = message_segment(draft_, kind == Event::Kind::kSend, slot.backward, lower_stage);
    stage_.events.push_back(std::move(e));
  }
  /// Forward comes from the stage before, backward from the stage after. `unit` is the one whose input or output arrives.
  void receive(const PipelineSlot& slot) {
    if (!has_neighbour(!slot.backward)) return;
    const int stage = stage_.role.stage;
    message(Event::Kind::kReceive, slot, slot.backward ? stage_.end_unit - 1 : stage_.first_unit,
            slot.backward ? stage : stage - 1);
  }
  void send(const PipelineSlot& slot) {
    if (!has_neighbour(slot.backward)) return;
    const int stage = stage_.role.stage;
    message(Event::Kind::kSend, slot, slot.backward ? stage_.first_unit : stage_.end_unit - 1, slot.backward ? stage - 1 : stage);
  }
  void compute(const PipelineSlot& slot) {
    const int units = stage_.end_unit - stage_.first_unit;
    for (int i = 0; i < units; ++i) {
      Event e;
      e.kind = slot.backward ? Event::Kind::kBackward : Event::Kind::kForward;
      e.unit = slot.backward ? stage_.end_unit - 1 - i : stage_.first_unit + i;
      e.micro_batch = slot.micro_batch;
      e.first = slot.backward && slot.micro_batch == 0;
      stage_.events.push_back(std::move(e));
    }
  }

  Draft& draft_;
  StageDraft& stage_;
  int stages_;
};

}  // namespace

void pipeline(Draft& draft) {
  if (draft.config.layout.pp > 1) localise(draft);
  assign_stages(draft);
  for (StageDraft& stage : draft.stages) Timetable(draft, stage).build();
}

}  // namespace shardlab::strategies
