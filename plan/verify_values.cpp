// Rules 3 and 4: a role's program is replayed on an abstract machine that knows, for each piece of each storage, what it holds.
//
// A name is a type on a window of storage, and reading it is right when every piece of the window was last written as that type:
//  - an op in place leaves a new type behind, so the old name no longer fits what is there;
//  - a whole may be read when all of its pieces are current, a part when the whole is;
//  - activations and temporaries are values: a second name of equal type on the same window, once written, ends the first;
//    parameters, gradients, moments and buckets are state: their windows are aliases;
//  - a flat (one-dim) buffer that is local along an axis carries pieces of any placement along it, each keeping its own: that is a
//    bucket of parameters of which some are sharded and some are replicated over tp.
//
// A segment is replayed in full once. Later calls skip what cannot differ between calls: its locals, and repeated reads.
#include "plan/verify_values.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string_view>
#include <tuple>

#include "plan/base/hash.h"
#include "plan/run_state.h"

namespace shardlab::verifying {
namespace {

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
  std::vector<int32_t> ordinals;  ///< by read of a forward op: which of its parameters it would be
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

std::string_view use_label(std::string_view label) {
  constexpr std::string_view kAgain = ".again";
  return label.ends_with(kAgain) ? label.substr(0, label.size() - kAgain.size()) : label;
}

bool is_state(BufferClass c) { return c != BufferClass::kActivation && c != BufferClass::kTemporary; }

/// What all roles share: types by number, the scripts of segments, and which type may be read where which was written.
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

bool Language::decide(const Type& held, const Type& wanted, AxisSet cut) const {
  if (held.dtype != wanted.dtype || held.scale != wanted.scale || held.micro != wanted.micro) return false;
  const bool flat = wanted.shape.rank <= 1;
  for (size_t a = 0; a < plan.mesh.axes.size(); ++a) {
    const Placement h = held.place[a], w = wanted.place[a];
    if (cut.contains(static_cast<int>(a))) {  // each rank takes its part of what is whole
      if (h.kind != Place::kReplicate || !(w.is_shard() || w.kind == Place::kLocal)) return false;
      continue;
    }
    if (h == w) continue;
    if (w.kind == Place::kLocal && (flat || h.kind == Place::kReplicate)) continue;
    // A flat buffer of state that was declared local: the windows on it say what they are, but a sum must be seen to be reduced.
    if (h.kind == Place::kLocal && held.shape.rank <= 1 && !w.is_partial()) continue;
    return false;
  }
  return true;
}

Act Language::act_of(const Segment& segment, const Op& op) const {
  Act act;
  act.op = &op;
  act.source = hash_text(use_label(op.label));
  const auto micro = [&](SlotId s) { return segment.slots[s.index()].type.micro; };
  const bool sums = std::ranges::any_of(op.writes, [&](SlotId s) { return micro(s) == Micro::kSum; });
  act.uses_parameters = phase_of(op.work) == Phase::kF;
  if (std::holds_alternative<Sgd>(op.work) || std::holds_alternative<AdamW>(op.work))
    act.kind = Act::Kind::kOptimizer;
  else if (std::holds_alternative<Collective>(op.work) || std::holds_alternative<Copy>(op.work) || rounds(op.work))
    act.kind = Act::Kind::kTransfer;
  else if (std::holds_alternative<Add>(op.work) && sums)
    act.kind = Act::Kind::kAdd;
  else if (sums || std::holds_alternative<SquaredNorm>(op.work) ||
           (std::holds_alternative<Send>(op.work) && micro(op.reads[0]) == Micro::kSum))
    act.kind = Act::Kind::kSum;
  int32_t ordinal = 0;
  const bool scaled = std::holds_alternative<Linear>(op.work) && has_scales(segment.slots[op.reads[0].index()].type.dtype);
  for (const SlotId s : reads_with_predicate(op)) {
    const bool scales = scaled && (act.reads.size() == 2 || act.reads.size() == 3);
    act.reads.push_back(s.value);
    act.ordinals.push_back(micro(s) == Micro::kNone && !scales ? ordinal++ : -1);
  }
  for (const SlotId s : op.writes) act.writes.push_back(s.value);
  act.aliasing = aliasing_of(segment, op);
  return act;
}

Script Language::compile(const Segment& segment) {
  Script script;
  for (size_t s = 0; s < segment.slots.size(); ++s) {
    const Window w = window_of(segment, SlotId(static_cast<int32_t>(s)));
    const bool bound = segment.slots[static_cast<size_t>(w.root)].kind == SlotKind::kBound;
    script.slots.push_back({w, types.value(segment.slots[s].type), bound});
  }
  for (const Step& step : segment.steps) {
    Act act;
    if (const Op* op = std::get_if<Op>(&step)) {
      act = act_of(segment, *op);
    } else if (const auto* alloc = std::get_if<AllocSlot>(&step)) {
      act.kind = Act::Kind::kAlloc;
      act.writes = {alloc->slot.value};
    } else {
      act.kind = Act::Kind::kFree;
      act.writes = {std::get<FreeSlot>(step).slot.value};
    }
    script.full.push_back(std::move(act));
  }
  lighten(segment, script);
  return script;
}

/// Leaves out what every call does alike: locals that carry no sum over micro-batches and no parameter, and reads of what was read
/// just before.
void Language::lighten(const Segment& segment, Script& script) const {
  std::vector<bool> kept(segment.slots.size());
  for (size_t s = 0; s < kept.size(); ++s)
    kept[s] = script.slots[s].bound || segment.slots[static_cast<size_t>(script.slots[s].window.root)].type.micro == Micro::kSum ||
              segment.slots[s].type.micro == Micro::kSum;
  for (const Act& act : script.full)
    if (act.op != nullptr && rounds(act.op->work) && segment.slots[act.op->reads[0].index()].type.micro == Micro::kNone)
      for (const int32_t w : act.writes) kept[static_cast<size_t>(script.slots[static_cast<size_t>(w)].window.root)] = true;
  std::vector<bool> read(segment.slots.size());
  for (const Act& act : script.full) {
    Act light = act;
    // Of what must not share storage the first call is taken as the pattern; what must is looked at in every call.
    std::erase_if(light.aliasing, [](const Aliasing& a) { return a.kind == Aliasing::Kind::kMustNot; });
    const bool whole =
        act.kind != Act::Kind::kPlain && act.kind != Act::Kind::kAlloc && act.kind != Act::Kind::kFree &&
        (std::holds_alternative<SquaredNorm>(act.op->work) ||
         std::ranges::all_of(act.writes, [&](int32_t s) { return kept[static_cast<size_t>(s)]; })) &&
        std::ranges::all_of(act.reads, [&](int32_t s) { return kept[static_cast<size_t>(s)] || act.kind == Act::Kind::kSum; });
    if (!whole && light.kind != Act::Kind::kAlloc && light.kind != Act::Kind::kFree) light.kind = Act::Kind::kPlain;
    light.reads.clear();
    light.ordinals.clear();
    for (size_t i = 0; i < act.reads.size(); ++i) {
      const auto s = static_cast<size_t>(act.reads[i]);
      if (!kept[s]) continue;
      const bool again = light.kind == Act::Kind::kPlain && !light.uses_parameters && read[s];
      read[s] = true;
      if (again) continue;
      light.reads.push_back(act.reads[i]);
      light.ordinals.push_back(act.ordinals[i]);
    }
    std::erase_if(light.writes, [&](int32_t s) { return !kept[static_cast<size_t>(s)]; });
    for (const int32_t w : light.writes)
      for (size_t s = 0; s < read.size(); ++s)
        if (script.slots[s].window.root == script.slots[static_cast<size_t>(w)].window.root) read[s] = false;
    if (!light.reads.empty() || !light.writes.empty()) script.light.push_back(std::move(light));
  }
}

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
  void play_sum(const Act& act);
  void play_transfer(const Act& act);
  void spread_out(Region& at, AxisSet axes, int64_t length);
  void play_add(const Act& act);
  void play_optimizer(const Act& act);
  void check_factor_of_step(const Act& act, const Region& grad);
  void finish();
  void finish_storage(size_t root);
  void finish_metric(size_t root);
  void finish_versions();
  void finish_gradients();

