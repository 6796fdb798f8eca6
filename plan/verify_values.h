// The abstract machine of rules 3 and 4: what each piece of each storage holds while a role's program is replayed.
// Internal to the replay (plan/verify_replay.h) and plan/verify_gradients.cpp.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plan/verify_internal.h"

namespace shardlab::verifying {

/// A multiset of micro-batches, by the op that contributed: how often, and a sum of hashes that tells the multiset apart.
struct Source {
  uint64_t id = 0;           ///< of the use of the parameter: label, layer, and which of the op's parameters it is
  uint64_t fingerprint = 0;  ///< sum of mix(micro-batch + 1)
  int32_t count = 0;
  const Op* op = nullptr;  ///< one of the ops, for messages
  int32_t layer = -1;
  friend bool operator==(const Source&, const Source&) = default;
};

/// The source of a sum over micro-batches that came from another role: the n-th collective of a group of a communicator that joins
/// roles, or the n-th such message from one role to another.
struct CrossRole {
  int32_t comm = -1;
  int32_t from = -1, to = -1;  ///< roles, of a message; of a collective, the first of its group where there are several
  int32_t ordinal = 0;
  int64_t end = 0;  ///< of what is no gradient: where in the sum it ends
  friend auto operator<=>(const CrossRole&, const CrossRole&) = default;
};

/// The contents of a sum over micro-batches.
struct Contributions {
  std::vector<Source> sources;
  /// For a squared norm: how many elements of each parameter's gradient it counts, over all ranks.
  std::map<int32_t, int64_t> normed;
  std::vector<CrossRole> merged;  ///< sums over roles that it went through: the other roles' parts are looked up at the end
  /// A kernel made it of several parameters' gradients at once (a compressed bucket): the kernel is trusted to have kept their
  /// elements apart, so what belongs to another parameter is no fault.
  bool mixed = false;

  void add(const Source& s);
  void add(const Contributions& other);
};

/// How the parts of a partial value are to be combined. A kernel that the core does not know decides for itself.
enum class Pending : uint8_t { kSum, kMax, kEither };

/// Elements [begin, end) of one storage, all in the same state. The bounds count elements of the whole range. If `shard` is not
/// empty, only the rank's own part of the range is current, and the ranks along `shard` hold the range together.
struct Piece {
  int64_t begin = 0, end = 0;
  int64_t origin = 0;       ///< where element 0 of the parameter would lie
  int32_t value_type = -1;  ///< in the TypeTable
  int32_t slice = -1;       ///< micro-batch, for slices
  int32_t parameter = -1;
  int32_t sum = -1;          ///< index of its Contributions, or -1 for none
  int32_t name = -1;         ///< last written under this buffer, or kSlotName + slot
  int32_t call = -1;         ///< number of the call that wrote it
  int32_t version = 0;       ///< updates since the period began
  int32_t run = -1;          ///< of the op that wrote it (Replay::runs_), or -1 for what the last period left
  int32_t state = -1;        ///< number of the value, which copies carry along, or -1
  int64_t state_origin = 0;  ///< where element 0 of that value would lie
  AxisSet shard;
  bool written = false;
  bool initial = false;  ///< from before the period
  bool zero = false;
  bool spent = false;  ///< a gradient by which an update was made
  Pending pending = Pending::kSum;
  /// The divisor that a scalar still needs before it is reported: the targets of the step for a loss that was just computed, 1 for
  /// the mean and for a squared norm, 0 for anything else and for an unknown origin.
  Rational owed{0};
};

inline constexpr int32_t kSlotName = 1 << 30;

/// One storage of a role, or of a local slot.
struct Storage {
  bool alive = false;
  bool persistent = false;
  bool read_initial = false;  ///< some op relied on what the last period left
  bool changed = false;       ///< some op of the period wrote to it
  int32_t copy_of = -1;       ///< root of the state that this is a copy of, as the period began, or -1
  int32_t taken_back = -1;    ///< run that wrote the predicate by which it last became again what it was, or -1

