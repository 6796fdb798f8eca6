// Mixtures of experts: the CPU's kernels are the reference (tests/kernels holds them to the definitions). What sums and copies has their bits in
// fp32, and in 16 bits their values rounded once; numbers behind the device's exp and log meet theirs.
#include "kernels/experts.h"

#include <algorithm>
#include <numeric>

#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_experts {
namespace {

using gpu::RowCounts;
using kernels::RouteShape;
using Ints = std::vector<int32_t>;

const kernels::Kernels& cpu() { return kernels::kernels_for_this_processor(); }

/// n poisoned numbers.
Ints poisoned_ints(int64_t n) { return Ints(static_cast<size_t>(n), -77777); }

struct Router {
  RouteShape shape;
  int64_t ranks = 1, leaves = 1, capacity = 0;
  bool biased = false, placed = false, cut = false;
  int64_t whole = 0;  ///< tokens of a sequence, of which the rank has a part; 0: it has all
  TokenOrder order;
};
RouteShape routes(int64_t sequences, int64_t tokens, int64_t experts, int64_t top_k) {
  return {.sequences = sequences, .tokens = tokens, .experts = experts, .top_k = top_k, .step_tokens = 2 * sequences * tokens};
}
/// Every rule of a router, by itself and with others; experts that are fewer and more than the lanes of a token.
std::vector<Router> routers() {
  std::vector<Router> all;
  const auto add = [&](RouteShape shape, const auto& change) {
    Router r{.shape = shape};
    change(r);
    all.push_back(r);
  };
  add(routes(1, 1, 1, 1), [](Router&) {});
  add(routes(2, 37, 4, 2), [](Router& r) { r.shape.normalise = true, r.leaves = 32; });
  add(routes(2, 21, 40, 6), [](Router& r) { r.shape.balance = 0.3f, r.shape.z_loss = 0.2f, r.leaves = 32, r.ranks = 4; });
  add(routes(1, 33, 24, 4),
      [](Router& r) { r.shape.sigmoid = r.shape.normalise = true, r.shape.factor = 2.5f, r.shape.balance = 0.3f; });
  add(routes(2, 16, 16, 3), [](Router& r) { r.shape.sigmoid = r.biased = true, r.shape.groups = 4, r.shape.groups_chosen = 2; });
  add(routes(1, 19, 32, 8), [](Router& r) { r.shape.groups = 8, r.shape.groups_chosen = 3, r.shape.normalise = true; });
  add(routes(2, 40, 8, 2), [](Router& r) { r.capacity = 7, r.leaves = 32, r.shape.balance = 0.5f; });
  add(routes(3, 20, 8, 2), [](Router& r) { r.placed = true, r.ranks = 2, r.leaves = 3, r.shape.balance = 0.5f, r.capacity = 6; });
  add(routes(2, 12, 8, 2), [](Router& r) {
    r.whole = 36, r.order = {TokenOrder::Kind::kZigzag, 3}, r.capacity = 7, r.leaves = 8, r.shape.normalise = true;
  });
  add(routes(2, 9, 12, 4), [](Router& r) {
    r.whole = 36, r.order = {TokenOrder::Kind::kStriped, 4}, r.capacity = 5, r.placed = true, r.ranks = 4;
  });
  add(routes(2, 8, 12, 3), [](Router& r) { r.cut = true, r.shape.balance = 0.7f, r.shape.normalise = true; });
  return all;
}

struct Routed {
  Floats weights, dlogits, load, all_load;
  Ints choice, counts;
};

/// Logits in which many are equal, so that the rule for equal ones shows.
struct RouteInputs {
  Floats logits, bias, dweights, load;
  Ints places, by_place;
  Ints chosen;  ///< of all parts, where the rank has the second
};
RouteInputs route_inputs(const Router& r) {
  const RouteShape& s = r.shape;
  RouteInputs in{random_floats(s.sequences * s.tokens * s.experts, 1, 3.0f),
                 random_floats(s.experts, 2),
                 random_floats(s.sequences * s.tokens * s.top_k, 3),
                 {},
                 {},
                 {},
                 {}};
  for (size_t i = 0; i < in.logits.size(); i += 3) in.logits[i] = std::round(in.logits[i]);
  for (int64_t i = 0; i < s.sequences * s.experts; ++i) in.load.push_back(static_cast<float>((5 * i) % 9));
  for (int64_t e = 0; e < s.experts; ++e) in.places.push_back(static_cast<int32_t>((5 * e + 3) % s.experts));
  in.by_place.resize(in.places.size());
  for (size_t e = 0; e < in.places.size(); ++e) in.by_place[static_cast<size_t>(in.places[e])] = static_cast<int32_t>(e);
  for (int64_t i = 0; i < s.sequences * r.whole; ++i) {
    Ints experts;  // ascending, as routers choose them
    for (int64_t j = 0; j < s.top_k; ++j)
      experts.push_back(static_cast<int32_t>((7 * i * i + j * (s.experts / s.top_k) + i % 3) % s.experts));
    std::ranges::sort(experts);
    for (const int32_t e : experts) in.chosen.push_back(r.placed ? in.places[static_cast<size_t>(e)] : e);
  }
  return in;
}

/// What micro-batches before have counted: whole numbers.
Floats earlier_load(int64_t experts) {
  Floats load;
  for (int64_t e = 0; e < experts; ++e) load.push_back(static_cast<float>(7 * e % 11));
  return load;
}

/// The arguments of F and I on arrays that are anywhere.
kernels::RouteForward forward_of(const Router& r) {
  return {.shape = r.shape, .ranks = r.ranks, .leaves = r.leaves, .capacity = r.capacity};
}
Routed routed_by_cpu(const Router& r, const RouteInputs& in) {
  const RouteShape& s = r.shape;
  const int64_t chosen = s.sequences * s.tokens * s.top_k;
  Routed to{poisoned(chosen),
            poisoned(static_cast<int64_t>(in.logits.size())),
            poisoned(s.sequences * s.experts),
            earlier_load(s.experts),
            poisoned_ints(chosen),
            poisoned_ints(r.leaves * s.experts)};
  Scratch scratch(kernels::route_scratch_bytes(s.experts, true));
  kernels::RouteForward f = forward_of(r);
  f.logits = in.logits.data(), f.weights = to.weights.data(), f.choice = to.choice.data(), f.counts = to.counts.data();
  f.bias = r.biased ? in.bias.data() : nullptr, f.places = r.placed ? in.places.data() : nullptr, f.scratch = scratch.data();
  if (r.whole > 0) f.chosen = {in.chosen.data(), r.whole, s.tokens, r.order};
  if (r.whole > 0) f.by_place = r.placed ? in.by_place.data() : nullptr;
  kernels::route_forward(cpu(), f);
  Floats dweights = in.dweights;
  for (size_t i = 0; i < dweights.size(); ++i) dweights[i] = to.choice[i] < 0 ? 0.0f : dweights[i];
  const int32_t* by_place = r.placed ? in.by_place.data() : nullptr;
  kernels::route_input(cpu(), {.shape = s,
                               .dweights = dweights.data(),
                               .logits = in.logits.data(),
                               .choice = to.choice.data(),
                               .by_place = by_place,
                               .load = r.cut ? in.load.data() : nullptr,
                               .whole_tokens = r.cut ? 3 * s.tokens : 0,
                               .dlogits = to.dlogits.data(),
                               .scratch = scratch.data()});
  kernels::ExpertLoad load{to.choice.data(), to.load.data(), s.sequences, s.tokens, s.top_k, s.experts, false, by_place};
  kernels::expert_load(load);
  load.load = to.all_load.data(), load.accumulate = true;
  kernels::expert_load(load);
  return to;
}
Routed routed(const Router& r, const RouteInputs& in) {
  const RouteShape& s = r.shape;
  const int64_t chosen = s.sequences * s.tokens * s.top_k;
  const Array logits(in.logits, DType::f32), bias(in.bias, DType::f32), load(in.load, DType::f32);
  const Array weights(Array::poison(chosen), DType::f32),
      dlogits(Array::poison(static_cast<int64_t>(in.logits.size())), DType::f32);
  const Array own_load(Array::poison(s.sequences * s.experts), DType::f32), all_load(earlier_load(s.experts), DType::f32);
  const Numbers<int32_t> places(in.places), by_place(in.by_place), all(in.chosen), choice(poisoned_ints(chosen)),
      counts(poisoned_ints(r.leaves * s.experts));
  kernels::RouteForward f = forward_of(r);
  f.logits = logits.floats(), f.weights = weights.floats(), f.choice = choice.data(), f.counts = counts.data();
  f.bias = r.biased ? bias.floats() : nullptr, f.places = r.placed ? places.data() : nullptr;
  if (r.whole > 0) f.chosen = {all.data(), r.whole, s.tokens, r.order};
  if (r.whole > 0) f.by_place = r.placed ? by_place.data() : nullptr;
  table().route_forward(f, stream());
  Floats kept = in.dweights;
  const Ints made = choice.read();
  for (size_t i = 0; i < kept.size(); ++i) kept[i] = made[i] < 0 ? 0.0f : kept[i];
  const Array dweights(kept, DType::f32);
  gpu::RouteInput b{.shape = s,
                    .dweights = dweights.floats(),
                    .logits = logits.floats(),
                    .choice = choice.data(),
                    .by_place = r.placed ? by_place.data() : nullptr,
                    .load = r.cut ? load.floats() : nullptr,
                    .whole_tokens = r.cut ? 3 * s.tokens : 0,
                    .dlogits = dlogits.floats()};
  const Lent scratch(gpu::scratch_bytes(b));
  b.scratch = gpu::Scratch(scratch).data;
  table().route_input(b, stream());
  gpu::ExpertLoad l{choice.data(), own_load.floats(), s.sequences, s.tokens, s.top_k, s.experts, false, b.by_place};
  table().expert_load(l, stream());
  l.load = all_load.floats(), l.accumulate = true;
  table().expert_load(l, stream());
  return {weights.read(), dlogits.read(), own_load.read(), all_load.read(), made, counts.read()};
}

Doubles wide_of(const Floats& x) { return {x.begin(), x.end()}; }

}  // namespace

