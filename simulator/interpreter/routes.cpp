#include "simulator/interpreter/routes.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <span>

#include "plan/base/check.h"
#include "plan/base/hash.h"
#include "plan/node_reach.h"
#include "plan/row_levels.h"

namespace shardlab::simulator {
namespace {

/// From 0 to 1, of a layer, an owner and a micro-batch or sequence of it.
double uniform(int layer, size_t owner, int64_t number) {
  const uint64_t key =
      mix(mix(static_cast<uint64_t>(layer)) ^ (static_cast<uint64_t>(owner) << 32) ^ static_cast<uint64_t>(number));
  return static_cast<double>(key >> 11) * 0x1p-53;
}

/// Draws rows by expert of `tokens` tokens: `upto` is the running sum of shares, up to top_k. Adds them to `rows`, of each expert `most` at
/// most (0: all).
void draw(const std::vector<double>& upto, int64_t tokens, double first, int64_t most, std::vector<int64_t>& rows) {
  // Points (i + first) / tokens below `end`, i from 0 on.
  const auto below = [&](double end) { return static_cast<int64_t>(std::ceil(static_cast<double>(tokens) * end - first)); };
  int64_t before = 0;
  for (size_t e = 0; e < upto.size(); ++e) {
    const int64_t until = std::max(before, below(upto[e]));
    rows[e] += most > 0 ? std::min(most, until - before) : until - before;
    before = until;
  }
}

/// How the tokens of sequences are dealt to owners: which have parts of the same ones, and where the parts begin.
struct Parts {
  TokenOrder order;
  int64_t tokens = 0, length = 0;           ///< of a sequence; of a part of it
  std::vector<std::vector<size_t>> owners;  ///< those that share sequences, by part
  std::vector<int64_t> begins;              ///< by owner

  Parts(const Plan& plan, const RowOwners& of, const Type& choice)
      : order(plan.token_order), tokens(logical_shape(choice, plan.mesh)[1]), length(choice.shape[1]) {
    std::map<int64_t, size_t> groups;  // by first sequence
    for (size_t o = 0; o < of.ranks.size(); ++o) {
      const Shape origin = logical_origin(choice, plan.mesh, plan.mesh.coordinates(of.ranks[o]));
      const auto [group, is_new] = groups.try_emplace(origin[0], owners.size());
      if (is_new) owners.emplace_back();
      owners[group->second].push_back(o);
      begins.push_back(origin[1]);
    }
  }

  /// Leaves of the rows of one expert, by part, those that it has room for: the first `most` in the order of the text. The rows of a part
  /// are spread evenly over its tokens.
  void cut(const std::vector<size_t>& of, int64_t most, std::span<int64_t> rows) const {
    if (std::accumulate(rows.begin(), rows.end(), int64_t{0}) <= most) return;
    const auto upto = [&](size_t part, int64_t position) {
      const int64_t begin = begins[of[part]];
      return rows[part] * order.seen(begin, begin + length, position, tokens) / length;
    };
    const auto fits = [&](int64_t position) {
      int64_t sum = 0;
      for (size_t part = 0; part < rows.size(); ++part) sum += upto(part, position);
      return sum <= most;
    };
    int64_t last = -1;  // the last position up to which all rows fit
    for (int64_t end = tokens - 1; last < end;) {
      const int64_t middle = last + (end - last + 1) / 2;
      if (fits(middle))
        last = middle;
      else
        end = middle - 1;
    }
    for (size_t part = 0; part < rows.size(); ++part) most -= upto(part, last);
    for (size_t part = 0; part < rows.size(); ++part) {
      const int64_t first = upto(part, last), more = std::min(most, upto(part, last + 1) - first);
      rows[part] = first + more;
      most -= more;
    }
  }
};

/// Rows by owner and expert of the micro-batches of one layer.
class Draws {
 public:
  Draws(const CountedLayer& layer, const Parts& parts, const Routing& routing, const Experts& experts)
      : layer_(layer), parts_(parts), owners_(parts.begins.size()), experts_(static_cast<size_t>(experts.count)) {
    const size_t owners = owners_;
    if (routing.kind == Routing::Kind::kRecorded) {
      const auto found = std::ranges::find(routing.recorded, layer.layer, &ExpertRows::layer);
      SHARDLAB_CHECK(found != routing.recorded.end(), "no routes of layer {} are recorded", layer.layer);
      // Of as many ranks, whose tokens chose as many rows, of which no expert has more than it has room for: they are those of this step.
      const int64_t step = layer.chosen * layer.micro_batches, room = layer.capacity * layer.sequences * layer.micro_batches;
      const auto fits = [&](const std::vector<int64_t>& rows) {
        const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
        return (found->dropped > 0 ? all <= step : all == step) && (room == 0 || std::ranges::max(rows) <= room);
      };
      const bool alike = drops_of({&*found, 1}).chosen == step * static_cast<int64_t>(owners) && found->by_source.size() == owners;
      if (alike && std::ranges::all_of(found->by_source, fits)) recorded_ = &found->by_source;
    }
    double sum = 0;
    for (const double share : shares_of_experts(routing, experts, layer.layer)) upto_.push_back(sum += share);
    for (double& end : upto_) end *= static_cast<double>(experts.top_k) / sum;
    upto_.back() = static_cast<double>(experts.top_k);
  }

