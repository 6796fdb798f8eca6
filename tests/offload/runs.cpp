#include <fmt/format.h>

#include <bit>
#include <cmath>

#include "kernels/kernels.h"
#include "plan/memory.h"
#include "plan/wire.h"
#include "runtime/thread_transport.h"
#include "tests/namespaces.h"
#include "tests/numerics/matrix.h"
#include "tests/numerics/train_case.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

void require_measured_as_planned(const Case& c) {
  const PlacedPlan placed = place(plan_of(c));
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  ThreadTransport transport(kernels);
  const RandomText text(c.model.vocab);
  RunOptions options;
  options.poison = true;
  options.timeout_s = 60;
  auto session = Session::create(placed, options, transport, cpu_backend(kernels, {c.canonical, 1}), &text);
  INFO(offload_line(c) << (session.ok() ? std::string() : "\n" + to_string(session.error())));
  REQUIRE(session.ok());
  (*session)->initialise_parameters();
  for (int step = 0; step < 3; ++step) {
    int64_t planned = 0;
    for (const auto& [name, bytes] : total_wire_bytes(*placed.plan)) planned += bytes;
    CHECK((*session)->step(step).sent_bytes == planned);
  }
  for (int rank = 0; rank < placed.plan->mesh.world_size(); ++rank) {
    const auto peaks = memory_peak(*placed.plan, placed.plan->mesh.role_of(rank));
    for (size_t s = 0; s < kSpaces; ++s) {
      const Space space = static_cast<Space>(s);
      INFO("rank " << rank << " " << name_of(space));
      CHECK((*session)->ledger(rank).peak(space) == peaks[s].peak_bytes);
      CHECK((*session)->ledger(rank).at_peak(space).bytes == peaks[s].at_peak.bytes);
    }
  }
}

namespace {

/// Where two rows of numbers first differ in a bit, or hold what is no number: empty when they are the same finite numbers.
std::string difference(const std::string& name, const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return fmt::format("{}: {} and {} elements", name, a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    if (!std::isfinite(a[i]) || std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]))
      return fmt::format("{}[{}] is {:.9g} and {:.9g}", name, i, a[i], b[i]);
  return "";
}

}  // namespace

void require_same_bits(const Case& a, const Case& b, int steps) {
  INFO(offload_line(a) << "\n" << offload_line(b));
  const auto first = train_case(a, RandomText(a.model.vocab), steps), second = train_case(b, RandomText(b.model.vocab), steps);
  INFO((first.ok() ? std::string() : to_string(first.error())) << (second.ok() ? std::string() : to_string(second.error())));
  REQUIRE((first.ok() && second.ok()));
  CHECK(difference("loss", first->losses, second->losses) == "");
  CHECK(difference("validation loss", {first->validation_loss}, {second->validation_loss}) == "");
  CHECK(first->losses.front() != first->losses.back());
  REQUIRE(first->squared_norms.size() == second->squared_norms.size());
  for (size_t i = 0; i < first->squared_norms.size(); ++i)  // sums in fp64, each in an order of its own
    CHECK(second->squared_norms[i] == Approx(first->squared_norms[i]).epsilon(1e-12));
  REQUIRE(first->parameters.size() == second->parameters.size());
  for (const auto& [name, values] : first->parameters) CHECK(difference(name, values, second->parameters.at(name)) == "");
}

}  // namespace shardlab::testing