TEST_CASE("routers: choices, counts, dropped rows and loads are the CPU's; weights and gradients meet its") {
  for (const Router& r : routers()) {
    INFO("experts " << r.shape.experts << " top_k " << r.shape.top_k << " groups " << r.shape.groups << " capacity " << r.capacity
                    << " sigmoid " << r.shape.sigmoid);
    const RouteInputs in = route_inputs(r);
    const Routed want = routed_by_cpu(r, in);
    Routed got;
    in_both_orders([&] {
      got = routed(r, in);
      return joined({got.weights, got.dlogits, got.load, got.all_load});
    });
    REQUIRE(got.choice == want.choice);
    REQUIRE(got.counts == want.counts);
    REQUIRE(got.load == want.load);
    REQUIRE(got.all_load == want.all_load);
    REQUIRE(difference(got.weights, wide_of(want.weights), kTolerance) == "");
    if (r.shape.experts == 1)
      REQUIRE(got.dlogits == want.dlogits);  // 0: one expert has the whole weight whatever its logit
    else
      REQUIRE(difference(got.dlogits, wide_of(want.dlogits), kTolerance) == "");
    if (r.capacity > 0) REQUIRE(std::ranges::any_of(got.choice, [](int32_t c) { return c < 0; }));
  }
}

TEST_CASE("routers: no number among the logits leaves as many experts as are asked for") {
  Router r{.shape = routes(1, 5, 20, 3)};
  r.shape.groups = 4, r.shape.groups_chosen = 2;
  RouteInputs in = route_inputs(r);
  for (size_t i = 20; i < 60; ++i) in.logits[i] = NAN;
  const Ints choice = routed(r, in).choice;
  for (size_t t = 0; t < 5; ++t)
    for (size_t j = 0; j < 3; ++j) {
      REQUIRE(choice[3 * t + j] >= 0);
      REQUIRE(choice[3 * t + j] < 20);
      if (j > 0) REQUIRE(choice[3 * t + j] > choice[3 * t + j - 1]);
    }
}

