// Tier E3: 1-bit Adam has the bits of its emulation in one process through both of its phases, moments and errors included; what
// either leg sends and keeps is what it had; and the bytes on the wire fall when the variance freezes.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "plan/memory.h"
#include "plan/wire.h"
#include "runtime/backend.h"
#include "runtime/phases.h"
#include "strategies/lower.h"
#include "strategies/warm_up.h"
#include "tests/namespaces.h"
#include "tests/numerics/reference/order.h"
#include "tests/numerics/reference/trainer.h"
#include "tests/numerics/running.h"
#include "tests/test.h"

namespace shardlab::testing::of_one_bit_adam {
namespace {

using testing::Running;
using testing::same_bits;
using testing::tokens_of;

using Vector = std::vector<float>;

constexpr int kWarmUp = 2, kSteps = 6;

/// What travels together, and what each rank owes of it.
struct SignBucket {
  std::vector<size_t> parameters;
  int64_t elements = 0;  ///< padding included
  std::vector<Vector> errors, of_slices;
};

/// Ranks in a loop, a wire a copy: algorithm 1 of the paper, with Adam's corrections. Written apart from strategies and kernels.
class OneBitEmulation {
 public:
  explicit OneBitEmulation(const Case& config)
      : config_(config),
        ranks_(config.layout.dp),
        trainer_(config.model, config.train, config.sequences_per_step()),
        part_(config.model, config.train, config.sequences_per_step() / config.layout.dp) {
    for (const auto& value : trainer_.values()) {
      m_.emplace_back(value.size());
      v_.emplace_back(value.size());
    }
    fill_buckets();
  }

  /// Returns the loss before the step.
  float step(std::span<const int32_t> tokens) {
    const float loss = trainer_.loss(tokens);
    const std::vector<reference::Tensors<float>> gradients = by_rank(tokens);
    const bool warm = step_ < config_.layout.compression.warmup;
    for (SignBucket& bucket : buckets_) warm ? adam(bucket, gradients) : compressed(bucket, gradients);
    ++step_;
    return loss;
  }

  const reference::Trainer<float>& trainer() const { return trainer_; }
  const std::vector<SignBucket>& buckets() const { return buckets_; }
  const std::vector<Vector>& m() const { return m_; }
  const std::vector<Vector>& v() const { return v_; }
  bool conserved() const { return conserved_; }
  int64_t masked() const { return masked_; }

 private:
  /// Parameters from the last to the first, those with weight decay and those without apart; slices of whole bytes of signs.
  void fill_buckets() {
    SignBucket open[2];
    const auto close = [&](SignBucket& bucket) {
      if (bucket.parameters.empty()) return;
      const int64_t multiple = 8 * ranks_;
      bucket.elements = (bucket.elements + multiple - 1) / multiple * multiple;
      bucket.errors.assign(static_cast<size_t>(ranks_), Vector(static_cast<size_t>(bucket.elements)));
      bucket.of_slices.assign(static_cast<size_t>(ranks_), Vector(static_cast<size_t>(bucket.elements / ranks_)));
      buckets_.push_back(std::move(bucket));
      bucket = {};
    };
    for (size_t p = trainer_.values().size(); p-- > 0;) {
      SignBucket& bucket = open[decays(p) ? 0 : 1];
      bucket.parameters.push_back(p);
      bucket.elements += static_cast<int64_t>(trainer_.values()[p].size());
      if (4 * bucket.elements >= config_.layout.bucket_bytes) close(bucket);
    }
    for (SignBucket& bucket : open) close(bucket);
    std::ranges::sort(buckets_, std::greater(), [](const SignBucket& b) { return b.parameters.back(); });
  }

  bool decays(size_t p) const {
    const auto kind = trainer_.parameters()[p].kind;
    return kind != ModelParameter::Kind::kNormWeight && kind != ModelParameter::Kind::kBias;
  }
  float decay(size_t p) const { return decays(p) ? config_.train.weight_decay : 0.0f; }
  float rate() const { return learning_rate_at(config_.train.learning_rate, step_); }
  static float correction(float beta, int64_t steps) {
    return static_cast<float>(1.0 - std::pow(double{beta}, static_cast<double>(steps)));
  }

  /// Summands of the gradient of the mean over all targets.
  std::vector<reference::Tensors<float>> by_rank(std::span<const int32_t> tokens) {
    part_.values() = trainer_.values();
    std::vector<reference::Tensors<float>> all;
    const size_t rows = tokens.size() / static_cast<size_t>(ranks_);
    for (int64_t r = 0; r < ranks_; ++r) {
      all.push_back(part_.gradients(tokens.subspan(static_cast<size_t>(r) * rows, rows)).gradients);
      for (auto& gradient : all.back())
        for (float& g : gradient) g /= static_cast<float>(ranks_);
    }
    return all;
  }

  template <class Read>
  float over_ranks(const Read& read) const {
    return reference::tree<float>(ranks_, [&](int64_t r) { return read(static_cast<size_t>(r)); });
  }

