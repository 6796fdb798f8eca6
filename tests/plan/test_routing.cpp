// Routings by name, shares of experts, and the file of routes that a run records.
#include "plan/routing.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "plan/keys.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

constexpr Experts kEight{.count = 8, .top_k = 2, .ffn = 4};

Routing named(const char* text) {
  const auto routing = routing_named(text);
  REQUIRE(routing.has_value());
  return *routing;
}

Model mixture(int64_t layers) {
  Model m;
  m.layers = layers;
  m.experts = kEight;
  return m;
}

double sum(const std::vector<double>& shares) { return std::accumulate(shares.begin(), shares.end(), 0.0); }

TEST_CASE("a routing has a name, and other texts are none") {
  CHECK(named("balanced").is_even());
  CHECK(named("zipf:1.5").exponent == 1.5);
  CHECK(named("forced:3").experts == 3);
  for (const char* text :
       {"zipf", "zipf:", "zipf:0", "zipf:-1", "zipf:101", "zipf:x", "forced:0", "forced:1.5", "even", "balanced:1"})
    CHECK_FALSE(routing_named(text).has_value());
  const CaseKey* key = find_key("routing");
  REQUIRE(key != nullptr);
  Case c;
  CHECK(key->get(c) == "balanced");
  CHECK(key->set(c, "zipf:1.2"));
  CHECK(key->get(c) == "zipf:1.2");
  CHECK_FALSE(key->set(c, "zipf"));
  CHECK(key->set(c, "balanced"));
  CHECK(c.data.routing.empty());
}

TEST_CASE("shares add up to top_k, and none is above 1") {
  for (const char* text : {"balanced", "zipf:0.5", "zipf:1", "zipf:4", "forced:2", "forced:5"})
    for (int64_t layer = 0; layer < 4; ++layer) {
      INFO(text << " " << layer);
      const std::vector<double> shares = shares_of_experts(named(text), kEight, layer);
      CHECK(sum(shares) == Approx(2).epsilon(1e-12));
      CHECK(std::ranges::min(shares) >= 0);
      CHECK(std::ranges::max(shares) <= 1);
    }
  CHECK(shares_of_experts(named("balanced"), kEight, 0) == std::vector<double>(8, 0.25));
  CHECK(shares_of_experts(named("forced:2"), kEight, 1) == std::vector<double>{1, 1, 0, 0, 0, 0, 0, 0});
  // 1/r of the ranks 1 to 8, times c: none is above 1, as c = 2 / H_8 = 0.736.
  std::vector<double> zipf = shares_of_experts(named("zipf:1"), kEight, 2);
  CHECK(zipf != shares_of_experts(named("zipf:1"), kEight, 3));  // each layer has an order of its own
  std::ranges::sort(zipf, std::greater());
  for (size_t r = 0; r < 8; ++r) CHECK(zipf[r] == Approx(2 / 2.717857142857143 / static_cast<double>(r + 1)));
  // 1/r^4: the first would be above 1, and is 1; the others share what is left.
  std::vector<double> steep = shares_of_experts(named("zipf:4"), kEight, 2);
  std::ranges::sort(steep, std::greater());
  CHECK(steep[0] == 1);
  CHECK(steep[1] / steep[2] == Approx(std::pow(3.0 / 2.0, 4)));
}

TEST_CASE("the fullest rank over the mean follows from the shares") {
  const Model m = mixture(3);
  CHECK(expected_imbalance(named("balanced"), m, 4) == 1);
  CHECK(expected_imbalance(named("forced:2"), m, 4) == 4);  // experts 0 and 1 are the first rank's
  CHECK(expected_imbalance(named("forced:2"), m, 8) == 4);
  CHECK(expected_imbalance(named("forced:4"), m, 4) == 2);
  CHECK(expected_imbalance(named("forced:2"), m, 1) == 1);
  Model bounded = m;
  bounded.experts.capacity_factor = 1.5f;  // an expert takes 1.5 times the even share: both have as many
  CHECK(expected_imbalance(named("forced:2"), bounded, 4) == 4);
  bounded.experts.dense_layers = 3;
  CHECK(expected_imbalance(named("forced:2"), bounded, 4) == 1);
  Routing recorded{.kind = Routing::Kind::kRecorded};
  for (int layer = 0; layer < 3; ++layer)
    recorded.recorded.push_back({.layer = layer, .by_expert = {10, 10, 10, 10, 10, 10, 10, layer == 0 ? 90 : 10}});
  // The last layer's shares: 90 of 160 rows would be 1.125 of a token. It is 1, and the others have a seventh of the other row.
  CHECK(expected_imbalance(recorded, m, 8) == Approx((4.0 + 1 + 1) / 3));
}

