#include "tests/kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_cross_entropy {
namespace {

struct Shape {
  int64_t sequences, tokens, vocab;
  int64_t rows() const { return sequences * tokens; }
};
const Shape kShapes[] = {{1, 1, 1}, {1, 3, 3}, {2, 5, 17}, {2, 17, 40}, {2, 4, 257}};
constexpr int64_t kLossTokens = 40;

/// nll of each sequence in fp64.
Doubles losses64(const Doubles& x, const std::vector<int32_t>& targets, const Shape& s) {
  Doubles nll(s.sequences);
  for (int64_t r = 0; r < s.rows(); ++r) {
    double sum = 0;
    for (int64_t i = 0; i < s.vocab; ++i) sum += std::exp(x[r * s.vocab + i]);
    nll[r / s.tokens] += std::log(sum) - x[r * s.vocab + targets[r]];
  }
  return nll;
}

struct Outcome {
  Floats nll, dlogits;
};
Outcome fused(const kernels::Kernels& k, const Floats& logits, const std::vector<int32_t>& targets, const Shape& s) {
  Outcome out{poisoned(s.sequences), logits};
  k.cross_entropy_fused({.logits = out.dlogits.data(),
                         .targets = targets.data(),
                         .nll = out.nll.data(),
                         .tokens = {s.sequences, s.tokens, {}},
                         .vocab = s.vocab,
                         .loss_tokens = kLossTokens});
  return out;
}

/// The vocabulary-parallel parts over t shards, with what ranks would exchange between them.
std::vector<Outcome> in_shards(const kernels::Kernels& k, const Floats& logits, const std::vector<int32_t>& targets, const Shape& s,
                               int64_t t) {
  std::vector<kernels::CrossEntropy> calls;
  std::vector<Outcome> out;
  std::vector<Floats> max, sums;
  for (int64_t rank = 0; rank < t; ++rank) {
    const int64_t begin = s.vocab * rank / t, end = s.vocab * (rank + 1) / t;
    out.push_back({poisoned(s.sequences), columns_of(logits, s.vocab, begin, end)});
    max.push_back(poisoned(s.rows()));
    sums.push_back(poisoned(2 * s.rows()));
    calls.push_back({.targets = targets.data(),
                     .tokens = {s.sequences, s.tokens, {}},
                     .vocab = end - begin,
                     .vocab_part = {begin, s.vocab},
                     .loss_tokens = kLossTokens});
  }
  for (int64_t rank = 0; rank < t; ++rank) {
    calls[rank].logits = out[rank].dlogits.data();
    calls[rank].max = max[rank].data();
    calls[rank].sums = sums[rank].data();
    calls[rank].nll = out[rank].nll.data();
    k.cross_entropy_max(calls[rank]);
  }
  for (int64_t rank = 1; rank < t; ++rank)
    k.maximum({.a = max[0].data(), .b = max[rank].data(), .c = max[0].data(), .n = s.rows()});
  for (int64_t rank = 0; rank < t; ++rank) {
    max[rank] = max[0];
    calls[rank].max = max[rank].data();
    k.cross_entropy_sum(calls[rank]);
  }
  std::vector<const float*> parts;
  for (const Floats& x : sums) parts.push_back(x.data());
  Floats total = poisoned(2 * s.rows());
  k.tree_combine({.parts = parts.data(), .count = static_cast<int>(t), .out = total.data(), .n = 2 * s.rows()});
  for (auto& call : calls) {
    call.sums = total.data();
    k.cross_entropy_grad(call);
  }
  return out;
}

}  // namespace

TEST_CASE("cross-entropy: nll equals fp64, dlogits equals finite differences, on every variant") {
  for (const Shape& s : kShapes) {
    INFO("sequences " << s.sequences << " tokens " << s.tokens << " vocab " << s.vocab);
    const Floats logits = random_floats(s.rows() * s.vocab, 1, 4.0f);
    const auto targets = random_ids(s.rows(), 2, static_cast<int32_t>(s.vocab));
    const auto f = [&](const Doubles& at) { return losses64(at, targets, s); };
    const Floats all = on_every_variant([&](const kernels::Kernels& k) {
      const Outcome o = fused(k, logits, targets, s);
      return joined({o.nll, o.dlogits});
    });
    const Floats nll = part_of(all, 0, s.sequences), dlogits = part_of(all, s.sequences, static_cast<int64_t>(all.size()));
    if (s.vocab == 1) {
      REQUIRE((nll[0] == 0 && dlogits[0] == 0));
      continue;
    }
    REQUIRE(difference(nll, f(wide(logits)), kTolerance) == "");
    REQUIRE(difference(dlogits, numeric_gradient(f, wide(logits), Doubles(s.sequences, 1.0 / kLossTokens)), kTolerance) == "");
    REQUIRE(bit_difference(on_every_variant([&](const kernels::Kernels& k) {
                             Floats x = logits, loss = poisoned(s.sequences);
                             k.cross_entropy_loss_only({.logits = x.data(),
                                                        .targets = targets.data(),
                                                        .nll = loss.data(),
                                                        .tokens = {s.sequences, s.tokens, {}},
                                                        .vocab = s.vocab});
                             REQUIRE(bit_difference(x, logits) == "");
                             return loss;
                           }),
                           nll) == "");
  }
}

TEST_CASE("cross-entropy: the vocabulary-parallel parts equal the fused form bit for bit") {
  for (const int64_t vocab : {16, 48, 256, 272}) {
    const Shape s{2, 7, vocab};
    const Floats logits = random_floats(s.rows() * s.vocab, 3, 4.0f);
    const auto targets = random_ids(s.rows(), 4, static_cast<int32_t>(s.vocab));
    for (const kernels::Kernels* k : variants_here()) {
      const Outcome whole = fused(*k, logits, targets, s);
      for (const int64_t t : {1, 2, 4, 16}) {
        const auto shards = in_shards(*k, logits, targets, s, t);
        for (int64_t rank = 0; rank < t; ++rank) {
          REQUIRE(bit_difference(shards[rank].nll, whole.nll) == "");
          REQUIRE(bit_difference(shards[rank].dlogits,
                                 columns_of(whole.dlogits, vocab, vocab * rank / t, vocab * (rank + 1) / t)) == "");
        }
      }
    }
  }
}

TEST_CASE("cross-entropy: shards that cut leaves are right, though not bit for bit") {
  const Shape s{2, 3, 50};
  const Floats logits = random_floats(s.rows() * s.vocab, 5, 4.0f);
  const auto targets = random_ids(s.rows(), 6, 50);
  const kernels::Kernels& k = kernels::kernels_for_this_processor();
  const Outcome whole = fused(k, logits, targets, s);
  const auto shards = in_shards(k, logits, targets, s, 3);
  for (int64_t rank = 0; rank < 3; ++rank) {
    REQUIRE(difference(shards[rank].nll, wide(whole.nll), kTolerance) == "");
    REQUIRE(difference(shards[rank].dlogits, wide(columns_of(whole.dlogits, 50, 50 * rank / 3, 50 * (rank + 1) / 3)), kTolerance) ==
            "");
  }
}

}  // namespace shardlab::testing::of_cross_entropy
