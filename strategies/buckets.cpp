#include "strategies/buckets.h"

#include <algorithm>
#include <compare>
#include <functional>

#include "strategies/state.h"

namespace shardlab {
namespace {

struct Kind {
  bool decay = true, sliced = false, tied = false;
  friend auto operator<=>(const Kind&, const Kind&) = default;
};

class Bucketing {
 public:
  Bucketing(Draft& draft, StageDraft& stage, int64_t multiple) : draft_(draft), stage_(stage), multiple_(multiple) {}

  /// Backward finishes units from the last to the first, and a unit's parameters together.
  void fill() {
    std::map<Kind, Bucket> open;
    for (int unit = stage_.end_unit - 1; unit >= stage_.first_unit; --unit)
      for (int p = static_cast<int>(draft_.of_unit(unit).parameters.size()) - 1; p >= 0; --p) {
        if (stage_.at(unit, p).merged) continue;
        const Kind kind = kind_of_parameter(unit, p);
        Bucket& bucket = open[kind];
        bucket.decay = kind.decay;
        bucket.tied = kind.tied;
        bucket.members.push_back({unit, p, bucket.elements});
        bucket.elements += gradient(unit, p).type.shape.elements();
        bucket.last_unit = unit;
        if (kind.tied || bucket.elements * 4 >= draft_.config.layout.bucket_bytes) {
          close(std::move(bucket));
          open.erase(kind);
        }
      }
    for (auto& [kind, bucket] : open) close(std::move(bucket));
    std::ranges::stable_sort(stage_.buckets, std::greater(), &Bucket::last_unit);
    for (size_t i = 0; i < stage_.buckets.size(); ++i) declare(stage_.buckets[i], "bucket" + std::to_string(i));
  }

 private:
  Buffer& gradient(int unit, int p) { return stage_.role.buffers[stage_.at(unit, p).gradient.index()]; }

  Kind kind_of_parameter(int unit, int p) {
    const Unit& u = draft_.units[static_cast<size_t>(unit)];
    const Parameter& parameter = draft_.plan.parameters[u.parameters[static_cast<size_t>(p)].index()];
    const bool tied = draft_.config.model.tied_embeddings && parameter.name == "embed.tokens";
    const int tp = draft_.plan.mesh.axis("tp");
    return {parameter.decay, parameter.type.place[static_cast<size_t>(tp)].is_shard(), tied};
  }

  void close(Bucket bucket) { stage_.buckets.push_back(std::move(bucket)); }

  /// Makes the flat buffer and turns the members' gradients into views of it.
  void declare(Bucket& bucket, std::string name) {
    const int tp = draft_.plan.mesh.axis("tp");
    bucket.name = std::move(name);
    const int64_t filled = bucket.elements;
    bucket.elements = (filled + multiple_ - 1) / multiple_ * multiple_;
    const Bucket::Member& first = bucket.members.front();
    Buffer flat;
    flat.name = bucket.name + ".grad";
    flat.type = gradient(first.unit, first.parameter).type;
    flat.type.shape = {bucket.elements};
    // Slices of several dims lie side by side: along tp the bucket as a whole is nobody's shard.
    if (flat.type.place[static_cast<size_t>(tp)].is_shard()) flat.type.place[static_cast<size_t>(tp)] = Placement::local();
    flat.kind = BufferClass::kGradient;
    bucket.gradient = add_buffer(stage_, std::move(flat));
    for (const Bucket::Member& m : bucket.members) {
      const BufferId id = stage_.at(m.unit, m.parameter).gradient;
      stage_.role.buffers[id.index()].view = View{bucket.gradient.value, m.offset, {}};
      std::erase(stage_.whole_step, id);
    }
    stage_.whole_step.push_back(bucket.gradient);
    if (bucket.elements > filled) zero_tail(bucket, filled);
  }

  void zero_tail(const Bucket& bucket, int64_t filled) {
    Buffer tail = stage_.role.buffers[bucket.gradient.index()];
    tail.name = bucket.name + ".padding";
    tail.type.shape = {bucket.elements - filled};
    tail.view = View{bucket.gradient.value, filled, {}};
    const BufferId id = add_buffer(stage_, std::move(tail));
    const std::string name = "padding." + std::to_string(bucket.elements - filled) + "." + signature(draft_, stage_, bucket);
    const SegmentId segment = draft_.cached(name, [&] {
      Op op;
      op.work = Fill{0};
      op.label = "padding";
      op.strategy = "buckets";
      return one_op_segment(name, stage_, {id}, std::move(op), {}, {0});
    });
    Event event;
    event.call = bind(segment, {id});
    stage_.events.insert(stage_.events.begin(), std::move(event));
  }

  Draft& draft_;
  StageDraft& stage_;
  int64_t multiple_;
};

}  // namespace

void fill_buckets(Draft& draft, StageDraft& stage, int64_t multiple) { Bucketing(draft, stage, multiple).fill(); }

void insert_when_complete(Draft& draft, StageDraft& stage, const std::function<Event(const Bucket&)>& make_event) {
  std::vector<Event> events;
  const int last_micro = draft.micro_batches() - 1;
  std::vector<size_t> last_event(stage.state.size(), 0);
  for (size_t i = 0; i < stage.events.size(); ++i) {
    const Event& e = stage.events[i];
    if ((e.kind == Event::Kind::kBackward || e.kind == Event::Kind::kCall) && e.micro_batch == last_micro && stage.holds(e.unit))
      last_event[static_cast<size_t>(e.unit - stage.first_unit)] = i;
  }
  for (size_t i = 0; i < stage.events.size(); ++i) {
    events.push_back(std::move(stage.events[i]));
    if (!draft.config.layout.overlap) continue;
    for (const Bucket& bucket : stage.buckets)
      if (last_event[static_cast<size_t>(bucket.last_unit - stage.first_unit)] == i) events.push_back(make_event(bucket));
  }
  if (!draft.config.layout.overlap)
    for (const Bucket& bucket : stage.buckets) events.push_back(make_event(bucket));
  stage.events = std::move(events);
}

std::string signature(const Draft& draft, const StageDraft& stage, const Bucket& bucket) {
  const Type& type = stage.role.buffers[bucket.gradient.index()].type;
  const bool sliced = type.place[static_cast<size_t>(draft.plan.mesh.axis("tp"))].kind == Place::kLocal;
  return std::to_string(bucket.elements) + (sliced ? ".sliced" : "") + (bucket.tied ? ".tied" : "");
}

StreamId reduction_stream(Draft& draft) { return draft.config.layout.overlap ? draft.stream("dp") : StreamId(0); }

}  // namespace shardlab
