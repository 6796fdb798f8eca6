// The orders of the schedules that have a name, and the list scheduler. Notation: p stages, s a stage, m micro-batches, v parts a stage.
#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "plan/pipeline_schedule.h"

namespace shardlab {
namespace {

size_t at(int i) { return static_cast<size_t>(i); }

/// A stage's list as it is written: the next micro-batch of each kind of slot counts itself.
class Writer {
 public:
  Writer(std::vector<PipelineSlot>& order, int parts) : order_(order), next_(at(parts)) {}

  void slot(SlotWork work, int part, int micro_batch) { order_.push_back({work, part, micro_batch}); }
  void forward(int part) { slot(SlotWork::kF, part, next(SlotWork::kF, part)); }
  void input(int part) { slot(SlotWork::kI, part, next(SlotWork::kI, part)); }
  void weight(int part) { slot(SlotWork::kW, part, next(SlotWork::kW, part)); }
  void backward(int part) {
    next(SlotWork::kW, part);
    slot(SlotWork::kB, part, next(SlotWork::kI, part));
  }
  int done(SlotWork work, int part) const { return next_[at(part)][static_cast<size_t>(work)]; }
  /// The gradient of weights that has waited longest, of whichever part.
  void weight_owed() {
    const auto owed = std::ranges::find_if(
        order_, [&](const PipelineSlot& s) { return s.work == SlotWork::kI && s.micro_batch == done(SlotWork::kW, s.part); });
    weight(owed->part);
  }
  bool owes() const {
    return std::ranges::any_of(
        next_, [](const auto& n) { return n[static_cast<size_t>(SlotWork::kW)] < n[static_cast<size_t>(SlotWork::kI)]; });
  }
  /// The gradients of weights that are still owed.
  void weights_left(int part) {
    while (done(SlotWork::kW, part) < done(SlotWork::kI, part)) weight(part);
  }

 private:
  int next(SlotWork work, int part) { return next_[at(part)][static_cast<size_t>(work)]++; }

