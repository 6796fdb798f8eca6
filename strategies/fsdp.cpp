// ZeRO stage 3, fully sharded data parallelism: each rank keeps 1/N of everything, parameters included. A unit's parameters are
// gathered before its forward and again before its backward, and freed after; its gradients are reduce-scattered as in ZeRO-2.
//
// The unit of gathering is `fsdp.unit` layers; the embedding and the head are units of their own. The gather of a unit is issued
// when the unit `fsdp.prefetch` places before it begins to compute, on a stream and a communicator of its own, so that gathers and
// scatters overlap with compute and with each other. `fsdp.reshard: false` keeps what forward gathered until the micro-batch's
// backward has used it (FSDP's reshard_after_forward; ZeRO-2's volume for ZeRO-3's rest). What is gathered when it is needed again
// before it would be freed stays: the head's forward and backward follow one another, so the head travels once.
//
// ZeRO++ (zero_plus_plus.h) changes what a gather and a scatter are, and leaves when they are: see Gathers and scatter().
// Where parameters are parked outside the device (`offload: parameters`), a slice is fetched before it is gathered. With dp = 1 it
// is the whole unit, which is fetched to where it computes, and there is neither gather nor scatter.
//
// Shapes   bucket[n], slices [n/N]; a unit has a bucket for each kind of its parameters
// Adds     per micro-batch two all-gathers of the parameters (one without reshard) and a reduce-scatter of the gradients, each
//          Psi (N-1)/N, less the gather that a unit is spared whose backward follows its forward
// Memory   parameters, gradients and moments 1/N; 1 + prefetch units of whole parameters; the units between their first gradient
//          and their scatter
// Refuses  dp = 1 with parameters on the device
// Paper    Rajbhandari et al., "ZeRO" (2020), section 5.3; Zhao et al., "PyTorch FSDP" (2023)
#include "strategies/fsdp.h"

#include <algorithm>
#include <optional>
#include <set>

#include "plan/techniques.h"
#include "strategies/mirrored_stages.h"
#include "strategies/offload_parameters.h"
#include "strategies/shards.h"
#include "strategies/zero_plus_plus.h"

namespace shardlab::strategies {
namespace {

constexpr std::string_view kZero3Name = "zero-3";

/// Consecutive computing events that need the same buckets.
struct Visit {
  std::vector<int> buckets;  ///< indices into the stage's buckets, ascending
  size_t first = 0, last = 0;
};

/// The time for which a bucket's values are whole.
struct Stay {
  size_t issued = 0;      ///< the visit with which its gather begins
  size_t last = 0;        ///< the last visit that uses it
  size_t first = 0;       ///< the first
  bool backward = false;  ///< which begins with a backward
};

class FullyShard {
 public:
  FullyShard(Draft& draft, StageDraft& stage)
      : draft_(draft), stage_(stage), shards_(draft, stage, kZero3Name), parked_(draft, stage) {}

  void run() {
    const ZeroPlusPlus& less = draft_.config.layout.zero_plus_plus;
    fill_buckets(draft_, stage_,
                 {.multiple = shards_.ranks(),
                  .block = less.weights || less.gradients ? kScaleBlock : 0,
                  .layers = draft_.config.layout.fsdp.unit,
                  .whole_step = false});
    for (size_t b = 0; b < stage_.buckets.size(); ++b) {
      owners_.push_back(static_cast<int>(b));
      if (!shards_.shares_values(stage_.buckets[b])) continue;
      for (size_t other = 0; other < stage_.buckets.size(); ++other)
        if (stage_.buckets[other].tied && other != b) owners_.back() = static_cast<int>(other);
    }
    declare_values();
    // Scatters are found by the events of backward, so gathers, which move none of them, may come before or after.
    if (draft_.training) scatter();
    gather_before_use();
    if (draft_.training) update();
  }

 private:
  void scatter() {
    if (!draft_.config.layout.zero_plus_plus.gradients) return scatter_every_micro_batch(draft_, stage_, shards_, kZero3Name);
    QuantisedScatter quantised(draft_, stage_, shards_, {.code = {DType::u8, 4}, .strategy = "quantised-scatter"});
    scatter_every_micro_batch(draft_, stage_, shards_, kZero3Name, [&](const Bucket& bucket, BufferId slice, int micro_batch) {
      return quantised.scatter(bucket, slice, micro_batch);
    });
  }

  /// Whether no other rank has a copy of a bucket's values: experts that all data ranks share are cut already.
  bool stays_whole(const Bucket& bucket) const {
    const Bucket::Member& first = bucket.members.front();
    const Type value = nobodys_shard(draft_, stage_.role.buffers[stage_.at(first.unit, first.parameter).value.index()].type);
    return !parks_parameters(draft_.config) && draft_.plan.mesh.size(shards_.axes_of(value)) == 1;
  }
  bool owns_values(size_t bucket) const { return owners_[bucket] == static_cast<int>(bucket); }

