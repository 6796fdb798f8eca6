// Imports: the way back, foreign files as people have them, and files that are wrong.
#include <fmt/format.h>

#include <map>
#include <set>

#include "interop/frameworks.h"
#include "interop/said.h"
#include "interop/toml.h"
#include "plan/keys.h"
#include "sweeps/models.h"
#include "sweeps/resolution.h"
#include "sweeps/sweep.h"
#include "tests/interop/cases.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using interop::import_file;
using interop::Imported;

Imported imported(std::string_view text, std::string_view framework, int64_t devices = 0) {
  const auto i = import_file(text, "file", framework, devices);
  INFO((i.ok() ? std::string() : to_string(i.error())));
  REQUIRE(i.ok());
  return *i;
}

std::string refused(std::string_view text, std::string_view framework, int64_t devices = 0) {
  const auto i = import_file(text, "file", framework, devices);
  REQUIRE_FALSE(i.ok());
  return to_string(i.error());
}

std::string value(const Imported& i, std::string_view path) {
  for (const auto& [p, v] : i.settings)
    if (p == path) return v;
  return "";
}

/// The file of an export that holds the settings.
std::string settings_file(const Case& c, std::string_view framework) {
  const auto e = interop::export_case(c, framework);
  INFO((e.ok() ? std::string() : to_string(e.error())));
  REQUIRE(e.ok());
  return e->files.front().text;
}

/// Keys that a framework's file cannot hold, or holds otherwise, and that are therefore not compared.
bool is_elsewhere(std::string_view path, std::string_view framework, const Case& c) {
  if (interop::is_inert(path, c)) return true;
  static const std::set<std::string_view> of_script = {
      "train.seq_len", "train.global_batch_tokens", "train.seed",       "train.dropout",
      "layout.pp",     "layout.schedule",           "layout.recompute", "layout.stage_layers"};
  if (framework == "deepspeed" && (of_script.contains(path) || path.starts_with("model."))) return true;
  static const std::set<std::string_view> own_choice = {"layout.fsdp.prefetch", "layout.bucket_bytes", "train.guard.nonfinite"};
  if (own_choice.contains(path)) return path != "layout.bucket_bytes" || !interop::asks_for_buckets(c);
  if (path == "model.init_deviation") return framework == "torchtitan";
  if (path == "train.dropout") return framework == "torchtitan";
  return path == "layout.stage_layers" && c.layout.pp == 1;
}

void require_round_trip(const Case& c, std::string_view framework) {
  const Imported back = imported(settings_file(c, framework), framework, c.layout.world_size());
  Case again;
  again.machine = c.machine;
  for (const auto& [path, text] : back.settings) {
    const CaseKey* key = find_key(path);
    INFO(path << "=" << text);
    REQUIRE(key != nullptr);
    REQUIRE(has_form(*key, text));
    REQUIRE(key->set(again, text));
  }
  for (const CaseKey& key : case_keys()) {
    if (key.get == nullptr || is_elsewhere(key.path, framework, c)) continue;
    INFO(framework << " " << key.path << "\n" << settings_file(c, framework));
    CHECK(key.get(again) == key.get(c));
  }
}

const std::string kWsd = "train: {learning_rate: {peak: 1e-3, kind: wsd, warmup_steps: 10, total_steps: 1000, decay_steps: 250}}\n";

