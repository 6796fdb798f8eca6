#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_linear {
namespace {

using kernels::LinearForward;
using kernels::LinearInput;
using kernels::LinearWeight;

struct Shape {
  int64_t sequences, tokens, in, out;
  int64_t rows() const { return sequences * tokens; }
};
const Shape kShapes[] = {{1, 1, 1, 1},    {1, 3, 17, 5},  {2, 17, 33, 50}, {4, 16, 64, 96},
                         {3, 5, 100, 37}, {1, 9, 3, 130}, {8, 4, 257, 65}};

Doubles forward64(const Floats& x, const Floats& w, const Floats& bias, const Shape& s) {
  Doubles y;
  for (int64_t r = 0; r < s.rows(); ++r)
    for (int64_t o = 0; o < s.out; ++o) {
      double sum = bias.empty() ? 0 : bias[o];
      for (int64_t i = 0; i < s.in; ++i) sum += double{x[r * s.in + i]} * w[o * s.in + i];
      y.push_back(sum);
    }
  return y;
}
Doubles input64(const Floats& dy, const Floats& w, const Shape& s) {
  Doubles dx(s.rows() * s.in);
  for (int64_t r = 0; r < s.rows(); ++r)
    for (int64_t o = 0; o < s.out; ++o)
      for (int64_t i = 0; i < s.in; ++i) dx[r * s.in + i] += double{dy[r * s.out + o]} * w[o * s.in + i];
  return dx;
}
Doubles weight64(const Floats& x, const Floats& dy, const Shape& s) {
  Doubles dw(s.out * s.in);
  for (int64_t r = 0; r < s.rows(); ++r)
    for (int64_t o = 0; o < s.out; ++o)
      for (int64_t i = 0; i < s.in; ++i) dw[o * s.in + i] += double{dy[r * s.out + o]} * x[r * s.in + i];
  return dw;
}
Doubles bias64(const Floats& dy, const Shape& s) {
  Doubles db(s.out);
  for (int64_t r = 0; r < s.rows(); ++r)
    for (int64_t o = 0; o < s.out; ++o) db[o] += dy[r * s.out + o];
  return db;
}

Floats forward(const kernels::Kernels& k, const Floats& x, const Floats& w, const Floats& bias, const Shape& s, bool canonical,
               kernels::Part part = {}) {
  Floats y = poisoned(s.rows() * s.out);
  LinearForward a{.x = x.data(),
                  .w = w.data(),
                  .bias = bias.empty() ? nullptr : bias.data(),
                  .y = y.data(),
                  .rows = s.rows(),
                  .in = s.in,
                  .out = s.out,
                  .in_part = part,
                  .canonical = canonical};
  Scratch scratch(linear_scratch_bytes(a));
  a.scratch = scratch.data();
  k.linear_forward(a);
  REQUIRE(scratch.intact());
  return y;
}
Floats input(const kernels::Kernels& k, const Floats& dy, const Floats& w, const Shape& s, bool canonical, kernels::Part part = {}) {
  Floats dx = poisoned(s.rows() * s.in);
  LinearInput a{.dy = dy.data(),
                .w = w.data(),
                .dx = dx.data(),
                .rows = s.rows(),
                .in = s.in,
                .out = s.out,
                .out_part = part,
                .canonical = canonical};
  Scratch scratch(linear_scratch_bytes(a));
  a.scratch = scratch.data();
  k.linear_input(a);
  REQUIRE(scratch.intact());
  return dx;
}
/// dw and dbias, joined.
Floats weight(const kernels::Kernels& k, const Floats& x, const Floats& dy, const Shape& s, bool canonical) {
  Floats dw = poisoned(s.out * s.in), dbias = poisoned(s.out);
  LinearWeight a{.x = x.data(),
                 .dy = dy.data(),
                 .dw = dw.data(),
                 .dbias = dbias.data(),
                 .tokens = {s.sequences, s.tokens, {}},
                 .in = s.in,
                 .out = s.out,
                 .canonical = canonical};
  Scratch scratch(linear_scratch_bytes(a));
  a.scratch = scratch.data();
  k.linear_weight(a);
  REQUIRE(scratch.intact());
  return joined({dw, dbias});
}

Doubles joined64(Doubles a, const Doubles& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

TEST_CASE("linear: F, I and W equal fp64 in both modes; canonical bits equal on every variant") {
  for (const Shape& s : kShapes) {
    INFO("sequences " << s.sequences << " tokens " << s.tokens << " in " << s.in << " out " << s.out);
    const Floats x = random_floats(s.rows() * s.in, 1), w = random_floats(s.out * s.in, 2), bias = random_floats(s.out, 3);
    const Floats dy = random_floats(s.rows() * s.out, 4);
    const auto weights64 = joined64(weight64(x, dy, s), bias64(dy, s));
    for (const kernels::Kernels* k : variants_here()) {
      REQUIRE(difference(forward(*k, x, w, bias, s, false), forward64(x, w, bias, s), kTolerance) == "");
      REQUIRE(difference(input(*k, dy, w, s, false), input64(dy, w, s), kTolerance) == "");
      REQUIRE(difference(weight(*k, x, dy, s, false), weights64, kTolerance) == "");
    }
    REQUIRE(difference(on_every_variant([&](const kernels::Kernels& k) { return forward(k, x, w, bias, s, true); }),
                       forward64(x, w, bias, s), kTolerance) == "");
    REQUIRE(difference(on_every_variant([&](const kernels::Kernels& k) { return forward(k, x, w, {}, s, true); }), forward64(x, w, {}, s),
                       kTolerance) == "");
    REQUIRE(difference(on_every_variant([&](const kernels::Kernels& k) { return input(k, dy, w, s, true); }), input64(dy, w, s),
                       kTolerance) == "");
    REQUIRE(difference(on_every_variant([&](const kernels::Kernels& k) { return weight(k, x, dy, s, true); }), weights64, kTolerance) == "");
  }
}

TEST_CASE("linear: fast W accumulates into what is there") {
  const Shape s{2, 17, 33, 50};
  const Floats x = random_floats(s.rows() * s.in, 1), dy = random_floats(s.rows() * s.out, 4);
  const Floats dw_old = random_floats(s.out * s.in, 5), dbias_old = random_floats(s.out, 6);
  for (const kernels::Kernels* k : variants_here()) {
    Floats dw = dw_old, dbias = dbias_old;
    k->linear_weight({.x = x.data(),
                      .dy = dy.data(),
                      .dw = dw.data(),
                      .dbias = dbias.data(),
                      .tokens = {s.sequences, s.tokens, {}},
                      .in = s.in,
                      .out = s.out,
                      .accumulate = true});
    Doubles want = weight64(x, dy, s), want_bias = bias64(dy, s);
    for (size_t i = 0; i < want.size(); ++i) want[i] += dw_old[i];
    for (size_t i = 0; i < want_bias.size(); ++i) want_bias[i] += dbias_old[i];
    REQUIRE(difference(dw, want, kTolerance) == "");
    REQUIRE(difference(dbias, want_bias, kTolerance) == "");
  }
}

TEST_CASE("linear: canonical mode is a tree over leaves of fused chains, as docs/canonical-order.md says") {
  for (const int64_t in : {1, 7, 16, 50, 96}) {
    const Shape s{1, 3, in, 19};
    const Floats x = random_floats(s.rows() * s.in, 7), w = random_floats(s.out * s.in, 8);
    Floats want;
    for (int64_t r = 0; r < s.rows(); ++r)
      for (int64_t o = 0; o < s.out; ++o) {
        Floats leaves;
        for (int leaf = 0; leaf < kContractionLeaves; ++leaf) {
          float sum = 0;
          for (int64_t i = leaf_begin(in, leaf); i < leaf_begin(in, leaf + 1); ++i)
            sum = std::fma(x[r * in + i], w[o * in + i], sum);
          leaves.push_back(sum);
        }
        want.push_back(tree_of(leaves));
      }
    REQUIRE(bit_difference(on_every_variant([&](const kernels::Kernels& k) { return forward(k, x, w, {}, s, true); }), want) == "");
  }
}

TEST_CASE("linear: canonical bits do not depend on how the contraction is cut over ranks") {
  const Shape s{2, 9, 96, 80};
  const Floats x = random_floats(s.rows() * s.in, 9), w = random_floats(s.out * s.in, 10), dy = random_floats(s.rows() * s.out, 11);
  for (const kernels::Kernels* k : variants_here()) {
    const Floats y = forward(*k, x, w, {}, s, true), dx = input(*k, dy, w, s, true);
    for (const int64_t t : {2, 4, 8, 16}) {
      std::vector<Floats> y_parts, dx_parts;
      for (int64_t rank = 0; rank < t; ++rank) {
        const int64_t in0 = s.in * rank / t, in1 = s.in * (rank + 1) / t, out0 = s.out * rank / t, out1 = s.out * (rank + 1) / t;
        y_parts.push_back(forward(*k, columns_of(x, s.in, in0, in1), columns_of(w, s.in, in0, in1), {},
                                  {s.sequences, s.tokens, in1 - in0, s.out}, true, {in0, s.in}));
        dx_parts.push_back(input(*k, columns_of(dy, s.out, out0, out1), part_of(w, out0 * s.in, out1 * s.in),
                                 {s.sequences, s.tokens, s.in, out1 - out0}, true, {out0, s.out}));
      }
      REQUIRE(bit_difference(tree_of(y_parts), y) == "");
      REQUIRE(bit_difference(tree_of(dx_parts), dx) == "");
    }
  }
}

TEST_CASE("linear: canonical gradients of a batch are the tree over its sequences") {
  for (const int64_t sequences : {2, 3, 4, 8}) {
    const Shape s{sequences, 21, 40, 24}, one{1, 21, 40, 24};
    const Floats x = random_floats(s.rows() * s.in, 12), dy = random_floats(s.rows() * s.out, 13);
    for (const kernels::Kernels* k : variants_here()) {
      std::vector<Floats> single;
      for (int64_t b = 0; b < sequences; ++b)
        single.push_back(
            weight(*k, part_of(x, b * 21 * 40, (b + 1) * 21 * 40), part_of(dy, b * 21 * 24, (b + 1) * 21 * 24), one, true));
      REQUIRE(bit_difference(weight(*k, x, dy, s, true), tree_of(single)) == "");
    }
  }
}

TEST_CASE("linear: sums over tokens do not depend on how sequences are cut") {
  const int64_t tokens = 48, width = 70;
  const Floats dy = random_floats(tokens * width, 14);
  const auto sum = [&](const kernels::Kernels& k, int64_t begin, int64_t end) {
    const Floats rows = part_of(dy, begin * width, end * width);
    Floats dbias = poisoned(width);
    k.bias_weight({.dy = rows.data(), .dbias = dbias.data(), .tokens = {1, end - begin, {begin, tokens}}, .width = width});
    return dbias;
  };
  for (const kernels::Kernels* k : variants_here())
    for (const int64_t t : {2, 4, 16}) {
      std::vector<Floats> parts;
      for (int64_t rank = 0; rank < t; ++rank) parts.push_back(sum(*k, tokens * rank / t, tokens * (rank + 1) / t));
      REQUIRE(bit_difference(tree_of(parts), sum(*k, 0, tokens)) == "");
    }
}

}  // namespace shardlab::testing::of_linear
