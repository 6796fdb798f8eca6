// The replay of rules 3 and 4: segments as scripts of acts (verify_script.cpp), the machine that they are played on
// (verify_replay.cpp), and what each kind of act does there (verify_values.cpp). Internal to these three.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/base/hash.h"
#include "plan/verify_values.h"

namespace shardlab::verifying {

struct SlotInfo {
  Window window;  ///< root is a slot
  int32_t value_type = -1;
  bool bound = false;  ///< its root is
};

/// One step of a segment, as the machine plays it.
struct Act {
  enum class Kind : uint8_t { kAlloc, kFree, kPlain, kSum, kTransfer, kAdd, kOptimizer } kind = Kind::kPlain;
  const Op* op = nullptr;
  uint64_t source = 0;            ///< hash of the label
  std::vector<int32_t> ordinals;  ///< by read of a forward op: which of the parameters of the op it would be
  bool uses_parameters = false;
  std::vector<int32_t> reads, writes;
  std::vector<Aliasing> aliasing;
};

struct Script {
  std::vector<SlotInfo> slots;
  std::vector<Act> full, light;
  bool replayed = false;
};

struct BufferInfo {
  Window window;
  int32_t value_type = -1;
};

struct Link {
  int64_t begin, end;
  int32_t parameter;
  int32_t value_type;
};

/// Tables shared by all roles: types by number, the scripts of segments, and which type may be read where another was written.
class Language {
 public:
  explicit Language(const Plan& plan) : plan(plan), types(plan.mesh) {
    scripts.reserve(plan.segments.size());
    for (const Segment& s : plan.segments) scripts.push_back(compile(s));
  }

  /// May a piece of type `held` be read as `wanted` by a window that adds shards along `cut`?
  bool fits(int32_t held, int32_t wanted, AxisSet cut) {
    if (held == wanted && cut.empty()) return true;
    const size_t key = (static_cast<size_t>(held) << 32) | (static_cast<size_t>(wanted) << 8) | cut.mask;
    const auto [at, fresh] = fits_.try_emplace(key, false);
    if (fresh) at->second = decide(types.value_type(held), types.value_type(wanted), cut);
    return at->second;
  }

  const Plan& plan;
  TypeTable types;
  std::vector<Script> scripts;

 private:
  bool decide(const Type& held, const Type& wanted, AxisSet cut) const;
  Script compile(const Segment& segment);
  Act act_of(const Segment& segment, const Op& op) const;
  void lighten(const Segment& segment, Script& script) const;

  std::unordered_map<size_t, bool> fits_;
};

/// Replays the program of one role.
class Replay {
 public:
  Replay(Language& language, int role, GradientLedger& ledger, Report& report)
      : language_(language),
        plan_(language.plan),
        role_(plan_.roles[static_cast<size_t>(role)]),
        role_index_(role),
        ledger_(ledger),
        report_(report) {
    for (size_t mask = 0; mask < parts_.size(); ++mask) parts_[mask] = plan_.mesh.size(AxisSet{static_cast<uint8_t>(mask)});
    collectives_.resize(plan_.comms.size());
  }

  void run();

 private:
  template <class... T>
  void fault(Rule rule, fmt::format_string<T...> format, T&&... values) {
    std::string where = act_ == nullptr ? "" : act_->op != nullptr ? op_name(*segment_, *act_->op, *call_) : segment_->name;
    report_.add(rule, role_index_, std::move(where), fmt::format(format, std::forward<T>(values)...));
  }

  void prepare();
  void initialise(size_t root);
  static bool is_stale_gradient(const Buffer& b) { return b.kind == BufferClass::kGradient && b.packed_as >= 0; }
  void initialise_gradient(size_t root, const Piece& whole);
  void allocate(Storage& storage, int64_t elements, const std::string& name);
  void release(Storage& storage, const std::string& name);
  void play(const Call& call);
  void play(const Act& act);
  void perform(const Act& act);
  Rational owed_by_reads(const Act& act);
  int64_t means_joined(const Act& act);
  void check_aliasing(const Act& act);
  bool read_all(const Act& act);
  void play_sum(const Act& act);
  void play_transfer(const Act& act);
  void spread_out(Region& at, AxisSet axes, int64_t length);
  void play_add(const Act& act);
  int32_t parted(int32_t parameter, int32_t gradient);
  void play_optimizer(const Act& act);
  std::optional<Region> factor_of(const Act& act);
  void check_factor_of_step(const Act& act, const Region& grad);
  void finish();
  void finish_storage(size_t root);
  void finish_metric(size_t root);
  void finish_versions();
  void finish_gradients();
  void finish_state(size_t root);
  void finish_runs();

  // The record of which op made which value from what: plan/verify_state.cpp.
  void begin_run(const Act& act);
  void check_repeated(const Act& act);
  void check_predicate(const Act& act);
  void check_age(const Piece& p, int32_t slot);
  void check_run_state(const Piece& p, const Region& at, int32_t slot);
  void check_load(const Act& act);
  std::optional<std::pair<Region, Region>> whole_copy(const Act& act);
  void note_copy(const Act& act);
  bool takes_back(const Act& act);
  void check_taken_back();
  void check_counted();
  bool changes_in_place(const Act& act, const Region& at);
  void supersede(const Region& at);
  void change(const Region& at, size_t result);
  std::string run_name(int32_t run) const;
  int32_t new_state() {
    superseded_.emplace_back();
    return static_cast<int32_t>(superseded_.size()) - 1;
  }

