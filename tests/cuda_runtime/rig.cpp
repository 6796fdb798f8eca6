#include "tests/cuda_runtime/rig.h"

#include <cmath>
#include <cstring>

#include "kernels/kernels.h"
#include "plan/base/philox.h"
#include "plan/memory.h"
#include "runtime/cuda/one_gpu_transport.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

RunOptions options_for(const Case& config, RunOptions options) {
  options.seed = config.train.seed;
  options.learning_rate = config.train.learning_rate;
  options.timeout_s = 120;
  options.poison = true;
  return options;
}

cuda::CudaOptions options_of(const Case& config, const RunSettings& settings) {
  cuda::CudaOptions options = settings.cuda;
  options.canonical = config.canonical;
  return options;
}

Run train(Session& session, const Case& config, const PlacedPlan& placed, int steps) {
  Run run;
  session.initialise_parameters();
  const int period = placed.plan->period;
  for (int step = 0; step + period <= steps; step += period)
    for (const StepResult& result : session.run(step, period)) {
      for (const auto& loss : result.losses) {
        REQUIRE(loss.has_value());
        run.losses.push_back(*loss);
      }
      if (result.grad_norm2) run.norms.push_back(*result.grad_norm2);
      run.sent_bytes = result.sent_bytes;
      run.skipped += result.skipped ? 1 : 0;
    }
  for (const ModelParameter& p : parameters_of(config.model)) {
    auto value = session.parameter(p.name);
    if (value.ok())
      run.parameters[p.name] = std::move(value->values);
    else
      run.replicas_agree = false;
  }
  for (int rank = 0; rank < placed.plan->mesh.world_size(); ++rank) {
    const auto stage = placed.plan->mesh.find("pp");
    const int role = stage ? placed.plan->mesh.coordinates(rank)[static_cast<size_t>(*stage)] : 0;
    run.peaks.push_back(session.ledger(rank).peak(Space::kDevice));
    run.planned.push_back(memory_peak(*placed.plan, role)[static_cast<size_t>(Space::kDevice)].peak_bytes);
  }
  return run;
}

PlacedPlan placed_plan(const Case& config) {
  auto plan = lower(config);
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  return place(std::move(*plan));
}

}  // namespace

std::vector<std::pair<std::string, Case>> training_layouts(const Case& subject) {
  std::vector<std::pair<std::string, Case>> all;
  const auto add = [&](const std::string& name, const auto& change) {
    Case c = subject;
    change(c);
    if (c.model.tied_embeddings && c.layout.pp > 1) c.train.grad_norm = false;  // the table's norm would count twice
    const int64_t per_rank = 8 / c.layout.dp;
    c.train.micro_batch = per_rank / c.train.grad_accumulation;
    c.train.global_batch_tokens = c.train.seq_len * 8;
    all.emplace_back(name, c);
  };
  add("single", [](Case&) {});
  add("accumulate 4", [](Case& c) { c.train.grad_accumulation = 4; });
  add("recompute", [](Case& c) { c.layout.recompute = Recompute::kFull; });
  add("dp2 overlap", [](Case& c) { c.layout.dp = 2, c.layout.bucket_bytes = 16384; });
  add("dp2 zero1 overlap", [](Case& c) { c.layout.dp = 2, c.layout.zero = 1, c.layout.bucket_bytes = 16384; });
  add("dp4 zero1", [](Case& c) { c.layout.dp = 4, c.layout.zero = 1; });
  add("tp2", [](Case& c) { c.layout.tp = 2; });
  add("pp2 afab", [](Case& c) { c = with_pipeline(c, 2, Schedule::kAfab, 2); });
  add("pp2 1f1b", [](Case& c) { c = with_pipeline(c, 2, Schedule::k1F1B, 4); });
  add("dp2 tp2 pp2 zero1", [](Case& c) {
    c = with_pipeline(c, 2, Schedule::k1F1B, 2);
    c.layout.dp = c.layout.tp = 2;
    c.layout.zero = 1;
    c.layout.bucket_bytes = 32768;
  });
  add("packed", [](Case& c) { c.data.packed = true; });
  add("packed dp2 tp2 sequence parallel", [](Case& c) {
    c.data.packed = true;
    c.layout.dp = c.layout.tp = 2;
    c.layout.sequence_parallel = true;
  });
  for (const ContextKind kind : {ContextKind::kZigzag, ContextKind::kAllGather, ContextKind::kUlysses})
    add(fmt::format("packed cp2 {}", name_of(kind)), [&](Case& c) {
      c.data.packed = true;
      c.layout.cp = 2;
      c.layout.cp_kind = kind;
      c.train.grad_accumulation = 8;
    });
  return all;
}