TEST_CASE("what is exported reads back as the case") {
  for (const char* more :
       {"tp: 4\npp: 2\nvpp: 4\nschedule: interleaved\nsequence_parallel: true\nzero: 1\nrecompute: selective\nmicro_batch: "
        "1\nbucket_bytes: 64Mi\n",
        "tp: 8\nsequence_parallel: true\nzero: 0\nrecompute: full\nmicro_batch: 2\noverlap: false\n", "zero: 3\nmicro_batch: 1\n",
        "zero: 2\nmicro_batch: 1\ncp: 2\n",
        "zero: 1\nhybrid_shard: 4\nmicro_batch: 1\nreduce_dtype: bf16\naccumulate_dtype: bf16\n",
        "pp: 4\nschedule: 1f1b\nstage_layers: '9,9,9,5'\nmicro_batch: 1\n",
        "precision: fp8\nfp8_scaling: block\nzero: 1\noffload: {optimizer: cpu}\nmicro_batch: 1\n",
        "precision: fp16\nloss_scale: 1024\nmicro_batch: 1\noptimizer: sgd\n", "model.qkv_biases: true\nmicro_batch: 1\n",
        "model.qk_norm: true\nmicro_batch: 1\n",
        "precision: fp16\nloss_scale_start: 4096\nloss_scale_interval: 500\nmicro_batch: 1\nclip_norm: 1\ndropout: 0.1\n"}) {
    std::string text = more;
    const bool precise = text.find("precision:") != std::string::npos;
    const std::string head =
        "profile: megatron\nmodel: llama-3.1-8b\nmachine: {preset: hgx-h100-ndr, nodes: 2}\nseq_len: 8192\nglobal_batch_tokens: "
        "1Mi\n";
    require_round_trip(point_of(head + (precise ? "" : "precision: bf16\n") + text), "megatron");
  }
  for (const char* kind : {"cp_kind: zigzag\ncp: 2\n", "cp_kind: all-gather\ncp: 2\n", "cp_kind: ulysses\ncp: 2\n",
                           "cp_kind: usp\ncp: 4\ncp_ulysses: 2\n"})
    require_round_trip(llama("megatron", "zero: 1\nmicro_batch: 1\n" + std::string(kind)), "megatron");
  require_round_trip(point_of("profile: megatron\nmodel: gpt2\nmachine: h100\nseq_len: 1Ki\nglobal_batch_tokens: "
                              "64Ki\nmicro_batch: 4\nprecision: bf16\nmodel.vocab: 50304\n" +
                              kWsd),
                     "megatron");

  for (const char* more :
       {"zero: 0\nmicro_batch: 1\n", "zero: 1\nmicro_batch: 2\nbucket_bytes: 64Mi\n",
        "zero: 2\noffload: {optimizer: cpu}\nmicro_batch: 1\noverlap: false\n",
        "zero: 3\nhybrid_shard: 8\noffload: {optimizer: nvme, parameters: cpu}\nmicro_batch: 1\nrecompute: full\n",
        "tp: 4\nzero: 1\nmicro_batch: 1\nclip_norm: 1\n", "zero: 1\nmicro_batch: 1\noptimizer: lion\nweight_decay: 0.5\n",
        "zero: 0\nmicro_batch: 1\ntrain: {learning_rate: {peak: 1e-3, kind: cosine, warmup_steps: 10, total_steps: 1000, floor: "
        "1e-4}}\n",
        "zero: 0\nmicro_batch: 1\ntrain: {learning_rate: {peak: 1e-3, kind: linear, warmup_steps: 10, total_steps: 1000}}\n",
        "zero: 0\nmicro_batch: 1\ntrain: {learning_rate: {peak: 1e-3, warmup_steps: 10}, weight_decay: 0.1, beta2: 0.99}\n"})
    require_round_trip(llama("deepspeed", more), "deepspeed");

  for (const char* more : {"tp: 2\npp: 2\nschedule: 1f1b\nsequence_parallel: true\nzero: 3\nrecompute: full\nmicro_batch: 1\n",
                           "zero: 3\nhybrid_shard: 8\nrecompute: selective\nmicro_batch: 2\n",
                           "zero: 0\nmicro_batch: 1\nrecompute: full\nrecompute_options: {every: 2}\nclip_norm: 0.5\n",
                           "pp: 4\nvpp: 2\nschedule: interleaved\nzero: 0\nmicro_batch: 1\n",
                           "pp: 4\nschedule: 1f1b\nstage_layers: '9,9,9,5'\nzero: 0\nmicro_batch: 1\n",
                           "cp: 2\nzero: 3\nfsdp: {reshard: false}\nmicro_batch: 1\noffload: {optimizer: cpu, parameters: cpu}\n",
                           "zero: 3\nmicro_batch: 1\ntrain: {learning_rate: {peak: 1e-3, kind: wsd, warmup_steps: 10, total_steps: "
                           "1000, decay_steps: 250, floor: 1e-4}}\n"})
    require_round_trip(llama("torchtitan", more), "torchtitan");
}

