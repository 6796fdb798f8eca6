// ZeRO-2, ZeRO-3, offload, and layers that differ, from the configuration: what is gathered and what waits for its reduction
// changes from unit to unit, so the peak is found by going through a stage's step, unit by unit, with the sizes of the literature.
// Nothing of a plan is known here: the rules of when a bucket is there are those of the papers, written a second time.
#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>

#include "simulator/closed_form_parts.h"

namespace shardlab::simulator::forms {
namespace {

/// Forward or backward of one unit of the stage (numbered from its first) for one micro-batch.
struct Visit {
  bool backward = false;
  int64_t unit = 0;
  int64_t micro_batch = 0;
  int64_t slot = 0;  ///< from 1
};

int64_t units_of(const Part& part) { return part.layers + part.first + part.last; }

/// In the order of the step. Which of them go back through a unit is asked for every bucket, so it is found once.
class Visits {
 public:
  explicit Visits(int64_t units) : backward_(static_cast<size_t>(units)) {}
  void push_back(const Visit& visit) {
    if (visit.backward) backward_[static_cast<size_t>(visit.unit)].push_back(all_.size());
    all_.push_back(visit);
  }
  size_t size() const { return all_.size(); }
  const Visit& operator[](size_t v) const { return all_[v]; }
  /// Numbers of the visits that go back through a unit: one for each micro-batch, in order.
  const std::vector<size_t>& backward(int64_t unit) const { return backward_[static_cast<size_t>(unit)]; }

