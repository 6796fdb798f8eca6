// ZeRO++ in execution: a secondary shard changes no bit; quantised weights and gradients have the bits of their emulation in one
// process, in one hop and in two; every part of it alone and with the others, under the other axes; memory and wire as planned.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/namespaces.h"
#include "tests/numerics/reference/order.h"
#include "tests/numerics/reference/trainer.h"
#include "tests/numerics/running.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab::testing::of_zero_plus_plus {
namespace {

using testing::base_case;
using testing::Running;
using testing::same_bits;
using testing::tokens_of;
using Vector = std::vector<float>;

constexpr int kSteps = 3;
constexpr int64_t kBlock = 256;

/// ZeRO-3 with ZeRO++ in one process: N ranks are a loop, a wire is a copy. Written apart from strategies and kernels, on top of
/// the reference trainer; canonical order throughout. Dropout, clipping and tied embeddings are not emulated.
class Emulation {
 public:
  explicit Emulation(const Case& c)
      : config_(c),
        ranks_(c.layout.dp),
        micro_batches_(c.train.grad_accumulation),
        trainer_(c.model, c.train, c.sequences_per_step()),
        seen_(c.model, c.train, c.sequences_per_step()),
        part_(c.model, c.train, c.train.micro_batch) {
    fill_buckets();
  }

  /// One step on the tokens of all ranks. Returns the loss before it, as the ranks compute it.
  float step(std::span<const int32_t> tokens) {
    const float loss = look().loss(tokens);
    part_.values() = seen_.values();
    const auto share = static_cast<float>(ranks_ * micro_batches_);  // a power of two: dividing by it rounds nothing
    const size_t rows = tokens.size() / static_cast<size_t>(ranks_ * micro_batches_);
    std::vector<std::vector<Vector>> sums(buckets_.size());  // by bucket and micro-batch
    for (int64_t j = 0; j < micro_batches_; ++j) {
      std::vector<reference::Tensors<float>> by_rank;
      for (int64_t r = 0; r < ranks_; ++r) {  // micro-batch by micro-batch, shared out in order
        const auto first = static_cast<size_t>(j * ranks_ + r) * rows;
        by_rank.push_back(part_.gradients(tokens.subspan(first, rows)).gradients);
        for (auto& gradient : by_rank.back())
          for (float& g : gradient) g /= share;
      }
      for (size_t b = 0; b < buckets_.size(); ++b) {
        std::vector<Vector> flat;
        for (const auto& tensors : by_rank) flat.push_back(packed(buckets_[b], tensors));
        sums[b].push_back(scattered(std::move(flat)));
      }
    }
    reference::Tensors<float> reduced(trainer_.values().size());
    for (size_t b = 0; b < buckets_.size(); ++b) {
      Vector sum(sums[b].front().size());
      for (size_t i = 0; i < sum.size(); ++i)
        sum[i] = reference::tree<float>(micro_batches_, [&](int64_t j) { return sums[b][static_cast<size_t>(j)][i]; });
      unpack(buckets_[b], sum, reduced);
    }
    trainer_.update(reduced);
    return loss;
  }
  const reference::Trainer<float>& trainer() const { return trainer_; }
  /// As every rank holds the parameters once gathered.
  const reference::Trainer<float>& look() {
    seen_.values() = trainer_.values();
    if (!config_.layout.zero_plus_plus.weights) return seen_;
    for (const Bucket& bucket : buckets_) {
      Vector flat = packed(bucket, trainer_.values());
      code(flat, 127, ranks_);
      unpack(bucket, flat, seen_.values());
    }
    return seen_;
  }

 private:
  struct Bucket {
    std::vector<size_t> parameters;  ///< in the order in which they lie
    int64_t elements = 0;            ///< padding included
  };

  /// The unit that gathers a parameter: the embedding, `fsdp.unit` layers, or the head.
  int64_t unit_of(const ModelParameter& p) const {
    if (p.name.starts_with("layers.")) return std::stoi(p.name.substr(7)) / config_.layout.fsdp.unit;
    return p.name.starts_with("embed.") ? -1 : 1 << 20;
  }
  /// From the last parameter of the model to the first, matrices and vectors apart, closed where a unit ends.
  void fill_buckets() {
    Bucket open[2];
    const auto close = [&](Bucket& bucket) {
      if (bucket.parameters.empty()) return;
      const int64_t slice = (bucket.elements + ranks_ - 1) / ranks_, blocks = 2 * ((slice + kBlock - 1) / kBlock);
      const ZeroPlusPlus& z = config_.layout.zero_plus_plus;
      const int64_t multiple = ranks_ * (z.weights || z.gradients ? blocks : 1);
      bucket.elements = (bucket.elements + multiple - 1) / multiple * multiple;
      buckets_.push_back(std::move(bucket));
      bucket = {};
    };
    const auto& parameters = trainer_.parameters();
    for (size_t p = parameters.size(); p-- > 0;) {
      if (p + 1 < parameters.size() && unit_of(parameters[p]) != unit_of(parameters[p + 1]))
        for (Bucket& bucket : open) close(bucket);
      const auto kind = parameters[p].kind;
      Bucket& bucket = open[kind == ModelParameter::Kind::kNormWeight || kind == ModelParameter::Kind::kBias];
      bucket.parameters.push_back(p);
      bucket.elements += static_cast<int64_t>(trainer_.values()[p].size());
    }
    for (Bucket& bucket : open) close(bucket);
  }

