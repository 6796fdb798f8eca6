#include "simulator/estimator/search/space.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "simulator/estimator/analytic/schedule.h"

namespace shardlab::simulator::search {
namespace {

/// `given`, or `all` where nothing is.
template <class T>
std::vector<T> either(const std::vector<T>& given, std::vector<T> all) {
  return given.empty() ? std::move(all) : given;
}

bool allows(const std::vector<int32_t>& given, int64_t value) {
  return given.empty() || std::find(given.begin(), given.end(), value) != given.end();
}

bool in(uint32_t set, int bit) { return set >> bit & 1; }

/// Whether a framework has an offload for such a cut.
bool has_offload(const analytic::Abilities& can, const Point& cut, const Offload& offload) {
  analytic::Abilities asked;  // of everything else the point says nothing here
  asked.offload = can.offload, asked.offload_with_pp = can.offload_with_pp;
  return has(asked, with(cut, State{.offload = offload}));
}

/// Cuts of one layout of ranks: what is left is how the batch is cut and what layers keep.
class Cuts {
 public:
  Cuts(const Space& space, const analytic::ModelShape& shape, const std::function<void(const Point&)>& visit,
       const std::function<void(const Point&)>& undivided)
      : space_(space), shape_(shape), visit_(visit), undivided_(undivided) {}

  void of_ranks(const Point& ranks) {
    bool any = false;
    if (space_.sequences % ranks.dp == 0) {
      const int64_t each = space_.sequences / ranks.dp;
      for (const int32_t micro : either(space_.micro_batch, divisors(each))) {
        if (each % micro != 0 || !allows(space_.grad_accumulation, each / micro) || each / micro > kMostSteps) continue;
        any = true;
        Point p = ranks;
        p.micro_batch = micro, p.grad_accumulation = static_cast<int32_t>(each / micro);
        of_batch(p);
      }
    }
    if (!any) undivided_(ranks);
  }

 private:
  static constexpr int64_t kMostSteps = 1 << 20;

  void of_batch(Point p) {
    const int64_t group = int64_t{p.dp} * p.cp * p.tp;
    for (const int32_t ep : either(space_.ep, shape_.moe() && has_axis(4) ? divisors(shape_.experts) : std::vector<int32_t>{1})) {
      if (space_.ep.empty() && group % ep != 0) continue;
      p.ep = ep;
      const auto skew = space_.expert_skew.find(ep);
      p.expert_skew = skew != space_.expert_skew.end() ? skew->second : 1;
      const std::vector<CpKind> kinds =
          p.cp == 1 ? std::vector<CpKind>{CpKind::kZigzag} : either(space_.cp_kind, kinds_of(space_.can));
      const std::vector<AlgorithmChoice> algorithms =
          p.world_size() == 1 ? std::vector{AlgorithmChoice::kAuto} : either(space_.collective_algorithm, {AlgorithmChoice::kAuto});
      for (const int32_t slices : slices_of(p))
        for (const CpKind kind : kinds)
          for (const AlgorithmChoice algorithm : algorithms) {
            p.expert_tp = slices, p.cp_kind = kind, p.algorithm = algorithm;
            of_layers(p);
          }
    }
  }

  void of_layers(Point p) {
    const std::vector<uint8_t> parallel =
        p.tp == 1 ? std::vector<uint8_t>{0}
                  : either(space_.sequence_parallel, has_axis(1) ? std::vector<uint8_t>{0, 1} : std::vector<uint8_t>{0});
    for (const uint8_t sequence_parallel : parallel)
      for (const analytic::Recompute recompute : either(space_.recompute, recomputes_of(space_.can))) {
        p.sequence_parallel = sequence_parallel != 0, p.recompute = recompute;
        visit_(p);
      }
  }

  /// Ranks that cut each expert. Where no ranks share experts, tp cuts them as it cuts a feed-forward, in every framework: Megatron-LM's
  /// --expert-tensor-parallel-size is tp by default, and torchtitan's degree counts with expert parallelism alone.
  std::vector<int32_t> slices_of(const Point& p) const {
    if (!shape_.moe() || p.tp == 1) return {1};
    if (p.ep == 1) return either(space_.expert_tp, {p.tp});
    return either(space_.expert_tp, space_.slices_experts ? divisors(p.tp) : std::vector<int32_t>{1});
  }

