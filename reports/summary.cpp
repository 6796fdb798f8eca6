#include "reports/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>

#include "plan/keys.h"
#include "plan/op_fields.h"
#include "plan/optimizers.h"
#include "plan/techniques.h"
#include "reports/columns.h"
#include "reports/format.h"

namespace shardlab::reports {

namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const size_t half = values.size() / 2;
  std::sort(values.begin(), values.end());
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Pairs of equal values among `sorted` ones.
template <typename T>
int64_t equal_pairs(const std::vector<T>& sorted) {
  int64_t pairs = 0;
  for (size_t i = 0, run = 0; i < sorted.size(); ++i) {
    run = i > 0 && sorted[i] == sorted[i - 1] ? run + 1 : 0;
    pairs += static_cast<int64_t>(run);
  }
  return pairs;
}

/// Pairs of `values` that stand in descending order; sorts them.
int64_t inversions(std::span<double> values) {
  if (values.size() < 2) return 0;
  const size_t half = values.size() / 2;
  int64_t pairs = inversions(values.first(half)) + inversions(values.subspan(half));
  size_t left = 0;
  for (size_t right = half; right < values.size(); ++right) {
    while (left < half && values[left] <= values[right]) ++left;
    pairs += static_cast<int64_t>(half - left);
  }
  std::inplace_merge(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(half), values.end());
  return pairs;
}

/// Kendall's tau-b in n log n steps (Knight 1966), or none where all x, or all y, are equal.
std::optional<double> kendall_tau(std::vector<std::pair<double, double>> pairs) {
  std::ranges::sort(pairs);
  std::vector<double> x, y;
  for (const auto& [a, b] : pairs) x.push_back(a), y.push_back(b);
  const auto n = static_cast<int64_t>(pairs.size());
  const int64_t all = n * (n - 1) / 2, same_x = equal_pairs(x), same_both = equal_pairs(pairs), against = inversions(y),
                same_y = equal_pairs(y);
  if (all == same_x || all == same_y) return std::nullopt;
  const int64_t agreed = all - same_x - same_y + same_both - 2 * against;
  return static_cast<double>(agreed) / std::sqrt(static_cast<double>(all - same_x)) / std::sqrt(static_cast<double>(all - same_y));
}

bool is_ok(const CaseOutcome& o) { return o.status == Status::kOk; }

Accuracy accuracy_of(std::span<const CaseOutcome> cases, int world_size /* 0: all */) {
  Accuracy a;
  std::vector<double> errors, unplanned, spreads;
  std::vector<std::pair<double, double>> steps;
  for (size_t i = 0; i < cases.size(); ++i) {
    const CaseOutcome& o = cases[i];
    const std::optional<double> error = step_error_pct(o);
    if (!is_ok(o) || !error || (world_size != 0 && o.config.layout.world_size() != world_size)) continue;
    ++a.cases;
    errors.push_back(std::abs(*error));
    unplanned.push_back(o.measured->unplanned_time_s / o.measured->step_s);
    spreads.push_back(o.measured->step_spread);
    steps.emplace_back(o.predicted->step_s, o.measured->step_s);
    if (errors.back() <= 10) ++a.within_10;
    if (a.worst_case < 0 || errors.back() > a.worst_abs_pct) a.worst_abs_pct = errors.back(), a.worst_case = static_cast<int>(i);
    const int64_t peak_miss = std::abs(o.predicted->peak_bytes - o.measured->peak_bytes);
    const bool unseen =
        bounds_experts(o.config) && o.measured->expert_reruns == 0 && o.predicted->peak_bytes > o.measured->peak_bytes;
    a.peak_unseen += unseen;
    a.peak_exact += peak_miss == 0;
    if (!unseen) a.peak_largest_miss = std::max(a.peak_largest_miss, peak_miss);
    if (!o.measured->wire_bytes) continue;
    const int64_t wire_miss = std::abs(o.predicted->wire_bytes - *o.measured->wire_bytes);
    ++a.wire_cases;
    a.wire_exact += wire_miss == 0;
    a.wire_largest_miss = std::max(a.wire_largest_miss, wire_miss);
  }
  a.median_abs_pct = median(std::move(errors));
  a.median_unplanned = median(std::move(unplanned));
  a.median_spread = median(std::move(spreads));
  if (a.cases >= kFewestOrdered) a.order = kendall_tau(std::move(steps));
  return a;
}

std::string loss_label(const Case& c) {
  std::string label = fmt::format("{}, {} tokens a step, {}, lr {}, seed {}", c.model.name, c.train.global_batch_tokens,
                                  name_of(c.train.optimizer), c.train.learning_rate.peak, c.train.seed);
  if (c.data.packed) label += ", packed";
  if (c.train.dropout > 0) label += fmt::format(", dropout {}", c.train.dropout);
  if (c.train.clip_norm > 0) label += fmt::format(", clip_norm {}", c.train.clip_norm);
  if (!c.checkpoint.resume.empty()) label += ", resumed";
  if (c.train.precision != Precision::kFp32) label += fmt::format(", {}", name_of(c.train.precision));
  // Sums over tokens in another order have other bits, which only canonical mode promises.
  if (const TokenOrder order = token_order_of(c.layout);
      c.canonical && order.kind != TokenOrder::Kind::kContiguous && order.parts > 1)
    label += fmt::format(", tokens in {} order of {}", kTokenOrders[static_cast<size_t>(order.kind)], order.parts);
  return label;
}

/// Everything that the losses depend on, and nothing of the layout.
std::string loss_key(const Case& c) {
  const Model& m = c.model;
  const Train& t = c.train;
  const LearningRate& r = t.learning_rate;
  std::string key = fmt::format("{}|{} {} {} {} {} {} {} {} {} {} {} {} {} {} {}", loss_label(c), name_of(m.family), m.layers,
                                m.hidden, m.heads, m.kv_heads, m.head_dim, m.ffn, m.vocab, m.vocab_multiple, m.max_positions,
                                m.tied_embeddings, m.norm_epsilon, m.rope_theta, m.init_deviation, m.qk_norm);
  if (m.qkv_biases) key += " biases of q, k and v";
  if (const LatentAttention& l = m.latent; m.is_latent())
    key += fmt::format(" latent {} {} {} {} {}", l.q_rank, l.kv_rank, l.nope, l.rope, l.v);
  if (const SlidingWindow& w = m.window; m.has_windows())
    key += fmt::format(" window {} {} {} {}", w.tokens, w.global_layers, w.global_every, w.rope_theta);
  if (const Guard& g = t.guard; g.spike != GuardAction::kNone)
    key += fmt::format(" spikes {} {} {}", g.loss_factor, g.norm_factor, g.window);
  key += " " + c.checkpoint.resume;
  if (const Experts& e = m.experts; e.count > 0)
    key += fmt::format("|{} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}", e.count, e.top_k, e.ffn, e.sigmoid, e.normalise,
                       e.factor, e.balance, e.z_loss, e.shared, e.dense_layers, e.every, e.groups, e.groups_chosen,
                       e.bias_update_rate, e.shared_gate, e.capacity_factor);
  key += fmt::format("|{} {} {} {} {} {}|{} {} {} {}|{} {} {} {}", t.seq_len, t.weight_decay, t.beta1, t.beta2, t.epsilon,
                     t.dropout, static_cast<int>(r.kind), r.warmup_steps, r.total_steps, r.floor, c.data.text, c.data.tokens,
                     c.data.packed, c.data.document_end);
  return key;
}

/// Whether losses depend on a key that `loss_label` may leave out.
bool is_of_loss(std::string_view path) {
  if (path == "model.name" || path.starts_with("data.rout")) return false;
  constexpr std::string_view kPrefixes[] = {"model.",     "data.",         "train.seq_len",        "train.weight_decay",
                                            "train.beta", "train.epsilon", "train.learning_rate.", "train.guard."};
  return std::ranges::any_of(kPrefixes, [&](std::string_view prefix) { return path.starts_with(prefix); });
}

/// Adds to labels that are alike what sets their groups apart: "model.capacity_factor=1.25".
void tell_apart(std::span<const CaseOutcome> cases, std::vector<LossGroup>& groups) {
  std::map<std::string, std::vector<LossGroup*>> alike;
  for (LossGroup& g : groups) alike[g.label].push_back(&g);
  for (const auto& [label, same] : alike) {
    if (same.size() == 1) continue;
    const auto value = [&](const CaseKey& key, const LossGroup* g) {
      return key.get(cases[static_cast<size_t>(g->cases.front())].config);
    };
    for (const CaseKey& key : case_keys()) {
      if (key.get == nullptr || !is_of_loss(key.path)) continue;
      const std::string first = value(key, same.front());
      if (std::ranges::all_of(same, [&](const LossGroup* g) { return value(key, g) == first; })) continue;
      for (LossGroup* g : same) g->label += fmt::format(", {}={}", key.path, value(key, g));
    }
  }
}

void measure_deviation(std::span<const CaseOutcome> cases, LossGroup& group) {
  size_t steps = SIZE_MAX;
  std::vector<double> last;
  for (const int i : group.cases) {
    const Measurement& m = *cases[static_cast<size_t>(i)].measured;
    steps = std::min(steps, m.losses.size());
    last.push_back(m.losses.back());
    if (m.loss_unigram) group.unigram = std::max(group.unigram.value_or(*m.loss_unigram), *m.loss_unigram);
    for (const double loss : m.losses) group.finite = group.finite && std::isfinite(loss);
  }
  group.steps = static_cast<int>(steps);
  group.last = median(std::move(last));
  const auto spread_of = [&](auto&& among) {
    LossSpread spread;
    for (const int i : group.cases) spread.cases += among(i);
    for (size_t step = 0; step < steps; ++step) {
      double low = HUGE_VAL, high = -HUGE_VAL;
      for (const int i : group.cases) {
        if (!among(i)) continue;
        const double loss = cases[static_cast<size_t>(i)].measured->losses[step];
        low = std::min(low, loss);
        high = std::max(high, loss);
      }
      if (spread.cases > 0 && (spread.at_step < 0 || high - low > spread.largest))
        spread.largest = high - low, spread.at_step = static_cast<int>(step);
    }
    return spread;
  };
  const LossSpread all = spread_of([](int) { return true; });
  group.largest_deviation = all.largest, group.at_step = all.at_step;
  const auto promise_of = [&](int i) { return loss_promise(cases[static_cast<size_t>(i)].config); };
  for (const LossPromise promise : kLossPromises) {
    const LossSpread own = spread_of([&](int i) { return promise_of(i) == promise; });
    LossSpread& spread = group.spread[static_cast<size_t>(promise)];
    spread = promise == LossPromise::kDesigned ? all
             : promise == LossPromise::kBlocks ? spread_of([&](int i) { return promise_of(i) != LossPromise::kDesigned; })
                                               : own;
    spread.cases = own.cases;
  }
}

std::vector<LossGroup> loss_groups(std::span<const CaseOutcome> cases) {
  std::vector<LossGroup> groups;
  std::map<std::string, size_t> by_key;
  for (size_t i = 0; i < cases.size(); ++i) {
    const CaseOutcome& o = cases[i];
    if (!is_ok(o) || !o.measured || o.measured->losses.empty()) continue;
    const auto [found, fresh] = by_key.try_emplace(loss_key(o.config), groups.size());
    if (fresh) groups.push_back({.label = loss_label(o.config), .cases = {}, .spread = {}, .precision = o.config.train.precision});
    groups[found->second].cases.push_back(static_cast<int>(i));
  }
  tell_apart(cases, groups);
  for (LossGroup& g : groups) measure_deviation(cases, g);
  return groups;
}

std::string counted(int64_t n, std::string_view one, std::string_view many) { return fmt::format("{} {}", n, n == 1 ? one : many); }

double step_of(const CaseOutcome& o, bool measured) { return measured ? o.measured->step_s : o.predicted->step_s; }
int64_t peak_of(const CaseOutcome& o, bool measured) { return measured ? o.measured->peak_bytes : o.predicted->peak_bytes; }

/// `head`: "Fastest", "Fastest of MODEL", or what else the case is.
Statement fastest_statement(std::span<const CaseOutcome> cases, const ModelBest& best, bool by_measurement, std::string_view head) {
  const CaseOutcome& o = cases[static_cast<size_t>(best.fastest)];
  const double step = step_of(o, by_measurement);
  std::string text = fmt::format("{}: {}, {} {}, {} a step", head, case_title(o.config),
                                 tokens_per_second_text(static_cast<double>(o.config.train.global_batch_tokens) / step),
                                 by_measurement ? "measured" : "predicted", seconds_text(step));
  if (const auto use = mfu(o, step)) text += fmt::format(", MFU {}", percent_text(*use));
  return {Statement::Mood::kAnswer,
          text + fmt::format(", {} of live tensors on the largest rank.", bytes_text(peak_of(o, by_measurement)))};
}

Statement smallest_statement(std::span<const CaseOutcome> cases, const ModelBest& best, bool by_measurement, std::string_view of) {
  const CaseOutcome& o = cases[static_cast<size_t>(best.smallest)];
  const CaseOutcome& fastest = cases[static_cast<size_t>(best.fastest)];
  std::string text = fmt::format("Smallest{}: {}, {} of live tensors on the largest rank", of, case_title(o.config),
                                 bytes_text(peak_of(o, by_measurement)));
  if (best.smallest == best.fastest) return {Statement::Mood::kAnswer, text + "; it is the fastest too."};
  const double rate = static_cast<double>(o.config.train.global_batch_tokens) / step_of(o, by_measurement);
  const double most = static_cast<double>(fastest.config.train.global_batch_tokens) / step_of(fastest, by_measurement);
  return {Statement::Mood::kAnswer, text + fmt::format(", at {} of the fastest's tokens per second.", percent_text(rate / most))};
}

constexpr size_t kModelsSaid = 6;  ///< models whose best cases are said in sentences; the table has them all

void best_statements(std::span<const CaseOutcome> cases, const Summary& s, std::vector<Statement>& out) {
  const bool one = s.by_model.size() == 1;
  for (size_t i = 0; i < std::min(s.by_model.size(), kModelsSaid); ++i) {
    const ModelBest& best = s.by_model[i];
    const std::string of = one ? std::string() : " of " + best.model;
    if (s.by_status[static_cast<size_t>(Status::kOk)] == 1) {  // fastest and smallest of itself
      out.push_back(fastest_statement(cases, best, s.by_measurement, "One case ran"));
      continue;
    }
    out.push_back(fastest_statement(cases, best, s.by_measurement, "Fastest" + of));
    // Of several models a smallest case that is the fastest too needs no line of its own.
    if (one || best.smallest != best.fastest) out.push_back(smallest_statement(cases, best, s.by_measurement, of));
  }
  if (s.by_model.size() > kModelsSaid)
    out.push_back({Statement::Mood::kNote, fmt::format("{} further models ran: the table has their cases, the fastest first.",
                                                       s.by_model.size() - kModelsSaid)});
}

Statement step_time_statement(std::span<const CaseOutcome> cases, const Summary& s) {
  const Accuracy& a = s.all;
  const CaseOutcome& worst = cases[static_cast<size_t>(a.worst_case)];
  std::string text =
      fmt::format("Step time was predicted with a median error of {:.1f} % over {} ({} within 10 %); worst {:.1f} %, {}.",
                  a.median_abs_pct, counted(a.cases, "case", "cases"), a.within_10, a.worst_abs_pct, case_title(worst.config));
  if (s.by_world_size.size() > 1) {
    text += " By ranks:";
    for (const auto& [ranks, part] : s.by_world_size)
      text += fmt::format(" {}: {:.1f} %{}", ranks, part.median_abs_pct, ranks == s.by_world_size.back().first ? "." : ",");
  }
  if (a.order) text += fmt::format(" The order of the cases by step time has a Kendall's tau of {:.2f}.", *a.order);
  if (a.median_spread > 0)
    text += fmt::format(" A case's own measured steps spread by {:.1f} % in the median (p90 - p10).", 100 * a.median_spread);
  return {a.median_abs_pct <= 10 ? Statement::Mood::kGood : Statement::Mood::kBad, text};
}

Statement exactness_statement(const Accuracy& a) {
  const int judged = a.cases - a.peak_unseen;
  const std::string unseen = a.peak_unseen == 0
                                 ? ""
                                 : fmt::format(" In {} no step ran again, and the second run may decide the predicted peak.",
                                               counted(a.peak_unseen, "further case", "further cases"));
  const bool exact = a.peak_exact == judged && a.wire_exact == a.wire_cases;
  if (exact && (a.wire_cases < a.cases || judged < a.cases))
    return {Statement::Mood::kGood,
            fmt::format(
                "Peak memory was predicted exactly, 0 bytes off, in all {}; wire bytes in the {} whose transport counts them.{}",
                counted(judged, "case", "cases"), a.wire_cases, unseen)};
  if (exact)
    return {Statement::Mood::kGood, fmt::format("Peak memory and wire bytes were predicted exactly, 0 bytes off, in all {}.",
                                                counted(a.cases, "case", "cases"))};
  return {Statement::Mood::kBad,
          fmt::format("Peak memory was exact in {} of {} cases (largest miss {} B), wire bytes in {} of {} (largest miss {} B).{}",
                      a.peak_exact, judged, a.peak_largest_miss, a.wire_exact, a.wire_cases, a.wire_largest_miss, unseen)};
}

/// How the curves of one promise lie, and whether that is what was promised.
Statement spread_statement(const LossGroup& g, LossPromise promise) {
  const LossSpread& s = g.spread[static_cast<size_t>(promise)];
  const std::string layouts = counted(s.cases, "layout", "layouts"), over = counted(g.steps, "step", "steps");
  switch (promise) {
    case LossPromise::kExact:
      if (s.largest == 0)
        return {Statement::Mood::kGood, fmt::format("Losses ({}): {} in canonical mode are equal to the bit over {}, as promised.",
                                                    g.label, layouts, over)};
      return {Statement::Mood::kBad,
              fmt::format("Losses ({}): {} in canonical mode lie up to {:.2g} apart, at step {}, where equal bits are promised.",
                          g.label, layouts, s.largest, s.at_step)};
    case LossPromise::kRounded:
      return {Statement::Mood::kNote,
              fmt::format("Losses ({}): {} differ by at most {:.2g} over {}. They {}.", g.label, layouts, s.largest, over,
                          g.precision == Precision::kFp32
                              ? "add in different orders, for which no bound is promised; with canonical: true the bits are equal"
                              : "add and round in different orders, for which no bound is promised")};
    case LossPromise::kBlocks:
      return {Statement::Mood::kNote,
              fmt::format("Losses ({}): {} whose moments in 8 bits have other blocks, and so other scales: the largest difference "
                          "from the other "
                          "layouts is {:.2g} over {}, for which no bound is promised; docs/optimizers.md says what narrows it.",
                          g.label, layouts, s.largest, over)};
    case LossPromise::kDesigned:
      return {Statement::Mood::kNote,
              fmt::format("Losses ({}): {} of another method (compression, staleness, delayed or local updates): the largest "
                          "difference from the "
                          "other layouts is {:.2g} over {}. A method's own difference has no promised bound.",
                          g.label, layouts, s.largest, over)};
  }
  return {};
}

/// Whether the curves of one promise are worth a sentence: two of them, or one that is held against those of other promises.
bool has_spread(const LossGroup& g, LossPromise promise) {
  const auto cases_of = [&](LossPromise of) { return g.spread[static_cast<size_t>(of)].cases; };
  int others = 0;
  if (promise == LossPromise::kDesigned) others = static_cast<int>(g.cases.size()) - cases_of(promise);
  if (promise == LossPromise::kBlocks) others = cases_of(LossPromise::kExact) + cases_of(LossPromise::kRounded);
  return cases_of(promise) > (others > 0 ? 0 : 1);
}

bool is_below_unigram(const LossGroup& g) { return g.unigram && g.last < *g.unigram; }

Statement last_loss_statement(const LossGroup& g) {
  std::string text = fmt::format("The last loss ({}) is {:.4f}", g.label, g.last);
  if (!g.unigram) return {Statement::Mood::kNote, text + "."};
  const bool below = is_below_unigram(g);
  text += fmt::format(", {} the unigram model's {:.4f}.", below ? "below" : "not below", *g.unigram);
  return {below ? Statement::Mood::kGood : Statement::Mood::kBad, text};
}

Statement not_finite_statement(const LossGroup& g) {
  return {Statement::Mood::kBad, fmt::format("Some loss is not finite ({}).", g.label)};
}

void loss_statements_of(const LossGroup& g, std::vector<Statement>& out) {
  if (!g.finite) {
    out.push_back(not_finite_statement(g));
    return;
  }
  for (const LossPromise promise : kLossPromises)
    if (has_spread(g, promise)) out.push_back(spread_statement(g, promise));
  out.push_back(last_loss_statement(g));
}

constexpr size_t kGroupsSaid = 2;  ///< groups of cases that train the same whose losses have sentences of their own

/// Losses of many groups in one sentence a promise: what holds in all of them is counted, what breaks a promise is named.
void many_groups_statements(std::span<const LossGroup> groups, std::vector<Statement>& out) {
  int exact = 0, below = 0, compared = 0, exact_cases = 0;
  const LossGroup *widest = nullptr, *widest_in_blocks = nullptr;
  const auto keep_wider = [](const LossGroup*& widest, const LossGroup& g, LossPromise promise) {
    const auto spread = [&](const LossGroup& of) { return of.spread[static_cast<size_t>(promise)].largest; };
    if (has_spread(g, promise) && (widest == nullptr || spread(g) > spread(*widest))) widest = &g;
  };
  for (const LossGroup& g : groups) {
    if (!g.finite) {
      out.push_back(not_finite_statement(g));
      continue;
    }
    if (has_spread(g, LossPromise::kExact)) {
      const LossSpread& s = g.spread[static_cast<size_t>(LossPromise::kExact)];
      if (s.largest == 0)
        ++exact, exact_cases += s.cases;
      else
        out.push_back(spread_statement(g, LossPromise::kExact));
    }
    keep_wider(widest, g, LossPromise::kRounded);
    keep_wider(widest_in_blocks, g, LossPromise::kBlocks);
    if (has_spread(g, LossPromise::kDesigned)) out.push_back(spread_statement(g, LossPromise::kDesigned));
    if (!g.unigram) continue;
    ++compared;
    if (is_below_unigram(g))
      ++below;
    else
      out.push_back(last_loss_statement(g));
  }
  if (exact > 0)
    out.push_back({Statement::Mood::kGood,
                   fmt::format("Losses: in {} that train the same, {} in canonical mode are equal to the bit, as promised.",
                               counted(exact, "group of cases", "groups of cases"), counted(exact_cases, "layout", "layouts"))});
  for (const auto& [group, promise] : {std::pair{widest, LossPromise::kRounded}, {widest_in_blocks, LossPromise::kBlocks}})
    if (group != nullptr) {
      const Statement most = spread_statement(*group, promise);
      out.push_back({most.mood, "The widest of all groups: " + most.text});
    }
  if (below > 0)
    out.push_back(
        {Statement::Mood::kGood, fmt::format("The last loss is below the unigram model's in {} of {} that train the same.", below,
                                             counted(compared, "group of cases", "groups of cases"))});
}

void loss_statements(std::span<const LossGroup> groups, std::vector<Statement>& out) {
  if (groups.size() > kGroupsSaid) return many_groups_statements(groups, out);
  for (const LossGroup& g : groups) loss_statements_of(g, out);
}

/// Of cases that ended well: those whose updates were left out, which no other figure shows.
std::optional<Statement> skipped_statement(std::span<const CaseOutcome> cases) {
  std::string text;
  for (const CaseOutcome& o : cases)
    if (is_ok(o) && o.measured && o.measured->skipped_steps > 0)
      text += fmt::format("{}{}: {}", text.empty() ? "Updates were left out. " : "; ", case_title(o.config),
                          o.reason.empty() ? counted(o.measured->skipped_steps, "update", "updates") : o.reason);
  if (text.empty()) return std::nullopt;
  return Statement{Statement::Mood::kBad, text + "."};
}

/// Of cases with experts: those that make many steps twice for want of room.
std::optional<Statement> bound_statement(std::span<const CaseOutcome> cases) {
  std::string text;
  for (const CaseOutcome& o : cases)
    if (is_ok(o) && o.measured && is_bound_tight(o.config, *o.measured))
      text += fmt::format("{}{}: {}", text.empty() ? "Steps take twice their time. " : "; ", case_title(o.config),
                          rerun_text(o.config, *o.measured));
  if (text.empty()) return std::nullopt;
  return Statement{Statement::Mood::kBad, text + "."};
}

/// Of cases with experts: how unevenly their rows fell.
std::optional<Statement> balance_statement(std::span<const CaseOutcome> cases) {
  constexpr size_t kShown = 4;
  size_t counted_cases = 0;
  std::string text;
  for (const CaseOutcome& o : cases) {
    if (!is_ok(o) || !o.measured || !o.measured->expert_imbalance || ++counted_cases > kShown) continue;
    const Measurement& m = *o.measured;
    text += fmt::format("{}{} {:.2f} (last step {:.2f})", text.empty() ? "" : "; ", case_title(o.config), *m.expert_imbalance,
                        *m.expert_imbalance_last);
    if (m.expert_rank_imbalance)
      text += fmt::format(", by rank {:.2f} ({:.2f})", *m.expert_rank_imbalance, *m.expert_rank_imbalance_last);
    if (m.expert_rank_imbalance_contiguous) text += fmt::format(", contiguous {:.2f}", *m.expert_rank_imbalance_contiguous);
    if (m.expert_rank_imbalance_peak) text += fmt::format(", in a micro-batch up to {:.2f}", *m.expert_rank_imbalance_peak);
    if (m.expert_reruns > 0) text += fmt::format(", {} ran again", counted(m.expert_reruns, "step", "steps"));
    if (m.expert_dropped)
      text += fmt::format(", {:.1f} % of rows dropped ({:.1f} %)", 100 * *m.expert_dropped, 100 * *m.expert_dropped_last);
  }
  if (text.empty()) return std::nullopt;
  if (counted_cases > kShown) text += fmt::format("; {} more in the table", counted_cases - kShown);
  return Statement{Statement::Mood::kNote, "Rows of a layer's fullest expert over the mean: " + text + "."};
}

/// Of cases with packed documents: those whose attention is predicted without knowing how long these are.
std::optional<Statement> documents_statement(std::span<const CaseOutcome> cases) {
  int64_t unknown = 0;
  for (const CaseOutcome& o : cases)
    unknown += is_ok(o) && o.predicted && o.config.data.packed && o.config.data.document_tokens == 0;
  if (unknown == 0) return std::nullopt;
  return Statement{Statement::Mood::kBad,
                   fmt::format("Attention of {} with packed documents was predicted as if each sequence were one document: set "
                               "data.document_tokens to the tokens that a document has on average.",
                               counted(unknown, "case", "cases"))};
}

Statement status_statement(const Summary& s) {
  std::string text = fmt::format("{}: ", counted(s.total, "case", "cases"));
  bool first = true;
  for (size_t i = 0; i < s.by_status.size(); ++i) {
    if (s.by_status[i] == 0) continue;
    text += fmt::format("{}{} {}", first ? "" : ", ", s.by_status[i], name_of(static_cast<Status>(i)));
    first = false;
  }
  const bool bad = s.by_status[static_cast<size_t>(Status::kFailed)] + s.by_status[static_cast<size_t>(Status::kTimeout)] > 0;
  return {bad ? Statement::Mood::kBad : Statement::Mood::kNote, text + "."};
}

}  // namespace