  Region region(int32_t slot);
  const std::string& slot_name(int32_t slot) const { return segment_->slots[static_cast<size_t>(slot)].name; }
  std::string held_name(const Piece& p) const;
  std::string type_text(int32_t value_type) const;

  void read(int32_t slot, const Region& at);
  bool read_piece(int32_t slot, const Region& at, const Piece& p);
  bool name_is_dead(const Region& at, const Piece& p, int32_t slot) const;
  void note_use(int32_t slot, const Region& at, int32_t ordinal);
  /// Replaces the pieces of the region by one fresh piece, or by one per parameter that lies there.
  void write(const Region& at, int32_t sum);
  void put(Storage& storage, int64_t begin, int64_t end, std::vector<Piece>& fresh);
  Piece fresh_piece(const Region& at, int64_t begin, int64_t end) const;
  /// The pieces of `src`, as an op that keeps elements apart leaves them in `dst`.
  void transfer(const Region& src, const Region& dst, AxisSet changed);
  int32_t retyped(int32_t from, int32_t declared, AxisSet changed);

  int32_t new_sum(Contributions c) {
    if (free_sums_.empty()) {
      sums_.push_back(std::move(c));
      return static_cast<int32_t>(sums_.size()) - 1;
    }
    const int32_t id = free_sums_.back();
    free_sums_.pop_back();
    sums_[static_cast<size_t>(id)] = std::move(c);
    return id;
  }
  int32_t copy_sum(int32_t id) { return id < 0 ? -1 : new_sum(Contributions(sums_[static_cast<size_t>(id)])); }
  void drop_sum(Piece& p) {
    if (p.sum >= 0) free_sums_.push_back(p.sum);
    p.sum = -1;
  }
  Source source_of(const Act& act, int32_t micro_batch, int32_t ordinal) const {
    Source s;
    s.id = mix(mix(act.source + static_cast<uint64_t>(call_->layer + 1)) + static_cast<uint64_t>(ordinal));
    s.fingerprint = GradientLedger::fingerprint_of(micro_batch);
    s.count = 1;
    s.op = act.op;
    s.layer = call_->layer;
    return s;
  }
  template <class F>
  void for_pieces(const Region& at, F f) {
    for (Piece& p : at.storage->pieces)
      if (p.begin < at.end && at.begin < p.end) f(p);
  }
  CrossRole message_key(CommId comm, int from, int to) { return {comm.value, from, to, messages_[{comm.value, from, to}]++}; }
  void demand(const Act& act, const Piece& p, bool complete, bool before_tie = false);
  void demand_of_kernel(const Act& act, const Piece& p);
  int64_t elements_over_ranks(const Piece& p, const Region& at, const Type& read_as) const;
  void check_norm(const Act& act, const Kernel& kernel);

  Language& language_;
  const Plan& plan_;
  const Role& role_;
  const int role_index_;
  GradientLedger& ledger_;
  Report& report_;
  std::array<int64_t, 256> parts_{};
  std::vector<BufferInfo> buffers_;
  std::vector<Storage> storages_;         ///< by buffer; only roots are used
  std::vector<std::vector<Link>> links_;  ///< by root
  std::vector<Storage> locals_;           ///< by slot of the segment in play
  std::vector<Contributions> sums_;
  std::vector<int32_t> free_sums_;
  std::vector<int32_t> collectives_;                           ///< sums over roles so far, by communicator
  std::map<std::tuple<int32_t, int, int>, int32_t> messages_;  ///< sums sent or received so far, by communicator and roles
  /// A gradient that an update took as the last period left it: what this period leaves in its place is held to the same, and so is
  /// the factor, if there is one, by which the update multiplied it.
  struct Stale {
    int32_t root, factor, parameter;
    int64_t begin, end;
    const Segment* segment;
    const Act* act;
    const Call* call;
  };
  std::vector<Stale> stale_;
  /// One run of an op, or one result of an update: each must be of use to somebody.
  struct Run {
    const Segment* segment = nullptr;
    const Act* act = nullptr;
    const Call* call = nullptr;
    bool used = false;
  };
  std::vector<Run> runs_;
  int32_t first_run_ = -1;  ///< of the act in play: its only one, or an update's first result
  /// Elements of a value that an op has changed in place since: what still holds the value is out of date.
  struct Superseded {
    int64_t begin, end;
    int32_t run;
  };
  std::vector<std::vector<Superseded>> superseded_;                     ///< by number of the value
  std::map<std::pair<const Op*, std::vector<int64_t>>, int32_t> last_;  ///< run of a kernel that changes storage in place, by where
  /// By step: updates of what forward ops read, and the first parameter read.
  std::map<int32_t, std::pair<int32_t, int32_t>> ages_;
  /// By step and root of state of the run: the op that left what forward ops read.
  std::map<std::pair<int32_t, int32_t>, int32_t> run_state_;
  std::map<int32_t, int32_t> biased_;  ///< by root of a router's bias: the layer that chooses by it
  std::vector<int32_t> steps_;         ///< of the period, by item of the program
  std::vector<int32_t> steps_begun_;   ///< the last that a micro-batch has begun there, by item
  /// By root: steps of the period in which a kernel has changed state of the run in place.
  std::map<int32_t, std::set<int32_t>> counted_;
  size_t item_ = 0;
  std::map<int32_t, std::pair<int32_t, int32_t>> predicates_;  ///< by root: the run that wrote it, and the first run under it
  std::vector<Piece> scratch_;
  // The call in play.
  const Call* call_ = nullptr;
  const Segment* segment_ = nullptr;
  const Script* script_ = nullptr;
  const Act* act_ = nullptr;
  int32_t call_number_ = 0;
};

}  // namespace shardlab::verifying
