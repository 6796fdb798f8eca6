// How fast a piece runs beside single ops on other streams of its device, and they beside it.
//
// Ops that ask the same of a device are of one KIND. A SET is the kinds that run on a device at one moment beside its control
// stream. While a set stays the same, each op of a piece has one speed and so has each member of the set while that op runs: what
// `share_device` gives them. A PROFILE adds that up along the piece, so that "where is the piece after t seconds" and "when has
// that message moved" are a search in a sorted list, whatever the number of ops that lie between.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "simulator/interpreter/resources.h"

namespace shardlab::simulator::segments {

/// The kind of time that the seconds of an op count as.
enum class Spent : uint8_t { kCompute, kCommunication, kCopy };
inline constexpr size_t kSpents = 3;

/// One op of a piece, priced.
struct Cost {
  double seconds = 0;  ///< alone
  int32_t kind = 0;
  Spent spent = Spent::kCompute;
  friend bool operator==(const Cost&, const Cost&) = default;
};

/// A piece beside a set of ops, at the begin of each of its ops and at the end of the last. Row 0 has the seconds that have passed.
/// Row 1 + i has the progress of member i, in seconds that it takes alone. The rows behind the members have what of the seconds
/// passed in communication and in copies of the piece.
struct Profile {
  std::vector<double> rows;
  size_t ops = 0;
  size_t communication = 1;  ///< its row; the row of copies is the next

  std::span<const double> row(size_t r) const { return {rows.data() + r * (ops + 1), ops + 1}; }
  double total(size_t r) const { return rows[r * (ops + 1) + ops]; }
};

class Beside {
 public:
  Beside();

  /// Kind 0 asks for nothing.
  int32_t kind_of(const Shares& shares);

  /// The kinds of ops that run beside a control stream, and their shares.
  struct Set {
    int32_t number = 0;                       ///< 0: nobody
    std::vector<int32_t> kinds;               ///< ascending
    std::vector<double> alone;                ///< speeds while the control stream runs nothing
    std::vector<Set*> with, without;          ///< by kind: the set with one more and one less, or null
    std::vector<std::vector<double>> beside;  ///< by kind of the control stream's op: its speed, then theirs; empty: not known
    std::vector<const Profile*> profiles;     ///< by piece, or null

    /// Position of the first member of a kind.
    size_t position(int32_t kind) const {
      size_t i = 0;
      while (kinds[i] != kind) ++i;
      return i;
    }
  };
  /// Sets stay where they are.
  Set& nobody() { return *sets_[0]; }
  Set& with(Set& set, int32_t kind) {
    if (static_cast<size_t>(kind) < set.with.size() && set.with[static_cast<size_t>(kind)] != nullptr)
      return *set.with[static_cast<size_t>(kind)];
    return find_with(set, kind);
  }
  Set& without(Set& set, int32_t kind) {
    if (static_cast<size_t>(kind) < set.without.size() && set.without[static_cast<size_t>(kind)] != nullptr)
      return *set.without[static_cast<size_t>(kind)];
    return find_without(set, kind);
  }

  /// Pieces are numbered by the caller, who gives the same costs each time.
  const Profile& profile(int32_t piece, std::span<const Cost> costs, Set& set);

 private:
  struct Hash {
    size_t operator()(const Shares& s) const;
  };

  Set& set_of(std::vector<int32_t> kinds);
  Set& find_with(Set& set, int32_t kind);
  Set& find_without(Set& set, int32_t kind);
  const std::vector<double>& speeds(Set& set, int32_t kind);
  void solve(const Set& set, int32_t kind, std::span<double> speeds) const;

  std::vector<Shares> kinds_;
  std::unordered_map<Shares, int32_t, Hash> kind_of_;
  std::vector<std::unique_ptr<Set>> sets_;
  std::deque<Profile> profiles_;
};

}  // namespace shardlab::simulator::segments