 private:
  std::vector<Visit> all_;
  std::vector<std::vector<size_t>> backward_;
};

Visits visits_of(const Part& part, const Timetable& table) {
  Visits all(units_of(part));
  int64_t forwards = 0, backwards = 0;
  const int64_t units = units_of(part);
  for (int64_t slot = 1; slot <= table.slots(); ++slot) {
    const bool backward = table.backward(slot);
    const int64_t micro = backward ? backwards++ : forwards++;
    for (int64_t i = 0; i < units; ++i) all.push_back({backward, backward ? units - 1 - i : i, micro, slot});
  }
  return all;
}

/// What is allocated (positive bytes) and freed before and after each visit, by class.
struct Change {
  BufferClass cls;
  int64_t bytes;
};
struct Around {
  std::vector<Change> before_scatter, before_gather, fetched, vacated, freed_gather, freed_scatter, after;
  // In host memory, in this order: what is given up late, what parameters are read into, activations read; activations written or
  // forgotten, and taken; parameters given up, gradients given up; and bucket by bucket gradients taken and updates.
  std::vector<Change> host_late, host_read, host_before, host_released, host_after, host_gathered, host_freed;
  /// By bucket, and for each in this order; what waits for all buckets at the end.
  enum Phase : size_t { kTaken, kTurned, kGivenUp, kWorked };
  std::map<std::pair<size_t, Phase>, std::vector<Change>> host_updated;
  std::vector<Change> nvme_after;
};

/// Micro-batches' sums as they are kept apart: whether one begins a further copy (one that is not the step's sum, and is not at
/// once added to another), and how many copies are free after it.
struct Written {
  bool begins = false;
  int64_t freed = 0;
  bool added = false;  ///< to another sum, at once
};
std::vector<Written> written_of(int64_t micro_batches, bool canonical) {
  std::vector<Written> all;
  std::vector<int64_t> held;  // leaves of each sum that is held
  for (int64_t j = 0; j < micro_batches; ++j) {
    held.push_back(1);
    int64_t added = 0;
    for (; held.size() > 1 && (!canonical || j + 1 == micro_batches || held.back() == held[held.size() - 2]); ++added) {
      held[held.size() - 2] += held.back();
      held.pop_back();
    }
    all.push_back({added == 0 && held.size() > 1, std::max<int64_t>(0, added - 1), added > 0});
  }
  return all;
}

/// A bucket's gradients are there from the first backward of its units until they are scattered; with overlap until the next unit
/// is done, or until they are needed again.
void add_gradients(const Case& c, const State& state, const BucketForm& bucket, const Visits& visits, std::vector<Around>& around) {
  const size_t number = static_cast<size_t>(&bucket - state.buckets.data());
  const std::vector<Written> plan = written_of(c.train.grad_accumulation, c.canonical);
  std::map<int64_t, std::pair<size_t, size_t>> spans;  // by micro-batch
  for (const size_t v : visits.backward(bucket.highest)) spans[visits[v].micro_batch].first = v;
  for (const size_t v : visits.backward(bucket.lowest)) spans[visits[v].micro_batch].second = v;
  constexpr BufferClass kGradient = BufferClass::kGradient;
  const int64_t element = Widths(c).gradient;
  const bool leaves = parks_parameters(c) && !bucket.tied;  // sums are formed in host memory
  for (const auto& [micro, span] : spans) {
    const auto& [first, last] = span;
    const Written& w = plan[static_cast<size_t>(micro)];
    const size_t release = c.layout.overlap ? std::min(last + 1, visits.size() - 1) : last;
    const auto next = spans.find(micro + 1);
    const bool again = next != spans.end() && release >= next->second.first;
    auto& freed = again             ? around[next->second.first].before_scatter
                  : release == last ? around[last].after
                                    : around[release].freed_scatter;
    auto& freed_sums = !leaves           ? freed
                       : again           ? around[next->second.first].host_late
                       : release == last ? around[last].host_updated[{number, Around::kGivenUp}]
                                         : around[release].host_freed;
    auto& taken = leaves ? around[last].host_updated[{number, Around::kTaken}] : around[last].after;
    around[first].before_scatter.push_back({kGradient, bucket.bytes(element)});
    const int64_t slice = bucket.slice_bytes(element);
    if (w.begins) taken.push_back({kGradient, slice});
    freed.push_back({kGradient, -bucket.bytes(element)});
    const bool arrives = leaves && w.added;  // what is added to a sum is in host memory beside it
    if (arrives) taken.push_back({kGradient, slice});
    for (int64_t i = 0; i < w.freed + (arrives ? 1 : 0); ++i) freed_sums.push_back({kGradient, -slice});
  }
}

/// The visit with which a bucket's gradients are complete; past the last where they wait for the end of backward: without overlap
/// for their reduction over ranks, a tied table's for its other use.
size_t complete_at(const Case& c, const BucketForm& bucket, const Visits& visits) {
  const bool apart = bucket.tied && (c.layout.pp > 1 || c.canonical || c.layout.zero >= 2);
  if (apart) return visits.size() + 1;  // after the others
  if (c.layout.dp > 1 && !c.layout.overlap && c.layout.zero < 2) return visits.size();
  return visits.backward(bucket.lowest).back();
}

/// With the optimizer's state, or parameters, on NVMe: what of it, and of gradients and results, is in host memory. With overlap
/// the state of the update that comes next is read before this one's gradient arrives, when the one before the last has been
/// written; without, one update at a time after backward. Gradients that stay for the step are counted elsewhere.
void add_staging(const Case& c, const State& state, const Part& part, const Visits& visits, std::vector<Around>& around) {
  const bool states = c.layout.offload.optimizer == OffloadTo::kNvme, values = c.layout.offload.parameters == OffloadTo::kNvme;
  if (!states && !values) return;
  const Widths widths(c);
  std::vector<const BucketForm*> jobs;
  for (const BucketForm& b : state.buckets)
    if (!is_shared(b, part)) jobs.push_back(&b);
  std::ranges::stable_sort(jobs, {}, [&](const BucketForm* b) { return complete_at(c, *b, visits); });
  const int64_t moments = states && c.train.optimizer == Optimizer::kAdamW ? 2 : 0;
  const bool copies = states && (widths.master || !parks_parameters(c));  // of parameters, in fp32
  const auto updated = [&](const BucketForm& b, int64_t e) { return updates_slices(c) ? b.slice_bytes(e) : b.bytes(e); };
  const auto change_state = [&](std::vector<Change>& list, const BucketForm& b, int64_t sign) {
    if (copies) list.push_back({BufferClass::kMaster, sign * updated(b, 4)});
    if (values && !widths.master) list.push_back({BufferClass::kParameter, sign * updated(b, 4)});
    if (moments > 0) list.push_back({BufferClass::kMoment, sign * moments * updated(b, 4)});
  };
  const auto change_gradient = [&](std::vector<Change>& list, const BucketForm& b, int64_t sign) {
    if (!keeps_host_gradients(c)) list.push_back({BufferClass::kGradient, sign * updated(b, widths.gradient)});
  };
  const auto change_result = [&](std::vector<Change>& list, const BucketForm& b, int64_t sign) {
    const bool on_host = c.layout.offload.parameters == OffloadTo::kCpu;  // where the copy is rounded into them
    if (widths.master && !on_host) list.push_back({BufferClass::kBuffer, sign * updated(b, widths.value)});
  };
  const auto forget = [&](std::vector<Change>& list, const BucketForm& b) {
    change_state(list, b, -1), change_gradient(list, b, -1), change_result(list, b, -1);
  };
  std::vector<Change>& end = around.back().host_updated[{SIZE_MAX, Around::kWorked}];
  const auto after = [&](const BucketForm& b, Around::Phase phase) -> std::vector<Change>& {
    const size_t at = complete_at(c, b, visits);
    if (at >= visits.size()) return end;
    return around[at].host_updated[{static_cast<size_t>(&b - state.buckets.data()), phase}];
  };
  if (!c.layout.overlap) {
    for (const BucketForm* b : jobs) change_gradient(after(*b, Around::kTurned), *b, 1);
    for (const BucketForm* b : jobs) change_state(end, *b, 1), change_result(end, *b, 1), forget(end, *b);
    return;
  }
  // Where every update waits for the last gradient, the ring turns after backward.
  const bool waits = c.train.clip_norm > 0 || may_skip(c);
  const size_t first = visits.backward(jobs.front()->highest).front();
  change_state(waits ? end : around[first].host_before, *jobs.front(), 1);
  for (size_t k = 0; k < jobs.size(); ++k) {
    std::vector<Change>& list = waits ? end : after(*jobs[k], Around::kTurned);
    if (k >= 2) forget(list, *jobs[k - 2]);
    if (k + 1 < jobs.size()) change_state(list, *jobs[k + 1], 1);
    change_gradient(list, *jobs[k], 1);
    change_result(waits ? end : after(*jobs[k], Around::kWorked), *jobs[k], 1);
  }
}

/// Gradients that the host is to have: a bucket is there from its first backward of the step until it is complete and has been
/// copied out, with overlap until the next unit is done.
void add_open_buckets(const Case& c, const State& state, const Part& part, const Visits& visits, std::vector<Around>& around) {
  const int64_t element = Widths(c).gradient;
  for (const BucketForm& bucket : state.buckets) {
    if (is_shared(bucket, part)) continue;
    const size_t first = visits.backward(bucket.highest).front();
    around[first].before_scatter.push_back({BufferClass::kGradient, bucket.bytes(element)});
    const size_t complete = complete_at(c, bucket, visits), until = c.layout.overlap ? complete + 1 : complete;
    if (until > complete && until < visits.size())
      around[until].freed_scatter.push_back({BufferClass::kGradient, -bucket.bytes(element)});
    else
      around[std::min(until, visits.size() - 1)].after.push_back({BufferClass::kGradient, -bucket.bytes(element)});
  }
}

/// The bucket that holds the values of each: another one's for the head's share of a table that is tied on one stage.
std::vector<size_t> owners_of(const State& state, const Part& part) {
  std::vector<size_t> owners(state.buckets.size());
  for (size_t b = 0; b < owners.size(); ++b) {
    owners[b] = b;
    if (!state.buckets[b].tied || state.buckets[b].lowest == 0 || !part.first) continue;
    for (size_t o = 0; o < owners.size(); ++o)
      if (state.buckets[o].tied && state.buckets[o].lowest == 0) owners[b] = o;
  }
  return owners;
}

/// How the unit's activations are treated; none where it is no layer.
const LayerTreatment* treatment_of(const Case& c, const Treatments& all, const Part& part, int64_t stage, int64_t unit) {
  const int64_t layer = unit - (part.first ? 1 : 0);
  return layer >= 0 && layer < part.layers ? &all.of(first_layer_of(c, stage) + layer) : nullptr;
}

/// From the visit before which a bucket is gathered to the visit after which it is freed. From NVMe it is read before visit `read`;
/// what it took on its way is given up after visit `passed`.
struct Stay {
  size_t issued, last;
  bool backward;  ///< its first use is
  size_t read, passed;
  size_t first;  ///< the visit that begins its first use
};

/// By bucket. Visits that follow one another and need the same count as one, and `prefetch` of those are fetched ahead.
std::vector<std::vector<Stay>> stays_of(const Case& c, const State& state, const Part& part, int64_t stage, const Visits& visits) {
  const std::vector<size_t> owners = owners_of(state, part);
  const Treatments treatments(c);
  // By direction and unit. Backward has no use for the tables of an embedding, nor for biases but where it runs forward again.
  std::array<std::vector<std::set<size_t>>, 2> needs_of;
  for (const bool backward : {false, true}) {
    needs_of[backward].resize(static_cast<size_t>(units_of(part)));
    for (size_t b = 0; b < owners.size(); ++b) {
      const auto reads = [&](int64_t u) {
        if (!backward) return true;
        if (part.first && u == 0) return false;
        const LayerTreatment* treatment = treatment_of(c, treatments, part, stage, u);
        return !state.buckets[b].biases || (treatment != nullptr && treatment->full);
      };
      for (int64_t u = state.buckets[b].lowest; u <= state.buckets[b].highest; ++u)
        if (reads(u)) needs_of[backward][static_cast<size_t>(u)].insert(owners[b]);
    }
  }
  const auto needs = [&](const Visit& v) -> const std::set<size_t>& { return needs_of[v.backward][static_cast<size_t>(v.unit)]; };
  struct Run {
    size_t first, last;
  };
  std::vector<Run> runs;
  for (size_t v = 0; v < visits.size(); ++v) {
    const bool same = v > 0 && needs(visits[v]) == needs(visits[v - 1]);
    if (same)
      runs.back().last = v;
    else
      runs.push_back({v, v});
  }
  const size_t ahead = static_cast<size_t>(c.layout.fsdp.prefetch);
  std::vector<std::vector<Stay>> stays(owners.size());
  // By bucket: the runs that read it, and the last unit to read it backward.
  std::vector<std::vector<size_t>> runs_of(owners.size());
  for (size_t r = 0; r < runs.size(); ++r)
    for (const size_t b : needs(visits[runs[r].first])) runs_of[b].push_back(r);
  std::vector<int64_t> lowest_of(owners.size(), units_of(part));
  for (int64_t u = units_of(part) - 1; u >= 0; --u)
    for (const size_t b : needs_of[true][static_cast<size_t>(u)]) lowest_of[b] = u;
  for (size_t b = 0; b < owners.size(); ++b) {
    const int64_t lowest = lowest_of[b];
    const bool read_backward = lowest < units_of(part);
    std::set<int64_t> awaited;  // micro-batches whose backward has yet to use it
    size_t until = 0;           // the last run of the last stay
    size_t unread = 0;          // the first run in which it is not on its way
    for (const size_t r : runs_of[b]) {
      const size_t issue = r >= ahead ? r - ahead : 0;
      const bool kept = !c.layout.fsdp.reshard && !awaited.empty();
      if (!stays[b].empty() && (kept || issue <= until)) {
        stays[b].back().last = runs[r].last;
      } else {
        const size_t read = std::max(unread, issue > 0 && ahead > 0 ? issue - 1 : issue);
        stays[b].push_back(
            {runs[issue].first, runs[r].last, visits[runs[r].first].backward, runs[read].first, runs[issue].last, runs[r].first});
        unread = issue + 1;
      }
      until = r;
      for (size_t v = runs[r].first; v <= runs[r].last; ++v) {
        if (!visits[v].backward && read_backward) awaited.insert(visits[v].micro_batch);
        if (visits[v].backward && visits[v].unit == lowest) awaited.erase(visits[v].micro_batch);
      }
    }
  }
  return stays;
}

/// The forms of a stage's units, those of layers alike made once.
class Units {
 public:
  Units(const Case& c, const Sizes& n, const Part& part, int64_t stage) {
    const Treatments treatments(c);
    for (int64_t unit = 0; unit < units_of(part); ++unit) {
      const LayerTreatment* treatment = treatment_of(c, treatments, part, stage, unit);
      treatments_.push_back(treatment != nullptr ? *treatment : LayerTreatment{});
      const auto found = std::ranges::find(distinct_, treatments_.back(), &std::pair<LayerTreatment, LayerForm>::first);
      form_.push_back(static_cast<size_t>(found - distinct_.begin()));
      if (found == distinct_.end()) distinct_.emplace_back(treatments_.back(), layer_form(c, n, treatments_.back()));
    }
  }
  /// Of a layer.
  const LayerForm& form(int64_t unit) const { return distinct_[form_[static_cast<size_t>(unit)]].second; }
  bool full(int64_t unit) const { return treatments_[static_cast<size_t>(unit)].full; }
  bool parked(int64_t unit) const { return treatments_[static_cast<size_t>(unit)].parked; }

