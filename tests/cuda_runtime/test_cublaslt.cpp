// Whole cases whose products cuBLASLt is asked for: every one that a plan comes to, carried out from its description alone.
#include <set>

#include "plan/device_scratch.h"
#include "tests/cuda_runtime/library_table.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/deal.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

namespace {

/// Losses of `steps` steps on the fake device, products by the table's library.
std::vector<double> losses_on(LibraryTable& table, const Case& config, int steps) {
  const PlacedPlan placed = lowered(config);
  FakeApi api;
  RunOptions options;
  options.seed = config.train.seed;
  options.learning_rate = config.train.learning_rate;
  options.timeout_s = 120;
  options.poison = true;
  std::vector<double> losses;
  {
    FakeRun fake(placed, api, options, {.canonical = config.canonical, .tf32 = config.tf32}, table.kernels(), nullptr);
    INFO((fake.session.ok() ? std::string() : to_string(fake.session.error())));
    REQUIRE(fake.session.ok());
    (*fake.session)->initialise_parameters();
    for (int step = 0; step < steps; ++step) losses.push_back((*fake.session)->step(step).loss.value());
  }
  REQUIRE(table.fake().faults == std::vector<std::string>{});
  REQUIRE(table.fake().live_descriptors() == 0);
  REQUIRE(table.fake().live_handles() == 0);
  REQUIRE(api.live_allocations() == 0);
  return losses;
}

/// What was asked for, without the extents.
std::set<std::string> kinds(const FakeCublasLt& fake) {
  std::set<std::string> all;
  for (const FakeCublasLt::Product& p : fake.products) all.insert(p.text().substr(p.text().find(' ') + 1));
  return all;
}

/// Few tokens: the emulation is slow.
Case small(Family family, Precision precision) {
  Case c = tiny_case(family);
  c.train.precision = precision;
  c.train.seq_len = 8;
  c.train.grad_accumulation = 2;
  c.train.micro_batch = 1;
  c.train.global_batch_tokens = 16;
  return c;
}

}  // namespace

TEST_CASE("every layout trains as on the CPU by the products that the library is described") {
  for (const Family family : {Family::kGpt, Family::kLlama}) {
    if (kWatched && !thorough() && family == Family::kLlama) continue;
    Case subject = training_subject(family);
    subject.canonical = false;
    uint64_t number = 0;
    for (const auto& [name, config] : training_layouts(subject)) {
      if (number++ % (kWatched ? dealt(1, 4) : dealt(1, 2)) != 0) continue;
      INFO(name_of(family) << " " << name);
      LibraryTable table(Behind::kHost);
      table.fake().algorithms = {{.workspace = 4096}};
      const std::vector<double> device = losses_on(table, config, 3);
      const Run cpu = train_on_cpu(config, {.steps = 3});
      REQUIRE(cpu.losses[2] != cpu.losses[0]);
      for (size_t step = 0; step < 3; ++step) REQUIRE(device[step] == Approx(cpu.losses[step]).epsilon(1e-4));
      std::set<std::string> expected{"TN f32 f32", "NN f32 f32", "NT f32 f32"};
      if (family == Family::kGpt) expected.insert("TN f32 f32 +bias");
      if (config.train.grad_accumulation > 1) expected.insert("NT f32 f32 +old");
      REQUIRE(kinds(table.fake()) == expected);
    }
  }
}

TEST_CASE("an algorithm may use all of the workspace that the plan lends, and no more is promised") {
  Case c = training_subject(Family::kLlama);
  c.canonical = false;
  c.train.micro_batch = 8;
  c.train.global_batch_tokens = c.train.seq_len * 8;
  LibraryTable table(Behind::kHost);
  table.fake().algorithms = {{.workspace = 2 * kLibraryWorkspace}, {.workspace = kLibraryWorkspace}};
  const std::vector<double> device = losses_on(table, c, 1);
  REQUIRE(device[0] == Approx(train_on_cpu(c, {.steps = 1}).losses[0]).epsilon(1e-5));
  for (const FakeCublasLt::Product& p : table.fake().products) {
    REQUIRE(p.workspace >= kLibraryWorkspace);  // what is left of the buffer from the first aligned address on
    REQUIRE(p.workspace <= kLibraryWorkspace + kScratchAlignment);
    REQUIRE(p.algorithm == 1);
  }
}

TEST_CASE("in two bytes and in tf32 a case asks for products of its types, and trains as by our own kernels") {
#ifdef __SANITIZE_THREAD__
  WARN("skipped: the thread sanitizer cannot follow the fibers that the emulation runs kernels on");
  return;
#endif
  for (const Family family : {Family::kGpt, Family::kLlama})
    for (const Precision precision : {Precision::kBf16, Precision::kFp32}) {
      INFO(name_of(family) << " " << name_of(precision));
      Case c = small(family, precision);
      c.tf32 = precision == Precision::kFp32;
      LibraryTable table(Behind::kEmulated);
      const std::vector<double> device = losses_on(table, c, 2);
      const Run own = train_on_fake(c, {.steps = 2, .kernels = Behind::kEmulated});
      for (size_t step = 0; step < 2; ++step) REQUIRE(device[step] == Approx(own.losses[step]).epsilon(1e-2));
      const std::string f = precision == Precision::kBf16 ? "bf16" : "f32", tf32 = c.tf32 ? " tf32" : "";
      for (const std::string& kind : kinds(table.fake())) {
        INFO(kind);
        REQUIRE(kind.substr(3, f.size()) == f);
        REQUIRE(kind.ends_with(tf32));
      }
      REQUIRE(kinds(table.fake()).size() >= 4);
    }
}

TEST_CASE("a product that the library refuses ends the case with the op, the shape and what to do") {
  Case c = training_subject(Family::kLlama);
  c.canonical = false;
  c.train.micro_batch = 8;
  c.train.global_batch_tokens = c.train.seq_len * 8;
  LibraryTable table(Behind::kHost);
  table.fake().algorithms = {{.workspace = 2 * kLibraryWorkspace}};
  const std::string text = world_error([&] { losses_on(table, c, 1); });
  INFO(text);
  REQUIRE(contains(text, "kernel linear_forward: cublasLt error 15: CUBLAS_STATUS_NOT_SUPPORTED for "));
  REQUIRE(contains(text, ", f32 to f32, arrays aligned to "));
  REQUIRE(contains(text, "bytes of workspace; canonical: true multiplies by own kernels"));
  REQUIRE_FALSE(contains(text, "issued earlier"));
}

}  // namespace shardlab::testing
