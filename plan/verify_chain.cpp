#include "plan/verify_chain.h"

#include <algorithm>

#include "plan/base/hash.h"

namespace shardlab::verifying {

uint64_t ChainRule::mix_term(int32_t n, size_t input) { return mix(static_cast<uint64_t>(n) * 2 + input + 1); }

int32_t ChainRule::find(uint64_t key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? -1 : found->second;
}

int32_t ChainRule::add(uint64_t key, const Site& site, int32_t settings, const std::vector<Held>& reads, size_t made,
                       int32_t depth) {
  const auto n = static_cast<int32_t>(nodes_.size());
  nodes_.push_back({site.role, site.segment, site.op, site.call, settings, held_.size(), static_cast<uint32_t>(reads.size()),
                    static_cast<uint32_t>(made), depth});
  held_.insert(held_.end(), reads.begin(), reads.end());
  for (size_t i = 0; i < made; ++i) {
    held_.push_back({Held::Kind::kValue, values_.size(), 0});
    values_.push_back({.maker = n});
  }
  by_key_[key] = n;
  return n;
}

void ChainRule::pass(const Held& value, int32_t n) {
  Value& v = values_[value.what];
  passes_.push_back({made(n, 0).what, v.first_pass});
  v.first_pass = static_cast<int32_t>(passes_.size()) - 1;
}

std::string ChainRule::name_of(const Held& value) const {
  const Node& made_by = node(maker(value));
  std::string text = "what ";
  if (made_by.call->layer >= 0) text += fmt::format("layers.{} ", made_by.call->layer);
  if (made_by.call->micro_batch >= 0) text += fmt::format("m{} ", made_by.call->micro_batch);
  return text + made_by.op->label + " made";
}

bool ChainRule::stands_for(const Held& value, const Held& made) const {
  if (value.kind != Held::Kind::kValue || made.kind != Held::Kind::kValue || value.turn != made.turn) return false;
  for (auto v = static_cast<int64_t>(value.what); v >= 0; v = values_[static_cast<size_t>(v)].before)
    if (v == static_cast<int64_t>(made.what)) return true;
  return false;
}

void ChainRule::read_block(const Held& value, const Mesh& mesh, const Site& site) {
  Ring& ring = rings_[value.what];
  const size_t size = value.turn == 0 ? 1 : static_cast<size_t>(mesh.axes[static_cast<size_t>(value.axis)].size);
  ring.reads.resize(std::max(ring.reads.size(), size));
  ++ring.reads[static_cast<size_t>(value.turn)];
  if (value.turn == 0) return;
  ring.axis = mesh.axes[static_cast<size_t>(value.axis)].name;
  ring.site = site;
}

/// Whoever reads a value's blocks around a ring reads each of them, and none more often than another.
void ChainRule::settle_rings() {
  for (const auto& [value, ring] : rings_) {
    if (ring.axis.empty() || report_.full()) continue;
    const auto first = std::ranges::find_if(ring.reads.begin() + 1, ring.reads.end(), [](int32_t n) { return n > 0; });
    for (size_t turn = 0; turn < ring.reads.size(); ++turn) {
      if (turn == 0 ? ring.reads[0] > 0 : ring.reads[turn] == *first) continue;
      report_.add(
          Rule::kValues, ring.site.role, op_name(*ring.site.segment, *ring.site.op, *ring.site.call),
          fmt::format("along {}: {} goes round a ring of {}, and its block {} hops away is read {} times, another {} times",
                      ring.axis, name_of({Held::Kind::kValue, value, 0}), ring.reads.size(), turn, ring.reads[turn], *first));
      break;
    }
  }
}

uint64_t ChainRule::mix_part(uint64_t several, const Held& part, int64_t begin) {
  return mix(several ^ mix(part.what) ^ mix(static_cast<uint64_t>(begin) * 8 + static_cast<uint64_t>(part.kind)));
}

/// Whether what was read is the gradient of the value. Of a value that was read in parts it has a piece for each part, in the same place.
bool ChainRule::is_gradient(const Check& check) const {
  const Value& value = values_[check.value];
  const auto found = parts_.find(check.value);
  if (found == parts_.end()) return check.in_parts || value.terms == check.terms;
  std::vector<Part> parts = found->second;
  std::ranges::sort(parts);
  uint64_t several = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Held piece{Held::Kind::kGradient, value.terms + parts[i].term, 0};
    several = mix_part(several, piece, parts[i].begin);
    const int64_t end = i == 0 ? 0 : parts[i - 1].begin + parts[i - 1].length;
    if (parts[i].begin != end) return false;  // some elements were read twice, or by nobody
  }
  return check.in_parts && several == check.terms;
}

/// Where the plan tells the step's loss, each part of a loss is in it once.
void ChainRule::settle_losses() {
  const auto states_loss = [](const Op& op) {
    const auto* loss = std::get_if<CrossEntropy>(&op.work);
    return loss != nullptr && loss->part != CrossEntropy::Part::kMax && loss->part != CrossEntropy::Part::kSum;
  };
  if (std::ranges::none_of(values_, [](const Value& v) { return v.reports > 0; })) return;
  for (size_t v = 0; v < values_.size() && !report_.full(); ++v) {
    const Node& by = node(values_[v].maker);
    if (!states_loss(*by.op) || made(values_[v].maker, 0).what != v || values_[v].reports == 1) continue;
    report_.add(Rule::kValues, by.role, op_name(*by.segment, *by.op, *by.call),
                fmt::format("makes a loss that is {} times in that of the step", values_[v].reports));
  }
}

void ChainRule::settle() {
  settle_rings();
  // A result is numbered after what it was made of, so that one way back through the numbers meets every gradient complete.
  for (size_t v = values_.size(); v-- > 0;)
    for (int32_t p = values_[v].first_pass; p >= 0; p = passes_[static_cast<size_t>(p)].next) {
      const Value& result = values_[passes_[static_cast<size_t>(p)].result];
      values_[v].terms += result.terms;
      values_[v].reports += result.reports;
      values_[v].hidden |= result.hidden;
    }
  settle_losses();
  for (const Check& check : checks_) {
    if (report_.full()) return;
    if (values_[check.value].hidden || is_gradient(check)) continue;
    report_.add(
        Rule::kGradients, check.site.role, op_name(*check.site.segment, *check.site.op, *check.site.call),
        fmt::format("reads %{}, which is not the gradient of {}, summed over all that read it: a path back is missing, one too "
                    "many, or leads past an op",
                    check.slot, name_of({Held::Kind::kValue, check.value, 0})));
  }
}

}  // namespace shardlab::verifying
