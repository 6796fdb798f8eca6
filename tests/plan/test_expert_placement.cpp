#include "plan/expert_placement.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "plan/case.h"
#include "plan/routing.h"
#include "tests/namespaces.h"
#include "tests/strategies/cases.h"
#include "tests/test.h"

namespace shardlab::testing {

TEST_CASE("placements are read as they are printed, and other texts are none") {
  const std::string text = "1:2,0,3,1 3:1,0,2,3";
  const auto read = read_placements(text);
  REQUIRE(read);
  CHECK(print_placements(*read) == text);
  CHECK(read->front() == ExpertPlacement{1, {2, 0, 3, 1}, {1, 3, 0, 2}});
  CHECK(placement_of(*read, 3) == &read->back());
  CHECK(placement_of(*read, 2) == nullptr);
  for (const char* wrong : {"", "1", "1:", "1:0,", "1:0,1 ", "1:0,1,x", "3:0,1 1:0,1", "1:0,1 1:1,0", "-1:0,1", "1:0,1\n", "1:0 1"})
    CHECK_FALSE(read_placements(wrong));
}

TEST_CASE("a placement that is no permutation is told by its fault, and has no places") {
  CHECK(placement_fault(place_experts(0, {1, 0}), 2).empty());
  CHECK(placement_fault(place_experts(0, {1, 0}), 3) == "2 places for 3 experts");
  CHECK(placement_fault(place_experts(0, {1, 1}), 2) == "expert 1 has two places");
  CHECK(placement_fault(place_experts(0, {1, 2}), 2) == "expert 2 of 2, from 0 on");
  CHECK(place_experts(0, {1, 1}).places.empty());
  CHECK(place_experts(0, {-1, 1}).places.empty());
}

TEST_CASE("experts whose weights are cut are named by their parameters") {
  CHECK(layer_of_expert_weight("layers.12.moe.wup") == 12);
  CHECK(layer_of_expert_weight("layers.0.moe.wdown") == 0);
  for (const char* other : {"layers.0.moe.router", "layers.0.moe.shared.wup", "layers.moe.wup", "embed.tokens", "layers.1.mlp.wup"})
    CHECK_FALSE(layer_of_expert_weight(other));
}

TEST_CASE("the longest load goes first, to the rank with the least that has room") {
  // 8 to rank 0, 7 to 1, 2 to 1 (7 < 8), then rank 1 is full and 1 goes to rank 0: 9 and 9.
  const std::vector<double> loads{8, 7, 2, 1};
  CHECK(imbalance_under(nullptr, loads, 2) == Approx(15.0 / 9));
  const ExpertPlacement balanced = balanced_placement(5, loads, 2);
  CHECK(balanced == place_experts(5, {0, 3, 1, 2}));
  CHECK(imbalance_under(&balanced, loads, 2) == 1);
  // Equal counts bind: three of four experts of one load cannot be on one rank.
  CHECK(balanced_placement(0, std::vector<double>{9, 1, 1, 1}, 2).experts == std::vector<int32_t>{0, 3, 1, 2});
  CHECK(imbalance_under(nullptr, std::vector<double>(4), 2) == 1);
}

TEST_CASE("two experts are exchanged where equal numbers of experts leave the fullest rank more than it must have") {
  // 8 to rank 0, 7 and 7 to rank 1 and 0 (8 < 14), 5 to 0, 4 to 0, which is full with 17; 1 is left to rank 1: 15. So 8 goes for 7.
  const std::vector<double> loads{7, 7, 1, 8, 5, 4};
  const ExpertPlacement balanced = balanced_placement(0, loads, 2);
  CHECK(balanced == place_experts(0, {0, 4, 5, 1, 2, 3}));
  CHECK(imbalance_under(&balanced, loads, 2) == 1);
}

TEST_CASE("a placement stays where another gains less than its threshold") {
  // Contiguous: 52 and 48; balanced: 51 and 49. 1 of 52 is below 2 %.
  const std::vector<double> near{26, 26, 25, 23};
  REQUIRE(imbalance_under(nullptr, near, 2) == Approx(1.04));
  CHECK_FALSE(placement_after(0, near, 2, nullptr));
  const std::vector<double> far{40, 30, 20, 10};
  const auto next = placement_after(0, far, 2, nullptr);
  REQUIRE(next);
  CHECK(next->experts == std::vector<int32_t>{0, 3, 1, 2});
  // A placement as good as the balanced one is kept; one that is worse is left, for the order of numbers too.
  const ExpertPlacement mirrored = place_experts(0, {1, 2, 0, 3});
  CHECK(placement_after(0, far, 2, &mirrored) == mirrored);
  const std::vector<double> in_order{40, 10, 30, 20};
  const ExpertPlacement bad = place_experts(0, {0, 2, 1, 3});
  CHECK_FALSE(placement_after(0, in_order, 2, &bad));
}

TEST_CASE("cases refuse placements that place no experts of the model") {
  Case c = tiny_case(Family::kLlama);
  const auto refused = [&](const char* placement) {
    c.layout.expert_placement = placement;
    const auto checked = check(c);
    return checked.ok() ? std::string() : checked.error().message;
  };
  CHECK(refused("balanced") == "expert_placement=balanced of a model without experts");
  c.model.experts = {.count = 4, .top_k = 2, .ffn = 8, .dense_layers = 1};
  c.layout.dp = c.layout.ep = 2;
  CHECK(refused("").empty());
  CHECK(refused("1:2,0,3,1").empty());
  CHECK(refused("balanced") ==
        "expert_placement=balanced with data.routing=balanced: all experts are expected to have as many rows");
  CHECK(refused("measured").starts_with("expert_placement=measured in a run that begins from its seed"));
  CHECK(check(c).error().kind == ErrorKind::kNotCounted);
  CHECK(refused("by hand") == "expert_placement=by hand: no experts by place, layer after layer");
  CHECK(refused("0:2,0,3,1") == "expert_placement names layer 0, and the model has no experts there");
  CHECK(refused("1:2,0,3,3") == "expert_placement of layer 1: expert 3 has two places");
  CHECK(refused("1:2,0,1") == "expert_placement of layer 1: 3 places for 4 experts");
  c.data.routing = "balanced";
  CHECK(refused("balanced").starts_with("expert_placement=balanced with data.routing=balanced"));
  c.data.routing = "zipf:1";
  CHECK(refused("balanced").empty());
  c.layout.ep = 1;
  CHECK(refused("balanced") == "expert_placement=balanced with ep=1: every rank has all experts");
  CHECK(check(c).error().kind == ErrorKind::kApart);
  CHECK(refused("1:2,0,3,1") == "expert_placement=1:2,0,3,1 with ep=1: every rank has all experts");
}

TEST_CASE("balanced experts of Zipf's law give the fullest expert's rank the least experts beside it, and none more than that") {
  Case c = tiny_case(Family::kLlama);
  c.model.experts = {.count = 16, .top_k = 2, .ffn = 8};
  c.layout.dp = c.layout.ep = 4;
  c.layout.expert_placement = "balanced";
  c.data.routing = "zipf:0.8";
  const Routing zipf = *routing_named("zipf:0.8");
  const auto placements = placements_of(c, zipf, 4);
  REQUIRE(std::ssize(placements) == c.model.layers);
  double before = 0, after = 0;  // sums over the layers
  for (int64_t layer = 0; layer < c.model.layers; ++layer) {
    std::vector<double> shares = shares_of_experts(zipf, c.model.experts, layer);
    const auto of_run = [&](size_t first) { return shares[first] + shares[first + 1] + shares[first + 2] + shares[first + 3]; };
    before += std::max({of_run(0), of_run(4), of_run(8), of_run(12)}) / 0.5;  // a rank's even share of top_k = 2
    std::ranges::sort(shares, std::greater());
    after += (shares[0] + shares[13] + shares[14] + shares[15]) / 0.5;
  }
  const auto layers = static_cast<double>(c.model.layers);
  CHECK(expected_imbalance(zipf, c.model, 4) == Approx(before / layers));
  CHECK(expected_imbalance(zipf, c.model, 4, placements) == Approx(after / layers));
  CHECK(after < before);
  // Every expert for itself: nothing to place.
  CHECK(placements_of(c, zipf, 16).empty());
  CHECK(expected_imbalance(zipf, c.model, 16, placements) == Approx(expected_imbalance(zipf, c.model, 16)));
  c.layout.expert_placement = print_placements(placements);
  CHECK(placements_of(c, zipf, 4) == placements);
  CHECK(is_placement_decided(c));
}

}  // namespace shardlab::testing