TEST_CASE("biases of routers move by the CPU's rule") {
  for (const int64_t experts : {1, 7, 300}) {
    Floats load, bias = random_floats(experts, 1);
    for (int64_t e = 0; e < experts; ++e) load.push_back(static_cast<float>((e * 7) % 5));
    const Array there(load, DType::f32), moved(bias, DType::f32), rate(Floats{0.125f}, DType::f32);
    table().update_router_bias({there.floats(), moved.floats(), rate.floats(), experts}, stream());
    kernels::update_router_bias({load.data(), bias.data(), experts, 0.125f});
    REQUIRE(bit_difference(moved.read(), bias) == "");
  }
}

TEST_CASE("counts are cut off where the room ends, as the CPU's, and a flag that is set stays set") {
  for (const int64_t n : {1, 7, 255, 256, 700, 5000})
    for (const double share : {0.0, 0.3, 0.99, 1.0, 1.5}) {
      Ints counts;
      int64_t all = 0;
      for (int64_t i = 0; i < n; ++i) counts.push_back(static_cast<int32_t>((i * 7 + 3) % 5)), all += counts.back();
      const auto room = static_cast<int64_t>(share * static_cast<double>(all));
      INFO(n << " counts of " << all << " rows, room for " << room);
      Ints want(counts.size());
      const bool cut = kernels::fit_rows(counts, room, want);
      REQUIRE(cut == (room < all));
      for (const int32_t flag : {0, 1}) {
        const Numbers<int32_t> there(counts), fitted(poisoned_ints(n)), overflow(Ints{flag});
        table().fit_rows({there.data(), fitted.data(), overflow.data(), n, room}, stream());
        CHECK(fitted.read() == want);
        CHECK(overflow.read() == Ints{flag == 1 || cut ? 1 : 0});
      }
    }
}