 private:
  std::vector<LayerTreatment> treatments_;
  std::vector<std::pair<LayerTreatment, LayerForm>> distinct_;
  std::vector<size_t> form_;
};

/// On its way from where it waits a slice is on the device until the gather that it is fetched for is done, and from NVMe in host
/// memory before that. A slice that is the whole is fetched to where it is used.
void add_fetch(const Case& c, const Stay& stay, int64_t slice, std::vector<Around>& around) {
  constexpr BufferClass kBuffer = BufferClass::kBuffer;
  if (c.layout.shard_ranks() > 1) {
    around[stay.issued].before_gather.push_back({kBuffer, slice});
    around[stay.passed].freed_gather.push_back({kBuffer, -slice});
  }
  if (c.layout.offload.parameters != OffloadTo::kNvme) return;
  around[stay.read].host_read.push_back({kBuffer, slice});
  around[stay.passed].host_gathered.push_back({kBuffer, -slice});
}

/// A layer's activations leave the device when the unit after it has run forward and are back when the unit before it in backward
/// begins; without overlap they leave at once and come back at once. One that would leave and come back with less than a unit's
/// work between stays. To NVMe they pass through host memory, where they stay until the second unit after has run forward, and
/// again from when the second unit before begins until the one before has run; one that would be back before it has left stays.
void add_parking(const Case& c, const Sizes& n, const Units& units, const Visits& visits, std::vector<Around>& around) {
  const bool nvme = c.layout.offload.activations == OffloadTo::kNvme;
  const size_t one = c.layout.overlap ? 1 : 0;
  std::map<std::pair<int64_t, int64_t>, size_t> forwards;
  for (size_t v = 0; v < visits.size(); ++v) {
    const Visit& visit = visits[v];
    if (!units.parked(visit.unit)) continue;
    const int64_t kept = units.form(visit.unit).kept + n.x;
    const std::pair key{visit.unit, visit.micro_batch};
    if (!visit.backward) {
      forwards[key] = v;
      continue;
    }
    const size_t f = forwards.at(key);
    if (v - f < (nvme && c.layout.overlap ? 5 : 4)) continue;
    constexpr BufferClass kActivation = BufferClass::kActivation;
    const Change there{kActivation, kept}, gone{kActivation, -kept};
    around[f + one].vacated.push_back(gone);
    around[v - one].fetched.push_back(there);
    around[f].host_after.push_back(there);
    if (!nvme) {
      around[v].host_released.push_back(gone);
      continue;
    }
    around[f].nvme_after.push_back(there);
    around[v].nvme_after.push_back(gone);
    (one > 0 ? around[f + 2].host_released : around[f].host_after).push_back(gone);
    around[v - 2 * one].host_before.push_back(there);
    (one > 0 ? around[v - 1].host_released : around[v].host_before).push_back(gone);
  }
}

/// Live bytes outside the device.
class Outside {
 public:
  explicit Outside(SpaceForm& form) : form_(form), now_(form.at_peak) { form_.peak = now_.total(); }

