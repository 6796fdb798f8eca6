// Case files: the resolved case as text, read back the same; ids that depend on what is asked and on nothing else.
#include "sweeps/sweep.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

namespace {

Machine here() {
  Machine m;
  m.id = "here";
  m.local = true;
  m.cores = 2;
  m.devices_per_node = 2;
  m.device.id = "core";
  m.device.memory_bytes = 1'000'000'007;
  m.device.memory_bytes_per_s = 1e10;
  m.device.peak_flops["fp32"] = 1e11;
  m.calibration = std::make_shared<const Calibration>(Calibration{.id = "c1"});
  return m;
}

LoadOptions options_with(std::vector<std::string> words) {
  LoadOptions options;
  options.overrides = std::move(words);
  options.local_machine = []() -> Result<Machine> { return here(); };
  return options;
}

}  // namespace

TEST_CASE("a resolved case is written in one stable form") {
  const auto c = case_from_words(options_with(
      {"name=the case", "model=tiny-llama", "machine=local", "dp=2", "tp=2", "micro_batch=2", "learning_rate=3e-3", "seed=7"}));
  REQUIRE(c.ok());
  REQUIRE_GOLDEN("sweeps/case_local.yaml", to_yaml(*c));
  const auto h = case_from_words(
      options_with({"model=gpt2", "machine=hgx-h100-ndr", "machine.nodes=2", "pp=4", "machine.device.memory=40Gi"}));
  REQUIRE(h.ok());
  REQUIRE_GOLDEN("sweeps/case_hgx.yaml", to_yaml(*h));
}

TEST_CASE("a case file read back is the same case") {
  const std::vector<std::vector<std::string>> cases = {
      {"model=tiny-gpt", "machine=local"},
      {"name=quote \" # : {x}", "model=tiny-llama", "machine=local", "dp=2", "pp=2", "schedule=afab", "zero=1", "recompute=full",
       "bucket_bytes=1Mi", "overlap=false"},
      {"model=llama-3.2-1b", "machine=hgx-b200-ndr", "tp=8", "global_batch_tokens=1Mi", "train.learning_rate.kind=cosine",
       "train.learning_rate.total_steps=100"},
      {"model=gpt2", "machine=mi300x-8", "dropout=0.1", "beta1=0.85", "weight_decay=0.033", "learning_rate=6.1e-4",
       "measure.timeout=2m", "seed=123456789012345"},
      {"model=gpt2", "machine=local", "model.norm_epsilon=1e-6", "model.layers=3", "canonical=true", "collective_algorithm=direct",
       "machine.cores=7", "optimizer=sgd"},
      {"model=tiny-gpt", "machine=local", "checkpoint.save_every=5", "checkpoint.folder=/saved/here",
       "checkpoint.resume=/saved/there"},
      {"model=tiny-llama", "machine=local", "recompute=1*full@cpu 2*attn.core 1*none"},
      {"model=tiny-llama", "machine=local", "recompute=[attn.core, mlp.act]", "offload={activations: cpu, optimizer: nvme}"},
      {"model=tiny-llama", "machine=local", "precision=fp16", "loss_scale=1024"},
  };
  for (const auto& words : cases) {
    const auto c = case_from_words(options_with(words));
    INFO((c.ok() ? "" : to_string(c.error())));
    REQUIRE(c.ok());
    const std::string text = to_yaml(*c);
    INFO(text);
    const auto back = load_case_text(text, "case.yaml", options_with({}));
    INFO((back.ok() ? "" : to_string(back.error())));
    REQUIRE(back.ok());
    CHECK(to_yaml(*back) == text);
    CHECK(back->name == c->name);
    CHECK(back->model == c->model);
    CHECK(back->layout == c->layout);
    CHECK(back->train == c->train);
    CHECK(back->measure == c->measure);
    CHECK(back->checkpoint == c->checkpoint);
    CHECK(back->machine.device.provenance == c->machine.device.provenance);
    CHECK(back->machine.device.peak_flops == c->machine.device.peak_flops);
    CHECK(back->machine.device.memory_bytes == c->machine.device.memory_bytes);
    CHECK(back->machine.device.id == c->machine.device.id);
    CHECK(back->machine.cores == c->machine.cores);
    CHECK((back->machine.calibration == nullptr) == (c->machine.calibration == nullptr));
    CHECK(case_id(*back) == case_id(*c));
  }
}

TEST_CASE("the id is that of what is asked") {
  const auto id = [](std::vector<std::string> more) {
    std::vector<std::string> words = {"model=tiny-gpt", "machine=local", "seq_len=64"};
    words.insert(words.end(), more.begin(), more.end());
    return case_id(*case_from_words(options_with(words)));
  };
  const std::string base = id({});
  CHECK(base.size() == 16);
  CHECK(id({"name=another"}) == base);
  CHECK(id({"dp=2"}) == base);                     // what would be derived
  CHECK(id({"global_batch_tokens=128"}) == base);  // likewise
  CHECK(id({"seed=2"}) != base);
  CHECK(id({"dp=1"}) != base);
  CHECK(id({"model.layers=3"}) != base);
  CHECK(id({"machine.cores=4"}) != base);
  CHECK(id({"checkpoint.resume=/saved"}) != base);
  Case c = *case_from_words(options_with({"model=tiny-gpt", "machine=local", "seq_len=64"}));
  c.machine.calibration = std::make_shared<const Calibration>(Calibration{.id = "another day"});
  c.machine.device.peak_flops["fp32"] = 2e11;
  CHECK(case_id(c) == base);
}

TEST_CASE("a sweep file of one point is a case file too") {
  const std::string one = "model: gpt2\nmachine: local\ndp: 1\n";
  const auto named = [](const std::string& text) { return load_case_text(text, "c.yaml", options_with({})); };
  const auto plain = named(one), swept = named(one + "mode: measure\nresolution: segments\ntraces: all\ndescription: one\n");
  REQUIRE(plain.ok());
  REQUIRE(swept.ok());
  CHECK(case_id(*plain) == case_id(*swept));
}

TEST_CASE("a case file has single values, and says what is wrong like a sweep") {
  const auto message = [](const std::string& text) { return to_string(load_case_text(text, "c.yaml", options_with({})).error()); };
  CHECK(message("model: gpt2\nmachine: local\naxes: {tp: [1]}\n").find("c.yaml:3:7: `axes` makes several cases of one") == 0);
  CHECK(message("model: gpt2\nmachine: local\ntp: [1, 2]\n").find("c.yaml:3:5: `tp` is a list") == 0);
  CHECK(message("model: gpt2\nmachine: local\ndp: 1\ntp: 5\n").find("c.yaml:4:5: heads 12 is not divisible by tp=5") == 0);
  CHECK(load_case("no/such.yaml").error().where == "no/such.yaml");
}