LossPromise loss_promise(const Case& c) {
  const Layout& l = c.layout;
  if (l.compression.kind != CompressionKind::kNone || l.zero_plus_plus.weights || l.zero_plus_plus.gradients ||
      l.diloco.steps > 0 || l.offload.delayed_update || (l.parameter_server.servers > 0 && l.parameter_server.staleness >= 0))
    return LossPromise::kDesigned;
  if (has_blocks(row_of(c.train.optimizer)) && !updates_whole_parameters(l)) return LossPromise::kBlocks;
  return c.canonical && c.train.precision == Precision::kFp32 ? LossPromise::kExact : LossPromise::kRounded;
}

Summary summarise(std::span<const CaseOutcome> cases, const std::array<int64_t, 5>& left_out) {
  Summary s;
  s.total = static_cast<int64_t>(cases.size()) + std::accumulate(left_out.begin(), left_out.end(), int64_t{0});
  s.by_status = left_out;
  for (const CaseOutcome& o : cases) {
    ++s.by_status[static_cast<size_t>(o.status)];
    s.by_measurement = s.by_measurement || (is_ok(o) && o.measured);
  }
  // Predictions of several resolutions do not compare: of those the finest count, in this order.
  constexpr std::string_view kFinest[] = {"timeline", "segments", "analytic", ""};
  const auto fineness = [&](const CaseOutcome& o) { return std::ranges::find(kFinest, predicted_by(o)) - kFinest; };
  ptrdiff_t finest = std::ssize(kFinest);
  for (const CaseOutcome& o : cases)
    if (is_ok(o) && o.predicted) finest = std::min(finest, fineness(o));
  std::vector<int> sizes;
  const auto rate = [&](int i) {
    const CaseOutcome& o = cases[static_cast<size_t>(i)];
    return static_cast<double>(o.config.train.global_batch_tokens) / step_of(o, s.by_measurement);
  };
  const auto peak = [&](int i) { return peak_of(cases[static_cast<size_t>(i)], s.by_measurement); };
  std::map<std::string, size_t> models;
  for (size_t i = 0; i < cases.size(); ++i) {
    const CaseOutcome& o = cases[i];
    if (!is_ok(o) || !(s.by_measurement ? o.measured.has_value() : o.predicted.has_value())) continue;
    if (!s.by_measurement && fineness(o) != finest) continue;
    const int own = static_cast<int>(i);
    const auto [found, fresh] = models.try_emplace(o.config.model.name, s.by_model.size());
    if (fresh) s.by_model.push_back({o.config.model.name, own, own});
    ModelBest& best = s.by_model[found->second];
    if (rate(own) > rate(best.fastest)) best.fastest = own;
    if (peak(own) < peak(best.smallest)) best.smallest = own;
    if (step_error_pct(o)) sizes.push_back(o.config.layout.world_size());
  }
  for (ModelBest& best : s.by_model) {
    if (peak(best.fastest) == peak(best.smallest)) best.smallest = best.fastest;
    if (s.fastest < 0 || rate(best.fastest) > rate(s.fastest)) s.fastest = best.fastest;
    if (s.smallest < 0 || peak(best.smallest) < peak(s.smallest)) s.smallest = best.smallest;
  }
  if (s.fastest >= 0 && peak(s.fastest) == peak(s.smallest)) s.smallest = s.fastest;
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  s.all = accuracy_of(cases, 0);
  for (const int size : sizes) s.by_world_size.emplace_back(size, accuracy_of(cases, size));
  s.losses = loss_groups(cases);
  return s;
}