  bool has_axis(int bit) const { return in(space_.can.axes, bit); }
  static std::vector<CpKind> kinds_of(const analytic::Abilities& can) {
    std::vector<CpKind> kinds;
    for (const CpKind kind : {CpKind::kZigzag, CpKind::kAllGather, CpKind::kUlysses})
      if (in(can.cp_kind, static_cast<int>(kind))) kinds.push_back(kind);
    return kinds.empty() ? std::vector<CpKind>{CpKind::kZigzag} : kinds;
  }
  static std::vector<analytic::Recompute> recomputes_of(const analytic::Abilities& can) {
    std::vector<analytic::Recompute> all{{0}};
    for (const analytic::Recompute r : {analytic::Recompute{analytic::Recompute::kSelective}, {analytic::Recompute::kLayer}})
      if ((r.modules & ~can.recompute) == 0) all.push_back(r);
    return all;
  }

  const Space& space_;
  const analytic::ModelShape& shape_;
  const std::function<void(const Point&)>& visit_;
  const std::function<void(const Point&)>& undivided_;
};

}  // namespace

std::vector<int32_t> divisors(int64_t n) {
  std::vector<int32_t> low, high;
  for (int64_t d = 1; d * d <= n; ++d) {
    if (n % d != 0) continue;
    low.push_back(static_cast<int32_t>(d));
    if (d * d != n && n / d <= INT32_MAX) high.push_back(static_cast<int32_t>(n / d));
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

Result<void> check(const Space& space) {
  const auto refuse = [](std::string message, std::string hint) {
    return Error{ExitCode::kUsage, std::move(message), std::move(hint), {}};
  };
  if (space.devices.empty()) return refuse("a search on no devices", "name their number");
  if (space.seq_len < 1 || space.seq_len > (int64_t{1} << 27))
    return refuse(fmt::format("seq_len {}", space.seq_len), "from 1 to 2^27");
  if (space.sequences < 1 || space.sequences > (int64_t{1} << 40))
    return refuse(fmt::format("a batch of {} sequences", space.sequences), "from 1 to 2^40; a batch is a multiple of seq_len");
  const std::pair<std::string_view, const std::vector<int32_t>*> sizes[] = {{"devices", &space.devices},
                                                                            {"dp", &space.dp},
                                                                            {"tp", &space.tp},
                                                                            {"pp", &space.pp},
                                                                            {"vpp", &space.vpp},
                                                                            {"cp", &space.cp},
                                                                            {"ep", &space.ep},
                                                                            {"expert_tp", &space.expert_tp},
                                                                            {"micro_batch", &space.micro_batch},
                                                                            {"grad_accumulation", &space.grad_accumulation}};
  for (const auto& [name, values] : sizes)
    for (const int32_t v : *values)
      if (v < 1 || v > (1 << 20)) return refuse(fmt::format("{} {}", name, v), "sizes are from 1 to 2^20");
  for (const int32_t v : space.zero)
    if (v < 0 || v > 3) return refuse(fmt::format("zero {}", v), "from 0 to 3");
  for (const int64_t v : space.bucket_bytes)
    if (v < 0 || v > (int64_t{1} << 40)) return refuse(fmt::format("bucket_bytes {}", v), "from 0 (each tensor by itself) to 2^40");
  for (const int32_t v : space.hybrid_shard)
    if (v < 0 || v > (1 << 20)) return refuse(fmt::format("hybrid_shard {}", v), "from 0 (all of dp) to 2^20");
  return {};
}

void for_each_cut(const Space& space, const analytic::ModelShape& shape, int32_t devices,
                  const std::function<void(const Point&)>& visit, const std::function<void(const Point&)>& undivided) {
  Cuts cuts(space, shape, visit, undivided);
  Point p;
  p.seq_len = space.seq_len, p.precision = space.precision;
  // An axis that the framework does not have is not cut, unless a flag asks for it, and is refused.
  const auto cut = [&](int axis, const std::vector<int32_t>& given, int32_t size) {
    return allows(given, size) && (size == 1 || !given.empty() || in(space.can.axes, axis));
  };
  for (const int32_t tp : divisors(devices)) {
    if (!cut(0, space.tp, tp)) continue;
    for (const int32_t pp : divisors(devices / tp)) {
      if (!cut(2, space.pp, pp)) continue;
      for (const int32_t cp : divisors(devices / tp / pp)) {
        if (!cut(3, space.cp, cp) || !allows(space.dp, devices / tp / pp / cp)) continue;
        p.tp = tp, p.pp = pp, p.cp = cp, p.dp = devices / tp / pp / cp;
        p.schedule = pp == 1 ? Schedule::kNone : Schedule::k1F1B;
        cuts.of_ranks(p);
      }
    }
  }
}

std::vector<State> states_of(const Space& space, const Point& cut, int32_t devices_per_node) {
  const std::vector<Offload> offloads =
      either(space.offload, {{},
                             {.optimizer = Medium::kCpu},
                             {.activations = Medium::kCpu},
                             {.activations = Medium::kCpu, .optimizer = Medium::kCpu},
                             {.optimizer = Medium::kCpu, .parameters = Medium::kCpu},
                             {.activations = Medium::kCpu, .optimizer = Medium::kCpu, .parameters = Medium::kCpu}});
  // Shards inside a node: the most ranks of the data-parallel group that one node holds.
  const int64_t replicas = int64_t{cut.dp} * cut.cp;
  int32_t inside = 0;
  for (const int32_t d : divisors(replicas))
    if (d > 1 && d < replicas && int64_t{d} * cut.tp <= devices_per_node) inside = d;
  const auto has_stage = [&](int32_t zero) {
    return in(space.can.zero, zero) && (cut.pp == 1 || in(space.can.zero_with_pp, zero));
  };
  std::vector<int32_t> stages = space.zero;
  if (stages.empty())
    for (const int32_t zero : {0, 1, 2, 3})
      if (has_stage(zero)) stages.push_back(zero);
  // Among one rank ZeRO shards nothing: one stage says it all, beside the one under which parameters are offloaded.
  const int32_t alone = space.zero.empty() && replicas == 1 && !stages.empty() ? stages.front() : -1;
  std::vector<State> states;
  for (const int32_t zero : stages) {
    std::vector<int32_t> shards{0};
    if (!space.hybrid_shard.empty())
      shards = space.hybrid_shard;
    else if (zero == 3 && inside > 0 && in(space.can.axes, 5))
      shards.push_back(inside);
    // What travels under zero 3 is the unit, and nothing does among one rank.
    const std::vector<int64_t> buckets = zero == 3 || replicas == 1 ? std::vector<int64_t>{-1} : either(space.bucket_bytes, {-1});
    for (const int32_t shard : shards)
      for (const Offload& offload : offloads) {
        if (space.offload.empty() && offload.parameters != Medium::kDevice && zero != 3) continue;
        if (space.offload.empty() && !has_offload(space.can, cut, offload)) continue;
        if (alone >= 0 && zero != alone && offload.parameters == Medium::kDevice) continue;
        for (const int64_t bucket : buckets) states.push_back({zero, shard, bucket, offload});
      }
  }
  return states;
}

std::vector<Order> orders_of(const Space& space, int64_t layers, int32_t stages) {
  // Of the schedules given, those for this number of stages; where there are none, all are asked for and refused.
  std::vector<Schedule> schedules = space.schedule;
  if (schedules.empty())
    for (const Schedule s : analytic::estimated_schedules())
      if (in(space.can.schedules, static_cast<int>(s))) schedules.push_back(s);
  if (stages == 1 && space.schedule.empty()) schedules = {Schedule::kNone};
  const auto fits = [&](Schedule s) { return (s == Schedule::kNone) == (stages == 1); };
  if (std::any_of(schedules.begin(), schedules.end(), fits)) std::erase_if(schedules, [&](Schedule s) { return !fits(s); });
  std::vector<Order> orders;
  for (const Schedule schedule : schedules) {
    std::vector<int32_t> loops{1};
    if (!space.vpp.empty()) {
      loops = space.vpp;
    } else if (is_looped(schedule)) {
      // Equal virtual stages, two or more to a rank; where there are none, two are asked for and refused.
      loops = layers % stages == 0 ? divisors(layers / stages) : std::vector<int32_t>{2};
      std::erase(loops, 1);
      if (loops.empty()) loops = {2};
    }
    for (const int32_t vpp : loops) orders.push_back({schedule, vpp});
  }
  return orders;
}

Point with(Point cut, const State& s) {
  cut.zero = s.zero, cut.hybrid_shard = s.hybrid_shard, cut.bucket_bytes = s.bucket_bytes;
  cut.offload_activations = s.offload.activations, cut.offload_optimizer = s.offload.optimizer;
  cut.offload_parameters = s.offload.parameters;
  return cut;
}

Point with(Point cut, const Order& o) {
  cut.schedule = o.schedule, cut.vpp = o.vpp;
  return cut;
}

}  // namespace shardlab::simulator::search
