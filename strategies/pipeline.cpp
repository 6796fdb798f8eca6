// Pipeline parallelism: the layers are cut into parts, consecutive runs; each of p stages holds one part or several, and
// micro-batches flow through them in the order of a schedule (plan/pipeline_schedule.h). With one stage it is the plain order.
//
// The schedule says which stage computes what in which order, and nothing else. What travels follows from it: where a part and the
// next lie on different stages, an activation forward and its gradient back. Each message travels as soon as it is made, on a
// stream of its own per direction and side, and each receive is posted one compute slot ahead, in the order in which the other side
// sends. A communicator joins one directed edge: stages are paired even to odd and odd to even, so that what a stage receives never
// queues behind what it sends.
//
// Where a schedule tells gradients of inputs (I) from gradients of weights (W), `emit` cuts each unit's backward in two pieces.
// What W reads of what I made waits between them, and counts among the activations.
//
// Shapes   a message is x[b,s,h] forward and d.x[b,s,h] backward
// Adds     per micro-batch and boundary between stages one send each way of b*s*h: p - 1 boundaries, p v - 1 of v parts a stage in
//          turn (interleaved, breadth-first), 2 (p - 1) of a V (zb-v, v-half, v-min, dualpipe-v)
// Memory   layers and their states 1/p; activations in flight by schedule (`most_held`), and the messages under way; between I and
//          W also the gradients that W reads: b s (4 h + q + u) elements of a layer, q rows of its qkv and u of its up projection
// Refuses  parts without a layer but for the first and the last. What DualPipe refuses: mirrored_stages.cpp
// Paper    Huang et al., "GPipe" (2019); Narayanan et al., "PipeDream" (2019) and "Megatron-LM" (2021), section 2.2; Lamy-Poirier,
//          "Breadth-First Pipeline Parallelism" (2022); Qi et al., "Zero Bubble Pipeline Parallelism" (2023) and "Pipeline
//          Parallelism with Controllable Memory" (2024); DeepSeek-AI, "DeepSeek-V3" (2024), section 3.2.1
#include "strategies/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>

#include "plan/braids.h"
#include "plan/pipeline_case.h"
#include "strategies/draft.h"
#include "strategies/router_bias.h"