  void adam(const SignBucket& bucket, const std::vector<reference::Tensors<float>>& gradients) {
    const Train& t = config_.train;
    const float c1 = correction(t.beta1, step_ + 1), c2 = correction(t.beta2, step_ + 1);
    for (const size_t p : bucket.parameters)
      for (size_t i = 0; i < m_[p].size(); ++i) {
        const float g = over_ranks([&](size_t r) { return gradients[r][p][i]; });
        float &m = m_[p][i], &v = v_[p][i], &w = trainer_.values()[p][i];
        m = t.beta1 * m + (1.0f - t.beta1) * g;
        v = t.beta2 * v + ((1.0f - t.beta2) * g) * g;
        float next = w - rate() * ((m / c1) / (std::sqrt(v / c2) + t.epsilon));
        if (decay(p) != 0) next = next - (rate() * decay(p)) * w;
        w = next;
      }
  }

  /// Signs and the mean size of x[begin, begin + n), in place; what that leaves out.
  Vector sign(Vector& x, size_t begin, size_t n) {
    double sum = 0;
    for (size_t block = 0; block < n; block += 4096)
      sum += reference::lanes<double>(static_cast<int64_t>(std::min<size_t>(4096, n - block)),
                                      [&](int64_t i) { return double{std::abs(x[begin + block + static_cast<size_t>(i)])}; });
    const auto scale = static_cast<float>(sum / static_cast<double>(n));
    Vector error(n);
    for (size_t i = 0; i < n; ++i) {
      const float had = x[begin + i], sent = std::signbit(had) ? -scale : scale;
      error[i] = had - sent;
      // The difference of two numbers of fp32 need not be one: what is kept is the nearest.
      conserved_ = conserved_ && std::abs(double{sent} + double{error[i]} - double{had}) <= std::abs(double{error[i]}) * 0x1p-24;
      x[begin + i] = sent;
    }
    return error;
  }

  void compressed(SignBucket& bucket, const std::vector<reference::Tensors<float>>& gradients) {
    const Train& t = config_.train;
    const auto n = static_cast<size_t>(bucket.elements), slice = n / static_cast<size_t>(ranks_);
    const float share = 1.0f / static_cast<float>(ranks_);
    std::vector<Vector> sent(static_cast<size_t>(ranks_));
    for (size_t r = 0; r < sent.size(); ++r) {
      for (const size_t p : bucket.parameters)
        for (size_t i = 0; i < m_[p].size(); ++i)
          sent[r].push_back(t.beta1 * (share * m_[p][i]) + (1.0f - t.beta1) * gradients[r][p][i]);
      sent[r].resize(n);
      for (size_t i = 0; i < n; ++i) sent[r][i] += bucket.errors[r][i];
      for (size_t owner = 0; owner < sent.size(); ++owner) {
        const Vector error = sign(sent[r], owner * slice, slice);
        std::ranges::copy(error, bucket.errors[r].begin() + static_cast<std::ptrdiff_t>(owner * slice));
      }
    }
    Vector momentum;
    for (size_t owner = 0; owner < sent.size(); ++owner) {
      Vector sum(slice);
      for (size_t i = 0; i < slice; ++i)
        sum[i] = over_ranks([&](size_t r) { return sent[r][owner * slice + i]; }) + bucket.of_slices[owner][i];
      bucket.of_slices[owner] = sign(sum, 0, slice);
      momentum.insert(momentum.end(), sum.begin(), sum.end());
    }
    size_t at = 0;
    const float c1 = correction(t.beta1, step_ + 1), c2 = correction(t.beta2, config_.layout.compression.warmup);
    for (const size_t p : bucket.parameters)
      for (size_t i = 0; i < m_[p].size(); ++i, ++at) {
        const float deviation = std::sqrt(v_[p][i] / c2);
        const bool known = deviation > t.epsilon;
        masked_ += known ? 0 : 1;
        m_[p][i] = known ? momentum[at] : 0;
        const float direction = known ? (m_[p][i] / c1) / (deviation + t.epsilon) : 0;
        float& w = trainer_.values()[p][i];
        w = w - rate() * (decay(p) != 0 ? direction + decay(p) * w : direction);
      }
  }

