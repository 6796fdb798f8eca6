#include "simulator/interpreter/segments/beside.h"

#include <algorithm>
#include <array>
#include <bit>

#include "plan/base/check.h"

namespace shardlab::simulator::segments {
namespace {

/// `share_device` takes no more: an op of the control stream, and one on each stream of a plan (kMaxStreams).
constexpr size_t kMostAtOnce = 32;

/// Entry `i` of a list that grows on demand.
template <class T>
T& grown(std::vector<T>& list, int32_t i, const T& otherwise) {
  if (static_cast<size_t>(i) >= list.size()) list.resize(static_cast<size_t>(i) + 1, otherwise);
  return list[static_cast<size_t>(i)];
}

}  // namespace

size_t Beside::Hash::operator()(const Shares& s) const {
  uint64_t h = std::bit_cast<uint64_t>(s.held_units);
  for (const double share : s.of) h = (h ^ std::bit_cast<uint64_t>(share)) * 0x9e3779b97f4a7c15ull, h ^= h >> 29;
  return h;
}

Beside::Beside() {
  kind_of(Shares{});
  set_of({});
}

int32_t Beside::kind_of(const Shares& shares) {
  const auto [known, fresh] = kind_of_.try_emplace(shares, static_cast<int32_t>(kinds_.size()));
  if (fresh) kinds_.push_back(shares);
  return known->second;
}

Beside::Set& Beside::set_of(std::vector<int32_t> kinds) {
  SHARDLAB_CHECK(kinds.size() < kMostAtOnce, "{} ops run at once on a device", kinds.size());
  for (const auto& set : sets_)
    if (set->kinds == kinds) return *set;
  Set& set = *sets_.emplace_back(std::make_unique<Set>());
  set.number = static_cast<int32_t>(sets_.size()) - 1;
  set.kinds = std::move(kinds);
  std::array<double, kMostAtOnce> speeds{};
  solve(set, 0, speeds);
  set.alone.assign(speeds.begin() + 1, speeds.begin() + 1 + static_cast<std::ptrdiff_t>(set.kinds.size()));
  return set;
}

Beside::Set& Beside::find_with(Set& set, int32_t kind) {
  std::vector<int32_t> kinds = set.kinds;
  kinds.insert(std::ranges::upper_bound(kinds, kind), kind);
  return *(grown<Set*>(set.with, kind, nullptr) = &set_of(std::move(kinds)));
}

Beside::Set& Beside::find_without(Set& set, int32_t kind) {
  std::vector<int32_t> kinds = set.kinds;
  kinds.erase(kinds.begin() + static_cast<std::ptrdiff_t>(set.position(kind)));
  return *(grown<Set*>(set.without, kind, nullptr) = &set_of(std::move(kinds)));
}

void Beside::solve(const Set& set, int32_t kind, std::span<double> speeds) const {
  std::array<const Shares*, kMostAtOnce> tasks;
  tasks[0] = &kinds_[static_cast<size_t>(kind)];
  for (size_t i = 0; i < set.kinds.size(); ++i) tasks[i + 1] = &kinds_[static_cast<size_t>(set.kinds[i])];
  share_device({tasks.data(), set.kinds.size() + 1}, speeds);
}

const std::vector<double>& Beside::speeds(Set& set, int32_t kind) {
  std::vector<double>& known = grown(set.beside, kind, {});
  if (known.empty()) {
    known.resize(set.kinds.size() + 1);
    solve(set, kind, known);
  }
  return known;
}

const Profile& Beside::profile(int32_t piece, std::span<const Cost> costs, Set& s) {
  const Profile*& known = grown(s.profiles, piece, static_cast<const Profile*>(nullptr));
  if (known != nullptr) return *known;
  Profile& p = profiles_.emplace_back();
  p.ops = costs.size();
  const size_t stride = costs.size() + 1, members = s.kinds.size();
  p.communication = 1 + members;
  p.rows.assign(stride * (p.communication + kSpents - 1), 0);
  for (size_t j = 0; j < costs.size(); ++j) {
    const std::vector<double>& v = speeds(s, costs[j].kind);
    const double slowed = costs[j].seconds / v[0];
    p.rows[j + 1] = p.rows[j] + slowed;
    for (size_t m = 1; m <= members; ++m) p.rows[m * stride + j + 1] = p.rows[m * stride + j] + slowed * v[m];
    for (size_t k = 1; k < kSpents; ++k) {
      double* row = p.rows.data() + (members + k) * stride;
      row[j + 1] = row[j] + (static_cast<size_t>(costs[j].spent) == k ? slowed : 0);
    }
  }
  known = &p;
  return p;
}

}  // namespace shardlab::simulator::segments