namespace {

struct Rows {
  int64_t tokens, top_k, experts, width;
  bool drops = false;
};
/// Tokens of one span and of several; rows that are whole vectors and not.
const Rows kRows[] = {{1, 1, 1, 1}, {37, 2, 4, 6}, {70, 3, 40, 16}, {100, 2, 3, 72, true}};

/// Different experts of each token, in no order; some dropped, and all of some tokens.
Ints choices(const Rows& s) {
  Ints choice;
  for (int64_t t = 0; t < s.tokens; ++t)
    for (int64_t j = 0; j < s.top_k; ++j) {
      const int32_t c = static_cast<int32_t>((t * t + 3 + j * (1 + s.experts / 3)) % s.experts);
      choice.push_back(s.drops && (t % 9 == 0 || (t + j) % 4 == 0) ? ~c : c);
    }
  return choice;
}

struct Moved {
  Floats rows, dx, y, drows, dweights;
};
Floats all_of(const Moved& m) { return joined({m.rows, m.dx, m.y, m.drows, m.dweights}); }

/// Rows behind those that are there, and of dropped choices, hold nothing: both sides begin with the same.
Moved moved(const Rows& s, DType t, bool by_cpu, int shift = 0) {
  const Ints choice = choices(s);
  const int64_t chosen = s.tokens * s.top_k;
  const Floats x = as_stored(random_floats(s.tokens * s.width, 1), t), drows = as_stored(random_floats(chosen * s.width, 2), t),
               weights = random_floats(chosen, 3), dy = as_stored(random_floats(s.tokens * s.width, 4), t),
               old = as_stored(random_floats(chosen * s.width, 5), t);
  if (by_cpu) {
    Moved m{old, poisoned(s.tokens * s.width), poisoned(s.tokens * s.width), old, poisoned(chosen)};
    Scratch scratch(kernels::places_scratch_bytes(s.tokens, s.top_k, s.experts));
    const auto data = scratch.data();
    kernels::dispatch({x.data(), m.rows.data(), choice.data(), s.tokens, s.top_k, s.experts, s.width, false, data});
    kernels::dispatch({drows.data(), m.dx.data(), choice.data(), s.tokens, s.top_k, s.experts, s.width, true, data});
    kernels::combine_forward(
        {drows.data(), weights.data(), choice.data(), m.y.data(), s.tokens, s.top_k, s.experts, s.width, data});
    kernels::combine_input({dy.data(), drows.data(), weights.data(), choice.data(), m.drows.data(), m.dweights.data(), s.tokens,
                            s.top_k, s.experts, s.width, data});
    return m;
  }
  const Numbers<int32_t> there(choice);
  const Array from(x, t, shift), rows(old, t), given(drows, t, shift), dx(Array::poison(s.tokens * s.width), t),
      by(weights, DType::f32), y(Array::poison(s.tokens * s.width), t), d(dy, t, shift), made(old, t),
      dweights(Array::poison(chosen), DType::f32);
  gpu::Dispatch a{from.in(), rows.out(), there.data(), s.tokens, s.top_k, s.experts, s.width, false, {}};
  const Lent scratch(gpu::scratch_bytes(a));
  a.scratch = scratch;
  table().dispatch(a, stream());
  a.from = given.in(), a.to = dx.out(), a.back = true;
  table().dispatch(a, stream());
  table().combine_forward({given.in(), by.floats(), there.data(), y.out(), s.tokens, s.top_k, s.experts, s.width, scratch},
                          stream());
  table().combine_input({d.in(), given.in(), by.floats(), there.data(), made.out(), dweights.floats(), s.tokens, s.top_k, s.experts,
                         s.width, scratch},
                        stream());
  return {rows.read(), dx.read(), y.read(), made.read(), dweights.read()};
}

}  // namespace