  std::vector<PipelineSlot>& order_;
  std::vector<std::array<int, 4>> next_;
};

void afab(Writer& w, int, int s, int m) {
  for (int j = 0; j < m; ++j) w.forward(s);
  for (int j = 0; j < m; ++j) w.backward(s);
}

void naive(Writer& w, int, int s, int m) {
  for (int j = 0; j < m; ++j) {
    w.forward(s);
    w.backward(s);
  }
}

/// `ahead` forwards to warm up, then one forward and one backward in turn.
void one_forward_one_backward(Writer& w, int s, int m, int ahead) {
  const int warm_up = std::min(m, ahead);
  for (int j = 0; j < warm_up; ++j) w.forward(s);
  for (int j = warm_up; j < m; ++j) {
    w.forward(s);
    w.backward(s);
  }
  for (int j = 0; j < warm_up; ++j) w.backward(s);
}

/// ZB-H1 and ZB-H2: `warm_up` forwards ahead; gradients of weights `delay` micro-batches behind gradients of inputs.
void zero_bubble(Writer& w, int s, int m, int warm_up, int delay) {
  for (int j = 0; j < std::min(warm_up, m); ++j) w.forward(s);
  for (int j = 0; j < m; ++j) {
    w.input(s);
    if (j >= delay) w.weight(s);
    if (warm_up + j < m) w.forward(s);
  }
  w.weights_left(s);
}

/// m is a multiple of p: micro-batches go p at a time through a stage's parts.
void interleaved(std::vector<Writer>& stages, int p, int v, int m) {
  const int slots = m * v;
  const auto chunk = [&](int k) { return k / p % v; };
  for (int s = 0; s < p; ++s) {
    const auto forward = [&](int k) { stages[at(s)].forward(chunk(k) * p + s); };
    const auto backward = [&](int k) { stages[at(s)].backward((v - 1 - chunk(k)) * p + s); };
    const int warm_up = std::min(slots, 2 * (p - 1 - s) + (v - 1) * p);
    for (int k = 0; k < warm_up; ++k) forward(k);
    for (int k = warm_up; k < slots; ++k) {
      forward(k);
      backward(k - warm_up);
    }
    for (int k = slots - warm_up; k < slots; ++k) backward(k);
  }
}

void breadth_first(std::vector<Writer>& stages, int p, int v, int m) {
  for (int s = 0; s < p; ++s) {
    for (int c = 0; c < v; ++c)
      for (int j = 0; j < m; ++j) stages[at(s)].forward(c * p + s);
    for (int c = v - 1; c >= 0; --c)
      for (int j = 0; j < m; ++j) stages[at(s)].backward(c * p + s);
  }
}

/// m is 2 p - 1 or more.
void zb_v(Writer& w, int p, int s, int m) {
  const int down = s, up = 2 * p - 1 - s;  // the stage's parts on the way there and on the way back
  for (int i = 0; i < 2 * (p - s) - 1; ++i) w.forward(down);
  for (int i = 0; i < s; ++i) {
    w.forward(up);
    w.forward(down);
  }
  for (int i = 0; i < p - s; ++i) {
    w.forward(up);
    w.input(up);
    w.weight(up);
  }
  while (w.done(SlotWork::kF, up) < m) {
    if (w.done(SlotWork::kF, down) < m) w.forward(down);
    w.input(down);
    w.weight(down);
    w.forward(up);
    w.input(up);
    w.weight(up);
  }
  for (int i = 0; i < s; ++i) {
    w.input(down);
    w.input(up);
  }
  for (int i = 0; i < p - s; ++i) {
    w.input(down);
    w.weight(down);
  }
  w.weights_left(up);
  w.weights_left(down);
}

/// DualPipe on 2 n stages, and DualPipeV on n stages of two parts each: one is the other folded in the middle. `outer` is how many
/// stages of a half are further out than this one. `first` is the part whose forwards begin, `second` the other. m micro-batches of
/// each part, 2 n or more.
void dual_pipe(Writer& w, int n, int outer, int first, int second, int m) {
  const int inner = n - 1 - outer;
  for (int i = 0; i < 2 * inner; ++i) w.forward(first);
  for (int i = 0; i <= outer; ++i) {
    w.forward(first);
    w.forward(second);
  }
  for (int i = 0; i < inner; ++i) {
    w.input(second);
    w.weight(second);
    w.forward(second);
  }
  for (int i = 0; i < m - 2 * n + outer + 1; ++i) {
    w.forward(first);
    w.backward(second);
    w.forward(second);
    w.backward(first);
  }
  for (int i = 0; i < inner; ++i) {
    w.backward(second);
    w.forward(second);
    w.backward(first);
  }
  // From half of the last backwards on, gradients of weights wait, so that those of inputs are on their way.
  for (int i = 0; i <= outer; ++i) {
    const int half = (outer + 1) / 2;
    const bool first_waits = i >= half, second_waits = outer % 2 == 1 ? i >= half : i > half;
    second_waits ? w.input(second) : w.backward(second);
    first_waits ? w.input(first) : w.backward(first);
  }
  for (int i = 0; i < inner; ++i) {
    w.weight_owed();
    w.input(first);
  }
  while (w.owes()) w.weight_owed();
}

/// m micro-batches of both directions.
void dual_pipe_mirrored(Writer& w, int p, int s, int m) {
  const int mirror = p - 1 - s;
  dual_pipe(w, p / 2, std::min(s, mirror), std::min(s, mirror) == s ? s : mirror, std::min(s, mirror) == s ? mirror : s, m / 2);
}

/// Orders that repeat: each stage starts the slots of micro-batch j at fixed times, 6 j later than the slots of the first
/// micro-batch, if every slot takes 1. `down` and `up` are the time from a stage to the next on the way to the last stage and on
/// the way back. Memory is (down + up)(p - 1)/6 activations, plus the activations that the turns add (Qi et al. 2024, section 3).
class Pattern {
 public:
  static constexpr int kPeriod = 6;

  Pattern(int p, int down, int up) : p_(p), down_(down), up_(up) {}

  /// The turns (at the last stage, at the first, at the last again) with which no two slots of a stage meet and the least is held;
  /// none if some always meet.
  bool choose() {
    int least = std::numeric_limits<int>::max(), soonest = least;
    std::array<int, 3> best{};
    for (turns_[0] = 1; turns_[0] <= kPeriod; ++turns_[0])
      for (turns_[1] = 1; turns_[1] <= kPeriod; ++turns_[1])
        for (turns_[2] = 1; turns_[2] <= kPeriod; ++turns_[2]) {
          const auto held = most_held();
          const int latest = turns_[0] + turns_[1] + turns_[2];
          if (!held || std::pair(*held, latest) >= std::pair(least, soonest)) continue;
          least = *held, soonest = latest, best = turns_;
        }
    turns_ = best;
    return least < std::numeric_limits<int>::max();
  }