  void declare_values() {
    for (size_t b = 0; b < stage_.buckets.size(); ++b) {
      flat_.emplace_back();
      slices_.emplace_back();
      fetched_.emplace_back();
      if (!owns_values(b)) continue;
      if (stays_whole(stage_.buckets[b])) {
        flat_[b] = shards_.flat_values(stage_.buckets[b], true);
        slices_[b] = shards_.slice_of(flat_[b], stage_.buckets[b].name + ".value.shard");
        continue;
      }
      flat_[b] = shards_.flat_values(stage_.buckets[b], false);
      slices_[b] = shards_.slice_apart(flat_[b], stage_.buckets[b].name + ".value.shard");
      Buffer& slice = stage_.role.buffers[slices_[b].index()];
      slice.kind = BufferClass::kParameter;
      slice.persistent = true;
      if (!parks_parameters(draft_.config)) continue;
      parked_.park(slices_[b]);
      fetched_[b] = shards_.ranks() > 1 ? parked_.on_device(slices_[b]) : BufferId();
    }
  }

  /// Which buckets hold what a unit's forward or backward reads. Backward reads fewer: neither tables of embeddings nor biases.
  using Needs = std::vector<std::vector<int>>;
  Needs needs_by_unit(bool backward) const {
    Needs needs(stage_.state.size());
    for (size_t b = 0; b < stage_.buckets.size(); ++b)
      for (const Bucket::Member& m : stage_.buckets[b].members)
        if (reads(m, backward) && !stays_whole(stage_.buckets[b])) needs[stage_.index_of(m.unit)].push_back(owners_[b]);
    for (auto& list : needs) {
      std::ranges::sort(list);
      list.erase(std::unique(list.begin(), list.end()), list.end());
    }
    return needs;
  }
  bool reads(const Bucket::Member& m, bool backward) const {
    const UnitTemplate& unit = draft_.of_unit(m.unit);
    return std::ranges::any_of((backward ? unit.backward : unit.forward).uses,
                               [&](const SlotUse& u) { return u.use == Use::kParameter && u.parameter == m.parameter; });
  }

  std::vector<Visit> visits() const {
    const Needs forward = needs_by_unit(false), backward = needs_by_unit(true);
    std::vector<Visit> all;
    for (size_t i = 0; i < stage_.events.size(); ++i) {
      const Event& e = stage_.events[i];
      if (!e.computes()) continue;
      // Gradients of parameters are made from what forward saved and from other gradients.
      static const std::vector<int> nothing;
      const size_t u = stage_.index_of(e.unit);
      const auto& needs = e.kind == Event::Kind::kForward ? forward[u] : e.goes_back() ? backward[u] : nothing;
      if (all.empty() || all.back().buckets != needs) all.push_back({needs, i, i});
      all.back().last = i;
    }
    return all;
  }

  /// The stays of each bucket: one a visit, those that meet joined.
  std::vector<std::vector<Stay>> stays(const std::vector<Visit>& visits) const {
    const Fsdp& options = draft_.config.layout.fsdp;
    const size_t ahead = static_cast<size_t>(options.prefetch);
    std::vector<std::vector<Stay>> all(stage_.buckets.size());
    std::vector<std::set<int>> awaiting(stage_.buckets.size());  // micro-batches whose backward has yet to read it
    const Needs read_by_backward = needs_by_unit(true);
    for (size_t v = 0; v < visits.size(); ++v)
      for (const int bucket : visits[v].buckets) {
        const size_t b = static_cast<size_t>(bucket);
        const size_t issued = v >= ahead ? v - ahead : 0;
        const bool kept = !options.reshard && !awaiting[b].empty();
        if (!all[b].empty() && (kept || issued <= all[b].back().last))
          all[b].back().last = v;
        else
          all[b].push_back({issued, v, v, stage_.events[visits[v].first].goes_back()});
        note(visits[v], lowest_reader(bucket, read_by_backward), awaiting[b]);
      }
    return all;
  }

  void note(const Visit& visit, std::optional<int> lowest, std::set<int>& awaiting) const {
    if (!draft_.training || !lowest) return;
    for (size_t i = visit.first; i <= visit.last; ++i) {
      const Event& e = stage_.events[i];
      if (e.kind == Event::Kind::kForward) awaiting.insert(e.micro_batch);
      if (e.goes_back() && e.unit == *lowest) awaiting.erase(e.micro_batch);
    }
  }
  /// The unit whose backward is the last of a micro-batch to read a bucket's values; none if no backward does.
  std::optional<int> lowest_reader(int bucket, const Needs& read_by_backward) const {
    for (size_t u = 0; u < read_by_backward.size(); ++u)
      if (std::ranges::find(read_by_backward[u], bucket) != read_by_backward[u].end()) return stage_.units[u];
    return std::nullopt;
  }