  Region region(int32_t slot);
  const std::string& slot_name(int32_t slot) const { return segment_->slots[static_cast<size_t>(slot)].name; }
  std::string held_name(const Piece& p) const;
  std::string type_text(int32_t value_type) const;

  void read(int32_t slot, const Region& at);
  bool read_piece(int32_t slot, const Region& at, const Piece& p);
  bool name_is_dead(const Region& at, const Piece& p, int32_t slot) const;
  void note_use(const Region& at, int32_t ordinal);
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
  /// A gradient that an update took as the last period left it: what this period leaves in its place is held to the same.
  struct Stale {
    int32_t root, parameter;
    int64_t begin, end;
    const Segment* segment;
    const Act* act;
    const Call* call;
  };
  std::vector<Stale> stale_;
  std::vector<Piece> scratch_;
  // The call in play.
  const Call* call_ = nullptr;
  const Segment* segment_ = nullptr;
  const Script* script_ = nullptr;
  const Act* act_ = nullptr;
  int32_t call_number_ = 0;
};

void Replay::run() {
  prepare();
  for (const Item& item : role_.program) {
    if (report_.full()) return;
    act_ = nullptr;
    if (const Call* call = std::get_if<Call>(&item)) {
      play(*call);
    } else if (const auto* alloc = std::get_if<Alloc>(&item)) {
      allocate(storages_[alloc->buffer.index()], role_.buffers[alloc->buffer.index()].type.shape.elements(),
               role_.buffers[alloc->buffer.index()].name);
    } else {
      const BufferId b = std::get<Free>(item).buffer;
      release(storages_[b.index()], role_.buffers[b.index()].name);
    }
  }
  act_ = nullptr;
  finish();
}

void Replay::prepare() {
  const size_t n = role_.buffers.size();
  buffers_.resize(n);
  storages_.resize(n);
  links_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    const Buffer& b = role_.buffers[i];
    buffers_[i] = {window_of(role_, BufferId(static_cast<int32_t>(i))), language_.types.value(b.type)};
    const Window& w = buffers_[i].window;
    if (b.parameter < 0 || !w.shard.empty()) continue;
    auto& links = links_[static_cast<size_t>(w.root)];
    const auto same = [&](const Link& l) { return l.begin < w.begin + w.length && w.begin < l.end; };
    if (std::ranges::none_of(links, same)) links.push_back({w.begin, w.begin + w.length, b.parameter, buffers_[i].value_type});
  }
  for (size_t i = 0; i < n; ++i) {
    std::ranges::sort(links_[i], {}, &Link::begin);
    if (!role_.buffers[i].view && role_.buffers[i].persistent) initialise(i);
  }
}

/// Persistent storage starts with what the last period left: as declared, parameter by parameter.
void Replay::initialise(size_t root) {
  Storage& storage = storages_[root];
  storage.alive = storage.persistent = true;
  Piece p;
  p.end = role_.buffers[root].type.shape.elements();
  p.value_type = buffers_[root].value_type;
  p.written = p.initial = true;
  p.name = static_cast<int32_t>(root);
  storage.pieces.assign(1, p);
  if (is_stale_gradient(role_.buffers[root])) return initialise_gradient(root, p);
  for (const Link& l : links_[root]) {
    Piece part = p;
    part.begin = part.origin = l.begin;
    part.end = l.end;
    part.parameter = l.parameter;
    part.value_type = l.value_type;
    scratch_.assign(1, part);
    put(storage, l.begin, l.end, scratch_);
  }
}

/// A flat gradient that lives on holds what the buffer that it is packed as says, or this rank's part of it.
void Replay::initialise_gradient(size_t root, const Piece& whole) {
  const int32_t base = buffers_[static_cast<size_t>(role_.buffers[root].packed_as)].window.root;
  const int64_t all = role_.buffers[static_cast<size_t>(base)].type.shape.elements();
  Storage& storage = storages_[root];
  AxisSet cut;
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
    if (role_.buffers[root].type.place[a].is_shard()) cut = cut | AxisSet::of(static_cast<int>(a));
  if (whole.end * parts_[cut.mask] != all) return;  // of another extent: it stands for itself
  storage.spread = cut;
  storage.pieces.front().end = all;
  storage.pieces.front().shard = storage.spread;
  for (const Link& l : links_[static_cast<size_t>(base)]) {
    Piece part = storage.pieces.front();
    part.begin = part.origin = l.begin;
    part.end = l.end;
    part.parameter = l.parameter;
    part.shard = storage.spread;
    part.value_type = retyped(l.value_type, whole.value_type, storage.spread);
    scratch_.assign(1, part);
    put(storage, l.begin, l.end, scratch_);
  }
}

void Replay::allocate(Storage& storage, int64_t elements, const std::string& name) {
  if (storage.persistent) return fault(Rule::kValues, "alloc of %{}, which is persistent", name);
  if (storage.alive) return fault(Rule::kValues, "alloc of %{}, which is live already", name);
  storage.alive = true;
  storage.spread = {};
  Piece p;
  p.end = elements;
  storage.pieces.assign(1, p);
}

void Replay::release(Storage& storage, const std::string& name) {
  if (storage.persistent) return fault(Rule::kValues, "free of %{}, which is persistent", name);
  if (!storage.alive) return fault(Rule::kValues, "free of %{}, which is not live", name);
  storage.alive = false;
  for (Piece& p : storage.pieces) drop_sum(p);
  storage.pieces.clear();
}

