#include "plan/pipeline_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

#include "plan/limits.h"

namespace shardlab {
namespace {

constexpr std::string_view kLetters = "FIWB";

size_t index(int i) { return static_cast<size_t>(i); }

/// A value for each part and micro-batch.
template <class T>
class ByPart {
 public:
  ByPart(const PipelineSchedule& schedule, T value)
      : micro_batches_(schedule.micro_batches), values_(index(schedule.parts) * index(schedule.micro_batches), value) {}
  T& operator()(int part, int micro_batch) { return values_[index(part) * index(micro_batches_) + index(micro_batch)]; }

 private:
  int micro_batches_;
  std::vector<T> values_;
};

/// What is wrong with a schedule, and where: a slot of a stage, or the stage as a whole.
struct Fault {
  Error error;
  size_t stage = 0;
  size_t slot = 0;
};

/// The slot that a slot waits for, on whichever stage; none for the first forward.
struct Need {
  bool any = false;
  PipelineSlot slot;
};

Need need_of(const PipelineSchedule& schedule, const PipelineSlot& slot) {
  PipelineSlot before = slot;
  switch (slot.work) {
    case SlotWork::kF: return {slot.part > 0, {SlotWork::kF, slot.part - 1, slot.micro_batch}};
    case SlotWork::kW: before.work = SlotWork::kI; return {true, before};
    case SlotWork::kI:
    case SlotWork::kB:
      if (slot.part == schedule.parts - 1) return {true, {SlotWork::kF, slot.part, slot.micro_batch}};
      return {true, {SlotWork::kI, slot.part + 1, slot.micro_batch}};  // or B, which makes as much
  }
  return {};
}

}  // namespace

std::string print(const PipelineSlot& slot) {
  return fmt::format("{}{}{}", slot.part, kLetters[static_cast<size_t>(slot.work)], slot.micro_batch);
}

int PipelineSchedule::stage_of(int part, int micro_batch) const {
  switch (placement) {
    case PartPlacement::kLooped: return part % stages;
    case PartPlacement::kFolded: return part < stages ? part : parts - 1 - part;
    case PartPlacement::kMirrored: return micro_batch < downward() ? part : parts - 1 - part;
    case PartPlacement::kListed: return listed[index(part)];
  }
  return 0;
}

std::vector<int> PipelineSchedule::parts_of(int stage) const {
  std::vector<int> all;
  for (int part = 0; part < parts; ++part)
    if (stage_of(part, 0) == stage || (placement == PartPlacement::kMirrored && parts - 1 - part == stage)) all.push_back(part);
  return all;
}

int parts_of(const PipelineShape& shape) {
  if (is_folded(shape.schedule)) return 2 * shape.stages;
  return is_looped(shape.schedule) ? shape.virtual_stages * shape.stages : shape.stages;
}

Result<void> check(const PipelineShape& s) {
  const std::string name(name_of(s.schedule));
  if ((s.stages == 1) != (s.schedule == Schedule::kNone))
    return refusal(fmt::format("schedule={} with pp={}: {}", name, s.stages,
                               s.stages == 1 ? "there is no pipeline to be scheduled" : "a pipeline needs a schedule"),
                   s.stages == 1 ? "set schedule: none, or pp above 1" : "set schedule: 1f1b, interleaved, zb-h1, ...");
  if (is_looped(s.schedule) != (s.virtual_stages > 1))
    return is_looped(s.schedule)
               ? refusal(fmt::format("schedule={} with vpp=1: it needs several virtual stages on each rank", name),
                         "set vpp: 2 or more, or schedule: 1f1b")
           : is_folded(s.schedule)
               ? refusal(fmt::format("schedule={} with vpp={}: it has two parts of the model on each rank by itself", name,
                                     s.virtual_stages),
                         "set vpp: 1")
               : refusal(fmt::format("schedule={} with vpp={}: it has one virtual stage on each rank", name, s.virtual_stages),
                         "set vpp: 1, or schedule: interleaved or breadth-first");
  if (s.schedule == Schedule::kDualPipe && s.stages % 2 != 0)
    return refusal(fmt::format("schedule=dualpipe with pp={}: each part lies on two stages, q and p - 1 - q", s.stages),
                   "set pp: an even number, or schedule: dualpipe-v");
  return {};
}

SlotCosts SlotCosts::uniform(int parts, double forward, double input, double weight, double hop) {
  const auto each = [&](double v) { return std::vector<double>(index(parts), v); };
  return {each(forward), each(input), each(weight), hop};
}

double SlotCosts::of(const PipelineSlot& slot) const {
  const size_t q = index(slot.part);
  switch (slot.work) {
    case SlotWork::kF: return forward[q];
    case SlotWork::kI: return input[q];
    case SlotWork::kW: return weight[q];
    case SlotWork::kB: return input[q] + weight[q];
  }
  return 0;
}

namespace {

/// The slot of a stage that does what is needed, as its row has it: a B where an I is needed.
PipelineSlot as_written(const PipelineSchedule& schedule, const PipelineSlot& need) {
  const auto& order = schedule.order[index(schedule.stage_of(need.part, need.micro_batch))];
  const auto found = std::ranges::find_if(order, [&](const PipelineSlot& slot) {
    const bool same = slot.work == SlotWork::kF ? need.work == SlotWork::kF : slot.goes_back() && need.goes_back();
    return same && slot.part == need.part && slot.micro_batch == need.micro_batch;
  });
  return found == order.end() ? need : *found;
}

constexpr const char* kOrder =
    "order the cells so that each follows what it needs: F the F of the previous part; I or B the F of its own part and the I or B "
    "of the next part; W the I of its own part";

/// The first stage that cannot go on, `done` slots of each stage being done.
std::optional<Fault> first_wait(const PipelineSchedule& schedule, const ScheduleTimes& times) {
  const auto at = [&](size_t stage) { return times.slots[stage].size(); };
  for (size_t stage = 0; stage < schedule.order.size(); ++stage) {
    if (at(stage) == schedule.order[stage].size()) continue;
    const PipelineSlot& slot = schedule.order[stage][at(stage)];
    const PipelineSlot need = as_written(schedule, need_of(schedule, slot).slot);
    const size_t home = index(schedule.stage_of(need.part, need.micro_batch));
    const std::string waits = fmt::format("stage {}: {} waits forever for {}", stage, print(slot), print(need));
    const std::string why = home == stage ? ", which stands behind it"
                            : at(home) < schedule.order[home].size()
                                ? fmt::format(" of stage {}, which itself waits at {}", home, print(schedule.order[home][at(home)]))
                                : fmt::format(" of stage {}", home);
    return Fault{refusal(waits + why, kOrder), stage, at(stage)};
  }
  return std::nullopt;
}

/// Runs the slots of all stages as far as they go.
ScheduleTimes played(const PipelineSchedule& schedule, const SlotCosts& costs) {
  constexpr double kNever = -1;
  ByPart<double> forward(schedule, kNever), input(schedule, kNever);
  ScheduleTimes times;
  times.slots.resize(index(schedule.stages));
  const auto end_of = [&](const PipelineSlot& slot) {
    return slot.work == SlotWork::kF ? forward(slot.part, slot.micro_batch) : input(slot.part, slot.micro_batch);
  };
  // A stage that has to wait is taken up again once what it waits for is done: each slot is looked at once or twice.
  constexpr int kNone = -1;
  ByPart<int> for_forward(schedule, kNone), for_input(schedule, kNone);  // the last stage that began to wait for it
  std::vector<int> waited_before(index(schedule.stages), kNone);         // for the same
  std::vector<int> ready;
  for (int stage = schedule.stages; stage-- > 0;) ready.push_back(stage);
  const auto release = [&](int& last) {
    for (int stage = std::exchange(last, kNone); stage != kNone; stage = waited_before[index(stage)]) ready.push_back(stage);
  };
  while (!ready.empty()) {
    const int stage = ready.back();
    ready.pop_back();
    const auto& order = schedule.order[index(stage)];
    auto& slots = times.slots[index(stage)];
    while (slots.size() < order.size()) {
      const PipelineSlot& slot = order[slots.size()];
      double begin = slots.empty() ? 0 : slots.back().end;
      if (const Need need = need_of(schedule, slot); need.any) {
        const double end = end_of(need.slot);
        if (end == kNever) {
          auto& waits = need.slot.work == SlotWork::kF ? for_forward : for_input;
          waited_before[index(stage)] = std::exchange(waits(need.slot.part, need.slot.micro_batch), stage);
          break;
        }
        const bool travels = schedule.stage_of(need.slot.part, slot.micro_batch) != stage;
        begin = std::max(begin, end + (travels ? costs.hop : 0));
      }
      const double end = begin + costs.of(slot);
      slots.push_back({begin, end});
      if (slot.work == SlotWork::kF) {
        forward(slot.part, slot.micro_batch) = end;
        release(for_forward(slot.part, slot.micro_batch));
      }
      if (slot.goes_back()) {
        input(slot.part, slot.micro_batch) = end;
        release(for_input(slot.part, slot.micro_batch));
      }
      times.end = std::max(times.end, end);
    }
  }
  return times;
}

/// A slot that repeats what an earlier one of its stage has done.
Fault repeated(const PipelineSchedule& schedule, size_t stage, size_t at) {
  const PipelineSlot& slot = schedule.order[stage][at];
  const PipelineSlot earlier = *std::ranges::find_if(schedule.order[stage], [&](const PipelineSlot& s) {
    return s.part == slot.part && s.micro_batch == slot.micro_batch && (s.work == SlotWork::kF) == (slot.work == SlotWork::kF);
  });
  const std::string message = earlier.work == slot.work ? fmt::format("stage {} has {} twice", stage, print(slot))
                                                        : fmt::format("stage {} has both {} and {}: a B is an I and a W in one",
                                                                      stage, print(earlier), print(slot));
  return {refusal(message, "remove one of the two"), stage, at};
}

/// The first thing wrong with a schedule.
std::optional<Fault> find_fault(const PipelineSchedule& schedule) {
  enum : unsigned { kForward = 1, kInput = 2, kWeight = 4, kAll = 7 };
  const auto makes = [](const PipelineSlot& slot) -> unsigned {
    return slot.work == SlotWork::kF   ? kForward
           : slot.work == SlotWork::kI ? kInput
           : slot.work == SlotWork::kW ? kWeight
                                       : kInput | kWeight;
  };
  ByPart<unsigned> done(schedule, 0U);
  for (size_t stage = 0; stage < schedule.order.size(); ++stage)
    for (size_t i = 0; i < schedule.order[stage].size(); ++i) {
      const PipelineSlot& slot = schedule.order[stage][i];
      if (const int home = schedule.stage_of(slot.part, slot.micro_batch); index(home) != stage)
        return Fault{refusal(fmt::format("stage {} has {}, but part {} for micro-batch {} is on stage {}", stage, print(slot),
                                         slot.part, slot.micro_batch, home),
                             "keep a part on one stage; of a mirrored schedule the first half of the micro-batches goes down"),
                     stage, i};
      unsigned& made = done(slot.part, slot.micro_batch);
      if ((made & makes(slot)) != 0) return repeated(schedule, stage, i);
      made |= makes(slot);
    }
  for (int part = 0; part < schedule.parts; ++part)
    for (int j = 0; j < schedule.micro_batches; ++j) {
      const unsigned made = done(part, j);
      if (made == kAll) continue;
      const auto lacks = [&](const char* what, std::string hint) {
        const int stage = schedule.stage_of(part, j);
        return Fault{
            refusal(fmt::format("stage {} has no {} of part {} for micro-batch {}", stage, what, part, j), std::move(hint)),
            index(stage), 0};
      };
      if ((made & kForward) == 0) return lacks("forward pass", fmt::format("add {}F{}", part, j));
      if (made == kForward) return lacks("backward pass", fmt::format("add {0}B{1}, or {0}I{1} and {0}W{1}", part, j));
      return (made & kInput) == 0 ? lacks("I", fmt::format("add {}I{}", part, j)) : lacks("W", fmt::format("add {}W{}", part, j));
    }
  // What a slot needs of its own part lies in its own row.
  ByPart<unsigned> before(schedule, 0U);
  for (size_t stage = 0; stage < schedule.order.size(); ++stage)
    for (size_t i = 0; i < schedule.order[stage].size(); ++i) {
      const PipelineSlot& slot = schedule.order[stage][i];
      unsigned& made = before(slot.part, slot.micro_batch);
      const SlotWork need = slot.work == SlotWork::kW ? SlotWork::kI : SlotWork::kF;
      if (slot.work != SlotWork::kF && (made & makes({need, slot.part, slot.micro_batch})) == 0) {
        const std::string needed = print({need, slot.part, slot.micro_batch});
        return Fault{refusal(fmt::format("stage {}: {} stands before {}, which it needs", stage, print(slot), needed),
                             fmt::format("put {} before {}", needed, print(slot))),
                     stage, i};
      }
      made |= makes(slot);
    }
  return first_wait(schedule, played(schedule, SlotCosts::uniform(schedule.parts, 1, 1, 1)));
}

}  // namespace

Result<ScheduleTimes> play(const PipelineSchedule& schedule, const SlotCosts& costs) {
  ScheduleTimes times = played(schedule, costs);
  if (const auto wait = first_wait(schedule, times)) return wait->error;
  return times;
}

Result<void> check(const PipelineSchedule& schedule) {
  if (const auto fault = find_fault(schedule)) return fault->error;
  return {};
}

double most_held(const PipelineSchedule& schedule, int stage) {
  int held = 0, most = 0;
  for (const PipelineSlot& slot : schedule.order[index(stage)]) {
    if (slot.work == SlotWork::kF) most = std::max(most, ++held);
    if (slot.makes_gradients()) --held;
  }
  return static_cast<double>(most) * schedule.stages / schedule.parts;
}

std::string to_csv(const PipelineSchedule& schedule) {
  std::string text;
  for (const auto& order : schedule.order) {
    std::string_view separator;
    for (const PipelineSlot& slot : order) text += fmt::format("{}{}", std::exchange(separator, ","), print(slot));
    text += '\n';
  }
  return text;
}

namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

/// The pieces of a text between separators; the last is empty where the text ends with one.
std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  while (true) {
    const size_t end = text.find(separator);
    pieces.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return pieces;
    text.remove_prefix(end + 1);
  }
}

