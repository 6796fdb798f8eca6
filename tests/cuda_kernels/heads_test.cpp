// Norms of heads and the heads of latent attention: against fp64 in every type, and in fp32 the bits of the CPU.
#include "kernels/head_norm.h"
#include "kernels/latent_heads.h"
#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_heads {
namespace {

const kernels::Kernels& cpu() { return kernels::kernels_for_this_processor(); }

constexpr float kEpsilon = 1e-3f;  // large enough to show in the result

gpu::HeadNormShape norm_shape(kernels::Tokens tokens, int heads, int kv_heads, int head_dim) {
  return {tokens, heads, kv_heads, head_dim};
}
// A head that is less than a half of a warp, one that is no multiple of it; one query for each key, several; a part of a sequence.
const gpu::HeadNormShape kNorms[] = {norm_shape({1, 1, {}}, 1, 1, 1), norm_shape({2, 5, {}}, 4, 2, 6),
                                     norm_shape({3, 33, {}}, 6, 2, 40), norm_shape({1, 20, {}}, 8, 8, 64),
                                     norm_shape({2, 16, {16, 64}}, 4, 1, 18)};

struct NormInputs {
  Floats qkv, dy, gamma_q, gamma_k;
};
int64_t width_of(const gpu::HeadNormShape& s) { return int64_t{s.heads + 2 * s.kv_heads} * s.head_dim; }
NormInputs norm_inputs(const gpu::HeadNormShape& s, DType t) {
  const int64_t n = s.tokens.rows() * width_of(s);
  return {as_stored(random_floats(n, 1, 2.0f), t), as_stored(random_floats(n, 2), t), random_floats(s.head_dim, 3),
          random_floats(s.head_dim, 4)};
}

struct NormResult {
  Floats y, stats, dqkv, dgammas;
};
NormResult normed(const NormInputs& in, const gpu::HeadNormShape& s, DType t, int64_t apart = 0, const Floats* old = nullptr,
                  int shift = 0) {
  const int64_t n = static_cast<int64_t>(in.qkv.size()), d = s.head_dim, sums = apart > 0 ? s.tokens.sequences * apart * d : d;
  const Array qkv(in.qkv, t, shift), dy(in.dy, t), gamma_q(in.gamma_q, DType::f32), gamma_k(in.gamma_k, DType::f32);
  const Array y(Array::poison(n), t), dqkv(Array::poison(n), t);
  const Array stats(Array::poison(s.tokens.rows() * s.stats_width()), DType::f32);
  const Array dgamma_q(old != nullptr ? *old : Array::poison(sums), DType::f32);
  const Array dgamma_k(old != nullptr ? *old : Array::poison(sums), DType::f32);
  table().head_norm_forward({s, qkv.in(), gamma_q.in(), gamma_k.in(), y.out(), stats.floats(), kEpsilon}, stream());
  table().head_norm_input({s, dy.in(), qkv.in(), gamma_q.in(), gamma_k.in(), stats.floats(), dqkv.out()}, stream());
  gpu::HeadNormWeight w{s, dy.in(), qkv.in(), stats.floats(), dgamma_q.out(), dgamma_k.out(), old != nullptr, apart, {}};
  const Lent scratch(gpu::scratch_bytes(w));
  w.scratch = scratch;
  table().head_norm_weight(w, stream());
  return {y.read(), stats.read(), dqkv.read(), joined({dgamma_q.read(), dgamma_k.read()})};
}
Floats all_of(const NormResult& r) { return joined({r.y, r.stats, r.dqkv, r.dgammas}); }

NormResult normed_by_cpu(const NormInputs& in, const gpu::HeadNormShape& s, int64_t apart = 0) {
  const kernels::HeadNormShape shape{s.tokens, s.heads, s.kv_heads, s.head_dim};
  const int64_t n = static_cast<int64_t>(in.qkv.size()), sums = s.head_dim * (apart > 0 ? s.tokens.sequences * apart : 1);
  NormResult r{poisoned(n), poisoned(s.tokens.rows() * s.stats_width()), poisoned(n), {}};
  Floats dgamma_q = poisoned(sums), dgamma_k = poisoned(sums);
  kernels::head_norm_forward(cpu(),
                             {shape, in.qkv.data(), in.gamma_q.data(), in.gamma_k.data(), r.y.data(), r.stats.data(), kEpsilon});
  kernels::head_norm_input(
      cpu(), {shape, in.dy.data(), in.qkv.data(), in.gamma_q.data(), in.gamma_k.data(), r.stats.data(), r.dqkv.data()});
  Scratch scratch(kernels::head_norm_scratch_bytes(shape));
  kernels::head_norm_weight(
      cpu(), {shape, in.dy.data(), in.qkv.data(), r.stats.data(), dgamma_q.data(), dgamma_k.data(), false, apart, scratch.data()});
  r.dgammas = joined({dgamma_q, dgamma_k});
  return r;
}

struct NormExpected {
  Doubles y, dqkv, dgammas;
};
/// In fp64, from the definition.
NormExpected expected(const NormInputs& in, const gpu::HeadNormShape& s) {
  NormExpected e{Doubles(in.qkv.begin(), in.qkv.end()), Doubles(in.dy.begin(), in.dy.end()), {}};
  const int64_t d = s.head_dim, each = s.heads / s.kv_heads + 2;
  e.dgammas.assign(static_cast<size_t>(2 * d), 0);
  for (int64_t head = 0; head < static_cast<int64_t>(in.qkv.size()) / d; ++head) {
    if (head % each == each - 1) continue;  // a value
    const bool key = head % each == each - 2;
    const float *x = in.qkv.data() + head * d, *dy = in.dy.data() + head * d, *gamma = (key ? in.gamma_k : in.gamma_q).data();
    double square = 0, along = 0;
    for (int64_t i = 0; i < d; ++i) square += static_cast<double>(x[i]) * x[i] / static_cast<double>(d);
    const double r = 1 / std::sqrt(square + static_cast<double>(kEpsilon));
    for (int64_t i = 0; i < d; ++i) along += static_cast<double>(dy[i]) * gamma[i] * (x[i] * r) / static_cast<double>(d);
    for (int64_t i = 0; i < d; ++i) {
      const size_t at = static_cast<size_t>(head * d + i);
      e.y[at] = x[i] * r * gamma[i];
      e.dqkv[at] = (static_cast<double>(dy[i]) * gamma[i] - x[i] * r * along) * r;
      e.dgammas[static_cast<size_t>((key ? d : 0) + i)] += dy[i] * (x[i] * r);
    }
  }
  return e;
}

}  // namespace

