#include "tests/numerics/running.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/kernels.h"
#include "plan/memory.h"
#include "plan/wire.h"
#include "plan/work.h"
#include "runtime/backend.h"
#include "runtime/named_kernels.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::ranges::equal(a, b, [](float x, float y) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y); });
}

Case base_case(const std::string& subject, int dp, int accumulation) {
  for (const Subject& s : subjects()) {
    if (s.name != subject) continue;
    Case c;
    c.layout.dp = dp;
    c.layout.overlap = false;
    c.canonical = true;
    c.train.grad_accumulation = accumulation;
    return rows_of(s, std::span(&c, 1)).at(0);
  }
  FAIL("no subject " << subject);
  return {};
}

std::vector<int32_t> tokens_of(const Case& c, int64_t step) {
  const RandomText text(c.model.vocab);
  const auto length = static_cast<size_t>(c.train.seq_len + 1);
  const int64_t sequences = c.sequences_per_step();
  std::vector<int32_t> tokens(static_cast<size_t>(sequences) * length);
  for (int64_t i = 0; i < sequences; ++i)
    text.sequence(step * sequences + i, std::span(tokens).subspan(static_cast<size_t>(i) * length, length));
  return tokens;
}

namespace {

/// The CPU back end, which also checks that every kernel by name has the scratch that the plan says it needs, to the byte.
class Measuring final : public Backend {
 public:
  Measuring(std::unique_ptr<Backend> backend, bool canonical) : backend_(std::move(backend)), options_{canonical, 1} {}
  std::string_view name() const override { return backend_->name(); }
  bool has_storage() const override { return backend_->has_storage(); }
  Result<Launch> bind(const BoundOp& op) override {
    if (const Kernel* kernel = std::get_if<Kernel>(&op.op().work)) {
      const Result<ScratchLaunch> bound = bind_named(op, *kernel, {kernels::kernels_for_this_processor(), options_});
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

}  // namespace

Running::Running(const Case& config) : Running(config, lower(config)) {}

Running::Running(const Case& config, Result<Plan> plan) : source(config.model.vocab), transport(kernels::kernels_for_this_processor()) {
  INFO(config.name << (plan.ok() ? "" : to_string(plan.error())));
  REQUIRE(plan.ok());
  placed = place(std::move(*plan));
  RunOptions options;
  options.seed = config.train.seed;
  options.learning_rate = config.train.learning_rate;
  options.timeout_s = 60;
  options.poison = true;
  const BackendFactory cpu = cpu_backend(kernels::kernels_for_this_processor(), {config.canonical, 1});
  auto made = Session::create(
      placed, options, transport, [&](int rank) { return std::make_unique<Measuring>(cpu(rank), config.canonical); }, &source);
  INFO((made.ok() ? "" : to_string(made.error())));
  REQUIRE(made.ok());
  session = std::move(*made);
  session->initialise_parameters();
}

void Running::require_counts() const {
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

}  // namespace shardlab::testing