void Replay::play(const Call& call) {
  call_ = &call;
  segment_ = &plan_.segments[call.segment.index()];
  Script& script = language_.scripts[call.segment.index()];
  script_ = &script;
  ++call_number_;
  if (locals_.size() < script.slots.size()) locals_.resize(script.slots.size());
  const size_t before = report_.count();
  for (const Act& act : script.replayed ? script.light : script.full) {
    play(act);
    if (report_.full()) return;
  }
  act_ = nullptr;
  for (size_t s = 0; s < script.slots.size(); ++s)
    if (!script.slots[s].bound && locals_[s].alive) {
      report_.add(Rule::kValues, role_index_, segment_->name,
                  fmt::format("local %{} is never freed", slot_name(static_cast<int32_t>(s))));
      release(locals_[s], slot_name(static_cast<int32_t>(s)));
    }
  script.replayed |= report_.count() == before;
}

Region Replay::region(int32_t slot) {
  const SlotInfo& info = script_->slots[static_cast<size_t>(slot)];
  Region at;
  at.value_type = info.value_type;
  at.begin = info.window.begin;
  at.shard = info.window.shard;
  if (info.bound) {
    const int32_t b = call_->binding[static_cast<size_t>(info.window.root)].value;
    const Window& w = buffers_[static_cast<size_t>(b)].window;
    at.storage = &storages_[static_cast<size_t>(w.root)];
    at.root = w.root;
    at.begin += w.begin;
    at.shard = at.shard | w.shard;
    at.name = info.window.root == slot ? b : kSlotName + slot;
  } else {
    at.storage = &locals_[static_cast<size_t>(info.window.root)];
    at.name = kSlotName + slot;
  }
  at.shard = at.shard | at.storage->spread;
  at.end = at.begin + info.window.length * parts_[at.shard.mask];
  return at;
}

std::string Replay::type_text(int32_t value_type) const {
  if (value_type < 0) return "nothing";
  const Type& t = language_.types.value_type(value_type);
  std::string text{shardlab::name_of(t.dtype)};
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
    if (plan_.mesh.axes[a].size > 1) text += fmt::format(" {}:{}", plan_.mesh.axes[a].name, placement_name(t.place[a]));
  if (t.scale != Scale{}) text += " scale " + scale_name(t.scale);
  if (t.micro != Micro::kNone) text += fmt::format(" micro:{}", name_of(t.micro));
  return text;
}

std::string Replay::held_name(const Piece& p) const {
  if (p.name < 0) return "it";
  if (p.name < kSlotName) return "%" + role_.buffers[static_cast<size_t>(p.name)].name;
  const auto slot = static_cast<size_t>(p.name - kSlotName);
  return p.call == call_number_ && slot < segment_->slots.size() ? "%" + segment_->slots[slot].name : "it";
}

/// A second name of equal type on exactly this window was written since: the first one is a value that is gone.
bool Replay::name_is_dead(const Region& at, const Piece& p, int32_t slot) const {
  if (p.name == at.name || p.name < 0 || is_state(segment_->slots[static_cast<size_t>(slot)].cls)) return false;
  if (p.begin != at.begin || p.end != at.end || p.value_type != at.value_type) return false;
  if (p.name >= kSlotName) return p.call == call_number_;
  return at.name < kSlotName || p.call == call_number_;
}

void Replay::read(int32_t slot, const Region& at) {
  if (!at.storage->alive) {
    return fault(Rule::kValues, "reads %{}, which is not live: it was not allocated, or freed before this", slot_name(slot));
  }
  for (const Piece& p : at.storage->pieces) {
    if (p.end <= at.begin || at.end <= p.begin) continue;
    if (!read_piece(slot, at, p)) return;
    at.storage->read_initial |= p.initial;
  }
}

bool Replay::read_piece(int32_t slot, const Region& at, const Piece& p) {
  if (!p.written) {
    fault(Rule::kValues, "reads %{} before it is written", slot_name(slot));
    return false;
  }
  if ((p.shard.mask & ~at.shard.mask) != 0) {
    fault(Rule::kValues, "reads %{}, but only this rank's shard of it is current since {} was written", slot_name(slot),
          held_name(p));
    return false;
  }
  const AxisSet cut{static_cast<uint8_t>(at.shard.mask & ~p.shard.mask)};
  if (!p.zero && !language_.fits(p.value_type, at.value_type, cut)) {
    fault(Rule::kValues, "reads %{} as {}, but since {} was written it holds {}", slot_name(slot), type_text(at.value_type),
          held_name(p), type_text(p.value_type));
    return false;
  }
  if (name_is_dead(at, p, slot)) {
    fault(Rule::kValues, "reads %{}, which {} has overwritten", slot_name(slot), held_name(p));
    return false;
  }
  if (p.slice >= 0 && call_->micro_batch >= 0 && p.slice != call_->micro_batch) {
    fault(Rule::kValues, "reads %{} in micro-batch {}, but it belongs to micro-batch {}", slot_name(slot), call_->micro_batch,
          p.slice);
    return false;
  }
  const auto* kernel = std::get_if<Kernel>(&act_->op->work);
  const bool goes_on = kernel != nullptr && kernel->name == "amax";  // with further tensors
  if (p.pending == Pending::kMax && act_->kind != Act::Kind::kTransfer && !goes_on &&
      !std::holds_alternative<Send>(act_->op->work)) {
    fault(Rule::kTypes, "reads %{}, a partial maximum that no all_reduce with max has combined", slot_name(slot));
    return false;
  }
  return true;
}

void Replay::note_use(const Region& at, int32_t ordinal) {
  if (ordinal < 0) return;
  for_pieces(at, [&](const Piece& p) {
    if (p.parameter >= 0) ledger_.use(p.parameter, source_of(*act_, 0, ordinal));
  });
}

Piece Replay::fresh_piece(const Region& at, int64_t begin, int64_t end) const {
  Piece p;
  p.begin = begin;
  p.end = end;
  p.origin = begin;
  p.value_type = at.value_type;
  p.name = at.name;
  p.call = call_number_;
  p.shard = at.shard;
  p.written = true;
  if (language_.types.value_type(at.value_type).micro == Micro::kSlice) p.slice = call_->micro_batch;
  return p;
}

/// Cuts the pieces of `storage` at [begin, end) and puts `fresh` there.
void Replay::put(Storage& storage, int64_t begin, int64_t end, std::vector<Piece>& fresh) {
  std::vector<Piece>& pieces = storage.pieces;
  if (pieces.size() == 1 && fresh.size() == 1 && pieces[0].begin == begin && pieces[0].end == end) {
    drop_sum(pieces[0]);
    pieces[0] = fresh[0];
    return;
  }
  std::vector<Piece> result;
  bool placed = false;
  const auto place = [&] {
    if (!placed) result.insert(result.end(), fresh.begin(), fresh.end());
    placed = true;
  };
  for (Piece& p : pieces) {
    if (p.end <= begin) {
      result.push_back(p);
      continue;
    }
    if (p.begin < begin) {
      Piece left = p;
      left.end = begin;
      left.sum = copy_sum(p.sum);
      result.push_back(left);
    }
    place();
    if (p.end <= end) {
      drop_sum(p);
    } else {
      p.begin = std::max(p.begin, end);
      result.push_back(p);
    }
  }
  place();
  pieces = std::move(result);
}

