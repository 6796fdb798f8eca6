// Declarations shared by the files of the verifier. Nothing outside plan/verify*.cpp includes this.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/precision.h"
#include "plan/text_places.h"
#include "plan/verify.h"

namespace shardlab::verifying {

/// Collects findings up to a limit; the passes stop early when it is full.
class Report {
 public:
  explicit Report(int limit) : limit_(limit) {}
  void add(Rule rule, int role, std::string op, std::string message) {
    if (!full()) findings_.push_back({rule, role, std::move(op), std::move(message)});
  }
  bool full() const { return static_cast<int>(findings_.size()) >= limit_; }
  size_t count() const { return findings_.size(); }
  std::vector<Finding> take() { return std::move(findings_); }

 private:
  int limit_;
  std::vector<Finding> findings_;
};

using shardlab::op_name;
/// "layers.3 m2 layer.F attn.qkv linear.F": an op of a segment in a call.
std::string op_name(const Segment& segment, const Op& op, const Call& call);
/// "replicate", "shard(1)", "partial", "local".
std::string placement_name(Placement p);
/// "1", "1/4", "1/target_tokens".
std::string scale_name(const Scale& s);
std::string_view name_of(Micro micro);
/// The reads of an op with its predicate as the last one.
std::vector<SlotId> reads_with_predicate(const Op& op);

/// Numbers equal types alike, so that a comparison of types is a comparison of integers. Placement along axes of size one means
/// nothing and is normalised away.
class TypeTable {
 public:
  explicit TypeTable(const Mesh& mesh) : mesh_(mesh) {}
  /// The number of `type` as it stands.
  int32_t exact(const Type& type) { return intern(type, exact_); }
  /// The number of the part of `type` that speaks about values: everything except the shape, and whether the shape is
  /// flat (one dim).
  int32_t value(const Type& type) {
    Type t = type;
    t.shape = type.shape.rank <= 1 ? Shape{0} : Shape{0, 0};
    for (size_t a = 0; a < kMaxAxes; ++a)
      if (a >= mesh_.axes.size() || mesh_.axes[a].size == 1) t.place[a] = Placement::replicate();
    const int32_t id = intern(t, value_);
    if (static_cast<size_t>(id) == values_.size()) values_.push_back(t);
    return id;
  }
  const Type& value_type(int32_t id) const { return values_[static_cast<size_t>(id)]; }
  int32_t value_types() const { return static_cast<int32_t>(values_.size()); }

 private:
  struct Hash {
    size_t operator()(const Type& t) const;
  };
  using Table = std::unordered_map<Type, int32_t, Hash>;
  static int32_t intern(const Type& type, Table& table) {
    return table.try_emplace(type, static_cast<int32_t>(table.size())).first->second;
  }

  const Mesh& mesh_;
  Table exact_;
  Table value_;
  std::vector<Type> values_;
};

/// A view followed down to the storage it lies in. Elements of the storage's owner; `shard` says that only the rank's own part of
/// [begin, begin + parts * length) is meant, where parts is the number of ranks along `shard`.
struct Window {
  int32_t root = -1;
  int64_t begin = 0;
  int64_t length = 0;
  AxisSet shard;
};

/// Follows the views of slot `slot` to its root slot. The views must have passed `check_form`.
Window window_of(const Segment& segment, SlotId slot);
/// Likewise for a buffer of a role.
Window window_of(const Role& role, BufferId buffer);

/// True for equal windows, whatever the names.
inline bool same_window(const Window& a, const Window& b) {
  return a.root == b.root && a.begin == b.begin && a.length == b.length && a.shard == b.shard;
}
bool overlap(const Mesh& mesh, const Window& a, const Window& b);

/// A kernel whose first result is its first operand, rounded: it stands for the same value, and a gradient passes as it is (the
/// straight-through estimate of fp8 training).
bool rounds(const Work& work);
/// Where the scales of a product's two factors begin among its reads, if these have 8 bits; 0 of an op that is no product.
size_t first_scales(const Work& work);

/// Roles along the pipeline axis: its index, or nothing when the plan has one role.
std::optional<int> role_axis(const Plan& plan);

/// A communicator whose groups join several roles.
bool joins_roles(const Plan& plan, const Comm& comm);

/// "dp, cp".
std::string axes_text(const Plan& plan, AxisSet axes);

/// Ops of one communicator run in issue order; the receives of a ring are an order of their own. The index of the order that an
/// op belongs to, below twice the number of communicators, or -1 for an op that does not communicate.
int order_of(const Op& op);

/// The role that a hop from `role` leads to; the role itself where the communicator lies within roles and the hop is cyclic; -1
/// where there is none.
int peer_of(const Plan& plan, int role, const Comm& comm, int hop, bool cyclic);

/// The line of messages between two roles that a hop belongs to. Sends and receives of one communicator and one pair of ranks match
/// in order, whatever their hops. Within a role the hop tells the pairs around the ring apart.
int line_of(const Plan& plan, const Comm& comm, int hop);

/// The passes. Each reports what it finds; a pass may rely on those before it having found nothing.
void check_form(const Plan& plan, Report& report);
void check_types(const Plan& plan, Report& report);
/// Backward from forward: what ops of phase I and W read is what the forward op of their label, layer and micro-batch read and
/// made, and the gradient that the chain rule gives.
void check_backward(const Plan& plan, Report& report);
void check_values(const Plan& plan, Report& report);
/// Room for fewer rows of experts than may come: a step in which more come changes nothing that is kept, and the run makes it again.
void check_overflow(const Plan& plan, Report& report);
void check_messages(const Plan& plan, Report& report);
void check_memory(const Plan& plan, const std::array<int64_t, kSpaces>& budget, Report& report);

/// Shape and number of operands of one op, as plan/op.h states them; a text that says what is wrong, or nothing.
/// Called by `check_form` for each op, implemented beside the type rules because both read the same equations.
std::string operand_fault(const Plan& plan, const Segment& segment, const Op& op);

/// A read and a write in slots that are bound apart, so that only a call can tell whether they share storage as they must
/// or must not.
struct Aliasing {
  SlotId read, write;
  enum class Kind : uint8_t { kMust, kMustNot } kind = Kind::kMust;
};
std::vector<Aliasing> aliasing_of(const Segment& segment, const Op& op);

/// Rows that tokens of choice[b,s,k] make at most at `some` of the experts, each of which takes `capacity` of a sequence.
int64_t most_rows(const Shape& choice, int64_t some, int64_t capacity);

}  // namespace shardlab::verifying