TEST_CASE("rows of experts: dispatched and combined, forward and backward, with the CPU's bits rounded once") {
  for (const DType t : kActivationTypes)
    for (const Rows& s : kRows) {
      INFO(name_of(t) << " tokens " << s.tokens << " experts " << s.experts << " width " << s.width);
      Moved got;
      in_both_orders([&] { return all_of(got = moved(s, t, false)); });
      Moved want = moved(s, t, true);
      for (Floats* x : {&want.rows, &want.dx, &want.y, &want.drows}) *x = as_stored(*x, t);
      REQUIRE(bit_difference(got.rows, want.rows) == "");
      REQUIRE(bit_difference(got.dx, want.dx) == "");
      REQUIRE(bit_difference(got.y, want.y) == "");
      REQUIRE(bit_difference(got.drows, want.drows) == "");
      REQUIRE(bit_difference(got.dweights, want.dweights) == "");
      REQUIRE(bit_difference(all_of(moved(s, t, false, 1)), all_of(got)) == "");
    }
}

TEST_CASE("gates of shared experts meet the CPU's, forward and backward") {
  for (const DType t : kActivationTypes)
    for (const auto& [tokens, width] : {std::pair<int64_t, int64_t>{1, 1}, {33, 24}, {5, 70}}) {
      INFO(name_of(t) << " tokens " << tokens << " width " << width);
      const Floats x = as_stored(random_floats(tokens * width, 1), t), dy = as_stored(random_floats(tokens * width, 2), t),
                   gate = as_stored(random_floats(tokens, 3, 4.0f), t);
      Floats y = poisoned(tokens * width), dx = y, dgate = poisoned(tokens);
      kernels::gate_forward(cpu(), {x.data(), gate.data(), y.data(), tokens, width});
      kernels::gate_input(cpu(), {dy.data(), x.data(), gate.data(), dx.data(), dgate.data(), tokens, width});
      const Floats got = in_both_orders([&] {
        const Array in(x, t), d(dy, t), g(gate, t), to(Array::poison(tokens * width), t), din(Array::poison(tokens * width), t),
            dg(Array::poison(tokens), t);
        table().gate_forward({in.in(), g.in(), to.out(), tokens, width}, stream());
        table().gate_input({d.in(), in.in(), g.in(), din.out(), dg.out(), tokens, width}, stream());
        return joined({to.read(), din.read(), dg.read()});
      });
      REQUIRE(difference(got, wide_of(joined({y, dx, dgate})), tolerance(t)) == "");
    }
}

