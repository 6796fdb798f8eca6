// Plans of one segment, put together from lists, for the tests of narrow storage in the runtime.
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "plan/text.h"
#include "plan/work.h"
#include "tests/namespaces.h"
#include "tests/runtime/rig.h"
#include "tests/test.h"

namespace shardlab::testing {

/// One segment, called once a step, over persistent buffers ("x", "other f32[4]") and buffers that it allocates itself.
struct OneSegment {
  struct Slot {
    std::string name, type;
  };
  std::vector<Slot> parameters;  ///< "w", "f32[4] dp:S0": drawn from a normal distribution of deviation 1
  std::vector<Slot> persistent, locals, views;
  std::vector<std::string> ops;
  int dp = 1;

  std::string text() const {
    std::string t = plan_head(1, dp, 1, "compute") + "comm dp axes dp\n\n";
    int tensor = 5;
    for (const Slot& p : parameters)
      t += fmt::format("parameter {} {} stage 0 normal deviation 1 tensor {}\n", p.name, p.type, tensor++);
    t += "\nsegment all\n";
    for (const Slot& p : parameters) t += fmt::format("  bound %{} parameter {}\n", p.name, p.type);
    for (const Slot& p : persistent) t += fmt::format("  bound %{} other {}\n", p.name, p.type);
    for (const Slot& p : locals) t += fmt::format("  local %{} temporary {}\n", p.name, p.type);
    for (const Slot& p : views) t += fmt::format("  local %{} temporary {}\n", p.name, p.type);
    t += "\n";
    for (const Slot& p : locals) t += fmt::format("  alloc %{}\n", p.name);
    for (const std::string& op : ops) t += "  " + op + "\n";
    for (const Slot& p : locals) t += fmt::format("  free %{}\n", p.name);
    t += "\nrole 0\n";
    for (const Slot& p : parameters) t += fmt::format("  %{0} parameter {1} persistent of {0}\n", p.name, p.type);
    for (const Slot& p : persistent) t += fmt::format("  %{} other {} persistent\n", p.name, p.type);
    t += "\n  call all (";
    std::string binding;
    for (const auto* slots : {&parameters, &persistent})
      for (const Slot& p : *slots) binding += fmt::format("{}{}=%{}", binding.empty() ? "" : ", ", p.name, p.name);
    return t + binding + ")\n";
  }
};

/// A session of it, with parameters drawn.
inline Rig run_segment(const OneSegment& segment, int steps) {
  INFO(segment.text());
  Rig rig(segment.text(), {.timeout_s = 60, .poison = true});
  rig.session->initialise_parameters();
  for (int s = 0; s < steps; ++s) rig.session->step(s);
  return rig;
}
inline std::vector<float> buffer(const Rig& rig, std::string_view name, int rank = 0) {
  auto values = rig.session->read_buffer(rank, name);
  INFO((values.ok() ? std::string() : to_string(values.error())));
  REQUIRE(values.ok());
  return std::move(values).value();
}
/// Why a segment is refused; empty where it is not.
inline std::string refusal(const OneSegment& segment) {
  auto parsed = parse_plan(segment.text());
  INFO((parsed.ok() ? std::string() : to_string(parsed.error())));
  REQUIRE(parsed.ok());
  add_workspaces(*parsed, true);
  const PlacedPlan placed = place(std::move(parsed).value());
  const kernels::Kernels& kernels = kernels::kernels_for_this_processor();
  ThreadTransport transport(kernels);
  const auto made = Session::create(placed, {}, transport, cpu_backend(kernels, {.canonical = true}), nullptr);
  return made.ok() ? "" : to_string(made.error());
}

}  // namespace shardlab::testing