  void change() {
    changed = true;
    copy_of = taken_back = -1;
  }
  AxisSet spread;             ///< the storage is one rank's part of ranges that are this many times longer
  std::vector<Piece> pieces;  ///< ascending, covering all elements
};

/// A window of a call, resolved to a storage.
struct Region {
  Storage* storage = nullptr;
  int64_t begin = 0, end = 0;  ///< in the coordinates of pieces
  AxisSet shard;
  int32_t value_type = -1;
  int32_t root = -1;  ///< role buffer, or -1 for a local
  int32_t name = -1;
};

/// A place that needs facts about gradients of all roles: an update or norm that needs a complete gradient, a kernel that needs to
/// know whose gradient it reads, or the use of a squared norm. Judged when all roles are known.
struct Demand {
  int role = -1;
  int32_t parameter = -1;  ///< -1: of a squared norm
  bool complete = true;    ///< false: it need not be all, but must be nothing else
  const Segment* segment = nullptr;
  const Op* op = nullptr;
  const Call* call = nullptr;
  Contributions sum;
  bool before_tie = false;  ///< of a parameter with several uses (a tied table) some may give to the sum later
};

/// The effects of all roles together on the parameters.
class GradientLedger {
 public:
  GradientLedger(const Plan& plan, Report& report) : plan_(plan), report_(report), uses_(plan.parameters.size()) {
    for (int m = 0; m < plan.micro_batches; ++m) complete_ += fingerprint_of(m);
  }
  static uint64_t fingerprint_of(int micro_batch);

  /// A forward op of any role read the parameter.
  void use(int32_t parameter, const Source& source);
  /// Some op made a contribution to a parameter's gradient: the plan trains.
  void note_training() { trains_ = true; }
  /// Records a fault of a plan that trains: state of role `role` that nothing in a period changes, or work whose
  /// result nobody uses.
  void lost(int role, std::string op, std::string message) { lost_.push_back({role, std::move(op), std::move(message)}); }
  void demand(Demand d) { demands_.push_back(std::move(d)); }
  /// A metric `name` that must hold every micro-batch, whichever stages ran them.
  void demand_all(Demand d, std::string name) { metrics_.emplace_back(std::move(d), std::move(name)); }
  /// A bias that must move by the load of `layer` in every micro-batch, whichever stages ran them; `message` says that it does not.
  void demand_load(Demand d, int layer, std::string message) { loads_.push_back({std::move(d), layer, std::move(message)}); }
  /// Whether a sum is the load of `layer` in every micro-batch of the step, and nothing else.
  bool is_load(const Contributions& sum, int layer) const;
  /// Role `role` gave `sum` to a sum over roles.
  void give(CrossRole key, int role, int32_t parameter, const Contributions& sum) { given_[key].push_back({role, parameter, sum}); }
  /// Role `role` updated elements of a parameter, counted over all ranks that share its pieces.
  void updated(int role, int32_t parameter, int64_t elements) { updated_[{role, parameter}] += elements; }
  bool is_complete(const Source& s) const { return s.count == plan_.micro_batches && s.fingerprint == complete_; }

  /// Judges every demand, and that every parameter of every role was updated once.
  void settle();

 private:
  struct Given {
    int role;
    int32_t parameter;
    Contributions sum;
  };
  void settle(const Demand& d);
  void settle_norm(const Demand& d);
  void settle_metric(const Demand& d, const std::string& name);
  Contributions total(const Demand& d) const;
  /// Roles that gave a sum over roles another parameter's gradient than the demanded one; nothing where all gave the same.
  const Given* stranger(const Demand& d) const;
  template <class F>
  void for_given(const Demand& d, F f) const;

  const Plan& plan_;
  Report& report_;
  uint64_t complete_ = 0;
  bool trains_ = false;
  std::vector<std::vector<Source>> uses_;
  std::vector<Demand> demands_;
  std::vector<std::pair<Demand, std::string>> metrics_;
  struct LoadDemand {
    Demand demand;
    int layer;
    std::string message;
  };
  std::vector<LoadDemand> loads_;
  struct Lost {
    int role;
    std::string op, message;
  };
  std::vector<Lost> lost_;
  std::map<CrossRole, std::vector<Given>> given_;
  std::map<std::pair<int, int32_t>, int64_t> updated_;
};

}  // namespace shardlab::verifying