  static Vector packed(const Bucket& bucket, const reference::Tensors<float>& tensors) {
    Vector flat;
    for (const size_t p : bucket.parameters) flat.insert(flat.end(), tensors[p].begin(), tensors[p].end());
    flat.resize(static_cast<size_t>(bucket.elements));
    return flat;
  }
  void unpack(const Bucket& bucket, const Vector& flat, reference::Tensors<float>& tensors) const {
    auto from = flat.begin();
    for (const size_t p : bucket.parameters) {
      const auto to = from + std::ssize(trainer_.values()[p]);
      tensors[p].assign(from, to);
      from = to;
    }
  }

  /// What is left of x, of `slices` slices, once it was rounded to so many levels either way, block by block.
  static void code(Vector& x, float levels, int64_t slices) {
    const int64_t slice = std::ssize(x) / slices, blocks = (slice + kBlock - 1) / kBlock;
    const auto block = static_cast<size_t>(slice / blocks);
    for (size_t first = 0; first < x.size(); first += block) {
      float most = 0;
      for (size_t i = first; i < first + block; ++i) most = std::max(most, std::abs(x[i]));
      const float scale = most / levels;
      for (size_t i = first; i < first + block; ++i)
        x[i] = scale == 0 ? 0 : std::clamp(std::nearbyint(x[i] / scale), -levels, levels) * scale;
    }
  }
  static Vector sum_over(std::span<const Vector> parts) {
    Vector sum(parts.front().size());
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] = reference::tree<float>(std::ssize(parts), [&](int64_t r) { return parts[static_cast<size_t>(r)][i]; });
    return sum;
  }
  /// The sum over the ranks: rounded by each rank, and again by each node where there are nodes.
  Vector scattered(std::vector<Vector> by_rank) const {
    const ZeroPlusPlus& z = config_.layout.zero_plus_plus;
    if (!z.gradients) return sum_over(by_rank);
    for (Vector& x : by_rank) code(x, 7, ranks_);
    if (z.secondary == 0) return sum_over(by_rank);
    std::vector<Vector> by_node;
    for (int64_t node = 0; node < ranks_; node += z.secondary) {
      by_node.push_back(sum_over(std::span(by_rank).subspan(static_cast<size_t>(node), static_cast<size_t>(z.secondary))));
      code(by_node.back(), 7, ranks_);
    }
    return sum_over(by_node);
  }

  Case config_;
  int64_t ranks_, micro_batches_;
  reference::Trainer<float> trainer_;  ///< of the step's sequences, with the parameters that the slices hold
  reference::Trainer<float> seen_;     ///< the same with those that the ranks gathered
  reference::Trainer<float> part_;     ///< of one micro-batch of one rank, whose mean is over fewer
  std::vector<Bucket> buckets_;
};

Case zero_plus_plus(const std::string& subject, int dp, int accumulation, const ZeroPlusPlus& z) {
  Case c = base_case(subject, dp, accumulation);
  c.layout.zero = 3;
  c.layout.zero_plus_plus = z;
  c.name += fmt::format(" weights {} secondary {} gradients {}", z.weights, z.secondary, z.gradients);
  const Result<void> checked = check(c);
  INFO((checked.ok() ? "" : to_string(checked.error())));
  REQUIRE(checked.ok());
  return c;
}

constexpr ZeroPlusPlus kParts[] = {
    {.weights = true},
    {.gradients = true},
    {.secondary = 2},
    {.weights = true, .secondary = 2},
    {.secondary = 2, .gradients = true},
    {.weights = true, .secondary = 2, .gradients = true},
};