namespace {

/// "A loss of 2.6 (mean of 10 steps): plain after 4.310 s and 51.20 k tokens, 100 steps; top10 not in 160 steps."
std::optional<Statement> time_to_loss_statement(std::span<const CaseOutcome> cases) {
  std::vector<std::pair<double, std::string>> reached;
  std::string missed;
  LossTarget target;
  for (const CaseOutcome& o : cases) {
    if (o.loss_target.loss <= 0 || !o.measured) continue;
    target = o.loss_target;
    if (const auto steps = steps_to_loss(o)) {
      const double seconds = static_cast<double>(*steps) * o.measured->step_s;
      const double tokens = static_cast<double>(*steps * o.config.train.global_batch_tokens);
      reached.emplace_back(seconds, fmt::format("{} after {} and {} tokens, {} steps", case_title(o.config), seconds_text(seconds),
                                                count_text(tokens), *steps));
    } else {
      missed += fmt::format("; {} not in {} steps", case_title(o.config), o.measured->losses.size());
    }
  }
  if (reached.empty() && missed.empty()) return std::nullopt;
  std::ranges::sort(reached);
  std::string text;
  for (const auto& [seconds, words] : reached) text += "; " + words;
  text = (text + missed).substr(2);
  return Statement{reached.empty() ? Statement::Mood::kNote : Statement::Mood::kAnswer,
                   fmt::format("Time to a loss of {} (mean of {} steps): {}.", target.loss, target.mean_of, text)};
}

}  // namespace

std::vector<Statement> statements(std::span<const CaseOutcome> cases, const Summary& s) {
  std::vector<Statement> out;
  if (s.fastest >= 0) {
    best_statements(cases, s, out);
  } else {
    out.push_back(
        {Statement::Mood::kBad, s.total == 0 ? "There are no cases." : "No case ran: the table gives the reason of each."});
  }
  if (s.all.cases > 0) {
    out.push_back(step_time_statement(cases, s));
    out.push_back(exactness_statement(s.all));
  }
  loss_statements(s.losses, out);
  if (auto time = time_to_loss_statement(cases)) out.push_back(*std::move(time));
  if (auto skipped = skipped_statement(cases)) out.push_back(std::move(*skipped));
  if (auto bound = bound_statement(cases)) out.push_back(std::move(*bound));
  if (auto balance = balance_statement(cases)) out.push_back(std::move(*balance));
  if (auto documents = documents_statement(cases)) out.push_back(std::move(*documents));
  if (s.total > 0) out.push_back(status_statement(s));
  return out;
}

}  // namespace shardlab::reports