  /// By owner and expert.
  std::vector<std::vector<int64_t>> rows(int micro_batch) const {
    std::vector<std::vector<int64_t>> rows(owners_, std::vector<int64_t>(experts_));
    if (recorded_ == nullptr && layer_.capacity > 0 && parts_.length < parts_.tokens) {
      for (const std::vector<size_t>& sharers : parts_.owners) draw_shared(sharers, micro_batch, rows);
      return rows;
    }
    for (size_t owner = 0; owner < owners_; ++owner) draw_own(owner, micro_batch, rows[owner]);
    return rows;
  }

 private:
  void draw_own(size_t owner, int micro_batch, std::vector<int64_t>& rows) const {
    if (recorded_ != nullptr) {
      const auto upto = [&](int64_t all, int m) {
        return all / layer_.micro_batches * m + all % layer_.micro_batches * m / layer_.micro_batches;
      };
      for (size_t e = 0; e < experts_; ++e) {
        const int64_t all = (*recorded_)[owner][e];
        rows[e] = upto(all, micro_batch + 1) - upto(all, micro_batch);
      }
      return;
    }
    const int64_t tokens = layer_.chosen / layer_.top_k, pieces = layer_.capacity > 0 ? layer_.sequences : 1;
    for (int64_t piece = 0; piece < pieces; ++piece)
      draw(upto_, tokens / pieces, uniform(layer_.layer, owner, micro_batch * pieces + piece), layer_.capacity, rows);
  }

  /// Owners that have parts of the same sequences share the room of each.
  void draw_shared(const std::vector<size_t>& sharers, int micro_batch, std::vector<std::vector<int64_t>>& rows) const {
    for (int64_t sequence = 0; sequence < layer_.sequences; ++sequence) {
      std::vector<std::vector<int64_t>> chosen(sharers.size(), std::vector<int64_t>(experts_));
      for (size_t part = 0; part < sharers.size(); ++part)
        draw(upto_, parts_.length, uniform(layer_.layer, sharers[part], micro_batch * layer_.sequences + sequence), 0,
             chosen[part]);
      std::vector<int64_t> of_expert(sharers.size());
      for (size_t e = 0; e < experts_; ++e) {
        for (size_t part = 0; part < sharers.size(); ++part) of_expert[part] = chosen[part][e];
        parts_.cut(sharers, layer_.capacity, of_expert);
        for (size_t part = 0; part < sharers.size(); ++part) rows[sharers[part]][e] += of_expert[part];
      }
    }
  }

  const CountedLayer& layer_;
  const Parts& parts_;
  size_t owners_, experts_;
  std::vector<double> upto_;
  const std::vector<std::vector<int64_t>>* recorded_ = nullptr;  ///< by owner and expert, of a step
};

/// The levels of the exchanges of a role's program that go by node: those of one group.
std::optional<RowLevels> levels_of(const Program& program) {
  for (const Instruction& i : program.instructions)
    if (i.op != nullptr)
      if (const auto levels = row_levels(*i.segment, *i.op)) return levels;
  return std::nullopt;
}

/// Tokens that cross between nodes where each crosses to a node once.
class Crossing {
 public:
  /// Formula: `chances_of_nodes` of the layer's shares. Groups of experts make a token's nodes fewer, by as much as they do where routes are even.
  Crossing(const CountedLayer& layer, const Routing& routing, const Experts& experts, const RowLevels& levels)
      : tokens_(static_cast<double>(layer.chosen) / static_cast<double>(layer.top_k)),
        most_(static_cast<double>(std::min(layer.top_k, experts.count / levels.nodes))) {
    const std::vector<double> by_expert = shares_of_experts(routing, experts, layer.layer);
    std::vector<double> by_place;
    for (size_t place = 0; place < by_expert.size(); ++place) by_place.push_back(by_expert[layer.expert_at(place)]);
    Experts alone = experts;
    alone.groups = alone.groups_chosen = 1;
    const double fewer = even_chance_of_node(experts, levels.nodes) / even_chance_of_node(alone, levels.nodes);
    for (const double chance : chances_of_nodes(by_place, levels.nodes)) chances_.push_back(chance * std::min(1.0, fewer));
  }