void Replay::write(const Region& at, int32_t sum) {
  if (!at.storage->alive) return fault(Rule::kValues, "writes storage that is not live");
  Piece whole = fresh_piece(at, at.begin, at.end);
  whole.sum = sum;
  const auto* zero = std::get_if<Fill>(&act_->op->work);
  whole.zero = zero != nullptr && zero->value == 0;
  const auto* loss = std::get_if<CrossEntropy>(&act_->op->work);
  const auto* kernel = std::get_if<Kernel>(&act_->op->work);
  const bool partial = !axes_placed(language_.types.value_type(at.value_type), plan_.mesh, Place::kPartial).empty();
  if (partial && loss != nullptr && loss->part == CrossEntropy::Part::kMax) whole.pending = Pending::kMax;
  if (partial && kernel != nullptr && (kernel->rule == Kernel::Rule::kOpaque || kernel->rule == Kernel::Rule::kTrusted))
    whole.pending = kernel->name == "found_inf" || kernel->name == "amax" ? Pending::kMax  // no counts
                    : language_.types.value_type(at.value_type).micro == Micro::kSum
                        ? Pending::kSum  // of micro-batches and of ranks
                        : Pending::kEither;
  scratch_.clear();
  int64_t done = at.begin;
  if (at.root >= 0)
    for (const Link& l : links_[static_cast<size_t>(at.root)]) {
      if (l.end <= at.begin || at.end <= l.begin) continue;
      const int64_t begin = std::max(l.begin, at.begin), end = std::min(l.end, at.end);
      Piece part = whole;
      part.begin = done;
      part.end = begin;
      if (begin > done) scratch_.push_back(part);
      part.begin = begin;
      part.end = end;
      part.origin = l.begin;
      part.parameter = l.parameter;
      part.value_type = retyped(l.value_type, at.value_type, {});
      part.sum = scratch_.empty() ? sum : copy_sum(sum);
      scratch_.push_back(part);
      done = end;
    }
  if (done < at.end) {
    whole.begin = whole.origin = done;
    if (!scratch_.empty()) whole.sum = copy_sum(sum);
    scratch_.push_back(whole);
  }
  put(*at.storage, at.begin, at.end, scratch_);
}

/// The declared type, with what flat local axes carry kept from the piece it comes from.
int32_t Replay::retyped(int32_t from, int32_t declared, AxisSet changed) {
  const Type& to = language_.types.value_type(declared);
  const Type& was = language_.types.value_type(from);
  Type t = to;
  bool differs = false;
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
    if (to.place[a].kind == Place::kLocal && !changed.contains(static_cast<int>(a)) && was.place[a] != to.place[a]) {
      t.place[a] = was.place[a];
      differs = true;
    }
  if (!differs) return declared;
  t.shape = Shape{0, 0};  // the pieces of a bucket are tensors of their own
  return language_.types.value(t);
}

void Replay::transfer(const Region& src, const Region& dst, AxisSet changed) {
  if (!dst.storage->alive) return fault(Rule::kValues, "writes storage that is not live");
  scratch_.clear();
  const int64_t shift = dst.begin - src.begin;
  std::vector<Piece> moved;
  for_pieces(src, [&](const Piece& p) {
    Piece q = fresh_piece(dst, std::max(p.begin, src.begin) + shift, std::min(p.end, src.end) + shift);
    q.value_type = retyped(p.value_type, dst.value_type, changed);
    q.slice = p.slice;
    q.parameter = p.parameter;
    q.origin = p.origin + shift;
    q.version = p.version;
    q.zero = p.zero;
    q.spent = p.spent;
    q.owed = p.owed;
    if (changed.empty()) q.pending = p.pending;
    q.sum = copy_sum(p.sum);
    moved.push_back(q);
  });
  if (dst.root >= 0)
    for (Piece& q : moved)
      for (const Link& l : links_[static_cast<size_t>(dst.root)]) {
        if (q.parameter < 0 || l.end <= q.begin || q.end <= l.begin || l.parameter == q.parameter) continue;
        fault(Rule::kGradients, "what belongs to {} is written where {} is kept",
              plan_.parameters[static_cast<size_t>(q.parameter)].name, plan_.parameters[static_cast<size_t>(l.parameter)].name);
        return;
      }
  put(*dst.storage, dst.begin, dst.end, moved);
}

void Replay::check_aliasing(const Act& act) {
  for (const Aliasing& a : act.aliasing) {
    const Region in = region(a.read.value), out = region(a.write.value);
    const bool same = in.storage == out.storage && in.begin == out.begin && in.end == out.end && in.shard == out.shard;
    const bool overlap = in.storage == out.storage && in.begin < out.end && out.begin < in.end;
    if (a.kind == Aliasing::Kind::kMust && !same)
      fault(Rule::kForm, "%{} must be written in place of %{}, but they are bound to different storage", slot_name(a.write.value),
            slot_name(a.read.value));
    if (a.kind == Aliasing::Kind::kMustNot && overlap)
      fault(Rule::kForm, "%{} overwrites %{} while the op still reads it", slot_name(a.write.value), slot_name(a.read.value));
  }
}

/// What the losses that an op adds up still owe; 0 where that is not known of all.
Rational Replay::owed_by_reads(const Act& act) {
  std::optional<Rational> owed;
  for (const int32_t slot : act.reads) {
    const Region at = region(slot);
    if (!at.storage->alive) return Rational(0);
    bool unlike = false;
    for_pieces(at, [&](const Piece& p) {
      unlike = unlike || (p.written && owed && *owed != p.owed);
      owed = p.written ? p.owed : Rational(0);
    });
    if (unlike) {
      fault(Rule::kTypes, "adds %{} to losses that are divided otherwise", slot_name(slot));
      return Rational(0);
    }
  }
  return owed.value_or(Rational(0));
}

/// How many losses of ranks that train apart become summands of one here: their mean owes a division by as many.
int64_t Replay::means_joined(const Act& act) {
  int64_t ranks = 1;
  const Type& to = segment_->slots[static_cast<size_t>(act.writes[0])].type;
  const Type& from = segment_->slots[static_cast<size_t>(act.reads[0])].type;
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
    if (to.place[a].is_partial() && from.place[a].kind == Place::kLocal) ranks *= plan_.mesh.axes[a].size;
  return ranks;
}