TEST_CASE("quantised weights and gradients have the bits of their emulation, and a secondary shard none of its own") {
  size_t number = 0;
  for (const ZeroPlusPlus& z : kParts)
    for (const bool adamw : {false, true}) {
      Case c = zero_plus_plus(adamw ? "llama adamw" : "llama sgd", 4, adamw ? 2 : 1, z);
      c.layout.overlap = number % 2 == 1;
      c.layout.fsdp = {.unit = adamw ? 2 : 1, .prefetch = static_cast<int>(number % 3)};
      if (!adamw) c.train.learning_rate.peak = 0.25f;  // gradients of 4 bits are coarse
      ++number;
      INFO(c.name);
      Running run(c);
      Emulation emulation(c);
      std::vector<float> losses;
      for (int step = 0; step < kSteps; ++step) {
        const float expected = emulation.step(tokens_of(c, step));
        INFO("step " << step);
        REQUIRE(std::isfinite(expected));
        REQUIRE(static_cast<float>(*run.session->step(step).loss) == expected);
        losses.push_back(expected);
      }
      REQUIRE(losses.front() != losses.back());
      for (const ModelParameter& p : parameters_of(c.model)) {
        INFO(p.name);
        REQUIRE(same_bits(run.session->parameter(p.name)->values, emulation.trainer().value(p.name)));
      }
      run.require_counts();
      // What the ranks compute with is what is seen through 8 bits, not what the slices hold.
      const Vector& seen = emulation.look().value("layers.0.attn.wqkv");
      REQUIRE(same_bits(seen, emulation.trainer().value("layers.0.attn.wqkv")) == !z.weights);
    }
}

TEST_CASE("with nodes gradients are rounded twice: in one hop and in two the bits differ") {
  const Case one = zero_plus_plus("llama sgd", 4, 1, {.gradients = true});
  const Case two = zero_plus_plus("llama sgd", 4, 1, {.secondary = 2, .gradients = true});
  const testing::RandomText text(one.model.vocab);
  const auto a = testing::train_case(one, text, kSteps), b = testing::train_case(two, text, kSteps);
  REQUIRE(a.ok());
  REQUIRE(b.ok());
  CHECK(a->losses.front() == b->losses.front());
  CHECK(a->losses.back() != b->losses.back());
}

TEST_CASE("ZeRO++ stays near ZeRO-3, step after step: no loss of zero from the third step on") {
  // DeepSpeed issue 5059: with a secondary partition the loss was 0 from step 3 on, in buffers that had been reused.
  Case plain = zero_plus_plus("llama adamw", 4, 1, {});
  const testing::RandomText text(plain.model.vocab);
  const auto expected = testing::train_case(plain, text, 6);
  REQUIRE(expected.ok());
  for (const ZeroPlusPlus& z : kParts) {
    Case c = plain;
    c.layout.zero_plus_plus = z;
    const auto have = testing::train_case(c, text, 6);
    INFO("weights " << z.weights << " secondary " << z.secondary << " gradients " << z.gradients);
    REQUIRE(have.ok());
    for (size_t i = 0; i < 6; ++i) CHECK(have->losses[i] == Approx(expected->losses[i]).epsilon(0.05));
    CHECK(have->validation_loss == Approx(expected->validation_loss).epsilon(0.05));
    if (!z.weights && !z.gradients) CHECK(same_bits(have->losses, expected->losses));
  }
}

TEST_CASE("ZeRO++ under the other axes: replicas agree, and memory and wire are as planned") {
  size_t number = 0;
  for (const char* subject : {"gpt tied sgd", "llama adamw", "gpt tied bf16 clipped adamw", "gpt tied fp16 clipped adamw"})
    for (const ZeroPlusPlus& z : kParts) {
      Case c;
      for (const testing::Subject& s : testing::subjects())
        if (s.name == subject) {
          c.layout.dp = 4;
          c.layout.tp = number % 2 == 0 ? 2 : 1;
          c.layout.pp = 1;
          c.layout.zero = 3;
          c.layout.zero_plus_plus = z;
          if (number % 3 == 0 && z.secondary == 0) c.layout.hybrid_shard = 2;
          c.canonical = number % 5 == 0;
          c.train.grad_accumulation = number % 4 < 2 ? 2 : 1;
          if (number % 4 == 3) c.layout.recompute = Recompute::kFull;
          if (s.name == "llama adamw")
            c.layout.offload = number % 2 == 0 ? Offload{.activations = OffloadTo::kCpu} : Offload{.optimizer = OffloadTo::kCpu};
          const auto rows = testing::rows_of(s, std::span(&c, 1));
          INFO(c.name << " " << (check(c).ok() ? "" : to_string(check(c).error())));
          REQUIRE(rows.size() == 1);
          c = rows.front();
        }
      if (c.layout.tp == 1) {
        c.layout.pp = 2;
        c.layout.schedule = Schedule::k1F1B;
      }
      c.name += fmt::format(" {} weights {} secondary {} gradients {}", subject, z.weights, z.secondary, z.gradients);
      INFO(c.name);
      ++number;
      Running run(c);
      for (int step = 0; step < kSteps; ++step) REQUIRE(std::isfinite(*run.session->step(step).loss));
      for (const ModelParameter& p : parameters_of(c.model)) {
        INFO(p.name);
        const auto value = run.session->parameter(p.name);
        REQUIRE(value.ok());
        CHECK(std::ranges::all_of(value->values, [](float x) { return std::isfinite(x); }));
      }
      run.require_counts();
    }
}

}  // namespace
}  // namespace shardlab::testing::of_zero_plus_plus