namespace shardlab::strategies {

namespace {

constexpr std::string_view kPipelineName = "pipeline";

/// What an op makes of replicated values alone is replicated: a weight in 8 bits.
void share_what_is_made_of_shared(DraftSegment& segment, size_t axis) {
  const auto place = [&](SlotId id) -> Placement& { return segment.slot(id).type.place[axis]; };
  for (const Step& step : segment.segment.steps) {
    const Op* op = std::get_if<Op>(&step);
    if (op == nullptr || op->reads.empty()) continue;
    if (!std::ranges::all_of(op->reads, [&](SlotId id) { return place(id).kind == Place::kReplicate; })) continue;
    for (const SlotId id : op->writes)
      if (!place(id).is_partial()) place(id) = Placement::replicate();
  }
}

/// What a stage alone holds is local to its coordinate on the pipeline axis. What it shares with its mirror image has a value that
/// is replicated, and a gradient that is the sum of what the two find (mirrored_stages.cpp). A tied table whose two users are on
/// different stages is on both: its value is replicated, and its gradient the sum of what the two find.
void localise(Draft& draft) {
  const size_t axis = static_cast<size_t>(draft.plan.mesh.axis("pp"));
  const bool mirrored = is_mirrored(draft.config.layout.schedule);
  const bool tied = draft.config.model.tied_embeddings && &draft.embedding_stage() != &draft.head_stage();
  const auto placement = [&](std::string_view name, Use use) {
    const bool shared = mirrored || (tied && (name == "embed.tokens" || name == "d.embed.tokens"));
    if (shared && use == Use::kParameter) return Placement::replicate();
    if (shared && use == Use::kGradient) return Placement::partial();
    if (mirrored && name == kRouterLoadSlot) return Placement::partial();
    return Placement::local();
  };
  for (UnitTemplate& unit : draft.templates) {
    for (DraftSegment* segment : {&unit.forward, &unit.backward}) {
      for (size_t s = 0; s < segment->uses.size(); ++s) {
        Slot& slot = segment->segment.slots[s];
        const bool named = segment->uses[s].use == Use::kNamed;
        if (named && slot.type.micro != Micro::kSum) continue;  // the same on every stage
        const bool summand =
            segment->uses[s].use == Use::kLocal && slot.type.micro == Micro::kSum;  // of a gradient: "d.head.weight.copy1"
        slot.type.place[axis] = summand ? placement(slot.name.substr(0, slot.name.rfind(".copy")), Use::kGradient)
                                        : placement(slot.name, segment->uses[s].use);
        const auto saved = segment->uses[s].use == Use::kSaved ? unit.forward.find_if(slot.name) : std::nullopt;
        if (saved && segment == &unit.backward) slot.type.place[axis] = unit.forward.slot(*saved).type.place[axis];
      }
      if (mirrored) share_what_is_made_of_shared(*segment, axis);
    }
    for (UnitParameter& p : unit.parameters) p.type.place[axis] = placement(p.name, Use::kParameter);
  }
  for (Parameter& p : draft.plan.parameters) p.type.place[axis] = placement(p.name, Use::kParameter);
}

/// The parts that a stage holds, and their units.
void assign_stages(Draft& draft, const PipelineSchedule& schedule) {
  const std::vector<int> first = first_layers(draft.config);
  for (int stage = 0; stage < schedule.stages; ++stage) {
    StageDraft s;
    s.role.stage = stage;
    for (const int part : schedule.parts_of(stage)) {
      const int begin = part == 0 ? 0 : 1 + first[static_cast<size_t>(part)];  // unit 0 is the embedding
      const int end = part == schedule.parts - 1 ? draft.unit_count() : 1 + first[static_cast<size_t>(part) + 1];
      s.parts.push_back({part, begin, end});
      for (int unit = begin; unit < end; ++unit) s.units.push_back(unit);
    }
    draft.stages.push_back(std::move(s));
  }
  // A tied table lies on the stage with the embedding and on that with the head.
  for (Parameter& p : draft.plan.parameters) p.stages.clear();
  for (const StageDraft& stage : draft.stages)
    for (const int unit : stage.units)
      for (const ParameterId id : draft.units[static_cast<size_t>(unit)].parameters)
        if (auto& on = draft.plan.parameters[id.index()].stages; on.empty() || on.back() != stage.role.stage)
          on.push_back(stage.role.stage);
}

/// The segment that sends or receives one boundary tensor over a directed edge between two stages. Edges that meet on a stage are
/// on communicators of their own, so that what it receives never queues behind what it sends.
SegmentId message_segment(Draft& draft, bool send, bool gradients, int from, int to) {
  const int hop = to - from, usual = gradients ? -1 : 1;
  std::string traffic = gradients ? "bwd" : "fwd";
  if (hop == -usual) traffic += ".back";
  if (std::abs(hop) > 1) traffic += fmt::format(".hop{}", hop);
  const std::string edge = traffic + (std::min(from, to) / std::abs(hop) % 2 == 0 ? ".even" : ".odd");
  const std::string name = (send ? "send." : "receive.") + edge;
  return draft.cached(name, [&] {
    const CommId comm = draft.comm("pp." + edge, AxisSet::of(draft.plan.mesh.axis("pp")));
    Op op;
    if (send)
      op.work = Send{comm, hop};
    else
      op.work = Recv{comm, -hop};
    (send ? op.reads : op.writes).emplace_back(0);
    op.stream = draft.stream("pp." + traffic + (send ? ".send" : ".receive"));
    op.label = send ? "send" : "receive";
    op.strategy = kPipelineName;
    const UnitTemplate& any = draft.of(draft.layer_kinds().front());
    const DraftSegment& layer = gradients ? any.backward : any.forward;
    Segment segment;
    segment.name = name;
    Slot slot = layer.slot(layer.find(gradients ? "d.y" : "x"));
    slot.name = gradients ? "d.x" : "x";
    segment.slots.push_back(std::move(slot));
    segment.steps.emplace_back(std::move(op));
    return segment;
  });
}

/// What crosses from part to part between two stages: the input of `part`, or the gradient of its output.
struct Message {
  bool gradients = false;
  int part = 0, micro_batch = 0;
  int from = 0, to = 0;
  friend bool operator==(const Message&, const Message&) = default;
};

/// The messages of a schedule. Those over one edge are received in the order in which they are sent.
class Messages {
 public:
  explicit Messages(const PipelineSchedule& schedule) : schedule_(schedule) {
    for (const auto& order : schedule.order)
      for (const PipelineSlot& slot : order)
        if (const auto m = made_by(slot)) edges_[edge_of(*m)].push_back(*m);
  }