void Replay::play(const Act& act) {
  act_ = &act;
  if (!act.aliasing.empty()) check_aliasing(act);
  if (act.op == nullptr) return perform(act);
  if (const auto* kernel = std::get_if<Kernel>(&act.op->work)) check_norm(act, *kernel);
  const auto* sum = std::get_if<SumScalars>(&act.op->work);
  const auto* loss = std::get_if<CrossEntropy>(&act.op->work);
  const bool states_loss = loss != nullptr && loss->part != CrossEntropy::Part::kMax && loss->part != CrossEntropy::Part::kSum;
  const bool norm = std::holds_alternative<SquaredNorm>(act.op->work);
  const Rational owed = sum != nullptr ? owed_by_reads(act) * sum->factor * Rational(means_joined(act))
                                       : Rational(states_loss ? loss->tokens
                                                  : norm      ? 1
                                                              : 0);
  perform(act);
  for (const int32_t slot : act.writes) {
    const Region at = region(slot);
    if (!at.storage->alive) continue;
    if (sum != nullptr || norm || (states_loss && slot == act.op->writes[0].value))
      for_pieces(at, [&](Piece& p) { p.owed = owed; });
  }
}

void Replay::perform(const Act& act) {
  switch (act.kind) {
    case Act::Kind::kAlloc:
    case Act::Kind::kFree: {
      const int32_t slot = act.writes[0];
      const bool bound = script_->slots[static_cast<size_t>(slot)].bound;
      const int32_t b = bound ? call_->binding[static_cast<size_t>(slot)].value : -1;
      if (bound && role_.buffers[static_cast<size_t>(b)].view)
        return fault(Rule::kValues, "%{} is bound to a view, so the segment cannot allocate or free it", slot_name(slot));
      Storage& storage = bound ? storages_[static_cast<size_t>(b)] : locals_[static_cast<size_t>(slot)];
      const std::string& name = bound ? role_.buffers[static_cast<size_t>(b)].name : slot_name(slot);
      if (act.kind == Act::Kind::kAlloc)
        allocate(storage, script_->slots[static_cast<size_t>(slot)].window.length, name);
      else
        release(storage, name);
      return;
    }
    case Act::Kind::kSum: return play_sum(act);
    case Act::Kind::kTransfer: return play_transfer(act);
    case Act::Kind::kAdd: return play_add(act);
    case Act::Kind::kOptimizer: return play_optimizer(act);
    case Act::Kind::kPlain: break;
  }
  for (size_t i = 0; i < act.reads.size(); ++i) {
    const Region at = region(act.reads[i]);
    read(act.reads[i], at);
    if (act.uses_parameters && at.storage->alive) note_use(at, act.ordinals[i]);
  }
  for (const int32_t slot : act.writes) write(region(slot), -1);
}

/// A sum over micro-batches: what its reads hold, and, where it reads a slice, this micro-batch's contribution.
void Replay::play_sum(const Act& act) {
  Contributions sum;
  const bool every_read = std::holds_alternative<SumScalars>(act.op->work);
  bool contributes = act.op->reads.empty() && call_->micro_batch >= 0 && !std::holds_alternative<Recv>(act.op->work);
  int32_t micro_batch = call_->micro_batch;
  const bool norm = std::holds_alternative<SquaredNorm>(act.op->work);
  const auto* send = std::get_if<Send>(&act.op->work);
  CrossRole sent;
  if (send != nullptr)
    sent =
        message_key(send->comm, role_index_, peer_of(plan_, role_index_, plan_.comms[send->comm.index()], send->hop, send->cyclic));
  const bool by_kernel = std::holds_alternative<Kernel>(act.op->work);
  for (size_t i = 0; i < act.reads.size(); ++i) {
    const Region at = region(act.reads[i]);
    read(act.reads[i], at);
    if (!at.storage->alive) continue;
    if (act.uses_parameters) note_use(at, act.ordinals[i]);
    int32_t parameter = -1, last = -1;  // of the pieces before
    for_pieces(at, [&](const Piece& p) {
      if (by_kernel && p.sum >= 0) {
        sum.mixed = sum.mixed || (parameter >= 0 && p.parameter >= 0 && parameter != p.parameter);
        if (!sums_[static_cast<size_t>(p.sum)].mixed) demand_of_kernel(act, p);  // the last to see what lies where
        parameter = p.parameter >= 0 ? p.parameter : parameter;
        // What a kernel wrote at once stands as a whole in each piece that it wrote: one for each parameter there, and the padding.
        if (last >= 0 && sums_[static_cast<size_t>(p.sum)].sources == sums_[static_cast<size_t>(last)].sources) return;
        last = p.sum;
      }
      if (norm) {
        if (p.parameter >= 0)
          sum.normed[p.parameter] += elements_over_ranks(p, at, segment_->slots[static_cast<size_t>(act.reads[i])].type);
        return demand(act, p, true);
      }
      if (send != nullptr && p.sum >= 0) ledger_.give(sent, role_index_, p.parameter, sums_[static_cast<size_t>(p.sum)]);
      if (p.sum >= 0) sum.add(sums_[static_cast<size_t>(p.sum)]);
      if (p.slice < 0) return;
      if (every_read) sum.add(source_of(act, p.slice, 0));
      contributes = !every_read;
      micro_batch = p.slice;
    });
  }
  // In a light replay the local operands of a W op are left out; it was found to read this micro-batch when it was replayed in
  // full.
  const bool sum_op = phase_of(act.op->work) == Phase::kW;
  if ((contributes || (sum_op && sum.sources.empty()) || (sum_op && act.reads.size() < act.op->reads.size())) && micro_batch >= 0 &&
      !every_read)
    sum.add(source_of(act, micro_batch, 0));
  for (size_t w = 0; w < act.writes.size(); ++w) {
    const int32_t slot = act.writes[w];
    const Region at = region(slot);
    if (language_.types.value_type(at.value_type).micro != Micro::kSum) {
      write(at, -1);
      continue;
    }
    if (const auto* r = std::get_if<Recv>(&act.op->work)) {  // what it holds is looked up on the other side
      sum.merged.push_back(
          message_key(r->comm, peer_of(plan_, role_index_, plan_.comms[r->comm.index()], r->hop, r->cyclic), role_index_));
      sum.sources.clear();
    }
    // With several results each has its own old value: take only the sums that this window held.
    Contributions own = sum;
    if (act.writes.size() > 1 && phase_of(act.op->work) == Phase::kW) {
      own = {};
      const bool accumulates = std::ranges::any_of(act.op->reads, [&](SlotId r) { return r.value == slot; });
      if (accumulates)
        for_pieces(at, [&](const Piece& p) {
          if (p.sum >= 0) own.add(sums_[static_cast<size_t>(p.sum)]);
        });
      if (micro_batch >= 0) own.add(source_of(act, micro_batch, static_cast<int32_t>(w)));
    }
    write(at, new_sum(std::move(own)));
    if (at.root >= 0 && !links_[static_cast<size_t>(at.root)].empty()) ledger_.note_training();
  }
}