namespace {

struct Grouped {
  int64_t experts, leaves;
  int sources;
  int64_t in, out, room;  ///< rows beyond those that are counted
};
/// No rows at all, experts without a row, more rows than a tile, several sources, many leaves.
const Grouped kGrouped[] = {
    {1, 1, 1, 1, 1, 1}, {4, 16, 1, 24, 40, 7}, {3, 1, 1, 70, 66, 0}, {5, 32, 2, 17, 9, 90}, {2, 96, 1, 8, 130, 3}};

Ints counts_of(const Grouped& s) {
  Ints counts;
  for (int64_t l = 0; l < s.leaves; ++l)
    for (int64_t e = 0; e < s.experts; ++e)
      counts.push_back(e == 1 ? 0 : s.leaves == 1 ? static_cast<int32_t>(50 * e + 1) : static_cast<int32_t>((l * 5 + e * 3) % 9));
  return counts;
}

struct Products {
  Floats y, dx, dw, a, da;
};
Floats all_of(const Products& p) { return joined({p.y, p.dx, p.dw, p.a, p.da}); }

/// `empty`: nobody has chosen any of the experts. Rows that are not there are NaN, and stay what they were.
Products products(const Grouped& s, DType t, bool by_cpu, bool empty = false) {
  Ints counts = counts_of(s);
  if (empty) std::ranges::fill(counts, 0);
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0}), room = rows + s.room + (empty ? 1 : 0);
  const auto some = [&](int64_t width, uint32_t seed) {
    Floats x = as_stored(random_floats(room * width, seed), t);
    std::fill(x.begin() + rows * width, x.end(), std::numeric_limits<float>::quiet_NaN());
    return x;
  };
  const Floats x = some(s.in, 1), dy = some(s.out, 2), w = as_stored(random_floats(s.experts * s.out * s.in, 3), t),
               u = some(2 * s.in, 4), da = some(s.in, 5);
  const auto old = [&](int64_t width) { return Floats(static_cast<size_t>(room * width), 7.0f); };
  const kernels::Part in_part{0, 0};
  if (by_cpu) {
    Products p{old(s.out), old(s.in), poisoned(s.experts * s.out * s.in), old(s.in), old(2 * s.in)};
    const kernels::RowCounts r{counts.data(), s.leaves, s.experts, s.sources, room};
    kernels::GroupedLinear f{r, x.data(), w.data(), p.y.data(), s.in, s.out, in_part, false, true};
    kernels::GroupedLinear b{r, dy.data(), w.data(), p.dx.data(), s.in, s.out, in_part, true, true};
    kernels::GroupedLinearWeight g{r, x.data(), dy.data(), p.dw.data(), s.in, s.out, false, true};
    Scratch first(kernels::grouped_scratch_bytes(f)), second(kernels::grouped_scratch_bytes(b)),
        third(kernels::grouped_scratch_bytes(g));
    f.scratch = first.data(), b.scratch = second.data(), g.scratch = third.data();
    kernels::grouped_linear(cpu(), f);
    kernels::grouped_linear(cpu(), b);
    kernels::grouped_linear_weight(cpu(), g);
    kernels::grouped_activation(cpu(), {r, u.data(), nullptr, p.a.data(), s.in, true});
    kernels::grouped_activation(cpu(), {r, u.data(), da.data(), p.da.data(), s.in, true});
    return p;
  }
  const Numbers<int32_t> there(counts);
  const RowCounts r{there.data(), s.leaves, s.experts, s.sources, room};
  const Array dx_(dy, t), x_(x, t), w_(w, t), u_(u, t), da_(da, t), y(old(s.out), t), dx(old(s.in), t),
      dw(Array::poison(s.experts * s.out * s.in), t), a(old(s.in), t), du(old(2 * s.in), t);
  gpu::GroupedLinear f{r, x_.in(), w_.in(), y.out(), s.in, s.out, in_part, false, {}};
  const Lent scratch(gpu::scratch_bytes(f));
  f.scratch = scratch;
  table().grouped_linear(f, stream());
  table().grouped_linear({r, dx_.in(), w_.in(), dx.out(), s.in, s.out, in_part, true, scratch}, stream());
  table().grouped_linear_weight({r, x_.in(), dx_.in(), dw.out(), s.in, s.out, false, scratch}, stream());
  table().grouped_activation({r, u_.in(), {}, a.out(), s.in, true, scratch}, stream());
  table().grouped_activation({r, u_.in(), da_.in(), du.out(), s.in, true, scratch}, stream());
  return {y.read(), dx.read(), dw.read(), a.read(), du.read()};
}

}  // namespace