  Case config_;
  int64_t ranks_;
  reference::Trainer<float> trainer_, part_;  ///< of the step's sequences; of one rank's
  std::vector<Vector> m_, v_;
  std::vector<SignBucket> buckets_;
  int64_t step_ = 0, masked_ = 0;
  bool conserved_ = true;
};

/// On two ranks a bucket a parameter, accumulated; on four larger buckets, overlapped.
std::vector<Case> rows() {
  std::vector<Case> all;
  for (const bool four : {false, true}) {
    Case c = four ? testing::base_case("llama adamw", 4, 1) : testing::base_case("llama adamw", 2, 2);
    c.layout.compression = {.kind = CompressionKind::kOneBitAdam, .warmup = kWarmUp};
    c.layout.overlap = four;
    c.layout.bucket_bytes = four ? 20000 : 0;
    c.train.grad_norm = false;
    c.name = "one-bit-adam " + c.name;
    const auto checked = check(c);
    INFO(c.name << (checked.ok() ? "" : to_string(checked.error())));
    REQUIRE(checked.ok());
    all.push_back(std::move(c));
  }
  return all;
}

void require_same_state(const Session& session, const OneBitEmulation& emulation, int ranks) {
  for (size_t p = 0; p < emulation.m().size(); ++p) {
    const std::string& name = emulation.trainer().parameters()[p].name;
    INFO(name);
    REQUIRE(same_bits(session.parameter(name)->values, emulation.trainer().values()[p]));
    REQUIRE(same_bits(session.state({name, "m"})->values, emulation.m()[p]));
    REQUIRE(same_bits(session.state({name, "v"})->values, emulation.v()[p]));
  }
  for (size_t b = 0; b < emulation.buckets().size(); ++b)
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string name = fmt::format("bucket{}.error", b);
      INFO(name << " of rank " << rank);
      REQUIRE(same_bits(*session.read_buffer(rank, name), emulation.buckets()[b].errors[static_cast<size_t>(rank)]));
      REQUIRE(same_bits(*session.read_buffer(rank, name + ".slice"), emulation.buckets()[b].of_slices[static_cast<size_t>(rank)]));
    }
}

TEST_CASE("1-bit Adam has the bits of its emulation through both phases, moments and errors included, and loses nothing") {
  for (const Case& config : rows()) {
    INFO(config.name);
    OneBitEmulation emulation(config);
    std::vector<float> losses;
    const auto run = [&](Session& session, int begin, int end) {
      for (int step = begin; step < end; ++step) {
        INFO("step " << step);
        losses.push_back(emulation.step(tokens_of(config, step)));
        REQUIRE(std::isfinite(losses.back()));
        REQUIRE(static_cast<float>(*session.step(step).loss) == losses.back());
        require_same_state(session, emulation, config.layout.dp);
      }
    };
    Running first(config, lower_warm_up(config));
    run(*first.session, 0, kWarmUp);
    const auto state = take_state(*first.session);
    INFO((state.ok() ? "" : to_string(state.error())));
    REQUIRE(state.ok());
    Running second(config);
    const auto given = give_state(*state, *second.session);
    INFO((given.ok() ? "" : to_string(given.error())));
    REQUIRE(given.ok());
    run(*second.session, kWarmUp, kSteps);
    REQUIRE(emulation.conserved());
    REQUIRE(losses.front() != losses.back());
    second.require_counts();
  }
}

TEST_CASE("the wire falls when the variance freezes, and both phases are as planned to the byte") {
  for (Case config : rows()) {
    config.canonical = false;
    INFO(config.name);
    Running first(config, lower_warm_up(config));
    Running second(config);
    int64_t before = 0, after = 0;
    for (int step = 0; step < kWarmUp; ++step) before = first.session->step(step).sent_bytes;
    REQUIRE(give_state(*take_state(*first.session), *second.session).ok());
    for (int step = kWarmUp; step < kSteps; ++step) {
      const StepResult result = second.session->step(step);
      REQUIRE(std::isfinite(*result.loss));
      after = result.sent_bytes;
    }
    second.require_counts();
    for (const auto& [sent, plan] : {std::pair{before, first.placed.plan.get()}, {after, second.placed.plan.get()}}) {
      int64_t planned = 0;
      for (const auto& [comm, bytes] : total_wire_bytes(*plan)) planned += bytes;
      CHECK(sent == planned);
    }
    CHECK(before > 20 * after);
    const auto peak = [](const PlacedPlan& placed) {
      return memory_peak(*placed.plan, 0)[static_cast<size_t>(Space::kDevice)].peak_bytes;
    };
    CHECK(first.session->ledger(0).peak(Space::kDevice) == peak(first.placed));
    CHECK(peak(first.placed) <= peak(second.placed));  // signs are beside it
  }
}

TEST_CASE("an element of which the frozen variance knows nothing stays, and its neighbours' sign does not move it") {
  Case config = rows().front();
  config.model.vocab = 256;  // of which a step asks for few rows
  OneBitEmulation emulation(config);
  Running first(config, lower_warm_up(config));
  Running second(config);
  for (int step = 0; step < kWarmUp; ++step) {
    emulation.step(tokens_of(config, step));
    first.session->step(step);
  }
  REQUIRE(give_state(*take_state(*first.session), *second.session).ok());
  const Vector before = second.session->parameter("embed.tokens")->values, v = second.session->state({"embed.tokens", "v"})->values;
  for (int step = kWarmUp; step < kSteps; ++step) {
    emulation.step(tokens_of(config, step));
    second.session->step(step);
  }
  CHECK(emulation.masked() > 0);
  const Vector after = second.session->parameter("embed.tokens")->values;
  REQUIRE(same_bits(after, emulation.trainer().value("embed.tokens")));
  int64_t unseen = 0, moved = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    if (v[i] > 0) {
      moved += before[i] != after[i];
      continue;
    }
    ++unseen;
    const float largest = std::abs(before[i]) * 0.2f + 1e-6f;  // weight decay alone
    REQUIRE(std::abs(after[i] - before[i]) <= largest);
  }
  CHECK(unseen > 0);
  CHECK(moved > 0);
}

}  // namespace
}  // namespace shardlab::testing::of_one_bit_adam