/// Storage of its own that takes this rank's part of a whole range of `length` elements, cut along `axes`: from now on it stands
/// for that range.
void Replay::spread_out(Region& at, AxisSet axes, int64_t length) {
  if (axes.empty() || at.begin != 0) return;
  Storage& storage = *at.storage;
  const int64_t own = storage.pieces.empty() ? 0 : storage.pieces.back().end / parts_[storage.spread.mask];
  if (own * parts_[axes.mask] != length) return;
  storage.spread = axes;
  Piece undefined;
  undefined.end = length;
  for (Piece& p : storage.pieces) drop_sum(p);
  storage.pieces.assign(1, undefined);
  at.shard = axes;
  at.end = length;
}

void Replay::play_transfer(const Act& act) {
  const auto* collective = std::get_if<Collective>(&act.op->work);
  for (const int32_t slot : act.reads) read(slot, region(slot));
  if (report_.full() || act.reads.empty() || act.writes.empty()) return;
  Region src = region(act.reads[0]);
  if (!src.storage->alive) return;
  const Region first_dst = region(act.writes[0]);
  if (!first_dst.storage->alive) return fault(Rule::kValues, "writes storage that is not live");
  for (size_t i = 1; i < act.writes.size(); ++i) write(region(act.writes[i]), -1);  // the scales of what is rounded
  AxisSet changed;
  bool reduces = false;
  if (collective != nullptr) {
    changed = plan_.comms[collective->comm.index()].axes;
    reduces = collective->kind == CollectiveKind::kAllReduce || collective->kind == CollectiveKind::kReduceScatter;
    for_pieces(src, [&](const Piece& p) {
      if (!reduces || p.zero || parts_[changed.mask] == 1) return;
      if (collective->reduce == ReduceOp::kSum && p.pending == Pending::kMax)
        fault(Rule::kTypes, "sums %{}, a partial maximum", slot_name(act.reads[0]));
      else if (collective->reduce == ReduceOp::kMax && p.pending == Pending::kSum)
        fault(Rule::kTypes, "takes the maximum of %{}, a partial sum", slot_name(act.reads[0]));
    });
  }
  const bool gathers = collective != nullptr && collective->kind == CollectiveKind::kAllGather;
  const bool scatters = collective != nullptr && collective->kind == CollectiveKind::kReduceScatter;
  Region dst = first_dst;
  const Region& part = gathers ? src : dst;
  const Region& all = gathers ? dst : src;
  if ((gathers || scatters) && src.storage == dst.storage &&
      !(part.begin == all.begin && part.end == all.end && part.shard == (all.shard | changed)))
    return fault(Rule::kForm, "%{} and %{} share storage, but the one is not the rank's shard of the other",
                 slot_name(act.reads[0]), slot_name(act.writes[0]));
  if (scatters && dst.root != src.root) spread_out(dst, changed, src.end - src.begin);
  if (collective == nullptr && dst.shard.empty()) spread_out(dst, src.shard, src.end - src.begin);
  const bool joins = reduces && joins_roles(plan_, plan_.comms[collective->comm.index()]) &&
                     language_.types.value_type(src.value_type).micro == Micro::kSum;
  const CrossRole key{joins ? collective->comm.value : -1, -1, -1, joins ? collectives_[collective->comm.index()]++ : 0};
  const bool linked = std::ranges::any_of(src.storage->pieces,
                                          [](const Piece& p) { return p.parameter >= 0 || p.sum >= 0 || p.zero || p.slice >= 0; });
  const bool same_length = src.end - src.begin == dst.end - dst.begin;
  if (gathers && !linked && dst.root >= 0 && dst.root != src.root && !links_[static_cast<size_t>(dst.root)].empty()) {
    write(dst, -1);  // a flat shard of several parameters: the gathered whole says where each lies
    int32_t version = 0;
    for_pieces(src, [&](const Piece& p) { version = p.version; });
    for_pieces(dst, [&](Piece& p) {
      p.version = version;
      const auto& links = links_[static_cast<size_t>(dst.root)];
      const auto link = std::ranges::find(links, p.parameter, &Link::parameter);
      if (p.parameter >= 0 && link != links.end()) p.value_type = retyped(link->value_type, dst.value_type, {});
    });
    if (src.begin == 0 && (src.end - src.begin) * parts_[changed.mask] == dst.end - dst.begin) {
      src.storage->spread = changed;
      const Piece was = src.storage->pieces.front();
      std::vector<Piece> learnt;
      for_pieces(dst, [&](const Piece& p) {
        Piece q = p;
        q.shard = changed;
        q.name = was.name;
        q.call = was.call;
        q.initial = was.initial;
        q.value_type = retyped(p.value_type, was.value_type, changed);
        learnt.push_back(q);
      });
      src.storage->pieces = std::move(learnt);
    }
    return;
  }
  if (!linked || !same_length) {
    int32_t sum = -1, version = 0;
    Rational owed{0};
    for_pieces(src, [&](const Piece& p) {
      sum = p.sum;
      version = p.version;
      owed = p.owed;
    });
    write(dst, copy_sum(sum));
    const bool partial = !axes_placed(language_.types.value_type(dst.value_type), plan_.mesh, Place::kPartial).empty();
    for_pieces(dst, [&](Piece& p) {
      p.version = version;
      p.owed = owed;
      if (reduces && partial && collective->reduce == ReduceOp::kMax) p.pending = Pending::kMax;  // along the other axes still
    });
    return;
  }
  transfer(src, dst, changed);
  if (!joins) return;
  for_pieces(dst, [&](Piece& p) {
    if (p.sum < 0) return;
    Contributions& sum = sums_[static_cast<size_t>(p.sum)];
    if (p.parameter < 0 && sum.normed.empty()) return;
    ledger_.give(key, role_index_, p.parameter, sum);
    sum.merged.push_back(key);
  });
}

/// c = a + b over gradients: piece by piece, each with the contributions of both.
void Replay::play_add(const Act& act) {
  for (const int32_t slot : act.reads) read(slot, region(slot));
  if (report_.full()) return;
  const Region a = region(act.reads[0]), b = region(act.reads[1]), c = region(act.writes[0]);
  if (!a.storage->alive || !b.storage->alive || !c.storage->alive) return;
  std::vector<Piece> right;
  for_pieces(b, [&](const Piece& p) { right.push_back(p); });
  if (a.storage != c.storage || a.begin != c.begin)
    transfer(a, c, {});
  else
    for_pieces(c, [&](Piece& p) {
      p.name = c.name;
      p.call = call_number_;
    });
  for_pieces(c, [&](Piece& p) {
    for (const Piece& q : right) {
      const int64_t begin = q.begin - b.begin + c.begin, end = q.end - b.begin + c.begin;
      if (end <= p.begin || p.end <= begin) continue;
      if (p.parameter >= 0 && q.parameter >= 0 && p.parameter != q.parameter)
        fault(Rule::kGradients, "adds the gradient of {} to that of {}", plan_.parameters[static_cast<size_t>(q.parameter)].name,
              plan_.parameters[static_cast<size_t>(p.parameter)].name);
      p.zero = p.zero && q.zero;
      p.owed = Rational(0);
      if (q.sum < 0) continue;
      if (p.sum < 0) p.sum = new_sum({});
      const Contributions other = sums_[static_cast<size_t>(q.sum)];
      sums_[static_cast<size_t>(p.sum)].add(other);
    }
  });
}

