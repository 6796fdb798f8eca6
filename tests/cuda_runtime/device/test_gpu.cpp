// On a real GPU: every foundation layout in canonical mode gives one rank's bits and the CPU's values; the library's matmul trains;
// one rank of the real NCCL. Says that it is skipped where there is none.
#include "plan/text.h"
#include "runtime/cuda/nccl_transport.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

/// The real runtime, or nothing and a line that says why.
std::unique_ptr<cuda::Api> usable_gpu() {
  auto api = cuda::real_api();
  const cuda::Presence presence = cuda::presence();
  if (!api.ok() || !presence.usable()) {
    WARN("skipped: " << presence.reason);
    return nullptr;
  }
  return std::move(*api);
}

}  // namespace

TEST_CASE("every layout on the GPU gives the bits of one rank, and the CPU's values") {
  const auto api = usable_gpu();
  if (api == nullptr) return;
  for (const Family family : {Family::kGpt, Family::kLlama}) {
    const auto layouts = training_layouts(training_subject(family));
    const RunSettings settings{.steps = 3};
    const Run one = train_on_gpu(*api, *cuda::built_kernels(), layouts.front().second, settings);
    const Run cpu = train_on_cpu(layouts.front().second, settings);
    REQUIRE(one.losses[2] != one.losses[0]);
    for (size_t step = 0; step < one.losses.size(); ++step) REQUIRE(one.losses[step] == Approx(cpu.losses[step]).epsilon(1e-4));
    for (const auto& [name, values] : one.parameters) {
      INFO(name);
      REQUIRE(worst(values, cpu.parameters.at(name)) < 1e-3);
    }
    for (const auto& [name, config] : layouts) {
      INFO(name_of(family) << " " << name);
      const Run run = train_on_gpu(*api, *cuda::built_kernels(), config, settings);
      REQUIRE(run.losses == one.losses);
      for (const auto& [parameter, values] : one.parameters) {
        INFO(parameter);
        REQUIRE(same_bits(run.parameters.at(parameter), values));
      }
      REQUIRE(run.peaks == run.planned);
    }
  }
}

TEST_CASE("experts that ranks share on the GPU: every layout gives the bits of one rank") {
  const auto api = usable_gpu();
  if (api == nullptr) return;
  for (const auto& [name, subject] : mixtures()) {
    const RunSettings settings{.steps = 3};
    const Run one = train_on_gpu(*api, *cuda::built_kernels(), training_layouts(subject).front().second, settings);
    for (const auto& [layout, config] : expert_layouts(subject)) {
      if (config.layout.cp > 1) continue;  // tokens in another order
      INFO(name << " " << layout);
      const Run run = train_on_gpu(*api, *cuda::built_kernels(), config, settings);
      REQUIRE(run.losses == one.losses);
      for (const auto& [parameter, values] : one.parameters) {
        INFO(parameter);
        REQUIRE(same_bits(run.parameters.at(parameter), values));
      }
      REQUIRE(run.peaks == run.planned);
    }
  }
}

TEST_CASE("the library's matmul on the GPU trains as the CPU does") {
  const auto api = usable_gpu();
  if (api == nullptr) return;
  Case c = tiny_case(Family::kLlama);
  c.train.micro_batch = 4;
  c.layout.dp = 2;
  c.layout.bucket_bytes = 16384;
  c.train.learning_rate.peak = 1e-2f;
  const Run device = train_on_gpu(*api, *cuda::built_kernels(), c, {.steps = 3});
  const Run cpu = train_on_cpu(c, {.steps = 3});
  for (size_t step = 0; step < 3; ++step) REQUIRE(device.losses[step] == Approx(cpu.losses[step]).epsilon(1e-4));
}

TEST_CASE("cuDNN's attention on the GPU trains as our own does, in grouped heads too") {
  const auto api = usable_gpu();
  if (api == nullptr) return;
  auto cudnn = gpu::real_cudnn();
  if (!cudnn.ok()) {
    WARN("skipped: " << cudnn.error().message);
    return;
  }
  Case c = tiny_case(Family::kLlama);
  c.model.head_dim = 64;
  c.model.hidden = 256;
  c.train.precision = Precision::kBf16;
  c.train.seq_len = 128;
  c.train.micro_batch = 2;
  c.train.global_batch_tokens = 256;
  for (const int kv_heads : {1, 2, 4}) {
    INFO("kv_heads " << kv_heads);
    c.model.kv_heads = kv_heads;
    std::set<std::string> notes;
    const RunSettings own{.steps = 3};
    RunSettings theirs{.steps = 3};
    theirs.cuda = {.attention = AttentionBy::kCudnn, .cudnn = cudnn->get(), .notes = &notes};
    const Run a = train_on_gpu(*api, *cuda::built_kernels(), c, own), b = train_on_gpu(*api, *cuda::built_kernels(), c, theirs);
    REQUIRE(notes.size() == 2);
    REQUIRE(notes.begin()->find("cuDNN") != std::string::npos);
    REQUIRE(b.peaks == b.planned);
    for (size_t step = 0; step < 3; ++step) REQUIRE(b.losses[step] == Approx(a.losses[step]).epsilon(1e-2));
  }
}

TEST_CASE("one rank of the real NCCL: a communicator, its warm-up, an all_reduce and an all_gather in a step") {
  const auto api = usable_gpu();
  if (api == nullptr) return;
  auto nccl = cuda::real_nccl();
  if (!nccl.ok()) {
    WARN("skipped: " << nccl.error().message);
    return;
  }
  auto parsed = parse_plan(plan_head(1, 1, 1) + R"(comm dp axes dp
segment s
  bound %x temporary f32[64]
  bound %y temporary f32[64]
  local %sum temporary f32[64] view %x
  fill three () -> (%x) value=3
  all_reduce sum (%x) -> (%sum) comm=dp algorithm=ring @comm
  all_gather gather (%sum) -> (%y) comm=dp algorithm=ring @comm
role 0
  %x temporary f32[64] persistent
  %y temporary f32[64] persistent

  call s (x=%x, y=%y)
)");
  INFO((parsed.ok() ? std::string() : to_string(parsed.error())));
  REQUIRE(parsed.ok());
  const PlacedPlan placed = place(std::move(*parsed));
  cuda::Node node(*api, *cuda::built_kernels(), {0});
  auto transport = cuda::NcclTransport::create(**nccl, placed, &node);
  REQUIRE(transport.ok());
  auto session = Session::create(placed, {.timeout_s = 60}, **transport, cuda::cuda_backend(node, {}), nullptr);
  REQUIRE(session.ok());
  for (int step = 0; step < 3; ++step) (*session)->step(step);
  REQUIRE(*(*session)->read_buffer(0, "y") == std::vector<float>(64, 3.0f));
}

}  // namespace shardlab::testing