TEST_CASE("a case file is made of what was read, and loads") {
  const Case c = llama("megatron", "tp: 4\npp: 2\nschedule: 1f1b\nsequence_parallel: true\nzero: 1\nmicro_batch: 1\ndropout: 0\n");
  const Imported back = imported(settings_file(c, "megatron"), "megatron", 16);
  const Case again = point_of(interop::case_text(back, "profile: megatron\nmachine: {preset: hgx-h100-ndr, nodes: 2}\n"));
  REQUIRE(again.layout == c.layout);
  REQUIRE(again.train.micro_batch == c.train.micro_batch);
  REQUIRE(again.sequences_per_step() == c.sequences_per_step());
  REQUIRE(again.model.ffn == c.model.ffn);
}

TEST_CASE("the model's config.json reads back as the model") {
  for (const char* name : {"llama-3.1-8b", "gpt2", "tiny-llama", "tiny-gpt"}) {
    const auto model = sweeps::load_model(name);
    REQUIRE(model.ok());
    const auto again = sweeps::parse_model(interop::hugging_face_config(*model), model->name);
    INFO((again.ok() ? std::string() : to_string(again.error())));
    REQUIRE(again.ok());
    REQUIRE(*again == *model);
  }
}

TEST_CASE("a launch script with variables, arrays, comments and continued lines is read") {
  const Imported i = imported(R"(#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=4
TP=2   # tensor parallel
MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288 --num-attention-heads 96   # the 175B shape
    --attention-backend auto
    --seq-length 2048 --max-position-embeddings 2048
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NUM_NODES} pretrain_gpt.py ${MODEL_ARGS[@]} \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size=8 --num-layers-per-virtual-pipeline-stage 3 \
    --micro-batch-size 1 --global-batch-size 1536 --vocab-size 51200 --make-vocab-size-divisible-by 128 \
    --fp16 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --train-iters 500000 --use-distributed-optimizer --recompute-activations
)",
                              "megatron");
  REQUIRE(value(i, "layout.tp") == "2");
  REQUIRE(value(i, "layout.pp") == "8");
  REQUIRE(value(i, "layout.vpp") == "4");
  REQUIRE(value(i, "layout.schedule") == "interleaved");
  REQUIRE(value(i, "layout.dp") == "2");
  REQUIRE(value(i, "layout.zero") == "1");
  REQUIRE(value(i, "layout.recompute") == "selective");
  REQUIRE(value(i, "train.grad_accumulation") == "768");
  REQUIRE(value(i, "train.precision") == "fp16");
  REQUIRE(value(i, "train.clip_norm") == "1");  // Megatron-LM's default
  REQUIRE(value(i, "model.ffn") == "49152");
  REQUIRE(value(i, "train.learning_rate.total_steps") == "500000");
  REQUIRE(i.unread == std::vector<std::string>{"--attention-backend auto"});
}

