// The sweeps that ship with the program.
#include <algorithm>
#include <filesystem>
#include <set>

#include "plan/keys.h"
#include "sweeps/sweep.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

LoadOptions with_small_local() {
  LoadOptions options;
  options.local_machine = []() -> Result<Machine> {
    Machine m;
    m.local = true;
    m.cores = 2;
    m.devices_per_node = 1;
    m.device.memory_bytes = int64_t{4} << 30;
    return m;
  };
  return options;
}

Expansion shipped(const std::string& file) {
  const auto sweep = load_sweep(testing::source_dir() + "/sweeps/" + file, with_small_local());
  INFO((sweep.ok() ? "" : to_string(sweep.error())));
  REQUIRE(sweep.ok());
  auto expansion = expand(*sweep);
  INFO((expansion.ok() ? "" : to_string(expansion.error())));
  REQUIRE(expansion.ok());
  return *std::move(expansion);
}

}  // namespace

TEST_CASE("quickstart covers every strategy on 1, 2, 4 and 8 ranks with one global batch and seed") {
  const Expansion e = shipped("quickstart.yaml");
  CHECK(e.points.size() >= 16);
  CHECK(e.duplicates == 0);
  std::set<int> worlds;
  std::set<int64_t> batches;
  std::set<uint64_t> seeds;
  std::set<std::string> covered;
  for (const Point& p : e.points) {
    INFO(p.name);
    INFO((p.refusal ? p.refusal->message : ""));
    CHECK_FALSE(p.refusal);
    const Case& c = p.config;
    worlds.insert(c.layout.world_size());
    batches.insert(c.train.global_batch_tokens);
    seeds.insert(c.train.seed);
    const auto note = [&](bool holds, const char* what) {
      if (holds) covered.insert(what);
    };
    const Layout& l = c.layout;
    note(l.world_size() == 1 && c.train.grad_accumulation == 1, "single");
    note(l.dp > 1 && l.bucket_bytes == 0 && !l.overlap, "dp naive");
    note(l.dp > 1 && l.bucket_bytes > 0 && !l.overlap, "dp bucketed");
    note(l.dp > 1 && l.bucket_bytes > 0 && l.overlap, "dp overlap");
    note(c.train.grad_accumulation > 1 && l.pp == 1, "accumulation");
    note(l.zero == 1 && l.pp == 1, "zero 1");
    note(l.zero == 2, "zero 2");
    note(l.zero == 3, "zero 3");
    note(l.hybrid_shard > 0, "hybrid shard");
    note(l.offload.activations != OffloadTo::kNone, "offload of activations");
    note(l.offload.optimizer != OffloadTo::kNone, "offload of the optimizer");
    note(l.tp == 2, "tp 2");
    note(l.tp == 4, "tp 4");
    note(l.schedule == Schedule::kAfab, "afab");
    note(l.schedule == Schedule::k1F1B, "1f1b");
    note(l.recompute == Recompute::kFull, "recompute");
    note(l.dp == 2 && l.tp == 2 && l.pp == 2, "3-D");
    note(l.zero == 1 && l.pp > 1 && c.model.tied_embeddings, "zero 1 across tied stages");
    note(c.model.family == Family::kLlama, "llama");
    note(c.model.family == Family::kGpt, "gpt");
  }
  CHECK(worlds == std::set<int>{1, 2, 4, 8});
  CHECK(batches.size() == 1);
  CHECK(seeds.size() == 1);
  CHECK(covered == std::set<std::string>{"single",
                                         "dp naive",
                                         "dp bucketed",
                                         "dp overlap",
                                         "accumulation",
                                         "zero 1",
                                         "zero 2",
                                         "zero 3",
                                         "hybrid shard",
                                         "offload of activations",
                                         "offload of the optimizer",
                                         "tp 2",
                                         "tp 4",
                                         "afab",
                                         "1f1b",
                                         "recompute",
                                         "3-D",
                                         "zero 1 across tied stages",
                                         "llama",
                                         "gpt"});
}

