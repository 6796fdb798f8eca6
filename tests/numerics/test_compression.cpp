// Tier E3: training with compressed gradients has the bits of its emulation in one process, errors included; nothing is lost on the
// way; and where nothing is left out it is plain data parallelism.
#include <fmt/format.h>

#include <bit>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "plan/memory.h"
#include "plan/wire.h"
#include "plan/work.h"
#include "runtime/backend.h"
#include "runtime/named_kernels.h"
#include "runtime/session.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/numerics/emulation.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/test.h"

namespace shardlab {
namespace {

using testing::EmulatedBucket;
using testing::Emulation;

constexpr int kSteps = 3;

/// Compared as integers: -0 is not 0 here.
bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, [](float x, float y) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y); });
}

/// One of the matrix's untied subjects without dropout, which sums that are not the gradient leave finite.
Case base_case(const std::string& subject, int dp, int accumulation) {
  for (const testing::Subject& s : testing::subjects()) {
    if (s.name != subject) continue;
    Case c;
    c.layout.dp = dp;
    c.layout.overlap = false;
    c.canonical = true;
    c.train.grad_accumulation = accumulation;
    return testing::rows_of(s, std::span(&c, 1)).at(0);
  }
  FAIL("no subject " << subject);
  return {};
}

std::vector<int32_t> tokens_of(const Case& c, int64_t step) {
  const testing::RandomText text(c.model.vocab);
  const auto length = static_cast<size_t>(c.train.seq_len + 1);
  const int64_t sequences = c.sequences_per_step();
  std::vector<int32_t> tokens(static_cast<size_t>(sequences) * length);
  for (int64_t i = 0; i < sequences; ++i)
    text.sequence(step * sequences + i, std::span(tokens).subspan(static_cast<size_t>(i) * length, length));
  return tokens;
}

/// The CPU back end, which also checks that every kernel by name has the scratch that the plan says it needs, to the byte.
class Measuring final : public Backend {
 public:
  Measuring(std::unique_ptr<Backend> backend, bool canonical) : backend_(std::move(backend)), options_{canonical, 1} {}
  std::string_view name() const override { return backend_->name(); }
  bool has_storage() const override { return backend_->has_storage(); }
  Result<Launch> bind(const BoundOp& op) override {
    if (const Kernel* kernel = std::get_if<Kernel>(&op.op().work)) {
      const Result<ScratchLaunch> bound = bind_named(op, *kernel, {kernels_for_this_processor(), options_});
      if (!bound) return bound.error();
      const int64_t planned = scratch_bytes(*op.instruction->segment, op.op(), options_.canonical);
      INFO(kernel->name);
      CHECK(bound->scratch_bytes == planned);
      CHECK(planned <= static_cast<int64_t>(op.workspace.size()));
    }
    return backend_->bind(op);
  }
  void enter_thread(int stream) override { backend_->enter_thread(stream); }

 private:
  std::unique_ptr<Backend> backend_;
  CpuOptions options_;
};

/// A case in execution, with its plan.
struct Running {
  explicit Running(const Case& config) : source(config.model.vocab), transport(kernels_for_this_processor()) {
    auto plan = lower(config);
    INFO(config.name << (plan.ok() ? "" : to_string(plan.error())));
    REQUIRE(plan.ok());
    placed = place(std::move(*plan));
    RunOptions options;
    options.seed = config.train.seed;
    options.learning_rate = config.train.learning_rate;
    options.timeout_s = 60;
    options.poison = true;
    const BackendFactory cpu = cpu_backend(kernels_for_this_processor(), {config.canonical, 1});
    auto made = Session::create(
        placed, options, transport, [&](int rank) { return std::make_unique<Measuring>(cpu(rank), config.canonical); }, &source);
    REQUIRE(made.ok());
    session = std::move(*made);
    session->initialise_parameters();
  }

  /// Memory and wire as they were, to the byte.
  void require_counts() const {
    const Mesh& mesh = placed.plan->mesh;
    for (int rank = 0; rank < mesh.world_size(); ++rank) {
      const int stage = mesh.coordinates(rank)[static_cast<size_t>(mesh.axis("pp"))];
      const MemoryPeak peak = memory_peak(*placed.plan, stage)[static_cast<size_t>(Space::kDevice)];
      REQUIRE(session->ledger(rank).peak(Space::kDevice) == peak.peak_bytes);
      auto planned = wire_bytes(*placed.plan, placed.plan->mesh.coordinates(rank));
      for (size_t c = 0; c < placed.plan->comms.size(); ++c)
        REQUIRE(session->sent_by_comm(rank)[c] == planned[placed.plan->comms[c].name]);
    }
  }

  testing::RandomText source;
  ThreadTransport transport;
  PlacedPlan placed;
  std::unique_ptr<Session> session;
};

constexpr Compression kKinds[] = {
    {.kind = CompressionKind::kBf16},
    {.kind = CompressionKind::kInt8},
    {.kind = CompressionKind::kInt8, .bits = 4},
    {.kind = CompressionKind::kTopK, .k = 0.05},
    {.kind = CompressionKind::kRandomK, .k = 0.2},
    {.kind = CompressionKind::kPowerSgd, .rank = 3},
};

/// Every technique twice: on two ranks with SGD, a bucket a parameter, accumulated; on four with AdamW, larger buckets, overlapped.
std::vector<Case> rows() {
  std::vector<Case> all;
  for (const Compression& kind : kKinds)
    for (const bool four : {false, true}) {
      Case c = four ? base_case("llama adamw", 4, 1) : base_case("llama sgd", 2, 2);
      c.layout.compression = kind;
      c.layout.overlap = four;
      c.layout.bucket_bytes = four ? 20000 : 0;
      if (!four) c.train.learning_rate.peak = 0.25f;  // what is owed comes late, and adds up
      c.name = fmt::format("{} bits {} {}", name_of(kind.kind), kind.bits, c.name);
      REQUIRE(check(c).ok());
      all.push_back(std::move(c));
    }
  return all;
}