  void change(const std::vector<Change>& list) {
    for (const Change& c : list) {
      now_.bytes[static_cast<size_t>(c.cls)] += c.bytes;
      if (now_.total() <= form_.peak) continue;
      form_.peak = now_.total();
      form_.at_peak = now_;
    }
  }

 private:
  SpaceForm& form_;
  MemoryByClass now_;
};

/// Live bytes as they come and go, and the first of the highest.
class Level {
 public:
  explicit Level(StageForm& form) : form_(form), now_(form.at_peak) { look(Moment::kBetween); }

  void change(BufferClass cls, int64_t bytes) {
    now_.bytes[static_cast<size_t>(cls)] += bytes;
    if (bytes > 0) look(Moment::kBetween);
  }
  void change(const std::vector<Change>& list) {
    for (const Change& c : list) change(c.cls, c.bytes);
  }
  /// A moment within a unit, beyond what is there before it.
  void rise(const Rise& r) {
    const MemoryByClass before = now_;
    add(r.live);
    look(r.moment);
    now_ = before;
  }
  void add(const Live& live) {
    at(BufferClass::kActivation) += live.activation;
    at(BufferClass::kTemporary) += live.temporary;
    at(BufferClass::kInput) += live.input;
  }

 private:
  int64_t& at(BufferClass c) { return now_.bytes[static_cast<size_t>(c)]; }
  void look(Moment moment) {
    if (now_.total() <= best_) return;
    best_ = now_.total();
    form_.at_peak = now_;
    form_.peak = best_;
    form_.moment = moment;
  }