  /// What a slot makes for another stage.
  std::optional<Message> made_by(const PipelineSlot& slot) const {
    if (slot.work == SlotWork::kF && slot.part + 1 < schedule_.parts)
      return between(false, slot.part, slot.part + 1, slot.micro_batch);
    if (slot.goes_back() && slot.part > 0) return between(true, slot.part, slot.part - 1, slot.micro_batch);
    return std::nullopt;
  }
  /// What a slot needs from another stage.
  std::optional<Message> needed_by(const PipelineSlot& slot) const {
    if (slot.work == SlotWork::kF && slot.part > 0) return between(false, slot.part - 1, slot.part, slot.micro_batch);
    if (slot.goes_back() && slot.part + 1 < schedule_.parts) return between(true, slot.part + 1, slot.part, slot.micro_batch);
    return std::nullopt;
  }

  /// By slot of a stage: what is received before it begins. Each message is awaited from one slot ahead of its use on.
  std::vector<std::vector<Message>> received(int stage) const {
    const auto& order = schedule_.order[static_cast<size_t>(stage)];
    std::vector<std::vector<Message>> all(order.size());
    std::map<Edge, size_t> posted;
    for (size_t i = 0; i < order.size(); ++i) {
      const auto need = needed_by(order[i]);
      if (!need) continue;
      const auto& edge = edges_.at(edge_of(*need));
      size_t& count = posted[edge_of(*need)];
      const size_t place = static_cast<size_t>(std::ranges::find(edge, *need) - edge.begin());
      for (; count <= place; ++count) all[i > 0 ? i - 1 : 0].push_back(edge[count]);
    }
    return all;
  }

 private:
  using Edge = std::tuple<bool, int, int>;
  static Edge edge_of(const Message& m) { return {m.gradients, m.from, m.to}; }

  std::optional<Message> between(bool gradients, int maker, int reader, int micro_batch) const {
    const int from = schedule_.stage_of(maker, micro_batch), to = schedule_.stage_of(reader, micro_batch);
    if (from == to) return std::nullopt;
    return Message{gradients, reader, micro_batch, from, to};
  }

  const PipelineSchedule& schedule_;
  std::map<Edge, std::vector<Message>> edges_;
};

/// When what is sent is given up: with a slot of the sender that begins two slots later, and no earlier than that at which the
/// receiver begins to wait for it, if every slot takes one unit of time. So no two stages wait for each other, whatever the
/// schedule.
class SendTimes {
 public:
  SendTimes(const PipelineSchedule& schedule, const Messages& messages, const ScheduleTimes& times) : times_(times) {
    for (int stage = 0; stage < schedule.stages; ++stage) {
      const auto received = messages.received(stage);
      for (size_t i = 0; i < received.size(); ++i)
        for (const Message& m : received[i]) awaited_[{m.gradients, m.part, m.micro_batch}] = begin(stage, i);
    }
  }

  /// The slot with which a message that was made in slot `made` of its sender is given up; beyond the last: after all of them, or
  /// where a step follows that many slots into it.
  size_t given_up(const Message& message, size_t made) const {
    const double awaited = awaited_.at({message.gradients, message.part, message.micro_batch});
    const size_t slots = times_.slots[static_cast<size_t>(message.from)].size();
    size_t slot = made + 2;
    while (slot < slots && begin(message.from, slot) < awaited) ++slot;
    return slot;
  }

 private:
  double begin(int stage, size_t slot) const { return times_.slots[static_cast<size_t>(stage)][slot].begin; }

  const ScheduleTimes& times_;
  std::map<std::tuple<bool, int, int>, double> awaited_;
};

class Timetable {
 public:
  Timetable(Draft& draft, StageDraft& stage, const PipelineSchedule& schedule, const Messages& messages, const SendTimes& times,
            const Braids& braids)
      : draft_(draft),
        stage_(stage),
        order_(schedule.order[static_cast<size_t>(stage.role.stage)]),
        messages_(messages),
        times_(times),
        braids_(braids.with_next[static_cast<size_t>(stage.role.stage)]) {}

  void build() {
    const auto received = messages_.received(stage_.role.stage);
    for (size_t i = 0; i < order_.size(); ++i) {
      const size_t slots = braids_[i] ? 2 : 1;
      for (size_t k = i; k < i + slots; ++k)
        for (const Message& m : received[k]) receive(m);
      std::vector<Event> events = events_of(i);
      if (slots == 1)
        std::ranges::move(events, std::back_inserter(stage_.events));
      else if (order_[i].work == SlotWork::kF)
        braid(std::move(events), events_of(i + 1));
      else
        braid(events_of(i + 1), std::move(events));
      for (size_t k = i; k < i + slots; ++k)
        if (const auto made = messages_.made_by(order_[k])) send(*made, k);
      i += slots - 1;
    }
  }