Case training_subject(Family family) {
  Case c = tiny_case(family);
  c.canonical = true;
  c.train.optimizer = Optimizer::kSgd;
  c.train.learning_rate.peak = 1;
  c.train.grad_norm = true;
  if (family == Family::kGpt) {
    c.model.tied_embeddings = true;
    c.train.dropout = 0.1f;
  }
  return c;
}

double worst(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    REQUIRE(std::isfinite(a[i]));
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return most;
}

void Tokens64::sequence(int64_t number, std::span<int32_t> out) const {
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<int32_t>(random_bits({7, RandomUse::kShuffle, 1, 0}, static_cast<uint64_t>(number) * 1024 + i) % 64);
}

void Tokens64::packed(int64_t number, const PackedSequence& out) const {
  sequence(number, out.tokens);
  sequence(number + 100'000, out.targets);
  for (size_t i = 0; i < out.positions.size(); ++i) {
    const bool begins = random_bits({7, RandomUse::kShuffle, 2, 0}, static_cast<uint64_t>(number) * 1024 + i) % 5 == 0;
    out.positions[i] = i == 0 || begins ? 0 : out.positions[i - 1] + 1;
  }
}

PlacedPlan lowered(Case config) {
  config.backend = BackendKind::kCuda;
  config.transport = TransportKind::kOneGpu;
  return placed_plan(config);
}

FakeRun::FakeRun(const PlacedPlan& placed, FakeApi& api, const RunOptions& options, const cuda::CudaOptions& cuda, Behind kernels)
    : FakeRun(placed, api, options, cuda, queued_kernels(kernels), nullptr) {}

FakeRun::FakeRun(const PlacedPlan& placed, FakeApi& api, const RunOptions& options, const cuda::CudaOptions& cuda,
                 const gpu::Kernels& kernels, cuda::MemoryAccount* account)
    : node(api, kernels, std::vector<int>(static_cast<size_t>(placed.plan->mesh.world_size()), 0), account),
      transport(std::make_unique<cuda::OneGpuTransport>(node)),
      session(Session::create(placed, options, *transport, cuda::cuda_backend(node, cuda), &tokens)) {}

Run train_on_fake(const Case& config, const RunSettings& settings) {
  const PlacedPlan placed = lowered(config);
  FakeApi api(settings.seed);
  api.forget_waits = settings.forget_waits;
  Run run;
  {
    FakeRun fake(placed, api, options_for(config, settings.options), options_of(config, settings), settings.kernels);
    INFO((fake.session.ok() ? std::string() : to_string(fake.session.error())));
    REQUIRE(fake.session.ok());
    run = train(**fake.session, config, placed, settings.steps);
  }
  if (!settings.forget_waits) REQUIRE(run.replicas_agree);
  REQUIRE_FALSE(api.deadlocked());
  REQUIRE(api.live_allocations() == 0);
  REQUIRE(api.live_streams() == 0);
  REQUIRE(api.live_events() == 0);
  run.most_pending = api.most_pending();
  return run;
}

Run train_on_gpu(cuda::Api& api, const gpu::Kernels& kernels, const Case& config, const RunSettings& settings) {
  const PlacedPlan placed = lowered(config);
  const Tokens64 tokens;
  cuda::Node node(api, kernels, std::vector<int>(static_cast<size_t>(placed.plan->mesh.world_size()), 0));
  cuda::OneGpuTransport transport(node);
  auto session = Session::create(placed, options_for(config, settings.options), transport,
                                 cuda::cuda_backend(node, options_of(config, settings)), &tokens);
  INFO((session.ok() ? std::string() : to_string(session.error())));
  REQUIRE(session.ok());
  Run run = train(**session, config, placed, settings.steps);
  REQUIRE(run.replicas_agree);
  return run;
}

Run train_on_cpu(const Case& config, const RunSettings& settings) {
  const PlacedPlan placed = placed_plan(config);
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  ThreadTransport transport(kernels);
  const Tokens64 tokens;
  auto session = Session::create(placed, options_for(config, settings.options), transport,
                                 cpu_backend(kernels, {config.canonical, 1}), &tokens);
  REQUIRE(session.ok());
  return train(**session, config, placed, settings.steps);
}

}  // namespace shardlab::testing
