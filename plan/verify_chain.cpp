#include "plan/verify_chain.h"

#include "plan/base/hash.h"

namespace shardlab::verifying {

uint64_t ChainRule::mix_term(int32_t n) { return mix(static_cast<uint64_t>(n) + 1); }

int32_t ChainRule::find(uint64_t key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? -1 : found->second;
}

int32_t ChainRule::add(uint64_t key, const Op* op, int32_t settings, const std::vector<Held>& reads, size_t made) {
  const auto n = static_cast<int32_t>(nodes_.size());
  nodes_.push_back({op, settings, held_.size(), static_cast<uint32_t>(reads.size()), static_cast<uint32_t>(made)});
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

/// The labels of those that read a value, for messages.
std::string ChainRule::wanted(const Value& value) const {
  const std::string& maker = nodes_[static_cast<size_t>(value.maker)].op->label;
  return fmt::format("the gradient of what {} made, the sum over all that read it", maker);
}

void ChainRule::settle() {
  // A result is numbered after what it was made of, so that one way back through the numbers meets every gradient complete.
  for (size_t v = values_.size(); v-- > 0;)
    for (int32_t p = values_[v].first_pass; p >= 0; p = passes_[static_cast<size_t>(p)].next) {
      const Value& result = values_[passes_[static_cast<size_t>(p)].result];
      values_[v].terms += result.terms;
      values_[v].hidden |= result.hidden;
    }
  for (const Check& check : checks_) {
    if (report_.full()) return;
    const Value& value = values_[check.value];
    if (value.hidden || value.terms == check.terms) continue;
    report_.add(Rule::kGradients, check.site.role, op_name(*check.site.segment, *check.site.op, *check.site.call),
                fmt::format("reads %{}, which is not {}: a path back is missing, one too many, or leads past an op", check.slot,
                            wanted(value)));
  }
}

}  // namespace shardlab::verifying