 private:
  const PartDraft& part(int number) const { return *std::ranges::find(stage_.parts, number, &PartDraft::part); }

  Event message(Event::Kind kind, const Message& m, int unit) {
    Event e;
    e.kind = kind;
    e.unit = unit;
    e.micro_batch = m.micro_batch;
    e.gradients = m.gradients;
    e.call.segment = message_segment(draft_, kind == Event::Kind::kSend, m.gradients, m.from, m.to);
    return e;
  }
  /// `unit` is the one whose input, or the gradient of whose output, arrives.
  void receive(const Message& m) {
    const PartDraft& to = part(m.part);
    stage_.events.push_back(message(Event::Kind::kReceive, m, m.gradients ? to.end_unit - 1 : to.first_unit));
  }
  /// `unit` is the one whose output, or the gradient of whose input, leaves.
  void send(const Message& m, size_t slot) {
    const PartDraft& from = part(m.gradients ? m.part + 1 : m.part - 1);
    Event e = message(Event::Kind::kSend, m, m.gradients ? from.first_unit : from.end_unit - 1);
    e.slot = static_cast<int>(times_.given_up(m, slot));
    stage_.events.push_back(std::move(e));
  }
  /// Layers with experts in pairs, the first of a forward with the first of a backward; what else there is in its place.
  void braid(std::vector<Event> a, std::vector<Event> b) {
    const auto has_experts = [&](const Event& e) { return draft_.is_mixture(draft_.units[static_cast<size_t>(e.unit)].kind); };
    size_t i = 0, k = 0;
    const auto others = [&](const std::vector<Event>& events, size_t& at) {
      while (at < events.size() && !has_experts(events[at])) stage_.events.push_back(events[at++]);
    };
    while (i < a.size() || k < b.size()) {
      others(a, i), others(b, k);
      if (i < a.size() && k < b.size()) a[i].braid = b[k].braid = braid_++;
      if (i < a.size()) stage_.events.push_back(a[i++]);
      if (k < b.size()) stage_.events.push_back(b[k++]);
    }
  }

  std::vector<Event> events_of(size_t index) {
    const PipelineSlot& slot = order_[index];
    static constexpr Event::Kind kKinds[] = {Event::Kind::kForward, Event::Kind::kInput, Event::Kind::kWeight,
                                             Event::Kind::kBackward};
    const PartDraft& p = part(slot.part);
    const bool first = slot.makes_gradients() && begun_.insert(slot.part).second;
    std::vector<Event> events;
    for (int i = 0; i < p.end_unit - p.first_unit; ++i) {
      Event e;
      e.kind = kKinds[static_cast<size_t>(slot.work)];
      e.unit = slot.work == SlotWork::kF ? p.first_unit + i : p.end_unit - 1 - i;
      e.micro_batch = slot.micro_batch;
      e.first = first;
      e.slot = static_cast<int>(index);
      events.push_back(std::move(e));
    }
    return events;
  }

  Draft& draft_;
  StageDraft& stage_;
  const std::vector<PipelineSlot>& order_;
  const Messages& messages_;
  const SendTimes& times_;
  const std::vector<bool>& braids_;  ///< by slot: braided with the next
  std::set<int> begun_;              ///< parts whose gradients have a first term
  int braid_ = 0;                    ///< the next
};

/// What a validation step runs: the forwards, in their order.
PipelineSchedule forwards_of(PipelineSchedule schedule) {
  for (auto& order : schedule.order) std::erase_if(order, [](const PipelineSlot& s) { return s.work != SlotWork::kF; });
  return schedule;
}

}  // namespace

void pipeline(Draft& draft) {
  const PipelineSchedule schedule = draft.training ? schedule_of(draft.config) : forwards_of(schedule_of(draft.config));
  assign_stages(draft, schedule);
  if (schedule.stages > 1) localise(draft);
  const Messages messages(schedule);
  const bool braids = draft.config.layout.expert_overlap == ExpertOverlap::kMicroBatches;
  const Braids taken = braids ? braided(schedule) : unbraided(schedule);
  const SendTimes times(schedule, messages, taken.times);
  for (StageDraft& stage : draft.stages) Timetable(draft, stage, schedule, messages, times, taken).build();
}

}  // namespace shardlab::strategies