  StageForm& form_;
  MemoryByClass now_;
  int64_t best_ = -1;
};

/// A layer's forward that keeps nothing, op by op: the widest of its moments stand beside the layer's input.
Rise recomputed_forward(const Sizes& n) {
  const auto t = [](int64_t bytes) { return Rise{Moment::kForwardLayer, temporary(bytes)}; };
  return highest({t(n.x + n.statistics),
                  t(n.x + n.qkv),
                  t(n.qkv + n.o + n.log_sum_exp),
                  t(n.o + n.x),
                  t(2 * n.x),
                  t(2 * n.x + n.statistics),
                  t(2 * n.x + n.u),
                  t(n.x + n.u + n.a),
                  t(2 * n.x + n.a),
                  {Moment::kForwardLayer, activation(n.x) + temporary(2 * n.x)}});
}

/// What one visit adds while it works, and what it leaves.
struct Effect {
  Rise rise;
  Live left;
};

/// A case of the same peak: between those that fill the pipeline with those that are the first to reduce, and those that drain it,
/// each micro-batch finds what the one before found. Canonical sums are a tree over all of them, and AFAB holds all of them.
Case with_fewest_micro_batches(const Case& c) {
  Case fewer = c;
  if (!c.canonical && c.layout.schedule != Schedule::kAfab)
    fewer.train.grad_accumulation = std::min<int64_t>(c.train.grad_accumulation, c.layout.pp + 3);
  return fewer;
}

Effect effect_of(const Case& c, const Sizes& n, const Units& units, const Part& part, const Visit& v) {
  const LayerForm& layer = units.form(v.unit);
  const bool embed = part.first && v.unit == 0, head = part.last && v.unit == units_of(part) - 1;
  const Live inner = activation(layer.kept);
  const Live head_kept = activation(n.x + n.statistics + n.logits);
  if (!v.backward) {
    // Never the peak: the first layer adds more, or the head, whose table is as large.
    if (embed) return {{Moment::kBetween, input(n.ids) + activation(n.x)}, input(n.ids) + activation(n.x)};
    if (head) return {{Moment::kForwardHead, head_kept + input(n.ids) + temporary(n.loss_parts)}, head_kept};
    return {units.full(v.unit) && !multiplies_in_fp8(c) ? recomputed_forward(n) : layer.forward, inner + activation(n.x)};
  }
  if (embed) return {{Moment::kBetween, {}}, Live{} - input(n.ids) - activation(n.x)};
  if (head) return {{Moment::kBackwardHead, temporary(n.x)}, Live{} - head_kept};
  return {layer.backward, Live{} - inner - activation(n.x)};
}

}  // namespace

std::vector<GatherTimes> gathers_of(const Case& c, const State& state, const Part& part, int64_t stage) {
  std::vector<GatherTimes> times;
  for (const auto& stays : stays_of(c, state, part, stage, visits_of(part, Timetable(c, part, stage))))
    times.push_back({std::ssize(stays), std::ranges::count(stays, true, &Stay::backward)});
  return times;
}

void walk_to_peak(const Case& all, const Sizes& sizes, const State& state, const Part& part, int64_t stage, StageForm& form) {
  const Case c = with_fewest_micro_batches(all);
  const Timetable table(c, part, stage);
  const Visits visits = visits_of(part, table);
  std::vector<Around> around(visits.size());
  if (c.layout.zero >= 2)
    for (const BucketForm& bucket : state.buckets) add_gradients(c, state, bucket, visits, around);
  else if (updates_on_host(c))
    add_open_buckets(c, state, part, visits, around);
  if (c.layout.zero == 3) {
    const auto stays = stays_of(c, state, part, stage, visits);
    for (size_t b = 0; b < stays.size(); ++b)
      for (const Stay& stay : stays[b]) {
        around[stay.issued].before_gather.push_back({BufferClass::kBuffer, state.buckets[b].bytes(Widths(c).value)});
        around[stay.last].freed_gather.push_back({BufferClass::kBuffer, -state.buckets[b].bytes(Widths(c).value)});
        if (parks_parameters(c)) add_fetch(c, stay, state.buckets[b].slice_bytes(Widths(c).value), around);
      }
  }
  const Units units(c, sizes, part, stage);
  const int64_t common = layer_form(c, sizes, common_treatment(c)).kept;  // which was counted
  for (int64_t layer = 0; layer < part.layers; ++layer)
    form.bytes_in_flight += units.form(layer + (part.first ? 1 : 0)).kept - common;
  add_parking(c, sizes, units, visits, around);
  add_staging(c, state, part, visits, around);
  Level level(form);
  Outside host(form.host), drive(form.nvme);
  const auto message = [&](bool there) {
    if (there) level.change(BufferClass::kActivation, sizes.x);
  };
  int64_t sent_before = 0, sent_last = 0;                  // messages of the slot before the last, and of the last
  const size_t steps = c.layout.diloco.steps > 1 ? 2 : 1;  // a further step begins with what the one before still sends
  for (size_t i = 0; i < steps * visits.size(); ++i) {
    const size_t v = i % visits.size();
    if (v == 0) message(table.receives(1));
    const bool begins = v == 0 || visits[v - 1].slot != visits[v].slot;
    if (begins) message(table.receives(visits[v].slot + 1));
    level.change(around[v].before_scatter);
    level.change(around[v].before_gather);
    level.change(around[v].fetched);
    if (begins) level.change(BufferClass::kActivation, -sizes.x * sent_before), sent_before = sent_last, sent_last = 0;
    for (const auto* list : {&around[v].host_late, &around[v].host_read, &around[v].host_before}) host.change(*list);
    const Effect effect = effect_of(c, sizes, units, part, visits[v]);
    level.rise(effect.rise);
    level.add(effect.left);
    level.change(around[v].vacated);
    for (const auto* list : {&around[v].host_released, &around[v].host_after, &around[v].host_gathered, &around[v].host_freed})
      host.change(*list);
    for (const auto& [bucket, list] : around[v].host_updated) host.change(list);
    drive.change(around[v].nvme_after);
    level.change(around[v].freed_gather);
    level.change(around[v].freed_scatter);
    level.change(around[v].after);
    const bool ends = v + 1 == visits.size() || visits[v + 1].slot != visits[v].slot;
    if (ends && table.sends(visits[v].slot)) sent_last = 1;
  }
}

std::vector<GatherStay> gather_stays(const Case& c, const State& state, const Part& part, int64_t stage) {
  const Visits visits = visits_of(part, Timetable(c, part, stage));
  const auto by_bucket = stays_of(c, state, part, stage, visits);
  std::vector<GatherStay> all;
  for (size_t b = 0; b < by_bucket.size(); ++b)
    for (const Stay& s : by_bucket[b]) all.push_back({b, s.issued, s.first, s.last, s.read, s.passed});
  std::ranges::stable_sort(all, {}, [](const GatherStay& s) { return std::tuple(s.issued, s.first, s.bucket); });
  return all;
}

}  // namespace shardlab::simulator::forms