bool read_number(std::string_view& text, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

bool read_slot(std::string_view text, PipelineSlot& slot) {
  if (!read_number(text, slot.part) || text.empty()) return false;
  const size_t letter = kLetters.find(text.front());
  if (letter == std::string_view::npos) return false;
  slot.work = static_cast<SlotWork>(letter);
  text.remove_prefix(1);
  return read_number(text, slot.micro_batch) && text.empty();
}

/// The stages that each part is on, ascending.
std::vector<std::vector<int>> stages_by_part(const PipelineSchedule& s) {
  std::vector<std::vector<int>> stages(index(s.parts));
  for (int stage = 0; stage < s.stages; ++stage)
    for (const PipelineSlot& slot : s.order[index(stage)])
      if (auto& list = stages[index(slot.part)]; list.empty() || list.back() != stage) list.push_back(stage);
  return stages;
}

/// Finds the rule by which the parts lie on the stages, or that they follow none.
void find_placement(PipelineSchedule& s, const std::vector<std::vector<int>>& found) {
  for (const PartPlacement rule : {PartPlacement::kLooped, PartPlacement::kFolded, PartPlacement::kMirrored}) {
    s.placement = rule;
    const bool mirrored = rule == PartPlacement::kMirrored;
    if (rule == PartPlacement::kLooped ? s.parts % s.stages != 0 : s.parts != (mirrored ? 1 : 2) * s.stages) continue;
    bool holds = true;
    for (int part = 0; part < s.parts && holds; ++part) {
      std::vector<int> expected{s.stage_of(part, 0)};
      if (mirrored && s.parts - 1 - part != part) expected.push_back(s.parts - 1 - part);
      std::ranges::sort(expected);
      holds = found[index(part)] == expected;
    }
    if (holds) return;
  }
  s.placement = PartPlacement::kListed;
  for (const auto& stages : found) s.listed.push_back(stages.front());
}

}  // namespace

