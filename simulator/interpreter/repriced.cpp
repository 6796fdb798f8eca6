#include "simulator/interpreter/repriced.h"

#include <algorithm>
#include <map>
#include <set>

#include "plan/trace_internal.h"

namespace shardlab::simulator {
namespace {

constexpr std::string_view kLaunch = "launch";

/// "compute", "communication" or "copies".
std::string_view class_of(const Instruction& i) {
  return is_communication(i) ? "communication" : is_transfer(i) ? "copies" : "compute";
}

/// Whether `word` is `name`, or its beginning up to a dot.
bool begins(std::string_view name, std::string_view word) {
  return name.starts_with(word) && (name.size() == word.size() || name[word.size()] == '.');
}

Instruction instruction_of(const Segment& segment, const Op& op) {
  Instruction i;
  i.segment = &segment;
  i.op = &op;
  return i;
}

bool names(std::string_view word, const Instruction& i) {
  return word == class_of(i) || word == i.op->strategy || begins(kernel_of(*i.op), word) || word == kind_of(i.op->work) ||
         begins(i.op->label, word);
}

/// Calls `see` with every op of the plan.
template <class See>
void for_each_op(const Plan& plan, See see) {
  for (const Segment& segment : plan.segments)
    for (const Step& step : segment.steps)
      if (const Op* op = std::get_if<Op>(&step)) see(instruction_of(segment, *op));
}

}  // namespace

std::string_view name_of(PriceWord::Sort sort) {
  switch (sort) {
    case PriceWord::Sort::kClass: return "class";
    case PriceWord::Sort::kHost: return "host";
    case PriceWord::Sort::kKind: return "kind";
    case PriceWord::Sort::kStrategy: return "strategy";
    case PriceWord::Sort::kLabel: return "label";
  }
  return "";
}

std::vector<PriceWord> words_of_prices(const Plan& plan) {
  using Sort = PriceWord::Sort;
  std::map<Sort, std::set<std::string>> found{{Sort::kHost, {std::string(kLaunch)}}};
  for_each_op(plan, [&](const Instruction& i) {
    found[Sort::kClass].emplace(class_of(i));
    found[Sort::kKind].emplace(kind_of(i.op->work));
    // "linear.F.bias" is also "linear.F".
    const std::string kernel = kernel_of(*i.op);
    for (size_t dot = kernel.find('.'); dot != std::string::npos; dot = kernel.find('.', dot + 1))
      found[Sort::kKind].insert(kernel.substr(0, dot));
    found[Sort::kKind].insert(kernel);
    if (!i.op->strategy.empty()) found[Sort::kStrategy].insert(i.op->strategy);
    const std::string& label = i.op->label;
    for (size_t dot = label.find('.'); dot != std::string::npos; dot = label.find('.', dot + 1))
      found[Sort::kLabel].insert(label.substr(0, dot));
    found[Sort::kLabel].insert(label);
  });
  std::vector<PriceWord> words;
  std::set<std::string_view> seen;
  for (const auto& [sort, of_sort] : found)
    for (const std::string& word : of_sort)
      if (!word.empty() && seen.insert(word).second) words.push_back({sort, word});
  return words;
}

RepricedCostModel::RepricedCostModel(const PlacedCostModel& base, const Plan& plan, std::span<const PriceChange> changes)
    : ScaledCostModel(base) {
  for (const PriceChange& change : changes) {
    if (change.what == kLaunch) launch_ *= change.factor;
    for_each_op(plan, [&](const Instruction& i) {
      if (names(change.what, i)) factors_.try_emplace(i.op, 1.0).first->second *= change.factor;
    });
  }
}

double RepricedCostModel::factor_of(const Instruction& instruction) const {
  const auto found = factors_.find(instruction.op);
  return found == factors_.end() ? 1.0 : found->second;
}

double occupied_by(const Plan& plan, std::span<const Program> programs, const PlacedCostModel& costs, std::string_view word) {
  double most = 0;
  std::unordered_map<const Op*, double> known;  ///< negative: not named
  for (const Program& program : programs) {
    if (costs.differs_by_stage()) known.clear();
    for (const std::vector<int32_t>& stream : program.streams) {
      double seconds = 0;
      for (const int32_t id : stream) {
        const Instruction& i = program.instructions[static_cast<size_t>(id)];
        if (i.kind != Instruction::Kind::kRun) continue;
        const auto [price, unseen] = known.try_emplace(i.op, -1.0);
        if (unseen && names(word, i))
          price->second = (is_communication(i) ? costs.communicate(plan, i, 1) : costs.compute(plan, i, 1)).value;
        seconds += std::max(0.0, price->second);
      }
      most = std::max(most, seconds);
    }
  }
  return most;
}

}  // namespace shardlab::simulator
