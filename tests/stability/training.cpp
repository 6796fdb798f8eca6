#include "tests/stability/training.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/kernels.h"
#include "plan/base/hash.h"
#include "runtime/backend.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr int64_t kSequences = 8;

class Tokens final : public BatchSource {
 public:
  void sequence(int64_t number, std::span<int32_t> out) const override {
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<int32_t>(mix(static_cast<uint64_t>(number) * 1000 + i) % 64);
  }
};

/// Carries out every op as the real back end does, but for what is planted.
class PlantingBackend final : public Backend {
 public:
  PlantingBackend(std::unique_ptr<Backend> real, std::vector<Plant> plants) : real_(std::move(real)), plants_(std::move(plants)) {}

  std::string_view name() const override { return real_->name(); }
  bool has_storage() const override { return true; }
  void enter_thread(int stream) override { real_->enter_thread(stream); }
  Result<Launch> bind(const BoundOp& op) override {
    auto launch = real_->bind(op);
    const auto* kernel = std::get_if<Kernel>(&op.op().work);
    if (!launch.ok() || kernel == nullptr) return launch;
    std::erase_if(plants_, [&](const Plant& p) { return p.rank != op.rank; });
    return Launch(
        [plants = plants_, name = kernel->name, reads = op.reads, run = std::move(launch).value()](const StepState& state) {
          for (const Plant& p : plants) {
            if (p.step != state.step || p.kernel != name) continue;
            REQUIRE(reads.front().type->dtype == DType::f32);
            *reads.front().as<float>() = p.value;
          }
          run(state);
        });
  }

 private:
  std::unique_ptr<Backend> real_;
  std::vector<Plant> plants_;
};

}  // namespace

Case stability_case(const Ranks& ranks, Optimizer optimizer) {
  Case c;
  c.model = {.name = "tiny",
             .family = Family::kGpt,
             .layers = 2,
             .hidden = 32,
             .heads = 4,
             .kv_heads = 4,
             .head_dim = 8,
             .ffn = 64,
             .vocab = 64,
             .max_positions = 16,
             .tied_embeddings = true,
             .init_deviation = 0.15f};
  c.canonical = true;
  c.train.seq_len = 12;
  c.train.optimizer = optimizer;
  c.train.weight_decay = optimizer == Optimizer::kAdamW ? 0.1f : 0.0f;
  c.train.learning_rate.peak = optimizer == Optimizer::kAdamW ? 0.01f : 0.5f;
  c.layout.dp = ranks.dp;
  c.layout.tp = ranks.tp;
  c.layout.pp = ranks.pp;
  c.layout.schedule = ranks.pp > 1 ? Schedule::k1F1B : Schedule::kNone;
  c.layout.zero = ranks.zero;
  c.layout.recompute = ranks.recompute;
  c.train.grad_accumulation = ranks.accumulation;
  c.train.micro_batch = kSequences / ranks.dp / ranks.accumulation;
  return c;
}

std::string line_of(const Ranks& r) {
  return fmt::format("dp{} tp{} pp{} zero{} m{} recompute={}", r.dp, r.tp, r.pp, r.zero, r.accumulation, name_of(r.recompute));
}

Training::Training(const Case& c, std::vector<Plant> plants) : config(c) {
  auto plan = lower(config);
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  placed = place(std::move(*plan));
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  transport = std::make_unique<ThreadTransport>(kernels);
  RunOptions options;
  options.learning_rate = config.train.learning_rate;
  options.timeout_s = 60;
  options.poison = true;
  static const Tokens tokens;
  const BackendFactory real = cpu_backend(kernels, {config.canonical, 1});
  const BackendFactory planting = [real, plants](int rank) { return std::make_unique<PlantingBackend>(real(rank), plants); };
  auto made = Session::create(placed, options, *transport, planting, &tokens);
  INFO((made.ok() ? std::string() : to_string(made.error())));
  REQUIRE(made.ok());
  session = std::move(*made);
  session->initialise_parameters();
}

std::map<StateName, std::vector<float>> Training::state() const {
  std::map<StateName, std::vector<float>> all;
  const auto names = session->states();
  INFO((names.ok() ? std::string() : to_string(names.error())));
  REQUIRE(names.ok());
  for (const StateName& name : *names) {
    const auto tensor = session->state(name);
    INFO((tensor.ok() ? std::string() : to_string(tensor.error())));
    REQUIRE(tensor.ok());
    all[name] = tensor->values;
  }
  return all;
}

}  // namespace shardlab::testing