TEST_CASE("head norm: F, I and W equal fp64 in every type, and are the CPU's bits in fp32") {
  for (const DType t : kActivationTypes)
    for (const gpu::HeadNormShape& s : kNorms) {
      INFO(name_of(t) << " tokens " << s.tokens.rows() << " heads " << s.heads << " kv_heads " << s.kv_heads << " head_dim "
                      << s.head_dim);
      const NormInputs in = norm_inputs(s, t);
      const NormExpected want = expected(in, s);
      NormResult got;
      in_both_orders([&] { return all_of(got = normed(in, s, t)); });
      REQUIRE(difference(got.y, want.y, tolerance(t)) == "");
      REQUIRE(difference(got.dqkv, want.dqkv, (s.head_dim == 1 ? 100 : 5) * tolerance(t)) == "");
      REQUIRE(difference(got.dgammas, want.dgammas, 4 * kTolerance) == "");
      REQUIRE(bit_difference(all_of(normed(in, s, t, 0, nullptr, 1)), all_of(got)) == "");
      if (t != DType::f32) continue;
      const NormResult mine = normed_by_cpu(in, s);
      REQUIRE(bit_difference(got.y, mine.y) == "");
      REQUIRE(bit_difference(got.stats, mine.stats) == "");
      REQUIRE(bit_difference(got.dqkv, mine.dqkv) == "");
      REQUIRE(bit_difference(got.dgammas, mine.dgammas) == "");
    }
}

TEST_CASE("head norm: sums of sequences and of leaves stay apart with the CPU's bits, and W accumulates as old + new") {
  for (const gpu::HeadNormShape& s : kNorms) {
    const NormInputs in = norm_inputs(s, DType::f32);
    const int64_t leaves = kernels::PartLeaves(s.tokens.part, s.tokens.tokens).count();
    for (const int64_t apart : {int64_t{1}, leaves})
      REQUIRE(bit_difference(normed(in, s, DType::f32, apart).dgammas, normed_by_cpu(in, s, apart).dgammas) == "");
    const Floats old = random_floats(s.head_dim, 9);
    Floats want = normed(in, s, DType::f32).dgammas;
    for (size_t i = 0; i < want.size(); ++i) want[i] = old[i % old.size()] + want[i];
    REQUIRE(bit_difference(normed(in, s, DType::f32, 0, &old).dgammas, want) == "");
  }
}