TEST_CASE("what no case can say is refused by name; what does not matter is listed") {
  const std::string model =
      "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 128 --micro-batch-size 1 ";
  REQUIRE(refused(model + "--num-experts 8", "megatron").find("--num-experts: mixtures of experts") != std::string::npos);
  REQUIRE(refused(model + "--recompute-granularity full --recompute-method block --recompute-num-layers 2", "megatron")
              .find("--recompute-method") != std::string::npos);
  REQUIRE(refused(model + "--tensor-model-parallel-size ${TP}", "megatron").find("is not one value that stands in the file") !=
          std::string::npos);
  REQUIRE(refused(model + "--tensor-model-parallel-size 4", "megatron", 6).find("6 devices are not a multiple") !=
          std::string::npos);
  REQUIRE(refused(model + "--tensor-model-parallel-size -3", "megatron").find("`-3` is not a whole number of 1 or more") !=
          std::string::npos);
  REQUIRE(refused("hello", "megatron")
              .starts_with("file: none of --num-layers, --tensor-model-parallel-size, --micro-batch-size is given"));
  REQUIRE(refused("--tensor-model-paralel-size 2", "megatron").find("did you mean `--tensor-model-parallel-size`?") !=
          std::string::npos);
  REQUIRE(refused(model + "--qk-layernorm", "megatron").find("--qk-layernorm: gpt has no norms") != std::string::npos);
  REQUIRE(refused(model + "--global-batch-size 3", "megatron", 2)
              .find("--global-batch-size: 3 is not a multiple of micro-batch 1 * 2 data-parallel ranks = 2") != std::string::npos);

  const Imported auto_values = imported(
      R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": true},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9}, "steps_per_print": 100, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})",
      "deepspeed", 8);
  REQUIRE(value(auto_values, "layout.dp") == "8");
  REQUIRE(value(auto_values, "layout.zero") == "3");
  REQUIRE(value(auto_values, "layout.overlap") == "true");
  REQUIRE(value(auto_values, "layout.bucket_bytes") == "1000000000");
  REQUIRE(value(auto_values, "train.grad_accumulation") == "2");
  REQUIRE(std::ranges::count(auto_values.unread, "steps_per_print") == 1);
  REQUIRE(refused(R"({"optimizer": {"type": "Lamb"}})", "deepspeed").find("`Lamb` has no counterpart") != std::string::npos);
  REQUIRE(refused(R"({"zero_optimization": {"stage": 4}})", "deepspeed").find("4 is not a stage") != std::string::npos);
  REQUIRE(refused("[1]", "deepspeed").starts_with("file: the file is a list"));
  REQUIRE(refused("7", "deepspeed").starts_with("file: the file is the single value 7"));
  REQUIRE(refused(" \n", "deepspeed").starts_with("file: the file is empty"));
  REQUIRE(refused("{\"a\":\n // c\n \"\u00e9\", }", "deepspeed").starts_with("file:3:7: not JSON: "));
  REQUIRE(refused("{\"a\": 1", "deepspeed").starts_with("file:1:8: not JSON: unexpected end of input; expected '}'"));
  REQUIRE(refused("{\n\"a\": \"b\n}", "deepspeed")
              .starts_with("file:2:8: not JSON: the string is not closed before the end of its line"));
  REQUIRE(
      refused("{\"a\": \"b", "deepspeed").starts_with("file:1:9: not JSON: the string is not closed before the end of its line"));
  REQUIRE(refused("{\"a\": 1e999}", "deepspeed").starts_with("file: a number of the file is too large"));
  REQUIRE(refused(std::string(100000, '['), "deepspeed").starts_with("file: nested more than 64 levels deep"));
  for (const char* wrong : {R"({"zero_optimization": false})", R"({"bf16": 3, "fp16": []})", R"({"optimizer": {"type": 3}})",
                            R"({"train_batch_size": {}})", R"({"scheduler": {"type": null}})"})
    (void)import_file(wrong, "file", "deepspeed");  // refused or not, in words

  REQUIRE(refused("[model]\nname = \"deepseek_v3\"\nflavor = \"16B\"\n", "torchtitan", 8).find("is not known here") !=
          std::string::npos);
  REQUIRE(refused("[model]\nflavor = \"8B\"\n", "torchtitan").find("name --devices") != std::string::npos);
  const Imported defaults = imported("[model]\nflavor = \"8B\"\n[metrics]\nlog_freq = 10\n", "torchtitan", 8);
  REQUIRE(value(defaults, "layout.zero") == "3");
  REQUIRE(value(defaults, "train.micro_batch") == "8");
  REQUIRE(value(defaults, "train.seq_len") == "2048");
  REQUIRE(value(defaults, "layout.recompute") == "full");  // of every second layer: torchtitan's default
  REQUIRE(value(defaults, "layout.recompute_options.every") == "2");
  REQUIRE(defaults.unread == std::vector<std::string>{"metrics.log_freq"});
  REQUIRE(refused("a", "jax").find("are not read") != std::string::npos);
  REQUIRE(refused(std::string(2 << 20, ' '), "megatron").find("more than") != std::string::npos);
}