TEST_CASE("products with the weights of experts: the CPU's bits rounded once, and rows that are not there stay as they are") {
  for (const DType t : kActivationTypes)
    for (const Grouped& s : kGrouped)
      for (const bool empty : {false, true}) {
        INFO(name_of(t) << " experts " << s.experts << " leaves " << s.leaves << " in " << s.in << " out " << s.out << " empty "
                        << empty);
        Products got;
        in_both_orders([&] { return all_of(got = products(s, t, false, empty)); });
        const Products want = products(s, t, true, empty);
        REQUIRE(bit_difference(got.y, as_stored(want.y, t)) == "");
        REQUIRE(bit_difference(got.dx, as_stored(want.dx, t)) == "");
        REQUIRE(bit_difference(got.dw, as_stored(want.dw, t)) == "");
        REQUIRE(difference(got.a, wide_of(want.a), tolerance(t)) == "");
        REQUIRE(difference(got.da, wide_of(want.da), tolerance(t)) == "");
      }
}

TEST_CASE("products with the weights of experts: W accumulates as old + new, and counts beyond the room reach no other memory") {
  const Grouped s{3, 16, 1, 12, 20, 0};
  Ints counts = counts_of(s);
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const Floats x = random_floats(rows * s.in, 1), dy = random_floats(rows * s.out, 2),
               old = random_floats(s.experts * s.out * s.in, 3);
  const auto run = [&](const Ints& by, bool accumulate) {
    const Numbers<int32_t> there(by);
    const RowCounts r{there.data(), s.leaves, s.experts, s.sources, rows};
    const Array x_(x, DType::f32), dy_(dy, DType::f32), dw(old, DType::f32), w(old, DType::f32),
        y(Array::poison(rows * s.out), DType::f32);
    gpu::GroupedLinearWeight a{r, x_.in(), dy_.in(), dw.out(), s.in, s.out, accumulate, {}};
    const Lent scratch(gpu::scratch_bytes(a));
    a.scratch = scratch;
    table().grouped_linear_weight(a, stream());
    table().grouped_linear({r, x_.in(), w.in(), y.out(), s.in, s.out, {}, false, scratch}, stream());
    y.read();  // fails where something was written behind it
    return dw.read();
  };
  Floats want = run(counts, false);
  for (size_t i = 0; i < want.size(); ++i) want[i] = old[i] + want[i];
  REQUIRE(bit_difference(run(counts, true), want) == "");
  counts.back() += 1000;
  run(counts, false);
}

}  // namespace shardlab::testing::of_experts