  struct Start {
    SlotWork work;
    bool back;  ///< of the part on the way back
    int time;
  };
  /// When a stage starts the six slots of the first micro-batch; none where two of them meet.
  std::optional<std::array<Start, 6>> starts(int s) const {
    const int far = p_ - 1 - s, forward_turn = down_ * (p_ - 1) + turns_[0], back = forward_turn + up_ * (p_ - 1) + turns_[1],
              last_turn = back + down_ * (p_ - 1) + turns_[2];
    std::array<Start, 6> all{{{SlotWork::kF, false, down_ * s},
                              {SlotWork::kF, true, forward_turn + up_ * far},
                              {SlotWork::kI, true, back + down_ * s},
                              {SlotWork::kI, false, last_turn + up_ * far},
                              {SlotWork::kW, true, 0},
                              {SlotWork::kW, false, 0}}};
    std::array<bool, kPeriod> taken{};
    for (size_t i = 0; i < 4; ++i)
      if (std::exchange(taken[static_cast<size_t>(all[i].time % kPeriod)], true)) return std::nullopt;
    for (size_t i = 4; i < 6; ++i) {
      int time = all[i == 4 ? 2 : 3].time + 1;
      while (taken[static_cast<size_t>(time % kPeriod)]) ++time;
      taken[static_cast<size_t>(time % kPeriod)] = true;
      all[i].time = time;
    }
    return all;
  }

 private:
  /// Activations of parts that the stage with the most holds once the pipeline is full; none where slots meet.
  std::optional<int> most_held() const {
    int most = 0;
    for (int s = 0; s < p_; ++s) {
      const auto all = starts(s);
      if (!all) return std::nullopt;
      for (int now = 0; now < kPeriod; ++now) {
        // Micro-batches j with start <= now + 6 k - 6 j < end, for a k that is large.
        int held = 0;
        for (const bool back : {false, true}) {
          const int begin = (*all)[back ? 1 : 0].time, end = (*all)[back ? 4 : 5].time + 1;
          for (int t = begin; t < end; ++t) held += t % kPeriod == now ? 1 : 0;
        }
        most = std::max(most, held);
      }
    }
    return most;
  }

