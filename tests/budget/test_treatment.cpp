// The list of treatments by layer: its text, what is refused of it, and what the older keys come to in it.
#include "plan/treatment.h"

#include "tests/namespaces.h"
#include "tests/offload/cases.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

std::string refusal(std::string_view text, int64_t layers) {
  const auto list = parse_treatments(text, layers);
  REQUIRE_FALSE(list.ok());
  return list.error().message;
}

}  // namespace

TEST_CASE("a list by layer is read as it is written") {
  const std::string text = "3*full@cpu 2*attn.core+mlp.act 1*attn.norm@cpu 5*none";
  const auto list = parse_treatments(text, 11);
  REQUIRE(list.ok());
  CHECK(treatments_text(*list) == text);
  CHECK((*list)[0] == LayerTreatment{.full = true, .parked = true});
  CHECK((*list)[3] == LayerTreatment{.again = 0b1010});
  CHECK((*list)[5] == LayerTreatment{.again = 0b0001, .parked = true});
  CHECK((*list)[10] == LayerTreatment{});
  // Runs alike are one, in the canonical order of sub-layers.
  CHECK(treatments_text(*parse_treatments("1*none 1*none 1*mlp.act+attn.core", 3)) == "2*none 1*attn.core+mlp.act");
}

TEST_CASE("every set of sub-layers has a text that is read back") {
  for (unsigned set = 0; set < kSubLayerSets; ++set)
    for (const bool parked : {false, true}) {
      const LayerTreatment t{.again = set, .parked = parked};
      const auto read = parse_treatments("1*" + name_of(t), 1);
      REQUIRE(read.ok());
      CHECK(read->front() == t);
    }
}

TEST_CASE("what is no list by layer is refused by name") {
  CHECK(refusal("3*full", 4) == "recompute=3*full: 3 layers, and the model has 4");
  CHECK(refusal("3*full 2*none", 4) == "recompute=3*full 2*none: more layers than the model's 4");
  CHECK(refusal("full", 1) == "recompute=full: `full` is no run of layers");
  CHECK(refusal("0*full 1*none", 1) == "recompute=0*full 1*none: `0*full` is no run of layers");
  CHECK(refusal("-1*full", 1) == "recompute=-1*full: `-1*full` is no run of layers");
  CHECK(refusal("1x*full", 1) == "recompute=1x*full: `1x*full` is no run of layers");
  CHECK(refusal("1*", 1) == "recompute=: a run of layers without a treatment");
  CHECK(refusal("99999999999999999999*none", 1) ==
        "recompute=99999999999999999999*none: `99999999999999999999*none` is no run of layers");
  CHECK(refusal("1*mlp.up", 1) == "recompute of `mlp.up`, which is no sub-layer that can be made again by itself");
  CHECK(refusal("", 1) == "recompute=: 0 layers, and the model has 1");
}

TEST_CASE("the older keys are lists by layer") {
  Case c = testing::small_case(Family::kGpt, 5);
  CHECK(treatments_text(treatments_of(c)) == "5*none");
  c.layout.recompute = Recompute::kSelective;
  CHECK(treatments_text(treatments_of(c)) == "5*attn.core");
  c.layout.recompute_options.modules = "mlp.act attn.norm";
  c.layout.offload.activations = OffloadTo::kCpu;
  CHECK(treatments_text(treatments_of(c)) == "5*attn.norm+mlp.act@cpu");
  c.layout.offload = {};
  c.layout.recompute_options = {};
  c.layout.recompute = Recompute::kFull;
  c.layout.recompute_options.every = 2;
  CHECK(treatments_text(treatments_of(c)) == "1*full 1*none 1*full 1*none 1*full");
}

TEST_CASE("what a list or a budget leaves no room for is refused") {
  const auto refused = [](const Case& c) {
    const auto result = check(c);
    REQUIRE_FALSE(result.ok());
    return result.error().message;
  };
  Case c = testing::small_case(Family::kGpt, 4);
  c.layout.recompute_options.budget_bytes = 1000000;
  CHECK(check(c).ok());
  CHECK_FALSE(is_decided(c));
  c.layout.recompute = Recompute::kFull;
  CHECK(refused(c) == "recompute_options.budget_bytes=1000000 with recompute=full");
  c.layout.recompute = Recompute::kNone;
  c.layout.offload.activations = OffloadTo::kCpu;
  CHECK(refused(c) == "recompute_options.budget_bytes=1000000 with offload.activations=cpu");
  c.layout.offload = {};
  c.layout.recompute_options.budget_bytes = -1;
  CHECK(refused(c) == "recompute_options.budget_bytes=-1 is negative");
  c.layout.recompute_options = {};
  c.layout.recompute = Recompute::kByLayer;
  c.layout.recompute_options.layers = "4*none@cpu";
  CHECK(check(c).ok());
  CHECK(is_decided(c));
  c.layout.offload.activations = OffloadTo::kCpu;
  CHECK(refused(c) == "recompute layer by layer with offload.activations=cpu");
  c.layout.offload = {};
  c.backend = BackendKind::kCuda;
  c.transport = TransportKind::kOneGpu;
  CHECK(check(c).ok());
  c.layout.recompute_options.layers = "4*full";
  CHECK(check(c).ok());
  c.layout.recompute_options.layers = "3*full";
  CHECK(refused(c) == "recompute=3*full: 3 layers, and the model has 4");
}

}  // namespace shardlab::testing
