#include "tests/cuda_runtime/rig.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>

#include "kernels/kernels.h"
#include "plan/base/philox.h"
#include "plan/memory.h"
#include "plan/placed_plan.h"
#include "plan/techniques.h"
#include "runtime/cuda/nccl_transport.h"
#include "runtime/cuda/one_gpu_transport.h"
#include "runtime/made_again.h"
#include "runtime/thread_transport.h"
#include "strategies/lower.h"
#include "tests/cuda_runtime/moving_nccl.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

/// `beside`: the session in whose arenas the ranks lie, of a step's second run; none: the first.
RunOptions options_for(const Case& config, RunOptions options, const Session* beside = nullptr) {
  options.beside = beside;
  if (beside != nullptr) options.rows_together = static_cast<int>(config.train.micro_batch);
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

/// `in_step`: the session in which steps without room are made again; none: there is room for every row.
Run train(Session& session, const Case& config, const PlacedPlan& placed, int steps, const InStep& in_step = {}) {
  Run run;
  session.initialise_parameters();
  const int period = placed.plan->period;
  const auto results_of = [&](int step) -> std::vector<StepResult> {
    if (!in_step) return session.run(step, period);
    auto judged = run_judged(session, step, in_step);
    REQUIRE(judged.ok());
    run.reruns += judged->again.empty() ? 0 : 1;
    const auto counted = judged->counted();
    return {counted.begin(), counted.end()};
  };
  for (int step = 0; step + period <= steps; step += period)
    for (const StepResult& result : results_of(step)) {
      for (const auto& loss : result.losses) {
        REQUIRE(loss.has_value());
        run.losses.push_back(*loss);
      }
      if (result.grad_norm2) run.norms.push_back(*result.grad_norm2);
      run.sent_bytes = result.sent_bytes;
      run.skipped += result.skipped ? 1 : 0;
      run.experts.push_back(result.experts);
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

Case on_gpu(Case config) {
  config.backend = BackendKind::kCuda;
  config.transport = TransportKind::kOneGpu;
  return config;
}

PlacedPlan placed_plan(const Case& config) {
  auto plan = lower(config);
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  return place(std::move(*plan));
}

/// The plan of a step's second run in the arenas of the first, where there is a bound on rows of experts.
std::optional<PlacedPlan> placed_again(const Case& config, PlacedPlan& first) {
  if (!bounds_experts(config)) return std::nullopt;
  auto plan = lower_in_step(config);
  INFO((plan.ok() ? std::string() : to_string(plan.error())));
  REQUIRE(plan.ok());
  PlacedPlan again = place(std::move(*plan));
  REQUIRE(share_arenas(first, again).ok());
  return again;
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

std::vector<std::pair<std::string, Case>> mixtures() {
  std::vector<std::pair<std::string, Case>> all;
  const auto add = [&](const std::string& name, const Experts& experts) {
    Case c = training_subject(Family::kLlama);
    c.model.experts = experts;
    all.emplace_back(name, c);
  };
  add("softmax", {.count = 4, .top_k = 2, .ffn = 24, .balance = 0.05f, .z_loss = 0.01f});
  add("sigmoid", {.count = 8,
                  .top_k = 3,
                  .ffn = 16,
                  .sigmoid = true,
                  .factor = 2.5f,
                  .balance = 0.02f,
                  .shared = 1,
                  .dense_layers = 1,
                  .groups = 4,
                  .groups_chosen = 2,
                  .bias_update_rate = 0.01f});
  add("capacity", {.count = 4, .top_k = 2, .ffn = 24, .normalise = false, .shared = 1, .shared_gate = true, .capacity_factor = 1});
  return all;
}

std::vector<std::pair<std::string, Case>> expert_layouts(const Case& subject) {
  std::vector<std::pair<std::string, Case>> all;
  const auto add = [&](const std::string& name, const auto& change) {
    Case c = subject;
    change(c);
    c.train.micro_batch = 8 / c.layout.dp / c.train.grad_accumulation;
    c.train.global_batch_tokens = c.train.seq_len * 8;
    if (check(c).ok()) all.emplace_back(name, c);
  };
  const auto shared = [](Case& c, int dp, int ep, int zero = 0, int micro_batches = 1) {
    c.layout.dp = dp, c.layout.ep = ep, c.layout.zero = zero, c.train.grad_accumulation = micro_batches;
  };
  const auto place = [](Case& c) { c.layout.expert_placement = c.model.experts.count == 4 ? "1:3,0,2,1" : "1:6,0,3,1,7,2,4,5"; };
  add("dp2 ep2", [&](Case& c) { shared(c, 2, 2); });
  add("dp4 ep2 zero2", [&](Case& c) { shared(c, 4, 2, 2, 2); });
  add("dp4 ep4 zero2", [&](Case& c) { shared(c, 4, 4, 2); });
  add("dp2 ep2 zero3", [&](Case& c) { shared(c, 2, 2, 3, 2); });
  add("dp2 ep2 pp2", [&](Case& c) {
    shared(c, 2, 2);
    c = with_pipeline(c, 2, Schedule::k1F1B, 4);
  });
  add("dp2 ep2 tp2 sequence parallel", [&](Case& c) {
    shared(c, 2, 2, 0, 2);
    c.layout.tp = 2, c.layout.sequence_parallel = true;
  });
  add("dp2 ep2 recompute", [&](Case& c) {
    shared(c, 2, 2, 0, 2);
    c.layout.recompute = Recompute::kFull;
  });
  add("dp2 ep2 activations on the host", [&](Case& c) {
    shared(c, 2, 2, 0, 2);
    c.layout.offload.activations = OffloadTo::kCpu;
  });
  add("dp2 ep2 beside the layer", [&](Case& c) {
    shared(c, 2, 2, 0, 2);
    c.layout.expert_overlap = ExpertOverlap::kLayer;
  });
  add("dp2 ep2 braided", [&](Case& c) {
    shared(c, 2, 2, 0, 4);
    c.layout.expert_overlap = ExpertOverlap::kMicroBatches;
  });
  add("dp2 ep2 pp2 braided", [&](Case& c) {
    shared(c, 2, 2);
    c = with_pipeline(c, 2, Schedule::kZbH2, 4);
    c.layout.expert_overlap = ExpertOverlap::kMicroBatches;
  });
  add("dp2 ep2 placed", [&](Case& c) {
    shared(c, 2, 2);
    place(c);
  });
  for (const ContextKind kind : {ContextKind::kZigzag, ContextKind::kUlysses})
    add(fmt::format("dp2 cp2 ep4 {}", name_of(kind)), [&](Case& c) {
      shared(c, 2, 4, 0, 4);
      c.layout.cp = 2, c.layout.cp_kind = kind;
    });
  add("dp2 cp2 ep2 all-gather placed", [&](Case& c) {
    shared(c, 2, 2, 0, 4);
    c.layout.cp = 2, c.layout.cp_kind = ContextKind::kAllGather;
    place(c);
  });
  const auto whole = [&](Case& c, int dp, int ep, int zero, int micro_batches) {
    shared(c, dp, ep, zero, micro_batches);
    c.layout.tp = 2, c.layout.sequence_parallel = true, c.layout.expert_tp = 1;
  };
  add("dp2 tp2 ep4 whole placed", [&](Case& c) {
    whole(c, 2, 4, 0, 4);
    place(c);
  });
  add("dp2 tp2 ep2 whole zero2 recompute", [&](Case& c) {
    whole(c, 2, 2, 2, 4);
    c.layout.recompute = Recompute::kFull;
  });
  add("cp2 tp2 ep4 whole beside the layer", [&](Case& c) {
    whole(c, 1, 4, 0, 8);
    c.layout.cp = 2, c.layout.cp_kind = ContextKind::kUlysses;
    c.layout.expert_overlap = ExpertOverlap::kLayer;
  });
  add("dp2 tp4 ep4 slices over two ranks zero2", [&](Case& c) {
    shared(c, 2, 4, 2, 4);
    c.layout.tp = 4, c.layout.sequence_parallel = true, c.layout.expert_tp = 2;
  });
  return all;
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

PlacedPlan lowered(const Case& config) { return placed_plan(on_gpu(config)); }

FakeRun::FakeRun(const PlacedPlan& placed, FakeApi& api, const RunOptions& options, const cuda::CudaOptions& cuda, Behind kernels)
    : FakeRun(placed, api, options, cuda, queued_kernels(kernels), nullptr) {}

namespace {

/// Devices by rank.
std::vector<int> devices_of(const PlacedPlan& placed, bool apart) {
  std::vector<int> devices(static_cast<size_t>(placed.plan->mesh.world_size()), 0);
  if (apart) std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

std::unique_ptr<Transport> transport_of(const PlacedPlan& placed, cuda::Node& node, cuda::NcclApi* nccl) {
  if (nccl == nullptr) return std::make_unique<cuda::OneGpuTransport>(node);
  auto made = cuda::NcclTransport::create(*nccl, placed, &node);
  INFO((made.ok() ? std::string() : to_string(made.error())));
  REQUIRE(made.ok());
  return std::move(*made);
}

}  // namespace

FakeRun::FakeRun(const PlacedPlan& placed, FakeApi& api, const RunOptions& options, const cuda::CudaOptions& cuda,
                 const gpu::Kernels& kernels, cuda::MemoryAccount* account, cuda::NcclApi* nccl)
    : node(api, kernels, devices_of(placed, nccl != nullptr), account),
      transport(transport_of(placed, node, nccl)),
      session(Session::create(placed, options, *transport, cuda::cuda_backend(node, cuda), &tokens)) {}

Run train_on_fake(const Case& config, const RunSettings& settings) {
  PlacedPlan placed = lowered(config);
  std::optional<PlacedPlan> again = placed_again(on_gpu(config), placed);
  FakeApi api(settings.seed, settings.nccl ? placed.plan->mesh.world_size() : 1);
  api.forget_waits = settings.forget_waits;
  MovingNccl nccl;
  Run run;
  {
    const auto fake_run = [&](const PlacedPlan& of, const Session* beside) {
      auto made = std::make_unique<FakeRun>(of, api, options_for(config, settings.options, beside), options_of(config, settings),
                                            queued_kernels(settings.kernels), nullptr, settings.nccl ? &nccl : nullptr);
      INFO((made->session.ok() ? std::string() : to_string(made->session.error())));
      REQUIRE(made->session.ok());
      return made;
    };
    const auto first = fake_run(placed, nullptr);
    std::unique_ptr<FakeRun> second;
    const InStep in_step = [&]() -> Result<Session*> {
      if (second == nullptr) second = fake_run(*again, first->session->get());
      return second->session->get();
    };
    run = train(**first->session, config, placed, settings.steps, again ? in_step : InStep{});
  }
  if (!settings.forget_waits) REQUIRE(run.replicas_agree);
  REQUIRE(nccl.fault() == "");
  REQUIRE((nccl.messages() > 0 || !settings.nccl || config.layout.ep == 1));
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
  PlacedPlan placed = placed_plan(config);
  std::optional<PlacedPlan> again = placed_again(config, placed);
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  ThreadTransport transport(kernels), second_transport(kernels);
  const Tokens64 tokens;
  const auto session_of = [&](const PlacedPlan& of, Transport& by, const Session* beside) {
    auto session = Session::create(of, options_for(config, settings.options, beside), by,
                                   cpu_backend(kernels, {config.canonical, 1}), &tokens);
    REQUIRE(session.ok());
    return std::move(*session);
  };
  const auto first = session_of(placed, transport, nullptr);
  std::unique_ptr<Session> second;
  const InStep in_step = [&]() -> Result<Session*> {
    if (second == nullptr) second = session_of(*again, second_transport, first.get());
    return second.get();
  };
  return train(*first, config, placed, settings.steps, again ? in_step : InStep{});
}

}  // namespace shardlab::testing