  int p_, down_, up_;
  std::array<int, 3> turns_{1, 1, 1};
};

/// Writes the slots of one stage: the writer, p stages, stage s, m micro-batches.
using WriteStage = void (*)(Writer& w, int p, int s, int m);

template <WriteStage write>
void each_stage(std::vector<Writer>& stages, int p, int, int m) {
  for (int s = 0; s < p; ++s) write(stages[at(s)], p, s, m);
}

/// V-Min and V-Half: the pattern that holds least of those whose steps from stage to stage sum to `pace`.
template <int pace>
void patterned(std::vector<Writer>& stages, int p, int, int m) {
  std::optional<Pattern> chosen;
  for (int down = 1; down < pace && !chosen; ++down) {
    Pattern pattern(p, pace - down, down);
    if (pattern.choose()) chosen = pattern;
  }
  SHARDLAB_CHECK(chosen.has_value(), "no pattern of pace {} for {} stages", pace, p);
  for (int s = 0; s < p; ++s) {
    std::vector<std::pair<int, PipelineSlot>> timed;
    const auto starts = chosen->starts(s);
    for (int j = 0; j < m; ++j)
      for (const Pattern::Start& start : *starts)
        timed.push_back({start.time + Pattern::kPeriod * j, {start.work, start.back ? 2 * p - 1 - s : s, j}});
    std::ranges::sort(timed, {}, &std::pair<int, PipelineSlot>::first);
    for (const auto& [time, slot] : timed) stages[at(s)].slot(slot.work, slot.part, slot.micro_batch);
  }
}

int any(int, int m) { return m; }
int multiple_of_stages(int p, int m) { return (m + p - 1) / p * p; }

/// A schedule that has a name. To add one: a row, and what writes it.
struct Named {
  std::string_view name;
  PartPlacement placement = PartPlacement::kLooped;
  bool looped = false;              ///< whether a stage has `virtual_stages` parts
  bool splits = false;              ///< whether its slots tell I from W
  int (*stated_for)(int p, int m);  ///< the number of micro-batches, from m on, for which its paper states it
  void (*write)(std::vector<Writer>& stages, int p, int v, int m);
};

constexpr auto kLooped = PartPlacement::kLooped;
constexpr auto kFolded = PartPlacement::kFolded;
constexpr auto kMirrored = PartPlacement::kMirrored;

/// In the order of `Schedule`, as far as that goes.
constexpr Named kNamed[] = {
    {"none", kLooped, false, false, any, each_stage<naive>},
    {"afab", kLooped, false, false, any, each_stage<afab>},
    {"1f1b", kLooped, false, false, any,
     each_stage<[](Writer& w, int p, int s, int m) { one_forward_one_backward(w, s, m, p - 1 - s); }>},
    {"interleaved", kLooped, true, false, multiple_of_stages, interleaved},
    {"breadth-first", kLooped, true, false, any, breadth_first},
    {"zb-h1", kLooped, false, true, any, each_stage<[](Writer& w, int p, int s, int m) { zero_bubble(w, s, m, p - s, s); }>},
    {"zb-h2", kLooped, false, true, any,
     each_stage<[](Writer& w, int p, int s, int m) { zero_bubble(w, s, m, 2 * (p - s) - 1, 2 * s); }>},
    {"zb-v", kFolded, false, true, [](int p, int m) { return std::max(m, 2 * p - 1); }, each_stage<zb_v>},
    {"v-half", kFolded, false, true, any, patterned<3>},
    {"v-min", kFolded, false, true, any, patterned<2>},
    {"dualpipe", kMirrored, false, true, [](int p, int m) { return std::max(m + m % 2, 2 * p); }, each_stage<dual_pipe_mirrored>},
    {"dualpipe-v", kFolded, false, true, [](int p, int m) { return std::max(m, 2 * p); },
     each_stage<[](Writer& w, int p, int s, int m) { dual_pipe(w, p, s, s, 2 * p - 1 - s, m); }>},
    {"naive", kLooped, false, false, any, each_stage<naive>},
    {"eager-1f1b", kLooped, false, false, any,
     each_stage<[](Writer& w, int p, int s, int m) { one_forward_one_backward(w, s, m, 2 * (p - 1 - s)); }>},
};

const Named& row_of(Schedule schedule) {
  SHARDLAB_CHECK(is_named(schedule), "schedule {} has no slots of its own", name_of(schedule));
  return kNamed[static_cast<size_t>(schedule)];
}

}  // namespace

int named_schedules() { return static_cast<int>(std::size(kNamed)); }

bool is_named(Schedule s) { return static_cast<size_t>(s) < std::size(kNamed); }

std::string_view name_of(Schedule s) { return s == Schedule::kTable ? "table" : s == Schedule::kAuto ? "auto" : row_of(s).name; }

std::optional<Schedule> schedule_named(std::string_view name) {
  for (const Schedule s : {Schedule::kAuto, Schedule::kTable})
    if (name == name_of(s)) return s;
  for (int i = 0; i < named_schedules(); ++i)
    if (name == kNamed[i].name) return static_cast<Schedule>(i);
  return std::nullopt;
}

bool is_folded(Schedule s) { return is_named(s) && row_of(s).placement == kFolded; }
bool is_mirrored(Schedule s) { return is_named(s) && row_of(s).placement == kMirrored; }
bool is_looped(Schedule s) { return is_named(s) && row_of(s).looped; }
bool splits_backward(Schedule s) { return is_named(s) && row_of(s).splits; }

PipelineSchedule make_schedule(const PipelineShape& shape) {
  const Named& named = row_of(shape.schedule);
  PipelineSchedule schedule;
  schedule.placement = named.placement;
  schedule.stages = shape.stages;
  schedule.parts = parts_of(shape);
  schedule.micro_batches = shape.micro_batches;
  schedule.order.resize(at(shape.stages));
  std::vector<Writer> writers;
  for (auto& order : schedule.order) writers.emplace_back(order, schedule.parts);
  named.write(writers, shape.stages, shape.virtual_stages, named.stated_for(shape.stages, shape.micro_batches));
  // What goes up through mirrored parts are the last micro-batches; and those that are not there lose their slots.
  const int down = schedule.downward();
  const bool mirrored = named.placement == kMirrored;
  for (int s = 0; s < shape.stages; ++s)
    std::erase_if(schedule.order[at(s)], [&](PipelineSlot& slot) {
      const bool goes_up = mirrored && slot.part != s;
      if (slot.micro_batch >= (goes_up ? shape.micro_batches - down : mirrored ? down : shape.micro_batches)) return true;
      if (goes_up) slot.micro_batch += down;
      return false;
    });
  return schedule;
}

namespace {

class ListScheduler {
 public:
  ListScheduler(PipelineSchedule& schedule, const SlotCosts& costs, double held)
      : schedule_(schedule),
        costs_(costs),
        limit_(held * schedule.parts / schedule.stages + 1e-9),
        stages_(at(schedule.stages)),
        parts_(at(schedule.parts)) {
    for (Part& part : parts_) part.forward.assign(at(schedule.micro_batches), kNever), part.input = part.forward;
    for (int s = 0; s < schedule.stages; ++s) stages_[at(s)].parts = schedule.parts_of(s);
  }