/// Elements of a piece within a region, counted over the ranks that share its tensor out.
int64_t Replay::elements_over_ranks(const Piece& p, const Region& at, const Type& read_as) const {
  const Type& type = language_.types.value_type(p.value_type);
  int64_t n = std::min(p.end, at.end) - std::max(p.begin, at.begin);
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a) {
    // What was written as a bucket of several gradients is cut as the view says by which it is read.
    const Placement& place = type.place[a].kind == Place::kLocal ? read_as.place[a] : type.place[a];
    if (place.is_shard() && !at.shard.contains(static_cast<int>(a))) n *= plan_.mesh.axes[a].size;
  }
  return n;
}

/// What a kernel is given as a squared norm counts whole gradients, and what clips counts all of them.
void Replay::check_norm(const Act& act, const Kernel& kernel) {
  const bool clips = kernel.name == "clip_factor";
  bool is_norm = false;
  for (const int32_t slot : act.reads) {
    const Region at = region(slot);
    if (!at.storage->alive) continue;
    for_pieces(at, [&](const Piece& p) {
      if (p.sum < 0) return;
      const Contributions& sum = sums_[static_cast<size_t>(p.sum)];
      if (sum.normed.empty()) return;
      is_norm = is_norm || slot == act.reads[0];
      ledger_.demand({role_index_, -1, clips, segment_, act.op, call_, sum, false});
    });
  }
  if (clips && !is_norm) fault(Rule::kGradients, "clips by %{}, which is no squared norm of gradients", slot_name(act.reads[0]));
}

/// A kernel that mixes gradients is given all of each, or what one micro-batch gave (the kernel's results are added up after it).
void Replay::demand_of_kernel(const Act& act, const Piece& p) {
  const auto& sources = sums_[static_cast<size_t>(p.sum)].sources;
  const bool of_one = plan_.micro_batches > 1 && std::ranges::all_of(sources, [&](const Source& s) {
                        return s.count == 1 && s.fingerprint == sources.front().fingerprint;
                      });
  demand(act, p, !of_one, true);
}

void Replay::demand(const Act& act, const Piece& p, bool complete, bool before_tie) {
  if (p.parameter < 0) return;
  Demand d;
  d.role = role_index_;
  d.parameter = p.parameter;
  d.complete = complete;
  d.before_tie = before_tie;
  d.segment = segment_;
  d.op = act.op;
  d.call = call_;
  if (p.sum >= 0) d.sum = sums_[static_cast<size_t>(p.sum)];
  ledger_.demand(std::move(d));
}

void Replay::play_optimizer(const Act& act) {
  for (const int32_t slot : act.reads) read(slot, region(slot));
  if (report_.full()) return;
  const Region grad = region(act.reads[0]);
  Region param = region(act.reads[1]);
  if (!grad.storage->alive || !param.storage->alive) return;
  const bool unlinked = std::ranges::none_of(param.storage->pieces, [](const Piece& p) { return p.parameter >= 0; });
  const bool is_slice = (param.end - param.begin) * parts_[grad.shard.mask] == grad.end - grad.begin;
  if (unlinked && param.storage->spread.empty() && param.shard.empty() && param.begin == 0 && is_slice) {
    // A flat copy or shard of several parameters, whose layout its gradient tells.
    const Piece was = param.storage->pieces.front();
    const int32_t packed = param.root >= 0 ? role_.buffers[static_cast<size_t>(param.root)].packed_as : -1;
    param.storage->spread = grad.shard;
    param.storage->pieces.clear();
    for_pieces(grad, [&](const Piece& g) {
      if (packed >= 0 && g.parameter >= 0 && !links_[static_cast<size_t>(packed)].empty()) {
        const auto& links = links_[static_cast<size_t>(packed)];
        const auto link = std::ranges::find(links, g.parameter, &Link::parameter);
        if (link == links.end() || link->begin != g.origin - grad.begin)
          return fault(Rule::kGradients, "updates what is packed as %{} with the gradient of {}, which does not lie there",
                       role_.buffers[static_cast<size_t>(packed)].name, plan_.parameters[static_cast<size_t>(g.parameter)].name);
      }
      Piece q = was;
      q.begin = std::max(g.begin, grad.begin) - grad.begin;
      q.end = std::min(g.end, grad.end) - grad.begin;
      q.origin = g.origin - grad.begin;
      q.parameter = g.parameter;
      q.value_type = retyped(g.value_type, was.value_type, grad.shard);
      q.shard = param.storage->spread;
      param.storage->pieces.push_back(q);
    });
    param = region(act.reads[1]);
  }
  std::vector<Piece> updated;
  for_pieces(grad, [&](const Piece& g) {
    for_pieces(param, [&](const Piece& p) {
      const int64_t g_begin = std::max(g.begin, grad.begin) - grad.begin + param.begin,
                    g_end = std::min(g.end, grad.end) - grad.begin + param.begin;
      const int64_t begin = std::max({g_begin, p.begin, param.begin}), end = std::min({g_end, p.end, param.end});
      if (begin >= end) return;
      Piece q = p;
      q.begin = begin;
      q.end = end;
      q.initial = false;
      q.shard = param.shard;
      q.name = param.name;
      q.call = call_number_;
      ++q.version;
      if (!(param.shard == p.shard)) q.value_type = retyped(p.value_type, param.value_type, param.shard);
      updated.push_back(q);
      if (p.parameter < 0) return;
      const std::string& name = plan_.parameters[static_cast<size_t>(p.parameter)].name;
      if (g.parameter >= 0 && g.parameter != p.parameter)
        return fault(Rule::kGradients, "updates {} with the gradient of {}", name,
                     plan_.parameters[static_cast<size_t>(g.parameter)].name);
      if (g.parameter == p.parameter && g.origin - grad.begin != p.origin - param.begin)
        return fault(Rule::kGradients, "updates {} with another part of its gradient", name);
      if (q.version > 1 && plan_.period == 1) return fault(Rule::kGradients, "updates {} a second time", name);
      if (g.spent) return fault(Rule::kGradients, "updates {} a second time with one gradient", name);
      const Type& gt = language_.types.value_type(g.value_type);
      const Type& pt = language_.types.value_type(q.value_type);
      int64_t ranks = 1;
      for (size_t a = 0; a < plan_.mesh.axes.size(); ++a) {
        const Placement gp = gt.place[a], pp = pt.place[a];
        if (gp.is_partial() && !g.zero)
          return fault(Rule::kGradients, "along {}: the gradient of {} was never reduced", plan_.mesh.axes[a].name, name);
        const bool fine =
            g.zero || gp == pp || gp.kind == Place::kLocal || pp.kind == Place::kLocal || param.shard.contains(static_cast<int>(a));
        if (!fine)
          return fault(Rule::kGradients, "along {}: the gradient of {} is {}, the parameter {}", plan_.mesh.axes[a].name, name,
                       placement_name(gp), placement_name(pp));
        if (pp.is_shard() && !param.shard.contains(static_cast<int>(a))) ranks *= plan_.mesh.axes[a].size;
      }
      ledger_.updated(role_index_, p.parameter, (end - begin) * ranks);
      if (g.initial && g.sum < 0 && grad.root >= 0) {
        stale_.push_back({grad.root, p.parameter, g.begin, g.end, segment_, &act, call_});
        return;
      }
      Piece whole = g;
      whole.parameter = p.parameter;
      demand(act, whole, true);
    });
  });
  for_pieces(grad, [](Piece& g) { g.spent = true; });
  check_factor_of_step(act, grad);
  if (!updated.empty()) {
    std::ranges::sort(updated, {}, &Piece::begin);
    put(*param.storage, param.begin, param.end, updated);
  }
}

