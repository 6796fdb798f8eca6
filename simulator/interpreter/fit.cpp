// From traces of calibration plans to points: medians by kernel, shape and concurrency.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <tuple>

#include "plan/base/hash.h"
#include "simulator/interpreter/bench.h"
#include "simulator/interpreter/calibrate.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/peers.h"

namespace shardlab::simulator {
namespace {

/// The `q`-quantile of sorted values, by linear interpolation.
double quantile(const std::vector<double>& sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

/// Products that take as long tell how steady a core is, and not how fine the clock.
constexpr double kLong_s = 3e-5;

/// One measured step: the events of every rank, by instruction.
struct Recorded {
  std::vector<std::vector<const TraceEvent*>> op;  ///< by rank, by instruction; null where none was recorded
};

class Fit {
 public:
  void add(const CalibrationRun& run) {
    const Plan& plan = run.plan->plan;
    suffix_ = run.plan->canonical ? kCanonicalKernel : "";
    std::vector<Program> programs;
    for (size_t role = 0; role < plan.roles.size(); ++role) programs.push_back(expand_program(plan, static_cast<int>(role)));
    const SimulatedRanks ranks(plan.mesh, true);
    for (int step = run.skip; step < run.trace.steps; ++step) {
      const Recorded recorded = events_of(run, programs, ranks, step);
      for (int rank = 0; rank < plan.mesh.world_size(); ++rank) {
        const Program& program = programs[static_cast<size_t>(ranks.role_of(rank))];
        const auto& events = recorded.op[static_cast<size_t>(rank)];
        for (const Instruction& i : program.instructions) {
          if (events[static_cast<size_t>(i.id)] == nullptr || i.op->label == kPreparation) continue;
          if (!communicates(i)) sample(plan, i, run.plan->concurrency, events[static_cast<size_t>(i.id)]);
        }
        add_latencies(program, events, *run.plan);
      }
      if (run.plan->concurrency > 1 && !run.plan->crowded) add_differences(programs.front(), recorded);
      add_messages(plan, programs, recorded, run.plan->concurrency);
    }
  }

  Calibration take(const CalibrationOrigin& origin) {
    Calibration c;
    c.date = origin.date;
    c.command = origin.command;
    c.processor = origin.processor;
    c.kernel_variant = origin.kernel_variant;
    uint64_t hash = hash_text(origin.processor + origin.kernel_variant);
    const double between = origin.launch_ahead ? median_of(gaps_behind_long_) : 0;
    for (auto& [key, seconds] : samples_) {
      std::sort(seconds.begin(), seconds.end());
      const double median = quantile(seconds, 0.5) + between;
      const auto& [kernel, shape, concurrency] = key;
      const double spread = (quantile(seconds, 0.9) - quantile(seconds, 0.1)) / median;
      c.points.push_back({kernel, shape, concurrency, median, spread, static_cast<int>(seconds.size())});
      hash = hash_text(fmt::format("{} {} {}", kernel, concurrency, median), hash);
    }
    c.launch_ahead = origin.launch_ahead;
    c.op_overhead_s = median_of(origin.launch_ahead ? periods_ : gaps_);
    // What is measured ends with the dispatch of the op that waited.
    c.wake_latency_s = std::max(0.0, median_of(wakes_) - c.op_overhead_s);
    c.handover_s = std::max(0.0, median_of(handovers_) - c.op_overhead_s);
    c.turn_s = origin.turn_s;
    c.unsteadiness = unsteadiness();
    c.id = fmt::format("{}-{:08x}", origin.date, static_cast<uint32_t>(hash ^ (hash >> 32)));
    return c;
  }

 private:
  using Key = std::tuple<std::string, std::vector<int64_t>, int>;

  static double median_of(std::vector<double>& values) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    return std::max(0.0, quantile(values, 0.5));
  }

  static Recorded events_of(const CalibrationRun& run, const std::vector<Program>& programs, const SimulatedRanks& ranks,
                            int step) {
    Recorded recorded;
    for (const int rank : ranks.ranks())
      recorded.op.emplace_back(programs[static_cast<size_t>(ranks.role_of(rank))].instructions.size(), nullptr);
    for (const TraceEvent& e : run.trace.events)
      if (e.step == step && e.kind == TraceEvent::Kind::kOp)
        recorded.op[static_cast<size_t>(e.rank)][static_cast<size_t>(e.instruction)] = &e;
    return recorded;
  }

  void sample(const Plan& plan, const Instruction& i, int concurrency, const TraceEvent* e) {
    add_sample(Key{kernel_of(*i.segment, *i.op) + suffix_, cost_shape_of(plan, *i.segment, *i.op), concurrency}, e->end - e->begin);
  }

  void add_sample(const Key& key, double seconds) {
    if (seconds > 0) samples_[key].push_back(seconds);
  }

  /// How far apart cores are that do the same product at the same time: the first two ranks, relative to their mean.
  void add_differences(const Program& program, const Recorded& recorded) {
    for (const Instruction& i : program.instructions) {
      const TraceEvent *a = recorded.op[0][static_cast<size_t>(i.id)], *b = recorded.op[1][static_cast<size_t>(i.id)];
      if (a == nullptr || b == nullptr || i.op->label == kPreparation || !std::holds_alternative<Linear>(i.op->work)) continue;
      const double one = a->end - a->begin, other = b->end - b->begin;
      if (std::min(one, other) >= kLong_s) differences_.push_back(std::abs(one - other) * 2 / (one + other));
    }
  }

  /// Two independent normal times of standard deviation s are 2 s / sqrt(pi) apart in the mean.
  double unsteadiness() const {
    if (differences_.empty()) return 0;
    double sum = 0;
    for (const double d : differences_) sum += d;
    return sum / static_cast<double>(differences_.size()) * std::sqrt(std::numbers::pi) / 2;
  }

  /// The gap between two ops of one stream is dispatch; the gap between a dependency on another stream and the op that slept until
  /// then is a wake-up and a dispatch, or, where no core was idle, the handover of one and a dispatch. Where a host launches ahead,
  /// ops that end before the next is launched begin as far apart as the host takes, and behind one that takes longer than several
  /// launches the device itself needs the gap.
  void add_latencies(const Program& program, const std::vector<const TraceEvent*>& events, const CalibrationPlan& plan) {
    const bool alone = plan.concurrency == 1 && !plan.crowded;
    if (!alone && !plan.crowded) return;
    for (const auto& stream : program.streams)
      for (size_t k = 1; k < stream.size(); ++k) {
        const Instruction& i = program.instructions[static_cast<size_t>(stream[k])];
        const TraceEvent* before = events[static_cast<size_t>(stream[k - 1])];
        const TraceEvent* now = events[static_cast<size_t>(i.id)];
        if (before == nullptr || now == nullptr || communicates(i)) continue;
        double woken = before->end;
        for (const Wait& w : program.waits_of(i)) {
          const TraceEvent* done =
              events[static_cast<size_t>(program.streams[static_cast<size_t>(w.stream)][static_cast<size_t>(w.count - 1)])];
          if (done != nullptr) woken = std::max(woken, done->end);
        }
        if (woken > before->end)
          (alone ? wakes_ : handovers_).push_back(now->begin - woken);
        else if (alone && i.waits == 0) {
          constexpr double kShort_s = 2e-6, kBehind_s = 5e-5;
          const double took = before->end - before->begin, gap = now->begin - before->end;
          gaps_.push_back(gap);
          if (took < kShort_s && gap > 0) periods_.push_back(now->begin - before->begin);
          // A copy is not a kernel: a device takes longer to go from one to the other.
          const Instruction& previous = program.instructions[static_cast<size_t>(stream[k - 1])];
          const bool kernels = !std::holds_alternative<Copy>(previous.op->work) && !std::holds_alternative<Copy>(i.op->work);
          if (took > kBehind_s && kernels) gaps_behind_long_.push_back(gap);
        }
      }
  }

  /// A message's time: from the arrival of the last party to the end of the last. Every party counts the same message, so group
  /// index 0, or the receiver, speaks for all.
  void add_messages(const Plan& plan, const std::vector<Program>& programs, const Recorded& recorded, int concurrency) {
    for (size_t role = 0; role < programs.size(); ++role)
      for (const Instruction& i : programs[role].instructions) {
        if (!communicates(i) || std::holds_alternative<Send>(i.op->work)) continue;
        if (std::holds_alternative<Recv>(i.op->work)) {
          const TraceEvent* e = recorded.op[role][static_cast<size_t>(i.id)];  // a mesh of stages only: rank = role
          if (e != nullptr)
            add_sample({kernel_of(*i.segment, *i.op), cost_shape_of(plan, *i.segment, *i.op), concurrency},
                       e->end - e->begin - e->peer_wait);
          continue;
        }
        double arrival = 0, end = 0;
        for (const auto& events : recorded.op) {
          const TraceEvent* e = events[static_cast<size_t>(i.id)];
          if (e == nullptr) return;
          arrival = std::max(arrival, e->begin);
          end = std::max(end, e->end);
        }
        add_sample({kernel_of(*i.segment, *i.op), cost_shape_of(plan, *i.segment, *i.op), concurrency}, end - arrival);
      }
  }

  std::map<Key, std::vector<double>> samples_;
  std::string suffix_;  ///< of the run's kernels
  std::vector<double> differences_;
  std::vector<double> gaps_, periods_, gaps_behind_long_, wakes_, handovers_;
};

}  // namespace

Calibration fit(std::span<const CalibrationRun> runs, const CalibrationOrigin& origin) {
  Fit fit;
  for (const CalibrationRun& run : runs) fit.add(run);
  return fit.take(origin);
}

std::map<int, double> spread_of_products(const Calibration& calibration) {
  std::map<int, std::vector<double>> spreads;
  for (const RatePoint& p : calibration.points)
    if (p.kernel.starts_with("linear.") && p.seconds >= kLong_s) spreads[p.concurrency].push_back(p.spread);
  std::map<int, double> medians;
  for (auto& [concurrency, of] : spreads) {
    std::sort(of.begin(), of.end());
    medians[concurrency] = quantile(of, 0.5);
  }
  return medians;
}

Machine local_machine(const Calibration& calibration, int cores, int64_t memory_bytes) {
  Machine m;
  m.id = "local";
  m.local = true;
  m.cores = cores;
  m.devices_per_node = cores;
  m.device.id = "local-cpu";
  m.device.memory_bytes = memory_bytes;
  for (const RatePoint& p : calibration.points) {
    if (p.concurrency != 1) continue;
    if (p.kernel.starts_with("linear.") && p.shape.size() == 3) {
      const std::string precision = p.kernel.ends_with(".bf16") ? "bf16" : p.kernel.ends_with(".f16") ? "fp16" : "fp32";
      double& peak = m.device.peak_flops[precision];
      peak = std::max(peak, 2.0 * static_cast<double>(p.shape[0]) * static_cast<double>(p.shape[1]) *
                                static_cast<double>(p.shape[2]) / p.seconds);
      m.device.provenance["peak_flops." + precision] = Provenance::kMeasured;
    }
    if (p.kernel == "adamw" && p.shape.size() == 1 && p.shape[0] >= (16 << 20))  // all operands beyond the caches
      m.device.memory_bytes_per_s = std::max(m.device.memory_bytes_per_s, static_cast<double>(p.shape[0]) / p.seconds);
  }
  m.device.provenance["memory_bandwidth"] = Provenance::kMeasured;
  m.device.link_bytes_per_s = m.device.memory_bytes_per_s;
  m.calibration = std::make_shared<const Calibration>(calibration);
  return m;
}

Machine local_gpu_machine(const Calibration& calibration, const std::string& device, int devices, int64_t memory_bytes) {
  Machine m = local_machine(calibration, devices, memory_bytes);
  m.id = m.device.id = device;  // what results and reports call it
  return m;
}

}  // namespace shardlab::simulator