TEST_CASE("routes that are written are read, and what is none is refused with its line") {
  const std::vector<ExpertRows> layers{{.layer = 1, .by_expert = {4, 0, 6}, .by_source = {{1, 0, 2}, {3, 0, 4}}},
                                       {.layer = 3, .by_expert = {1, 1, 1}, .by_source = {{0, 1, 0}, {1, 0, 1}}}};
  const std::string text = print_routes(layers);
  CHECK(text ==
        "shardlab routes 1\nlayer 1 source 0 rows 1 0 2\nlayer 1 source 1 rows 3 0 4\nlayer 3 source 0 rows 0 1 0\n"
        "layer 3 source 1 rows 1 0 1\n");
  const auto again = parse_routes(text, "f");
  REQUIRE(again.ok());
  CHECK(*again == layers);
  const auto refused = [](const std::string& said) {
    const auto read = parse_routes(said, "f");
    return read.ok() ? "read" : read.error().message;
  };
  const std::string first = "shardlab routes 1\n";
  CHECK(refused("") == "line 1: no layer has rows");
  CHECK(refused("shardlab routes 2\n") == "line 1: `shardlab routes 1` is expected");
  CHECK(refused(first + "layer 0 rows 1\n") == "line 2: `layer L source S rows N N ...` is expected");
  CHECK(refused(first + "layer 0 source 1 rows 1\n") == "line 2: source 0 of layer 0 is expected");
  CHECK(refused(first + "layer 0 source 0 rows 1 x\n") == "line 2: a number of rows is expected");
  CHECK(refused(first + "layer 0 source 0 rows -1\n") == "line 2: a number of rows is expected");
  CHECK(refused(first + "layer 0 source 0 rows 99999999999999\n") == "line 2: a number of rows is expected");
  CHECK(refused(first + "layer 0 source 0 rows 1 2\nlayer 0 source 1 rows 1\n") ==
        "line 3: every source has a number for each expert");
  CHECK(refused(first + "layer 2 source 0 rows 1\nlayer 1 source 0 rows 1\n") == "line 3: layer 1 is out of order");
  // Rows that were dropped stand behind the layer's rows, once.
  std::vector<ExpertRows> dropped = layers;
  dropped[0].dropped = 7;
  CHECK(print_routes(dropped).find("layer 1 source 1 rows 3 0 4\nlayer 1 dropped 7\nlayer 3 source 0") != std::string::npos);
  const auto read = parse_routes(print_routes(dropped), "f");
  REQUIRE(read.ok());
  CHECK(*read == dropped);
  const std::string misplaced = "`layer L dropped N` is expected behind the rows of layer L";
  CHECK(refused(first + "layer 1 dropped 7\n") == "line 2: " + misplaced);
  CHECK(refused(first + "layer 1 source 0 rows 1\nlayer 2 dropped 7\n") == "line 3: " + misplaced);
  CHECK(refused(first + "layer 1 source 0 rows 1\nlayer 1 dropped 7 8\n") == "line 3: " + misplaced);
  CHECK(refused(first + "layer 1 source 0 rows 1\nlayer 1 dropped 7\nlayer 1 dropped 7\n") == "line 4: " + misplaced);
}

TEST_CASE("a case whose routing does not fit its model is refused") {
  const auto refused = [](const Model& m, const char* routing, const char* routes) {
    Case c;
    c.model = m;
    c.data.routing = routing, c.data.routes = routes;
    const auto legal = routing_of(c);
    return legal.ok() ? std::string("accepted") : legal.error().message;
  };
  const Model m = mixture(2);
  CHECK(refused(m, "zipf:1", "") == "accepted");
  CHECK(refused(m, "", "/nowhere/routes.txt") != "accepted");
  std::string path = (std::filesystem::temp_directory_path() / "shardlab-routes-XXXXXX").string();
  const int file = mkstemp(path.data());
  REQUIRE(file >= 0);
  close(file);
  const auto written = [&](const std::string& rows) {
    std::ofstream(path) << "shardlab routes 1\n" << rows;
    return refused(m, "", path.c_str());
  };
  CHECK(written("layer 0 source 0 rows 1 1 1 1 1 1 1 1\n") == "it has no layer 1");
  CHECK(written("layer 0 source 0 rows 1 1\nlayer 1 source 0 rows 1 1\n") == "layer 0 has 2 experts, and the model has 8");
  CHECK(written("layer 0 source 0 rows 0 0 0 0 0 0 0 0\nlayer 1 source 0 rows 1 1 1 1 1 1 1 1\n") == "layer 0 has no rows");
  const std::string both = "layer 0 source 0 rows 1 1 1 1 1 1 1 1\nlayer 1 source 0 rows 1 1 1 1 1 1 1 1\n";
  CHECK(written(both) == "accepted");
  CHECK(written(both + "layer 2 source 0 rows 1 1 1 1 1 1 1 1\n") == "the model has no experts in layer 2");
  // Two experts a token: none has more than half of the rows that were chosen.
  const std::string none = "layer 0 source 0 rows 1 1 1 1 1 1 1 1\nlayer 1 source 0 rows ";
  CHECK(written(none + "4 4 0 0 0 0 0 0\n") == "accepted");
  CHECK(written(none + "8 0 0 0 0 0 0 0\n") == "layer 1 has 8 rows of expert 0, and tokens that choose 2 experts each are 4");
  CHECK(written(none + "2 1 5 0 0 0 0 0\n") == "layer 1 has 5 rows of expert 2, and tokens that choose 2 experts each are 4");
  CHECK(written(none + "2 1 5 0 0 0 0 0\nlayer 1 dropped 2\n") == "accepted");
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace shardlab::testing