TEST_CASE("the batch of a DeepSpeed file follows from two of its three settings, as DeepSpeed has it") {
  const auto file = [](int sequences, int micro_batch, int accumulation) {
    std::string text = "{\"steps_per_print\": 1";
    if (sequences > 0) text += fmt::format(", \"train_batch_size\": {}", sequences);
    if (micro_batch > 0) text += fmt::format(", \"train_micro_batch_size_per_gpu\": {}", micro_batch);
    if (accumulation > 0) text += fmt::format(", \"gradient_accumulation_steps\": {}", accumulation);
    return text + "}";
  };
  const auto read = [&](int sequences, int micro_batch, int accumulation, int64_t devices) {
    const Imported i = imported(file(sequences, micro_batch, accumulation), "deepspeed", devices);
    return fmt::format("{} * {} * {}", value(i, "train.micro_batch"), value(i, "train.grad_accumulation"), value(i, "layout.dp"));
  };
  REQUIRE(read(32, 2, 2, 8) == "2 * 2 * 8");
  REQUIRE(read(32, 2, 0, 8) == "2 * 2 * 8");
  REQUIRE(read(32, 0, 2, 8) == "2 * 2 * 8");
  REQUIRE(read(0, 2, 2, 8) == "2 * 2 * 8");
  REQUIRE(read(32, 0, 0, 8) == "4 * 1 * 8");
  REQUIRE(read(0, 2, 0, 8) == "2 * 1 * 8");
  REQUIRE(read(0, 0, 2, 8) == "1 * 2 * 8");
  REQUIRE(read(32, 2, 2, 0) == "2 * 2 * 8");
  const auto refusal = [&](int sequences, int micro_batch, int accumulation, int64_t devices) {
    const std::string text = refused(file(sequences, micro_batch, accumulation), "deepspeed", devices);
    const size_t begin = text.find("train_batch_size: ");
    return begin == std::string::npos ? text : text.substr(begin, text.find('\n', begin) - begin);
  };
  const std::string micro = "train_micro_batch_size_per_gpu ", times = "gradient_accumulation_steps ";
  REQUIRE(refusal(7, 2, 2, 8) == "train_batch_size: 7 is not " + micro + "2 * " + times + "2 * 8 data-parallel ranks = 32");
  // A multiple of micro-batch and ranks, which another accumulation would explain: not the one that the file states.
  REQUIRE(refusal(16, 2, 2, 8) == "train_batch_size: 16 is not " + micro + "2 * " + times + "2 * 8 data-parallel ranks = 32");
  REQUIRE(refusal(10, 4, 0, 2) == "train_batch_size: 10 is not a multiple of " + micro + "4 * 2 data-parallel ranks = 8");
  REQUIRE(refusal(10, 0, 4, 2) == "train_batch_size: 10 is not a multiple of " + times + "4 * 2 data-parallel ranks = 8");
  REQUIRE(refusal(7, 0, 0, 8) == "train_batch_size: 7 is not a multiple of 8 data-parallel ranks = 8");
  REQUIRE(refusal(7, 2, 2, 0) == "train_batch_size: 7 is not a multiple of " + micro + "2 * " + times + "2 = 4");
}

TEST_CASE("TOML is read as it is defined, as far as it goes, and refused with its line") {
  const auto parsed = interop::parse_toml(
      "# c\na = 1_000 # c\n'q.r' = \"x\\\"y\"\n[t.u]\nb = [1, [2.5, 'z',],\n  # c\n  true]\nc.d = -3e2\ne = inf\n", "f");
  INFO((parsed.ok() ? std::string() : to_string(parsed.error())));
  REQUIRE(parsed.ok());
  std::map<std::string, interop::TomlValue> values;
  for (const interop::TomlEntry& e : *parsed) values[e.path] = e.value;
  REQUIRE(std::get<int64_t>(values["a"].value) == 1000);
  REQUIRE(std::get<std::string>(values["q.r"].value) == "x\"y");
  REQUIRE(std::get<interop::TomlValue::List>(values["t.u.b"].value).size() == 3);
  REQUIRE(std::get<double>(values["t.u.c.d"].value) == -300);
  REQUIRE(std::get<double>(values["t.u.e"].value) > 1e300);
  for (const char* bad : {"a", "a =", "a = 1 2", "a = [1", "a = \"x", "[t", "[[t]]", "a = {b = 1}", "a = 1\na = 2", "[t]\n[t]",
                          "a = \"\"\"x\"\"\"", "= 1", "a = 1e999", "a = x"}) {
    INFO(bad);
    const auto e = interop::parse_toml(bad, "f");
    REQUIRE_FALSE(e.ok());
    REQUIRE(e.error().where.starts_with("f:"));
  }
  const auto where = [](const char* bad) { return interop::parse_toml(bad, "f").error().where; };
  REQUIRE(where("[t\na = 1\n") == "f:1:3");
  REQUIRE(where("a = 1\n  b = 'x' c\n") == "f:2:11");
  REQUIRE(where("a = 1\n\n a = [\n2]\n") == "f:3:2");
  REQUIRE(where("\u00e4 = 1") == "f:1:1");
  REQUIRE(where("a = '\u00e4' x") == "f:1:9");
  REQUIRE_FALSE(interop::parse_toml("a = " + std::string(100000, '['), "f").ok());
}

}  // namespace
}  // namespace shardlab::testing