  void gather_before_use() {
    const std::vector<Visit> order = visits();
    const auto by_bucket = stays(order);
    Insertions insertions;
    // Gathers in the order in which they are needed, so that the stream that carries them out never holds one up for a later one.
    std::vector<std::vector<std::pair<Stay, int>>> due(order.size());
    for (size_t b = 0; b < by_bucket.size(); ++b)
      for (const Stay& stay : by_bucket[b]) {
        due[stay.issued].emplace_back(stay, static_cast<int>(b));
        insertions.release_after(order[stay.last].last, free_event(flat_[b]));
      }
    Gathers gathers(*this, by_bucket);
    std::vector<size_t> read_before(by_bucket.size(), 0);  // by bucket: the first visit that finds no earlier read of it under way
    for (size_t v = 0; v < order.size(); ++v) {
      std::ranges::sort(due[v], {}, [](const std::pair<Stay, int>& d) { return std::pair(d.first.first, d.second); });
      for (const auto& [stay, b] : due[v]) {
        const size_t index = static_cast<size_t>(b);
        if (parks_parameters(draft_.config)) {
          fetch(index, order[v], order[std::max(read_before[index], reads_at(v))], insertions);
          read_before[index] = v + 1;
          continue;
        }
        insertions.before(order[v].first, alloc_event(flat_[index]));
        for (Call& call : gathers.calls(index, stay)) insertions.before(order[v].first, call_event(std::move(call)));
      }
    }
    insertions.apply(stage_.events);
  }

  /// How a bucket is made whole: from the slices of all ranks, or in backward from the secondary shard of the node.
  class Gathers {
   public:
    Gathers(FullyShard& step, const std::vector<std::vector<Stay>>& stays) : step_(step) {
      const ZeroPlusPlus& less = step.draft_.config.layout.zero_plus_plus;
      if (less.weights) quantised_.emplace(step.draft_, step.stage_, step.shards_, step.gather_stream());
      if (less.secondary > 0) secondary_.emplace(step.draft_, step.stage_, step.gather_stream());
      for (const auto& list : stays)
        keeps_.push_back(secondary_ && std::ranges::any_of(list, [](const Stay& s) { return s.backward; }));
    }
    std::vector<Call> calls(size_t b, const Stay& stay) {
      const Bucket& bucket = step_.stage_.buckets[b];
      const BufferId slice = step_.slices_[b], flat = step_.flat_[b];
      if (secondary_ && stay.backward) return {secondary_->gather(bucket, flat)};
      std::vector<Call> all{quantised_ ? quantised_->gather(bucket, slice, flat)
                                       : step_.shards_.gather(bucket, slice, flat, step_.gather_stream())};
      if (keeps_[b]) all.push_back(secondary_->keep(bucket, flat));
      keeps_[b] = false;  // the values stay what they are until the end of the step
      return all;
    }

   private:
    FullyShard& step_;
    std::optional<QuantisedGather> quantised_;
    std::optional<SecondaryShard> secondary_;
    std::vector<bool> keeps_;  ///< by bucket: the next gather is the first of the step, and backward gathers too
  };

  /// The visit with which what is gathered with visit `v` is read from NVMe: one further ahead, where anything is fetched ahead.
  size_t reads_at(size_t v) const { return v > 0 && draft_.config.layout.fsdp.prefetch > 0 ? v - 1 : v; }

  /// From where they wait to where they compute: read with one visit, fetched and gathered with the next. What they took on the way
  /// is given up when that has computed.
  void fetch(size_t b, const Visit& visit, const Visit& earlier, Insertions& insertions) {
    for (Event& e : parked_.read(slices_[b])) insertions.before(earlier.first, std::move(e));
    const bool whole = !fetched_[b];
    if (!whole) {
      insertions.before(visit.first, alloc_event(fetched_[b]));
      insertions.before(visit.first, parked_.fetch(slices_[b], fetched_[b]));
    }
    insertions.before(visit.first, alloc_event(flat_[b]));
    insertions.before(visit.first, whole ? parked_.fetch(slices_[b], flat_[b]) : gather(b, fetched_[b]));
    if (!whole) insertions.release_after(visit.last, free_event(fetched_[b]));
    for (Event& e : parked_.give_up(slices_[b])) insertions.release_after(visit.last, std::move(e));
  }

  Event gather(size_t b, BufferId slice) { return call_event(shards_.gather(stage_.buckets[b], slice, flat_[b], gather_stream())); }

  StreamId gather_stream() { return draft_.config.layout.overlap ? draft_.stream("gather") : StreamId(0); }

  void update() {
    for (size_t b = 0; b < stage_.buckets.size(); ++b) {
      if (!owns_values(b)) continue;
      Update update;
      update.unit = stage_.buckets[b].last_unit;
      update.gradient = stage_.buckets[b].reduced;
      update.value = slices_[b];
      update.decay = stage_.buckets[b].decay;
      stage_.updates.push_back(std::move(update));
    }
  }

  Draft& draft_;
  StageDraft& stage_;
  Shards shards_;
  std::vector<int> owners_;  ///< by bucket: the bucket that holds its values
  ParkedParameters parked_;
  std::vector<BufferId> flat_, slices_;
  std::vector<BufferId> fetched_;  ///< the slice on the device, where it is parked and gathered
};

}  // namespace

void fsdp(Draft& draft) {
  for (StageDraft& stage : draft.stages) FullyShard(draft, stage).run();
  sum_slices_over_mirrors(draft);
}

}  // namespace shardlab::strategies
