#include "tests/cuda_kernels/support.h"
#include "tests/namespaces.h"

namespace shardlab::testing::of_cross_entropy {
namespace {

struct Shape {
  int64_t sequences, tokens, vocab;
  int shift = 0;
  int64_t rows() const { return sequences * tokens; }
};
// The fourth does not fit in shared memory in fp32.
const Shape kShapes[] = {{1, 1, 1}, {2, 5, 37}, {3, 17, 128}, {1, 2, 42000}, {2, 3, 80, 1}};
constexpr int64_t kLossTokens = 60;

struct Result {
  Floats nll, logits;
};
using Launch = void (*)(const gpu::CrossEntropy&, gpu::Stream);

Result run(Launch kernel, const Floats& logits, const std::vector<int32_t>& targets, const Shape& s, DType t, int64_t words = 0) {
  const Array x(logits, t, s.shift), nll(Array::poison(s.sequences), DType::f32);
  const Numbers<int32_t> there(targets);
  gpu::CrossEntropy a{.logits = x.out(),
                      .targets = there.data(),
                      .nll = nll.floats(),
                      .tokens = {s.sequences, s.tokens, {}},
                      .vocab = s.vocab,
                      .words = words,
                      .loss_tokens = kLossTokens};
  const Lent scratch(gpu::scratch_bytes(a));
  a.scratch = scratch;
  kernel(a, stream());
  return {nll.read(), x.read()};
}

}  // namespace

TEST_CASE("cross_entropy: the fused form's nll and dlogits equal fp64, loss_only's nll has the same bits") {
  for (const DType t : kActivationTypes)
    for (const Shape& s : kShapes) {
      INFO(name_of(t) << " rows " << s.rows() << " vocab " << s.vocab);
      const Floats logits = as_stored(random_floats(s.rows() * s.vocab, 1, 8.0f), t);
      const std::vector<int32_t> targets = random_ids(s.rows(), 2, static_cast<int32_t>(s.vocab));
      Doubles nll(static_cast<size_t>(s.sequences)), dlogits;
      for (int64_t r = 0; r < s.rows(); ++r) {
        const float* x = logits.data() + r * s.vocab;
        double sum = 0;
        for (int64_t i = 0; i < s.vocab; ++i) sum += std::exp(static_cast<double>(x[i]));
        nll[static_cast<size_t>(r / s.tokens)] += std::log(sum) - x[targets[static_cast<size_t>(r)]];
        for (int64_t i = 0; i < s.vocab; ++i)
          dlogits.push_back((std::exp(static_cast<double>(x[i])) / sum - (i == targets[static_cast<size_t>(r)] ? 1 : 0)) /
                            kLossTokens);
      }
      Floats losses;
      const Floats got = in_both_orders([&] {
        const Result r = run(table().cross_entropy_fused, logits, targets, s, t);
        losses = r.nll;
        return joined({r.nll, r.logits});
      });
      if (s.vocab > 1) {
        REQUIRE(difference(losses, nll, kTolerance) == "");
        REQUIRE(difference(part_of(got, s.sequences, static_cast<int64_t>(got.size())), dlogits, tolerance(t)) == "");
      } else {
        REQUIRE(got == Floats{0, 0});
      }
      const Result only = run(table().cross_entropy_loss_only, logits, targets, s, t);
      REQUIRE(bit_difference(only.nll, losses) == "");
      REQUIRE(bit_difference(only.logits, logits) == "");
    }
}

TEST_CASE("cross_entropy: columns beyond the words are as columns of -infinity, which have no gradient") {
  for (const DType t : kActivationTypes)
    for (const int64_t words : {1, 35, 150, 159}) {
      INFO(name_of(t) << " words " << words);
      const Shape s{2, 5, 160};
      const Floats logits = as_stored(random_floats(s.rows() * s.vocab, 1, 8.0f), t);
      const std::vector<int32_t> targets = random_ids(s.rows(), 2, static_cast<int32_t>(words));
      Floats low = logits;
      for (size_t i = 0; i < low.size(); ++i)
        if (static_cast<int64_t>(i) % s.vocab >= words) low[i] = -INFINITY;
      const Result got = run(table().cross_entropy_fused, logits, targets, s, t, words);
      const Result want = run(table().cross_entropy_fused, low, targets, s, t);
      REQUIRE(bit_difference(got.nll, want.nll) == "");
      REQUIRE(bit_difference(got.logits, want.logits) == "");
    }
}

TEST_CASE("cross_entropy: the vocabulary-parallel parts of 1, 2, 4, 8 and 16 ranks have the fused form's bits") {
  for (const auto& [t, words] :
       {std::pair<DType, int64_t>{DType::f32, 0}, {DType::bf16, 0}, {DType::f16, 0}, {DType::f32, 35}, {DType::bf16, 150}}) {
    const Shape s{2, 5, 160};
    const Floats logits = as_stored(random_floats(s.rows() * s.vocab, 1, 8.0f), t);
    const std::vector<int32_t> targets = random_ids(s.rows(), 2, static_cast<int32_t>(words == 0 ? s.vocab : words));
    const Result want = run(table().cross_entropy_fused, logits, targets, s, t, words);
    for (const int64_t ranks : {1, 2, 4, 8, 16}) {
      INFO(name_of(t) << " ranks " << ranks << " words " << words);
      const int64_t held = s.vocab / ranks;
      std::vector<std::unique_ptr<Array>> parts, maxima, sums;
      const Numbers<int32_t> there(targets);
      const Lent scratch(s.rows() * 4 + 256);
      const auto args = [&](int64_t rank) {
        return gpu::CrossEntropy{.logits = parts[static_cast<size_t>(rank)]->out(),
                                 .targets = there.data(),
                                 .tokens = {s.sequences, s.tokens, {}},
                                 .vocab = held,
                                 .vocab_part = {rank * held, s.vocab},
                                 .words = words,
                                 .loss_tokens = kLossTokens,
                                 .scratch = scratch};
      };
      for (int64_t rank = 0; rank < ranks; ++rank) {
        parts.push_back(std::make_unique<Array>(columns_of(logits, s.vocab, rank * held, (rank + 1) * held), t));
        maxima.push_back(std::make_unique<Array>(Array::poison(s.rows()), DType::f32));
        sums.push_back(std::make_unique<Array>(Array::poison(2 * s.rows()), DType::f32));
        gpu::CrossEntropy a = args(rank);
        a.max = maxima.back()->floats();
        table().cross_entropy_max(a, stream());
      }
      const auto all_reduce = [&](const std::vector<std::unique_ptr<Array>>& arrays, int64_t n, bool maximum) {
        std::vector<const void*> from;
        std::vector<void*> to;
        for (const auto& a : arrays) {
          from.push_back(a->data());
          to.push_back(a->data());
        }
        table().combine({from.data(), static_cast<int>(ranks), to.data(), static_cast<int>(ranks), n, DType::f32, maximum},
                        stream());
      };
      all_reduce(maxima, s.rows(), true);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        gpu::CrossEntropy a = args(rank);
        a.max = maxima[static_cast<size_t>(rank)]->floats();
        a.sums = sums[static_cast<size_t>(rank)]->floats();
        table().cross_entropy_sum(a, stream());
      }
      all_reduce(sums, 2 * s.rows(), false);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const Array nll(Array::poison(s.sequences), DType::f32);
        gpu::CrossEntropy a = args(rank);
        a.max = maxima[static_cast<size_t>(rank)]->floats();
        a.sums = sums[static_cast<size_t>(rank)]->floats();
        a.nll = nll.floats();
        table().cross_entropy_grad(a, stream());
        REQUIRE(bit_difference(nll.read(), want.nll) == "");
        REQUIRE(bit_difference(parts[static_cast<size_t>(rank)]->read(),
                               columns_of(want.logits, s.vocab, rank * held, (rank + 1) * held)) == "");
      }
    }
  }
}

TEST_CASE("cross_entropy: scores far from 0 neither overflow nor vanish; a target that is no id gives NaN") {
  const Shape s{1, 2, 40};
  Floats logits = random_floats(s.rows() * s.vocab, 1, 1.0f);
  logits[3] = 3e38f;
  logits[45] = -3e38f;
  const Result got = run(table().cross_entropy_fused, logits, {3, 7}, s, DType::f32);
  REQUIRE(std::isfinite(got.nll[0]));
  for (const float x : got.logits) REQUIRE(std::isfinite(x));
  REQUIRE(std::isnan(run(table().cross_entropy_loss_only, logits, {3, 40}, s, DType::f32).nll[0]));
  REQUIRE(std::isnan(run(table().cross_entropy_loss_only, logits, {3, -1}, s, DType::f32).nll[0]));
}

}  // namespace shardlab::testing::of_cross_entropy
