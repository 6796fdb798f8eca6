// Placements of experts, and rows that go by node to them, in plans: which are refused, and by what words.
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

TEST_CASE("rows by node: a token crosses to a node once by the choice that laid out its rows, and in the place of no other rows") {
  // Two layers with four experts on four ranks of two nodes; 16 tokens with 2 experts each.
  const std::string text = golden_plan("expert-parallel-by-node");
  const std::string go = "moe.go (%rows.in, %rows.counts, %rows.counts.there",
                    gradients = "moe.return.d (%d.rows.out, %rows.counts, %rows.counts.there",
                    back = "moe.return (%rows.out.there, %rows.counts.there, %rows.counts";
  const auto put = [](std::string plan, std::string_view from, std::string_view to) {  // each time
    REQUIRE(plan.find(from) != std::string::npos);
    for (size_t at = 0; (at = plan.find(from, at)) != std::string::npos; at += to.size()) plan.replace(at, from.size(), to);
    return plan;
  };
  const auto says = [&](const std::string& exchange, std::string_view reads, std::string_view instead) {
    const auto findings =
        find_faults(parse_or_fail(replaced(text, fmt::format("{}{})", exchange, reads), fmt::format("{}{})", exchange, instead))));
    return findings.empty() ? "" : findings[0].message;
  };
  CHECK(find_faults(parse_or_fail(text)).empty());
  // Every row by itself is a plan too.
  const std::string alone =
      put(put(text, ", %rows.counts.there, %moe.choice)", ", %rows.counts.there)"), ", %moe.choice, %moe.weights, %d.y)", ")");
  CHECK(find_faults(parse_or_fail(put(alone, " across=13", ""))).empty());

  constexpr std::string_view kChoice = ", %moe.choice", kAll = ", %moe.choice, %moe.weights, %d.y";
  CHECK(says(go, kChoice, "") == "across=13 of an op that reads no choice of experts");
  CHECK(refuses(parse_or_fail(replaced(text, go + ", %moe.choice)", go + ", %rows.counts)")),
                "reads %rows.counts as the choice that laid out %rows.in, and"));
  CHECK(says(go, kChoice, ", %moe.weights").starts_with("%moe.weights is f32 of 3 dims: choices of experts are i32 of 3"));
  CHECK(says(go, kChoice, ", %moe.choice, %moe.choice") != "");
  CHECK(
      says(go, kChoice, ", %moe.choice, %moe.weights, %mlp.norm.y")
          .starts_with("sends %mlp.norm.y with %moe.weights in the place of %rows.in, and no combine of this segment has made it"));
  CHECK(says(gradients, kAll, kChoice)
            .starts_with("sends a token once in the place of its rows in %d.rows.out, which are no copies of tokens"));
  CHECK(says(gradients, kAll, ", %moe.choice, %moe.weights, %mlp.norm.y")
            .starts_with(
                "sends %mlp.norm.y with %moe.weights in the place of %d.rows.out, and no combine of this segment has made it"));
  CHECK(says(gradients, kAll, ", %moe.choice, %d.moe.weights, %d.y")
            .starts_with("sends %d.y with %d.moe.weights in the place of %d.rows.out, and no combine of this segment has made it"));
  CHECK(says(back, "", kChoice).starts_with("reads the choice %moe.choice, and its rows do not go to experts by node"));
  for (const int across : {7, 17})
    CHECK(refuses(parse_or_fail(put(text, " across=13", fmt::format(" across={}", across))),
                  fmt::format("across={}: of 16 tokens with 2 experts each 8 to 16 cross to 1 other nodes", across)));
  // From rank to rank nothing crosses once.
  CHECK(refuses(parse_or_fail(put(text, " algorithm=hierarchical per_node=2", "")),
                "reads the choice %moe.choice, and its rows do not go to experts by node"));
  // What crosses is what the rows were made of.
  const std::string exchange = fmt::format("  all_to_all {}{})", gradients, kAll);
  CHECK(refuses(parse_or_fail(replaced(text, exchange, "  copy spoil (%mlp.norm.y) -> (%d.y)\n" + exchange)),
                "sends %d.y with %moe.weights in the place of %d.rows.out, and %d.y has changed since that was made"));
}

}  // namespace shardlab::testing