TEST_CASE("compressed training has the bits of its emulation, errors included, and loses nothing") {
  for (const Case& config : rows()) {
    INFO(config.name);
    Running run(config);
    Emulation emulation(config);
    std::vector<float> losses;
    for (int step = 0; step < kSteps; ++step) {
      const float expected = emulation.step(tokens_of(config, step));
      const StepResult result = run.session->step(step);
      REQUIRE(std::isfinite(expected));
      REQUIRE(static_cast<float>(*result.loss) == expected);
      losses.push_back(expected);
      for (size_t b = 0; b < emulation.buckets().size(); ++b)
        for (int rank = 0; rank < config.layout.dp; ++rank) {
          const EmulatedBucket& bucket = emulation.buckets()[b];
          const std::string name = fmt::format("bucket{}.error", b);
          INFO("step " << step << " rank " << rank << " " << name);
          const bool plain = config.layout.compression.kind == CompressionKind::kPowerSgd && bucket.basis.empty();
          if (plain) continue;
          if (!bucket.basis.empty())
            REQUIRE(same_bits(*run.session->read_buffer(rank, fmt::format("bucket{}.basis", b)), bucket.basis));
          REQUIRE(same_bits(*run.session->read_buffer(rank, name), bucket.errors[static_cast<size_t>(rank)]));
          if (!bucket.of_slices.empty())
            REQUIRE(same_bits(*run.session->read_buffer(rank, name + ".slice"), bucket.of_slices[static_cast<size_t>(rank)]));
        }
    }
    REQUIRE(emulation.conserved());
    REQUIRE(emulation.largest_loss() < 1e-6);  // PowerSGD's, to rounding; nothing else loses anything
    REQUIRE(losses.front() != losses.back());
    for (const ModelParameter& p : parameters_of(config.model)) {
      INFO(p.name);
      REQUIRE(same_bits(run.session->parameter(p.name)->values, emulation.trainer().value(p.name)));
    }
    run.require_counts();
  }
}

TEST_CASE("all elements sent is plain data parallelism, bit for bit") {
  for (const CompressionKind kind : {CompressionKind::kTopK, CompressionKind::kRandomK})
    for (const char* subject : {"llama sgd", "llama adamw"}) {
      Case plain = base_case(subject, 4, 1);
      Case all = plain;
      all.layout.compression = {.kind = kind, .k = 1.0};
      const testing::RandomText text(plain.model.vocab);
      const auto expected = testing::train_case(plain, text, kSteps), have = testing::train_case(all, text, kSteps);
      REQUIRE(expected.ok());
      REQUIRE(have.ok());
      CHECK(same_bits(expected->losses, have->losses));
      for (const auto& [name, values] : expected->parameters) {
        INFO(name);
        CHECK(std::ranges::equal(values, have->parameters.at(name)));  // a gradient of -0 may come as +0
      }
    }
}

TEST_CASE("under the other axes: replicas agree, and memory and wire are as planned") {
  size_t number = 0;
  for (const Compression& kind : kKinds) {
    Case c;
    for (const testing::Subject& s : testing::subjects())
      if (s.name == (number % 2 == 0 ? "gpt tied bf16 clipped adamw" : "llama tied dropout clipped adamw")) {
        c.layout.dp = 2;
        c.layout.tp = kind.kind == CompressionKind::kPowerSgd ? 1 : 2;
        c.layout.pp = 1;
        c.layout.schedule = c.layout.pp == 1 ? Schedule::kNone : Schedule::k1F1B;
        c.layout.bucket_bytes = 8192;
        c.train.grad_accumulation = 2;
        c = testing::rows_of(s, std::span(&c, 1)).at(0);
      }
    c.layout.compression = kind;
    c.name += fmt::format(" {} bits {}", name_of(kind.kind), kind.bits);
    INFO(c.name);
    ++number;
    Running run(c);
    for (int step = 0; step < kSteps; ++step) REQUIRE(std::isfinite(*run.session->step(step).loss));
    for (const ModelParameter& p : parameters_of(c.model)) {
      INFO(p.name);
      const auto value = run.session->parameter(p.name);  // refused where two replicas differ in a bit
      REQUIRE(value.ok());
      CHECK(std::ranges::all_of(value->values, [](float x) { return std::isfinite(x); }));
    }
    run.require_counts();
  }
}

TEST_CASE("PowerSGD at full rank is plain data parallelism but for rounding") {
  Case plain = base_case("llama sgd", 2, 1);
  Case full = plain;
  full.layout.compression = {.kind = CompressionKind::kPowerSgd, .rank = 1 << 20};
  const testing::RandomText text(plain.model.vocab);
  const auto expected = testing::train_case(plain, text, kSteps), have = testing::train_case(full, text, kSteps);
  REQUIRE(expected.ok());
  REQUIRE(have.ok());
  for (int step = 0; step < kSteps; ++step)
    CHECK(have->losses[static_cast<size_t>(step)] == Approx(expected->losses[static_cast<size_t>(step)]).epsilon(1e-4));
  double error = 0, size = 0;
  for (const auto& [name, values] : expected->parameters)
    for (size_t i = 0; i < values.size(); ++i) {
      const double d = double{values[i]} - double{have->parameters.at(name)[i]};
      error += d * d;
      size += double{values[i]} * double{values[i]};
    }
  CHECK(std::sqrt(error / size) < 1e-4);
  CHECK(error > 0);  // the factors were multiplied
}

}  // namespace
}  // namespace shardlab