  /// Of the tokens with `rows` rows for a node those that reach it: expected, and no more and no fewer than there can be.
  int64_t tokens(int64_t rows, size_t node) const {
    const auto r = static_cast<double>(rows);
    return std::llround(std::clamp(tokens_ * chances_[node], r / most_, r));
  }

 private:
  double tokens_, most_;
  std::vector<double> chances_;
};

}  // namespace

RowUse row_use(const Segment& segment, const Op& op) {
  if (std::holds_alternative<GroupedLinear>(op.work)) return RowUse::kWorks;
  if (const auto* a = std::get_if<Activation>(&op.work)) return a->counted ? RowUse::kWorks : RowUse::kNone;
  if (const auto* k = std::get_if<Kernel>(&op.work); k != nullptr && k->counted)
    return segment.slots[op.reads[0].index()].type.shape[0] == 1 ? RowUse::kWorks : RowUse::kNone;
  return moves_packed_rows(op) ? RowUse::kExchanges : RowUse::kNone;
}

Routes::Routes(const Plan& plan, const std::vector<Program>& programs, const Routing& routing, const Experts& experts, bool by_rank)
    : plan_(plan), by_rank_(by_rank) {
  std::vector<RowCounting> counted;
  for (size_t role = 0; role < plan.roles.size(); ++role) counted.emplace_back(plan, plan.roles[role], programs[role]);
  std::vector<std::vector<int64_t>> numbers;  // of each entry of `ranks`
  std::vector<RankRows> ranks;
  std::vector<int32_t> counts;
  for (size_t role = 0; role < plan.roles.size(); ++role) {
    const auto layers = counted[role].layers();
    if (layers.empty()) continue;
    owners_.emplace_back(*layers[0].counts, plan.mesh, static_cast<int>(role));
    const RowOwners& owners = owners_.back();
    const size_t n = owners.ranks.size();
    const std::optional<RowLevels> levels = levels_of(programs[role]);
    for (const CountedLayer& layer : layers) {
      const Shape& shape = layer.counts->shape;
      const auto own = static_cast<size_t>(shape.last()), parts = static_cast<size_t>(shape[1] / layer.sources);
      const Parts dealt(plan, owners, *layer.choice);
      const Draws draws(layer, dealt, routing, experts);
      const auto crossing = levels ? std::optional(Crossing(layer, routing, experts, *levels)) : std::nullopt;
      const bool first = find(static_cast<int>(role), layer.layer) == nullptr;  // later steps of a period are drawn alike
      Drawn drawn{.stage = static_cast<int>(role),
                  .layer = layer.layer,
                  .micro_batches = layer.micro_batches,
                  .copies = owners.copies,
                  .owners = owners_.size() - 1};
      const size_t begin = numbers.size();
      for (size_t o = 0; o < n; ++o) {
        numbers.emplace_back(layer.numbers());
        ranks.push_back({plan.mesh.coordinates(owners.ranks[o]), layer, {}});
      }
      for (int m = 0; m < layer.micro_batches; ++m) {
        const std::vector<std::vector<int64_t>> rows = draws.rows(m);  // by owner and expert
        Share most{0, 0};
        int64_t moved = 0;
        ByNode by_node;
        for (size_t o = 0; o < n; ++o) {
          const size_t begins = static_cast<size_t>(owners.part[o]) * own;
          counts.assign(static_cast<size_t>(shape.elements()), 0);
          int64_t works = 0, stays = 0;
          for (size_t source = 0; source < static_cast<size_t>(layer.sources); ++source) {
            const auto sender = static_cast<size_t>(owners.sources[o][source]);
            for (size_t e = 0; e < own; ++e) {
              const int64_t r = rows[sender][layer.expert_at(begins + e)];
              counts[source * parts * own + e] = static_cast<int32_t>(r);
              works += r;
              if (sender == o) stays += r;
              if (!levels) continue;
              by_node.across += r * levels->crosses(static_cast<int>(source), owners.part[o]);
              by_node.within += r * levels->changes_place(static_cast<int>(source), owners.part[o]);
            }
          }
          add_rows(counts.data(), layer, m, numbers[begin + o]);
          const int64_t made = std::accumulate(rows[o].begin(), rows[o].end(), int64_t{0});
          const double even = static_cast<double>(layer.expected) * (layer.sources - 1) / layer.sources;
          const Share share{static_cast<float>(static_cast<double>(works) / static_cast<double>(layer.expected)),
                            even > 0 ? static_cast<float>(static_cast<double>(std::max(made, works) - stays) / even) : 1};
          most = {std::max(most.works, share.works), std::max(most.exchanges, share.exchanges)};
          if (by_rank) drawn.shares.push_back(share);
          moved += works - stays;
          for (int node = 0; levels && node < levels->nodes; ++node) {
            if (node == owners.part[o] / levels->per_node) continue;
            int64_t there = 0;
            const size_t of_node = own * static_cast<size_t>(levels->per_node);
            for (size_t e = 0; e < of_node; ++e) there += rows[o][layer.expert_at(static_cast<size_t>(node) * of_node + e)];
            by_node.tokens += crossing->tokens(there, static_cast<size_t>(node));
          }
        }
        drawn.most.push_back(most);
        drawn.moved.push_back(moved);
        drawn.by_node.push_back(by_node);
      }
      exchanges_ |= layer.sources > 1;
      if (first) drawn_.push_back(std::move(drawn));
    }
    for (const Instruction& i : programs[role].instructions) {
      if (i.op == nullptr || !moves_packed_rows(*i.op)) continue;
      const Drawn* drawn = find(static_cast<int>(role), i.layer);
      SHARDLAB_CHECK(drawn != nullptr, "`{}` exchanges rows of a layer whose rows are not counted", describe(plan, i));
      const Type& moved = *programs[role].reads(i)[0].type;
      const auto m = static_cast<size_t>(i.micro_batch % drawn->micro_batches);
      const int64_t row_bytes = bytes_of(moved.dtype, moved.shape.last());
      int64_t bytes = drawn->moved[m] * row_bytes;
      if (const auto levels = row_levels(*i.segment, *i.op)) {
        const ByNode& rows = drawn->by_node[m];
        bytes = ((levels->once ? rows.tokens : rows.across) + rows.within) * row_bytes + levels->list_bytes(rows.across) +
                levels->count_bytes() * static_cast<int64_t>(owners_[drawn->owners].ranks.size());
      }
      exchange_bytes_ += bytes * drawn->copies;
    }
  }
  for (size_t r = 0; r < ranks.size(); ++r) ranks[r].numbers = numbers[r];
  layers_ = expert_rows(plan.mesh, ranks);
}

const Routes::Drawn* Routes::find(int stage, int layer) const {
  const auto found = std::ranges::find_if(drawn_, [&](const Drawn& d) { return d.stage == stage && d.layer == layer; });
  return found != drawn_.end() ? &*found : nullptr;
}

double Routes::share(const Instruction& i, int rank) const {
  const RowUse use = i.op != nullptr ? row_use(*i.segment, *i.op) : RowUse::kNone;
  if (use == RowUse::kNone) return 1;
  const Drawn* drawn = find(plan_.mesh.role_of(plan_.mesh.coordinates(rank)), i.layer);
  if (drawn == nullptr) return 1;
  const auto m = static_cast<size_t>(i.micro_batch % drawn->micro_batches);
  if (!by_rank_) return drawn->most[m].of(use);
  const RowOwners& owners = owners_[drawn->owners];
  return drawn->shares[m * owners.ranks.size() + static_cast<size_t>(owners.owner[static_cast<size_t>(rank)])].of(use);
}

double Routes::fullest(RowUse use) const {
  double sum = 0;
  int64_t n = 0;
  for (const Drawn& d : drawn_)
    for (const Share& most : d.most) sum += most.of(use), ++n;
  return n > 0 ? sum / static_cast<double>(n) : 1;
}

double RoutedCosts::factor_of(const Instruction& i) const {
  const RowUse use = i.op != nullptr ? row_use(*i.segment, *i.op) : RowUse::kNone;
  return use == RowUse::kWorks ? works_ : use == RowUse::kExchanges ? exchanges_ : 1;
}

}  // namespace shardlab::simulator
