// The machine of rules 3 and 4: what storages hold from one call to the next, and what a period must leave behind.
#include <algorithm>

#include "plan/named_kernels.h"
#include "plan/period.h"
#include "plan/run_state.h"
#include "plan/verify_replay.h"

namespace shardlab::verifying {
namespace {

/// A collective that makes another value of what it moves.
bool reduces(const Op& op) {
  const auto* collective = std::get_if<Collective>(&op.work);
  return collective != nullptr &&
         (collective->kind == CollectiveKind::kAllReduce || collective->kind == CollectiveKind::kReduceScatter);
}

bool is_state(BufferClass c) { return c != BufferClass::kActivation && c != BufferClass::kTemporary; }

/// For each item of a program, the last step of the period that a micro-batch has begun there or before, by calls that happen once a step.
std::vector<int32_t> steps_begun(const Plan& plan, const Role& role, const std::vector<int32_t>& steps) {
  if (plan.period == 1) return steps;
  const auto key_of = [](const Call& c) { return std::tuple(c.segment.value, c.layer, c.micro_batch); };
  std::map<std::tuple<int32_t, int, int>, int> times;
  for (const Item& item : role.program)
    if (const Call* call = std::get_if<Call>(&item); call != nullptr && call->micro_batch >= 0) ++times[key_of(*call)];
  std::vector<int32_t> begun(role.program.size());
  int32_t last = 0;
  for (size_t i = 0; i < begun.size(); ++i) {
    const Call* call = std::get_if<Call>(&role.program[i]);
    if (call != nullptr && call->micro_batch >= 0 && times[key_of(*call)] == plan.period) last = std::max(last, steps[i]);
    begun[i] = last;
  }
  return begun;
}

}  // namespace

void Replay::run() {
  prepare();
  steps_ = steps_of_calls(plan_, role_);
  steps_begun_ = steps_begun(plan_, role_, steps_);
  for (item_ = 0; item_ < role_.program.size(); ++item_) {
    const Item& item = role_.program[item_];
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
  p.state = new_state();
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
    if (p.run >= 0) runs_[static_cast<size_t>(p.run)].used = true;
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
  const auto goes_on = [&] {  // with further tensors
    const auto* kernel = std::get_if<Kernel>(&act_->op->work);
    return kernel != nullptr && (meaning_of(*kernel) == KernelMeaning::kLargest || meaning_of(*kernel) == KernelMeaning::kFit);
  };
  if (p.pending == Pending::kMax && act_->kind != Act::Kind::kTransfer && !std::holds_alternative<Send>(act_->op->work) &&
      !goes_on()) {
    fault(Rule::kTypes, "reads %{}, a partial maximum that no all_reduce with max has combined", slot_name(slot));
    return false;
  }
  return true;
}

void Replay::note_use(int32_t slot, const Region& at, int32_t ordinal) {
  if (ordinal < 0) return;
  for_pieces(at, [&](const Piece& p) {
    if (p.parameter >= 0) check_age(p, slot);
    if (p.parameter < 0) check_run_state(p, at, slot);
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
  p.run = first_run_;
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
  at.storage->change();
  Piece whole = fresh_piece(at, at.begin, at.end);
  whole.sum = sum;
  whole.state = new_state();
  whole.state_origin = at.begin;
  const auto* zero = std::get_if<Fill>(&act_->op->work);
  whole.zero = zero != nullptr && zero->value == 0;
  const auto* loss = std::get_if<CrossEntropy>(&act_->op->work);
  const auto* kernel = std::get_if<Kernel>(&act_->op->work);
  const bool partial = !axes_placed(language_.types.value_type(at.value_type), plan_.mesh, Place::kPartial).empty();
  if (partial && loss != nullptr && loss->part == CrossEntropy::Part::kMax) whole.pending = Pending::kMax;
  if (partial && kernel != nullptr && is_believed(*kernel))
    whole.pending = takes_maximum(*kernel) ? Pending::kMax  // no counts
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
  if (from < 0) return declared;
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
  dst.storage->change();
  const int64_t shift = dst.begin - src.begin;
  const int32_t sum_of_ranks = reduces(*act_->op) ? new_state() : -1;
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
    q.state = sum_of_ranks >= 0 ? sum_of_ranks : p.state;
    q.state_origin = sum_of_ranks >= 0 ? dst.begin : p.state_origin + shift;
    q.sum = copy_sum(p.sum);
    // A sum that was formed in a segment's own storage belongs to the parameter whose gradient is kept where it comes to.
    if (q.parameter < 0 && q.sum >= 0 && dst.root >= 0)
      for (const Link& l : links_[static_cast<size_t>(dst.root)])
        if (l.begin <= q.begin && q.end <= l.end)
          q.parameter = l.parameter, q.origin = l.begin, q.value_type = retyped(l.value_type, dst.value_type, {});
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

void Replay::finish() {
  for (size_t i = 0; i < storages_.size() && !report_.full(); ++i) {
    if (role_.buffers[i].view) continue;
    if (storages_[i].persistent) {
      finish_storage(i);
      finish_state(i);
    } else if (storages_[i].alive) {
      fault(Rule::kValues, "%{} is never freed", role_.buffers[i].name);
    }
  }
  finish_versions();
  check_taken_back();
  check_counted();
  finish_gradients();
  finish_runs();
}

void Replay::finish_gradients() {
  for (const Stale& s : stale_) {
    segment_ = s.segment;
    call_ = s.call;
    for (const Piece& p : storages_[static_cast<size_t>(s.root)].pieces) {
      if (p.end <= s.begin || s.end <= p.begin) continue;
      if (s.factor >= 0 && storages_[static_cast<size_t>(s.factor)].pieces.front().call < p.call)
        fault(Rule::kGradients, "%{} waits for the next period, and its factor %{} is of an earlier gradient",
              role_.buffers[static_cast<size_t>(s.root)].name, role_.buffers[static_cast<size_t>(s.factor)].name);
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
  const auto unwritten = std::ranges::find(storages_[root].pieces, true, &Piece::initial);
  if (unwritten != storages_[root].pieces.end())
    return fault(
        Rule::kValues, "%{} is reported, and nothing writes {}", role_.buffers[root].name,
        storages_[root].pieces.size() == 1 ? "it" : fmt::format("its elements [{}, {})", unwritten->begin, unwritten->end));
  if (storages_[root].read_initial)
    return fault(Rule::kValues, "%{} is reported, and has what the step before left in it", role_.buffers[root].name);
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
    if (sum.normed.empty())
      ledger_.demand_all({role_index_, -1, true, nullptr, nullptr, nullptr, sum, false}, role_.buffers[root].name);
  }
}

}  // namespace shardlab::verifying
