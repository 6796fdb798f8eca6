// Profiles are data: all that ship are read, and what is wrong in one is refused where it stands.
#include <set>

#include "plan/keys.h"
#include "tests/analytic/studies.h"
#include "tests/test.h"

namespace shardlab::simulator::analytic {
namespace {

TEST_CASE("every framework of the contract has a profile that reads") {
  std::set<std::string_view> names;
  for (const std::string_view name : profile_names()) {
    const auto p = profile_named(name);
    INFO(name);
    REQUIRE(p.ok());
    CHECK(p->name == name);
    CHECK(!p->describes.empty());
    names.insert(name);
  }
  for (const char* needed : {"shardlab", "megatron", "nanotron", "torchtitan", "deepspeed", "llm-foundry", "llm.c", "llmq"})
    CHECK(names.count(needed) == 1);
  const std::vector<std::string> words = words_of(*find_key("profile"));
  CHECK(std::set<std::string_view>(words.begin(), words.end()) == names);  // a sweep can ask for each, and for no other
}

TEST_CASE("a profile starts from another and changes what it names") {
  const auto base = profile_named("megatron");
  const auto p = read_profile("name: mine\nbased_on: megatron\nstate: {gradient: 2}\nmodel: {selective: norms+up}\n", "mine.yaml");
  REQUIRE(base.ok());
  REQUIRE(p.ok());
  FrameworkProfile expected = *base;
  expected.name = "mine", expected.state.gradient = 2;
  expected.model.selective.modules = Recompute::kNorms | Recompute::kUp;
  CHECK(*p == expected);
}

TEST_CASE("what is wrong in a profile is refused with its place") {
  const auto refused = [](const char* yaml, const char* word) {
    const auto p = read_profile(yaml, "mine.yaml");
    REQUIRE(!p.ok());
    INFO(to_string(p.error()));
    CHECK(to_string(p.error()).find(word) != std::string::npos);
  };
  refused("state: {gradients: 2}\n", "mine.yaml:1:9: `state.gradients`");
  refused("status: {gradient: 2}\n", "`status` is not a section");
  refused("state:\n  gradient: -2\n", "mine.yaml:2:13");
  refused("state: {gradient: .nan}\n", "state.gradient");
  refused("state: {gradient: .inf}\n", "state.gradient");
  refused("state: {gradient: two}\n", "state.gradient");
  refused("state: {gradient: 2, gradient: 4}\n", "twice");
  refused("state: 3\n", "not a section of keys");
  refused("attention: {fused: perhaps}\n", "attention.fused");
  refused("model: {selective: everything}\n", "model.selective");
  refused("model: {selective: selective}\n", "name the modules");
  refused("based_on: nothing\n", "no framework profile `nothing`");
  refused("state: {gradient: 2\n", "mine.yaml");
  refused("- 1\n", "map of sections");
  refused("can: 3\n", "not a map of lists");
  refused("can: {zero: 1}\n", "mine.yaml:1:13: `can.zero` is not a list");
  refused("can: {zeros: [1]}\n", "`can.zeros` is not a key of a profile");
  refused("can: {zero: [4]}\n", "`4` is nothing of `can.zero`");
  refused("can: {zero: [1], zero: [2]}\n", "twice");
}

TEST_CASE("every profile says what its framework can do, and takes over what it does not say") {
  for (const std::string_view name : profile_names()) {
    INFO(name);
    CHECK(profile_named(name)->can != Abilities{});
  }
  const auto mine = read_profile("name: mine\nbased_on: megatron\ncan: {schedules: [afab]}\n", "mine.yaml");
  REQUIRE(mine.ok());
  Abilities expected = profile_named("megatron")->can;
  CHECK(ability_words("schedules")[1] == "afab");
  expected.schedules = 2;
  CHECK(mine->can == expected);
  CHECK(read_profile("name: mine\n", "mine.yaml")->can == Abilities{});
}

TEST_CASE("words of abilities are those of layouts") {
  const auto all_read = [](std::string_view key, auto value) {
    for (const std::string& word : ability_words(key)) {
      INFO(key << " " << word);
      CHECK(read(word, &value));
      CHECK(name_of(value) == word);
    }
  };
  all_read("schedules", Schedule{}), all_read("cp_kind", CpKind{}), all_read("compression", Compression{});
  all_read("recompute", Recompute{});
  for (const std::string& word : ability_words("precision")) CHECK(precision_named(word));
}

TEST_CASE("words of recompute go there and back") {
  for (const char* word : {"none", "full", "selective", "norms", "norms+activation", "attention-core+up+experts"}) {
    Recompute r;
    REQUIRE(read(word, &r));
    CHECK(name_of(r) == word);
  }
  Recompute r{.modules = 5};
  for (const char* word : {"", "some", "norms+", "+norms", "norms+some"}) CHECK(!read(word, &r));
  CHECK(r.modules == 5);
}

}  // namespace
}  // namespace shardlab::simulator::analytic