/// Where the period has several steps, what clips a gradient is made after it: a factor that is older is that of the step before.
void Replay::check_factor_of_step(const Act& act, const Region& grad) {
  const size_t state = std::holds_alternative<AdamW>(act.op->work) ? 4 : 2;
  if (plan_.period == 1 || act.reads.size() <= state) return;
  int32_t made = INT32_MAX, wanted = 0;
  for_pieces(region(act.reads[state]), [&](const Piece& p) { made = std::min(made, p.call); });
  for_pieces(grad, [&](const Piece& g) { wanted = std::max(wanted, g.call); });
  if (made < wanted) fault(Rule::kGradients, "takes %{} from before the gradient that it scales", slot_name(act.reads[state]));
}

void Replay::finish() {
  for (size_t i = 0; i < storages_.size() && !report_.full(); ++i) {
    if (role_.buffers[i].view) continue;
    if (storages_[i].persistent)
      finish_storage(i);
    else if (storages_[i].alive)
      fault(Rule::kValues, "%{} is never freed", role_.buffers[i].name);
  }
  finish_versions();
  finish_gradients();
}

void Replay::finish_gradients() {
  for (const Stale& s : stale_) {
    segment_ = s.segment;
    call_ = s.call;
    for (const Piece& p : storages_[static_cast<size_t>(s.root)].pieces) {
      if (p.end <= s.begin || s.end <= p.begin) continue;
      Piece whole = p;
      whole.parameter = s.parameter;
      demand(*s.act, whole, true);
    }
  }
}

/// Where a parameter is kept twice (a master copy, a second element type), an update must have reached every copy.
void Replay::finish_versions() {
  std::vector<std::pair<int32_t, size_t>> seen(plan_.parameters.size(), {-1, 0});  // version and storage of the first copy
  for (size_t i = 0; i < storages_.size(); ++i) {
    const BufferClass kind = role_.buffers[i].kind;
    if (!storages_[i].persistent || role_.buffers[i].view || (kind != BufferClass::kParameter && kind != BufferClass::kMaster))
      continue;
    for (const Piece& p : storages_[i].pieces) {
      if (p.parameter < 0) continue;
      auto& [version, first] = seen[static_cast<size_t>(p.parameter)];
      if (version < 0) {
        version = p.version;
        first = i;
      } else if (version != p.version) {
        const bool stale_first = version < p.version;
        return fault(Rule::kValues, "%{} misses the update of {} that %{} has", role_.buffers[stale_first ? first : i].name,
                     plan_.parameters[static_cast<size_t>(p.parameter)].name, role_.buffers[stale_first ? i : first].name);
      }
    }
  }
}

/// What the next period relies on must be as it was: of the declared type, whole, and, for a parameter, of one version in all its
/// copies.
void Replay::finish_storage(size_t root) {
  const Buffer& buffer = role_.buffers[root];
  const Storage& storage = storages_[root];
  if (buffer.kind == BufferClass::kMetric) return finish_metric(root);
  if (!storage.read_initial) return;
  for (const Piece& p : storage.pieces) {
    const auto& links = links_[root];
    const auto link = std::ranges::find_if(links, [&](const Link& l) { return l.begin <= p.begin && p.end <= l.end; });
    const int32_t declared = link == links.end() ? buffers_[root].value_type : link->value_type;
    if ((p.shard.mask & ~storage.spread.mask) != 0)
      return fault(Rule::kValues, "%{} ends the period with only this rank's shard current: the next period reads the whole",
                   buffer.name);
    if (!p.zero && storage.spread.empty() && !language_.fits(p.value_type, declared, {}))
      return fault(Rule::kValues, "%{} ends the period as {}, but began as {}", buffer.name, type_text(p.value_type),
                   type_text(declared));
  }
}

/// What is reported must be whole: reduced, and over every micro-batch. Where servers keep a pace of their own, so do the workers,
/// and each reports its part.
void Replay::finish_metric(size_t root) {
  const bool by_worker = std::ranges::find(plan_.streams, kServerStream) != plan_.streams.end() &&
                         !axes_placed(role_.buffers[root].type, plan_.mesh, Place::kPartial).empty();
  if (std::ranges::all_of(storages_[root].pieces, [](const Piece& p) { return p.initial; }))
    return fault(Rule::kValues, "%{} is reported, and nothing writes it", role_.buffers[root].name);
  for (const Piece& p : storages_[root].pieces) {
    if (!p.written || p.zero || p.initial) continue;
    const Type& t = language_.types.value_type(p.value_type);
    if (!by_worker && !axes_placed(t, plan_.mesh, Place::kPartial).empty())
      return fault(Rule::kTypes, "%{} is reported as an unreduced sum: {}", role_.buffers[root].name, type_text(p.value_type));
    if (t.micro != Micro::kSum || p.sum < 0) continue;
    const Contributions& sum = sums_[static_cast<size_t>(p.sum)];
    if (!sum.normed.empty()) ledger_.demand({role_index_, -1, true, nullptr, nullptr, nullptr, sum, false});
    if (p.owed != Rational(0) && p.owed != Rational(1))
      return fault(
          Rule::kTypes,
          "%{} is reported as {}/{} times what it sums up to: the mean loss of the step's targets, or the whole squared norm",
          role_.buffers[root].name, p.owed.num, p.owed.den);
    for (const Source& s : sum.sources)
      if (!ledger_.is_complete(s))
        return fault(Rule::kValues, "%{} holds {} of the step's {} micro-batches", role_.buffers[root].name, s.count,
                     plan_.micro_batches);
  }
}

}  // namespace

void check_values(const Plan& plan, Report& report) {
  Language language(plan);
  GradientLedger ledger(plan, report);
  const size_t before = report.count();
  for (size_t r = 0; r < plan.roles.size() && !report.full(); ++r) Replay(language, static_cast<int>(r), ledger, report).run();
  if (report.count() == before) ledger.settle();
}

}  // namespace shardlab::verifying