Result<PipelineSchedule> from_csv(std::string_view text, std::string_view where) {
  size_t head = 0;  // lines before the first row: the name of the file that the table was read from
  const auto no = [&](size_t row, size_t column, std::string message, std::string hint) {
    return Error{ExitCode::kUsage, std::move(message), std::move(hint), fmt::format("{}:{}:{}", where, head + row + 1, column + 1)};
  };
  constexpr std::string_view kForm =
      "write one row for each stage, cells separated by commas; a cell is PART, letter, MICRO-BATCH, such as 0F0; letters: F "
      "forward, I gradient of the input, W gradients of the weights, B both (docs/pipelines.md)";
  PipelineSchedule s;
  s.order.clear();
  s.parts = s.micro_batches = 0;
  std::vector<std::string_view> rows = split(text, '\n');
  if (!rows.empty() && trimmed(rows.front()).ends_with(".csv")) rows.erase(rows.begin()), head = 1;
  while (!rows.empty() && trimmed(rows.back()).empty()) rows.pop_back();
  if (rows.empty()) return no(0, 0, "the schedule is empty", std::string(kForm));
  if (std::ssize(rows) > kMaxMicroBatches)
    return no(0, 0, fmt::format("{} rows, at most {}", rows.size(), kMaxMicroBatches), std::string(kForm));
  std::vector<std::vector<size_t>> columns;  // of each slot, where its cell begins
  for (size_t row = 0; row < rows.size(); ++row) {
    auto& order = s.order.emplace_back();
    auto& begins = columns.emplace_back();
    for (const std::string_view cell : split(rows[row], ',')) {
      const std::string_view word = trimmed(cell);
      if (word.empty()) continue;
      const auto column = static_cast<size_t>(word.data() - rows[row].data());
      PipelineSlot slot;
      if (!read_slot(word, slot))
        return no(row, column, fmt::format("`{}` is not a cell of a schedule", word.substr(0, 40)), std::string(kForm));
      if (slot.part >= kMaxLayers || slot.micro_batch >= kMaxMicroBatches)
        return no(row, column, fmt::format("{} is beyond {} parts or {} micro-batches", print(slot), kMaxLayers, kMaxMicroBatches),
                  std::string(kForm));
      order.push_back(slot);
      begins.push_back(column);
      s.parts = std::max(s.parts, slot.part + 1);
      s.micro_batches = std::max(s.micro_batches, slot.micro_batch + 1);
    }
    if (order.empty())
      return no(row, 0, fmt::format("the row of stage {} has no cell", row),
                "give each stage a part to compute; leave no row empty");
  }
  s.stages = static_cast<int>(s.order.size());
  size_t slots = 0;
  for (const auto& order : s.order) slots += order.size();
  // Each part has two or three slots a micro-batch: what is checked by part and micro-batch is no larger than the text.
  if (index(s.parts) * index(s.micro_batches) > slots)
    return no(0, 0, fmt::format("{} cells are too few for {} parts and {} micro-batches", slots, s.parts, s.micro_batches),
              std::string(kForm));
  const auto found = stages_by_part(s);
  if (const auto gap = std::ranges::find_if(found, [](const auto& stages) { return stages.empty(); }); gap != found.end()) {
    const auto beyond = std::ranges::find_if(gap, found.end(), [](const auto& stages) { return !stages.empty(); });
    const auto part = static_cast<int>(gap - found.begin()), next = static_cast<int>(beyond - found.begin());
    const auto row = index(beyond->front());
    const size_t at = static_cast<size_t>(std::ranges::find(s.order[row], next, &PipelineSlot::part) - s.order[row].begin());
    return no(row, columns[row][at], fmt::format("no stage has part {}, but stage {} has part {}", part, row, next),
              "number the parts from 0 without gaps, in model order");
  }
  find_placement(s, found);
  if (const auto fault = find_fault(s))
    return no(fault->stage, columns[fault->stage][fault->slot], fault->error.message, fault->error.hint);
  return s;
}