  /// The slot that can begin soonest, of all stages, until none is left.
  void run() {
    while (true) {
      std::optional<Choice> best;
      for (int s = 0; s < schedule_.stages; ++s)
        for (const int part : stages_[at(s)].parts) consider(s, part, best);
      if (!best) return;
      take(*best);
    }
  }

 private:
  static constexpr double kNever = -1;
  struct Part {
    std::vector<double> forward, input;  ///< ends, by micro-batch
    int forwards = 0, inputs = 0, weights = 0;
  };
  struct Stage {
    std::vector<int> parts;
    double free = 0;
    int held = 0;
  };
  struct Choice {
    double begin = 0;
    int rank = 0;  ///< what is taken of two that begin together: the lower
    int stage = 0;
    PipelineSlot slot;
  };

  double arrival(double end, int part, int from_part) const {
    return end + (schedule_.stage_of(part, 0) != schedule_.stage_of(from_part, 0) ? costs_.hop : 0);
  }

  void consider(int s, int q, std::optional<Choice>& best) const {
    const Stage& stage = stages_[at(s)];
    const Part& part = parts_[at(q)];
    const auto offer = [&](SlotWork work, int micro_batch, double ready, int rank) {
      const double begin = std::max(ready, stage.free);
      if (!best || std::pair(begin, rank) < std::pair(best->begin, best->rank))
        best = Choice{begin, rank, s, {work, q, micro_batch}};
    };
    if (const int j = part.inputs; j < part.forwards) {
      const double need = q == schedule_.parts - 1 ? part.forward[at(j)] : parts_[at(q) + 1].input[at(j)];
      if (need != kNever) offer(SlotWork::kI, j, q == schedule_.parts - 1 ? need : arrival(need, q, q + 1), 0);
    }
    // A part that is not the stage's last leaves room for that of the oldest micro-batch: it cannot go back before.
    const int room = q == stage.parts.back() ? 0 : 1;
    if (const int j = part.forwards; j < schedule_.micro_batches && stage.held + 1 + room <= limit_) {
      const double need = q == 0 ? 0 : parts_[at(q) - 1].forward[at(j)];
      if (need != kNever) offer(SlotWork::kF, j, q == 0 ? 0 : arrival(need, q, q - 1), 1);
    }
    if (const int j = part.weights; j < part.inputs) offer(SlotWork::kW, j, part.input[at(j)], 2);
  }

  void take(const Choice& choice) {
    Stage& stage = stages_[at(choice.stage)];
    Part& part = parts_[at(choice.slot.part)];
    const double end = choice.begin + costs_.of(choice.slot);
    const size_t j = at(choice.slot.micro_batch);
    stage.free = end;
    switch (choice.slot.work) {
      case SlotWork::kF: part.forward[j] = end, ++part.forwards, ++stage.held; break;
      case SlotWork::kI: part.input[j] = end, ++part.inputs; break;
      default: ++part.weights, --stage.held; break;
    }
    schedule_.order[at(choice.stage)].push_back(choice.slot);
  }

  PipelineSchedule& schedule_;
  const SlotCosts& costs_;
  double limit_;  ///< in parts
  std::vector<Stage> stages_;
  std::vector<Part> parts_;
};

}  // namespace

PipelineSchedule list_schedule(PartPlacement placement, int stages, int virtual_stages, int micro_batches, const SlotCosts& costs,
                               double held) {
  PipelineSchedule schedule;
  schedule.placement = placement;
  schedule.stages = stages;
  schedule.parts = stages * (placement == PartPlacement::kFolded ? 2 : virtual_stages);
  schedule.micro_batches = micro_batches;
  schedule.order.resize(at(stages));
  ListScheduler(schedule, costs, held).run();
  return schedule;
}

}  // namespace shardlab
