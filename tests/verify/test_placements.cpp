// Placements of experts in plans: which are refused, and by what words.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "plan/text.h"
#include "tests/golden_plans.h"
#include "tests/namespaces.h"
#include "tests/test.h"
#include "tests/verify/good_plans.h"

namespace shardlab::testing {
namespace {

/// A plan of two layers with four experts each on two ranks.
std::string placed(std::string_view lines) {
  return replaced(golden_plan("expert-parallel"), "\nstrategies ", fmt::format("\n{}strategies ", lines));
}

bool refuses(const Plan& plan, std::string_view says) {
  const auto findings = find_faults(plan);
  INFO(findings_text(findings));
  return std::ranges::any_of(findings, [&](const Finding& f) { return f.message.starts_with(says); });
}

}  // namespace

TEST_CASE("placements of experts: a permutation of each layer's experts is proved, and printed as it was read") {
  const std::string text = placed("expert_placement 0 2 1 0 3\nexpert_placement 1 3 2 1 0\n");
  const Plan plan = parse_or_fail(text);
  REQUIRE(plan.expert_placement.size() == 2);
  CHECK(plan.expert_placement[1].places == std::vector<int32_t>{3, 2, 1, 0});
  CHECK(find_faults(plan).empty());
  CHECK(print(plan) == text);
}

TEST_CASE("placements of experts: what is no permutation, or of no layer with experts, is refused by name") {
  CHECK(refuses(parse_or_fail(placed("expert_placement 0 2 1 0 2\n")), "expert_placement of layer 0: expert 2 has two places"));
  CHECK(refuses(parse_or_fail(placed("expert_placement 1 0 1 2\n")), "expert_placement of layer 1: 3 places for 4 experts"));
  CHECK(refuses(parse_or_fail(placed("expert_placement 1 0 1 2 4\n")), "expert_placement of layer 1: expert 4 of 4"));
  CHECK(refuses(parse_or_fail(placed("expert_placement 2 0 1 2 3\n")), "expert_placement of layer 2, which has no experts"));
  CHECK(refuses(parse_or_fail(placed("expert_placement 1 0 1 3 2\nexpert_placement 0 0 1 3 2\n")),
                "expert_placement of layer 0 stands behind layer 1"));
  Plan plan = parse_or_fail(placed("expert_placement 0 2 1 0 3\n"));
  std::swap(plan.expert_placement[0].places[0], plan.expert_placement[0].places[1]);
  CHECK(refuses(plan, "expert_placement of layer 0: the places of experts are not those"));
}

TEST_CASE("placements of experts: a router whose call names no layer is refused, since no placement is its own") {
  Plan plan = parse_or_fail(placed("expert_placement 1 2 1 0 3\n"));
  for (Item& item : plan.roles[0].program)
    if (Call* call = std::get_if<Call>(&item); call != nullptr && call->layer == 0) call->layer = -1;
  CHECK(refuses(plan, "goes by places of experts, and its call names no layer"));
  plan.expert_placement.clear();
  CHECK_FALSE(refuses(plan, "goes by places of experts"));
}

TEST_CASE("placements of experts: rows that go by one placement meet no weights that lie by another") {
  // Both calls of layer.F take the weights of layer 1: rows of layer 0 are then counted by the placement of layer 0.
  const auto exchanged = [](std::string_view lines) {
    Plan plan = parse_or_fail(placed(lines));
    for (Role& role : plan.roles)
      for (Item& item : role.program) {
        Call* call = std::get_if<Call>(&item);
        if (call == nullptr || call->layer != 0) continue;
        for (BufferId& b : call->binding)
          for (const char* weight : {"moe.wup", "moe.wdown"})
            if (b.value >= 0 && role.buffers[b.index()].name == fmt::format("layers.0.{}", weight))
              b = BufferId(static_cast<int32_t>(std::ranges::find(role.buffers, fmt::format("layers.1.{}", weight), &Buffer::name) -
                                                role.buffers.begin()));
      }
    return plan;
  };
  constexpr std::string_view kSays =
      "works for layer 0 and %moe.wup is given %layers.1.moe.wup: experts of layer 1 are placed otherwise";
  CHECK(refuses(exchanged("expert_placement 1 2 1 0 3\n"), kSays));
  CHECK(refuses(exchanged("expert_placement 0 2 1 0 3\n"), kSays));
  CHECK(refuses(exchanged("expert_placement 0 0 1 3 2\nexpert_placement 1 2 1 0 3\n"), kSays));
  CHECK_FALSE(refuses(exchanged("expert_placement 0 2 1 0 3\nexpert_placement 1 2 1 0 3\n"), kSays));
}

}  // namespace shardlab::testing