TEST_CASE("the claims load, each with points to run and sentences to test") {
  for (const auto& entry : std::filesystem::directory_iterator(testing::source_dir() + "/sweeps/claims")) {
    INFO(entry.path());
    const auto sweep = load_sweep(entry.path().string(), with_small_local());
    REQUIRE(sweep.ok());
    CHECK(!sweep->claims().empty());
    const auto expansion = expand(*sweep);
    REQUIRE(expansion.ok());
    CHECK(expansion->runnable() == static_cast<int64_t>(expansion->points.size()));
  }
}

TEST_CASE("the sweep of overlap has pairs that differ in overlap alone") {
  const Expansion e = shipped("overlap.yaml");
  REQUIRE(e.points.size() == 6);
  for (size_t i = 0; i < e.points.size(); i += 2) {
    INFO(e.points[i].name);
    CHECK_FALSE(e.points[i].refusal);
    Case serial = e.points[i + 1].config;
    CHECK_FALSE(serial.layout.overlap);
    serial.layout.overlap = true;
    CHECK(serial.layout == e.points[i].config.layout);
    CHECK(serial.train == e.points[i].config.train);
  }
}

TEST_CASE("the sweep for a GPU has layouts whose curves must agree, in canonical mode, and models at full speed") {
  const Expansion e = shipped("gpu.yaml");
  int canonical = 0, fast = 0;
  for (const Point& p : e.points) {
    INFO(p.name);
    INFO((p.refusal ? p.refusal->message : ""));
    CHECK_FALSE(p.refusal);
    CHECK(p.config.backend == BackendKind::kCuda);
    CHECK(p.config.transport == TransportKind::kOneGpu);
    (p.config.canonical ? canonical : fast) += 1;
    if (!p.config.canonical) CHECK(p.config.layout.world_size() == 1);
  }
  CHECK(canonical >= 8);
  CHECK(fast >= 2);
}

TEST_CASE("the example sweeps load and have points to run") {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(testing::source_dir() + "/sweeps/examples")) {
    if (entry.path().extension() != ".yaml") continue;  // models of an example
    INFO(entry.path());
    const Expansion e = shipped("examples/" + entry.path().filename().string());
    CHECK(e.runnable() > 0);
    ++files;
  }
  CHECK(files >= 2);
  const Expansion llama = shipped("examples/llama8b-hgx-h100.yaml");
  for (const Point& p : llama.points) CHECK((p.refusal || p.config.layout.world_size() == 16));
}

TEST_CASE("every key of the contract has its word") {
  const std::vector<std::string> words = keys_under("");
  for (const char* word : {"dp",
                           "tp",
                           "pp",
                           "vpp",
                           "cp",
                           "ep",
                           "zero",
                           "schedule",
                           "sequence_parallel",
                           "recompute",
                           "offload",
                           "precision",
                           "micro_batch",
                           "grad_accumulation",
                           "seq_len",
                           "global_batch_tokens",
                           "optimizer",
                           "bucket_bytes",
                           "overlap",
                           "fsdp",
                           "hybrid_shard",
                           "zero_plus_plus",
                           "parameter_server",
                           "compression",
                           "diloco",
                           "collective_algorithm",
                           "cp_kind",
                           "reduce_dtype",
                           "accumulate_dtype",
                           "clip_norm",
                           "dropout",
                           "canonical",
                           "threads_per_rank",
                           "seed",
                           "backend",
                           "transport"}) {
    INFO(word);
    CHECK(std::count(words.begin(), words.end(), word) == 1);
    CHECK(find_key(word) != nullptr);
  }
}

TEST_CASE("the table of keys is one table") {
  std::set<std::string_view> words;
  for (const CaseKey& key : case_keys()) {
    INFO(key.path);
    CHECK(words.insert(key.path).second);
    CHECK(find_key(key.path) == &key);
    CHECK(key.set != nullptr);
    if (key.form == Form::kWord) CHECK_FALSE(key.words.empty());
  }
  // What a getter writes has the key's form, and setting it changes nothing.
  Case c = shipped("quickstart.yaml").points.back().config;
  c.machine.local = false;
  for (const CaseKey& key : case_keys()) {
    if (!key.get || key.form == Form::kPath) continue;
    INFO(key.path);
    const std::string text = key.get(c);
    CHECK(has_form(key, text));
    Case copy = c;
    CHECK(key.set(copy, text));
    CHECK(key.get(copy) == text);
    CHECK(case_id(copy) == case_id(c));
  }
}
