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
// Here is what each kind of act does to that machine; the machine itself is in verify_replay.cpp.
#include <algorithm>
#include <optional>

#include "plan/named_kernels.h"
#include "plan/optimizers.h"
#include "plan/verify_replay.h"

namespace shardlab::verifying {
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

namespace {

/// a * b; nothing where the numbers grow too large.
std::optional<Rational> product(Rational a, Rational b) {
  const Rational x(a.num, b.den), y(b.num, a.den);
  Rational p;
  if (__builtin_mul_overflow(x.num, y.num, &p.num) || __builtin_mul_overflow(x.den, y.den, &p.den)) return std::nullopt;
  return p;
}

}  // namespace

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

/// How many losses of ranks that train apart become summands of one here: their mean owes a division by as many. Stages share the
/// micro-batches of one step among them.
int64_t Replay::means_joined(const Act& act) {
  int64_t ranks = 1;
  const Type& to = segment_->slots[static_cast<size_t>(act.writes[0])].type;
  const Type& from = segment_->slots[static_cast<size_t>(act.reads[0])].type;
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
    if (to.place[a].is_partial() && from.place[a].kind == Place::kLocal && plan_.mesh.axes[a].name != kPipelineAxis)
      ranks *= plan_.mesh.axes[a].size;
  return ranks;
}

void Replay::play(const Act& act) {
  act_ = &act;
  if (!act.aliasing.empty()) check_aliasing(act);
  if (act.op == nullptr) return perform(act);
  begin_run(act);
  if (const auto* kernel = std::get_if<Kernel>(&act.op->work)) check_norm(act, *kernel);
  const auto* sum = std::get_if<SumScalars>(&act.op->work);
  const auto* loss = std::get_if<CrossEntropy>(&act.op->work);
  const bool states_loss = loss != nullptr && loss->part != CrossEntropy::Part::kMax && loss->part != CrossEntropy::Part::kSum;
  const bool norm = std::holds_alternative<SquaredNorm>(act.op->work);
  Rational owed(states_loss ? loss->tokens : norm ? 1 : 0);
  if (sum != nullptr) {
    const auto scaled = product(owed_by_reads(act), sum->factor);
    const auto joined = scaled ? product(*scaled, Rational(means_joined(act))) : std::nullopt;
    if (!joined) fault(Rule::kTypes, "multiplies a loss by factors whose product has more than 63 bits");
    owed = joined.value_or(Rational(0));
  }
  const bool adds_slices = std::holds_alternative<Add>(act.op->work) && act.kind == Act::Kind::kPlain;  // losses of parts, perhaps
  if (adds_slices) owed = owed_by_reads(act);
  perform(act);
  for (const int32_t slot : act.writes) {
    const Region at = region(slot);
    if (!at.storage->alive) continue;
    if (sum != nullptr || norm || adds_slices || (states_loss && slot == act.op->writes[0].value))
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
    case Act::Kind::kTransfer:
      if (takes_back(act)) return;
      play_transfer(act);
      return note_copy(act);
    case Act::Kind::kAdd: return play_add(act);
    case Act::Kind::kOptimizer: return play_optimizer(act);
    case Act::Kind::kPlain: break;
  }
  for (size_t i = 0; i < act.reads.size(); ++i) {
    const Region at = region(act.reads[i]);
    read(act.reads[i], at);
    if (act.uses_parameters && at.storage->alive) note_use(act.reads[i], at, act.ordinals[i]);
  }
  for (const int32_t slot : act.writes) {
    const Region at = region(slot);
    if (changes_in_place(act, at)) supersede(at);
    write(at, -1);
  }
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
    if (act.uses_parameters) note_use(act.reads[i], at, act.ordinals[i]);
    int32_t parameter = -1, last = -1, told = -1;  // of the pieces before
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
      if (every_read && p.slice != told) sum.add(source_of(act, p.slice, 0));  // once, however many ops wrote its losses
      told = p.slice;
      contributes = !every_read;
      micro_batch = p.slice;
    });
  }
  // In a light replay the local operands of a W op, or of a count of tokens, are left out; it was found to read this micro-batch when it was replayed in
  // full.
  const bool sum_op = phase_of(act.op->work) == Phase::kW || std::holds_alternative<ExpertLoad>(act.op->work);
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

/// Reads every operand. Where one is not what it should be, what the op writes is taken to be as declared: nothing can be derived
/// from a fault, and what follows is judged by itself.
bool Replay::read_all(const Act& act) {
  const size_t before = report_.count();
  for (const int32_t slot : act.reads) read(slot, region(slot));
  if (report_.full()) return false;
  if (report_.count() == before) return true;
  for (const int32_t slot : act.writes) write(region(slot), -1);
  return false;
}

