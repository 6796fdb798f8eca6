// Every pair of choices of which docs/compatibility.md says that it goes on `backend: cuda` is trained there, on the fake runtime:
// with the bits of the CPU back end where the GPU's kernels keep them (fp32, canonical order), near its losses where they round
// otherwise.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/pairs.h"
#include "tests/cuda_runtime/rig.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr int kSteps = 4;

/// The distance of losses, relative, within which a GPU that rounds to 16 bits in an order of its own is near the CPU.
constexpr double kNear = 1e-3;

/// As small as the pair allows, in canonical order where it can be.
Case small(Case c) {
  c.train.seq_len = 16;
  c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
  c.checkpoint = {};
  c.canonical = true;
  if (!check(c).ok()) c.canonical = false;
  REQUIRE(check(c).ok());
  return c;
}

Case on_cpu(Case c) {
  c.backend = "cpu";
  c.transport = "threads";
  return c;
}

/// Whether two runs have the same losses and parameters, bit for bit.
bool same(const Run& a, const Run& b) {
  if (a.losses != b.losses || a.parameters.size() != b.parameters.size()) return false;
  return std::ranges::all_of(a.parameters, [&](const auto& p) { return same_bits(p.second, b.parameters.at(p.first)); });
}

}  // namespace

TEST_CASE("every yes of backend cuda is trained on the fake runtime, as the CPU trains it") {
  int trained = 0, bits = 0;
  double farthest = 0;
  std::string farthest_pair;
  for (const LegalPair& pair : legal_pairs()) {
    if (pair.config.backend != "cuda") continue;
    const Case c = small(pair.config);
    INFO(pair.first << " with " << pair.second);
    const Run cpu = train_on_cpu(on_cpu(c), {.steps = kSteps});
    const Behind behind = c.train.precision == "fp32" ? Behind::kHost : Behind::kEmulated;
    const Run device = train_on_fake(c, {.steps = kSteps, .seed = static_cast<uint64_t>(1 + trained), .kernels = behind});
    ++trained;
    CHECK(device.sent_bytes == cpu.sent_bytes);
    CHECK(device.peaks == device.planned);
    CHECK(device.skipped == cpu.skipped);
    REQUIRE(device.losses.size() == cpu.losses.size());
    REQUIRE(device.losses.size() == kSteps);
    CHECK(cpu.losses.front() != cpu.losses.back());
    if (c.canonical && c.train.precision == "fp32") {
      CHECK(same(device, cpu));
      ++bits;
    }
    for (size_t step = 0; step < device.losses.size(); ++step) {
      const double apart = std::abs(device.losses[step] / cpu.losses[step] - 1);
      INFO("loss of step " << step << ": " << device.losses[step] << ", CPU " << cpu.losses[step]);
      CHECK(apart < kNear);
      if (apart > farthest) farthest = apart, farthest_pair = pair.first;
    }
  }
  fmt::print("{} pairs trained on the fake GPU, {} with the bits of the CPU; the farthest by {:.2g} of the loss: {}\n", trained,
             bits, farthest, farthest_pair);
  CHECK(trained >= 34);
  CHECK(bits >= 30);
}

}  // namespace shardlab::testing