std::string print_grid(const PipelineSchedule& schedule, const SlotCosts& costs) {
  const auto times = play(schedule, costs);
  SHARDLAB_CHECK(times.ok(), "a schedule that was not checked: {}", times.error().message);
  size_t width = 1;
  for (const auto& order : schedule.order)
    for (const PipelineSlot& slot : order) width = std::max(width, print(slot).size());
  const size_t labels = fmt::format("{}", schedule.stages - 1).size();
  std::string text;
  for (int stage = 0; stage < schedule.stages; ++stage) {
    std::string row = fmt::format("stage {:>{}}", stage, labels);
    const size_t begin = row.size() + 1;
    for (size_t i = 0; i < schedule.order[index(stage)].size(); ++i) {
      const SlotTime& time = times->slots[index(stage)][i];
      const auto from = begin + static_cast<size_t>(std::llround(time.begin)) * (width + 1);
      const auto to = begin + static_cast<size_t>(std::llround(time.end)) * (width + 1);
      row.resize(std::max(row.size(), from), ' ');
      std::string word = print(schedule.order[index(stage)][i]);
      word.resize(std::max(word.size(), to - from - 1), '-');
      row += word;
      row += ' ';
    }
    while (row.back() == ' ') row.pop_back();
    text += row + "\n";
  }
  return text;
}

}  // namespace shardlab