void Replay::play_transfer(const Act& act) {
  const auto* collective = std::get_if<Collective>(&act.op->work);
  if (!read_all(act) || act.reads.empty() || act.writes.empty()) return;
  Region src = region(act.reads[0]);
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
  const std::vector<int>* group = joins ? group_at(plan_.comms[collective->comm.index()], role_index_) : nullptr;
  const CrossRole key{joins ? collective->comm.value : -1, group != nullptr ? group->front() : -1, -1,
                      joins ? collectives_[collective->comm.index()]++ : 0};
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
    int32_t sum = -1, version = 0, state = -1, states = 0;
    int64_t state_origin = 0;
    Rational owed{0};
    for_pieces(src, [&](const Piece& p) {
      sum = p.sum;
      version = p.version;
      owed = p.owed;
      states += p.state != state || states == 0;
      state = p.state;
      state_origin =
          p.state_origin + dst.begin - src.begin;  // where one of the two stands for a whole: near enough to be superseded
    });
    write(dst, copy_sum(sum));
    const bool same_part = (src.end - src.begin) / parts_[src.shard.mask] == (dst.end - dst.begin) / parts_[dst.shard.mask];
    const bool stays = collective == nullptr && same_part && states == 1;
    const bool partial = !axes_placed(language_.types.value_type(dst.value_type), plan_.mesh, Place::kPartial).empty();
    for_pieces(dst, [&](Piece& p) {
      p.version = version;
      p.owed = owed;
      if (stays) p.state = state;
      if (stays) p.state_origin = state_origin;
      if (reduces && partial && collective->reduce == ReduceOp::kMax) p.pending = Pending::kMax;  // along the other axes still
    });
    return;
  }
  transfer(src, dst, changed);
  if (!joins) return;
  for_pieces(dst, [&](Piece& p) {
    if (p.sum < 0) return;
    Contributions& sum = sums_[static_cast<size_t>(p.sum)];
    CrossRole part = key;
    if (p.parameter < 0) part.end = p.end - dst.begin;
    ledger_.give(part, role_index_, p.parameter, sum);
    sum.merged.push_back(part);
  });
}

/// c = a + b over gradients: piece by piece, each with the contributions of both.
void Replay::play_add(const Act& act) {
  if (!read_all(act)) return;
  const Region a = region(act.reads[0]), b = region(act.reads[1]), c = region(act.writes[0]);
  if (!c.storage->alive) return fault(Rule::kValues, "writes storage that is not live");
  std::vector<Piece> right;
  for_pieces(b, [&](const Piece& p) { right.push_back(p); });
  if (a.storage != c.storage || a.begin != c.begin)
    transfer(a, c, {});
  else
    for_pieces(c, [&](Piece& p) {
      p.name = c.name;
      p.call = call_number_;
      p.run = first_run_;
    });
  c.storage->change();
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
  const bool clips = meaning_of(kernel) == KernelMeaning::kClipFactor;
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

/// The type of a parameter after an update: ranks that had it in common and update it with gradients of their own have parted.
int32_t Replay::parted(int32_t parameter, int32_t gradient) {
  Type t = language_.types.value_type(parameter);
  const Type& g = language_.types.value_type(gradient);
  bool differs = false;
  for (size_t a = 0; a < plan_.mesh.axes.size(); ++a)
    if (t.place[a].kind == Place::kReplicate && g.place[a].kind == Place::kLocal) {
      t.place[a] = Placement::local();
      differs = true;
    }
  if (!differs) return parameter;
  t.shape = Shape{0, 0};
  return language_.types.value(t);
}

void Replay::play_optimizer(const Act& act) {
  if (!read_all(act)) return;
  const Region grad = region(act.reads[0]);
  Region param = region(act.reads[1]);
  if (grad.storage == param.storage)
    return fault(Rule::kForm, "%{} and %{} share storage: a gradient lies apart from what it updates", slot_name(act.reads[0]),
                 slot_name(act.reads[1]));
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
  const std::optional<Region> factor = factor_of(act);
  supersede(param);
  param.storage->change();
  for (size_t w = 1; w < act.writes.size(); ++w) change(region(act.writes[w]), w);
  const int32_t updated_state = new_state();
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
      q.run = first_run_;
      q.state = updated_state;
      q.state_origin = param.begin;
      ++q.version;
      if (!(param.shard == p.shard)) q.value_type = retyped(p.value_type, param.value_type, param.shard);
      if (g.parameter >= 0) q.value_type = parted(q.value_type, g.value_type);
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
        if (pp.is_partial())
          return fault(Rule::kGradients, "along {}: updates {}, which is an unreduced sum", plan_.mesh.axes[a].name, name);
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
        stale_.push_back({grad.root, factor ? factor->root : -1, p.parameter, g.begin, g.end, segment_, &act, call_});
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

/// What an update multiplies its gradient by.
std::optional<Region> Replay::factor_of(const Act& act) {
  const size_t before = update_operands(*update_of(act.op->work));
  const bool predicated = static_cast<bool>(act.op->when);  // which is read last
  if (act.reads.size() <= before + (predicated ? 1 : 0)) return std::nullopt;
  return region(act.reads[before]);
}

/// What clips a gradient is made after it: a factor that is older is that of a step before. Where the gradient is of the last
/// period, so is its factor, and not this period's.
void Replay::check_factor_of_step(const Act& act, const Region& grad) {
  const std::optional<Region> factor = factor_of(act);
  if (!factor) return;
  int32_t made = INT32_MAX, wanted = 0;
  bool kept = false, waited = false;
  for_pieces(*factor, [&](const Piece& p) {
    made = std::min(made, p.call);
    kept = kept || p.initial;
  });
  for_pieces(grad, [&](const Piece& g) {
    wanted = std::max(wanted, g.call);
    waited = waited || g.initial;
  });
  if (waited != kept)
    fault(Rule::kGradients, "takes a factor of {} period for a gradient of {}", kept ? "the last" : "this",
          waited ? "the last" : "this");
  else if (plan_.period > 1 && made < wanted)
    fault(Rule::kGradients, "takes its factor from before the gradient that it scales");
}

void check_values(const Plan& plan, Report& report) {
  Language language(plan);
  GradientLedger ledger(plan, report);
  const size_t before = report.count();
  for (size_t r = 0; r < plan.roles.size() && !report.full(); ++r) Replay(language, static_cast<int>(r), ledger, report).run();
  if (report.count() == before) ledger.settle();
}

}  // namespace shardlab::verifying