namespace {

struct Latent {
  int64_t sequences, tokens;
  int heads, nope, rope, values;
  bool packed = false;
};
const Latent kLatents[] = {
    {1, 1, 1, 1, 2, 1}, {2, 5, 4, 6, 4, 7}, {1, 9, 3, 5, 8, 18}, {2, 4, 2, 128, 64, 128}, {2, 6, 4, 6, 4, 7, true}};

struct LatentArrays {
  Floats q, kv, k_rope, qkv;
};

/// F of q, kv and k_rope; I of qkv. `by_cpu`: the CPU's kernels, in fp32.
LatentArrays latent(const Latent& s, const LatentArrays& in, DType t, bool by_cpu) {
  const int64_t rows = s.sequences * s.tokens, positions = s.packed ? s.tokens + 2 : 0, count = s.packed ? 20 : s.tokens;
  const Floats angles = random_floats(count * s.rope, 7);
  std::vector<int32_t> places = random_ids(s.sequences * positions, 8, static_cast<int32_t>(count));
  LatentArrays to{poisoned(static_cast<int64_t>(in.q.size())), poisoned(static_cast<int64_t>(in.kv.size())),
                  poisoned(static_cast<int64_t>(in.k_rope.size())), poisoned(static_cast<int64_t>(in.qkv.size()))};
  gpu::LatentHeads a{.sequences = s.sequences,
                     .tokens = s.tokens,
                     .heads = s.heads,
                     .nope = s.nope,
                     .rope = s.rope,
                     .value_dim = s.values,
                     .positions_stride = positions,
                     .table_rows = count};
  if (by_cpu) {
    for (int64_t b = 0; b < s.sequences; ++b) {
      const kernels::LatentHeads one{
          s.tokens, s.heads, s.nope, s.rope, s.values, angles.data(), s.packed ? places.data() + b * positions : nullptr};
      const int64_t row = b * s.tokens;
      kernels::latent_heads_forward(one, in.q.data() + row * a.q_width(), in.kv.data() + row * a.kv_width(),
                                    in.k_rope.data() + row * s.rope, to.qkv.data() + row * a.qkv_width());
      kernels::latent_heads_input(one, in.qkv.data() + row * a.qkv_width(), to.q.data() + row * a.q_width(),
                                  to.kv.data() + row * a.kv_width(), to.k_rope.data() + row * s.rope);
    }
    return to;
  }
  const Array table_of(angles, DType::f32);
  const Numbers<int32_t> there(places.empty() ? std::vector<int32_t>{0} : places);
  a.table = table_of.floats();
  a.positions = s.packed ? there.data() : nullptr;
  const Array q(in.q, t), kv(in.kv, t), k_rope(in.k_rope, t), qkv(Array::poison(rows * a.qkv_width()), t);
  a.q = q.out(), a.kv = kv.out(), a.k_rope = k_rope.out(), a.qkv = qkv.out();
  table().latent_heads(a, stream());
  const Array dq(to.q, t), dkv(to.kv, t), dk_rope(to.k_rope, t), dqkv(in.qkv, t);
  a.q = dq.out(), a.kv = dkv.out(), a.k_rope = dk_rope.out(), a.qkv = dqkv.out(), a.back = true;
  table().latent_heads(a, stream());
  return {dq.read(), dkv.read(), dk_rope.read(), qkv.read()};
}

}  // namespace

TEST_CASE("latent heads: the CPU's bits in fp32, and in 16 bits its values rounded once, of packed documents too") {
  for (const DType t : kActivationTypes)
    for (const Latent& s : kLatents) {
      INFO(name_of(t) << " heads " << s.heads << " nope " << s.nope << " rope " << s.rope << " values " << s.values);
      const int64_t rows = s.sequences * s.tokens, depth = s.nope + s.rope;
      const LatentArrays in{as_stored(random_floats(rows * s.heads * depth, 1), t),
                            as_stored(random_floats(rows * s.heads * (s.nope + s.values), 2), t),
                            as_stored(random_floats(rows * s.rope, 3), t),
                            as_stored(random_floats(rows * s.heads * (2 * depth + s.values), 4), t)};
      LatentArrays got;
      in_both_orders([&] {
        got = latent(s, in, t, false);
        return joined({got.q, got.kv, got.k_rope, got.qkv});
      });
      const LatentArrays want = latent(s, in, t, true);
      REQUIRE(bit_difference(got.qkv, as_stored(want.qkv, t)) == "");
      REQUIRE(bit_difference(got.q, as_stored(want.q, t)) == "");
      REQUIRE(bit_difference(got.kv, as_stored(want.kv, t)) == "");
      REQUIRE(bit_difference(got.k_rope, as_stored(want.k_rope, t)) == "");
    }
}

}  // namespace shardlab::testing::of_heads
