// Exports: their text, and that no setting is lost on the way.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "interop/frameworks.h"
#include "plan/keys.h"
#include "plan/pipeline_case.h"
#include "tests/interop/cases.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using interop::export_case;
using interop::Exported;

std::string text_of(const Exported& e) {
  std::string text;
  for (const interop::File& file : e.files)
    text += fmt::format("==== {}{}\n{}", file.name, file.executable ? " (executable)" : "", file.text);
  return text;
}

Exported exported(const Case& c, std::string_view framework, bool slurm = false) {
  const auto e = export_case(
      c, framework, {.program = "shardlab", .case_id = "0123456789abcdef", .entry_point = {}, .slurm_account = {}, .slurm = slurm});
  INFO((e.ok() ? std::string() : to_string(e.error())));
  REQUIRE(e.ok());
  return *e;
}

std::string refusal(const Case& c, std::string_view framework) {
  const auto e = export_case(c, framework);
  REQUIRE_FALSE(e.ok());
  REQUIRE(e.error().code == ExitCode::kUsage);
  return e.error().message;
}

const std::string kRate =
    "learning_rate: 3e-4\ntrain: {learning_rate: {kind: cosine, warmup_steps: 100, total_steps: 2000, floor: 3e-5}, weight_decay: "
    "0.1, clip_norm: 1}\n";

/// A case that the framework has, with much of what it can say.
Case rich(std::string_view framework) {
  if (framework == "megatron")
    return llama("megatron",
                 "tp: 4\npp: 2\nvpp: 2\nschedule: interleaved\nsequence_parallel: true\nzero: 1\nrecompute: "
                 "selective\nmicro_batch: 1\nbucket_bytes: 64Mi\n" +
                     kRate);
  if (framework == "deepspeed")
    return llama("deepspeed", "zero: 3\nhybrid_shard: 8\noffload: {optimizer: cpu}\nrecompute: full\nmicro_batch: 1\n" + kRate);
  if (framework == "torchtitan")
    return llama("torchtitan",
                 "tp: 2\npp: 2\nschedule: 1f1b\nsequence_parallel: true\nzero: 3\nrecompute: full\nmicro_batch: 1\n" + kRate);
  if (framework == "nanotron")
    return llama("nanotron",
                 "tp: 4\npp: 2\nschedule: 1f1b\nsequence_parallel: true\nzero: 1\nrecompute: full\nmicro_batch: 2\n" + kRate);
  return llama("torchtitan", "zero: 3\nhybrid_shard: 8\nrecompute: full\nmicro_batch: 1\n" + kRate);
}

TEST_CASE("the files of each framework are as they were reviewed") {
  for (const interop::Framework& f : interop::frameworks())
    REQUIRE_GOLDEN(fmt::format("interop/{}.txt", f.id), text_of(exported(rich(f.id), f.id, true)));
  REQUIRE_GOLDEN("interop/accelerate-deepspeed.txt",
                 text_of(exported(llama("deepspeed", "zero: 2\nmicro_batch: 1\n" + kRate), "accelerate")));
}

/// Other values of a key, as texts that have its form.
std::vector<std::string> other_values(const CaseKey& key, const Case& c) {
  std::vector<std::string> values;
  const std::string now = key.get(c);
  switch (key.form) {
    case Form::kInteger:
    case Form::kCount:
      for (const char* v : {"0", "1", "2", "3", "8", "64"}) values.emplace_back(v);
      break;
    case Form::kNumber:
      for (const char* v : {"0.001", "0.125", "0.5", "2"}) values.emplace_back(v);
      break;
    case Form::kBool: values = {"true", "false"}; break;
    case Form::kWord: values = words_of(key); break;
    case Form::kText: values = {"16,16", "20,12"}; break;
    case Form::kPath: values = {"/data/text"}; break;
    case Form::kMap:
      values = {"none",
                "{optimizer: cpu}",
                "{optimizer: nvme}",
                "{activations: cpu}",
                "{parameters: cpu}",
                "{optimizer: cpu, parameters: cpu}"};
      break;
    case Form::kAny:
      values = words_of(key);
      values.push_back("[attn.core]"), values.push_back("32*full"), values.push_back("1024");
      break;
    case Form::kDuration: break;
  }
  std::erase(values, now);
  return values;
}

TEST_CASE("no setting is lost: each other value changes the files, is left to the script, or is refused by its key") {
  for (const interop::Framework& f : interop::frameworks()) {
    const Case base = rich(f.id);
    const Exported was = exported(base, f.id);
    int changed = 0, refused = 0;
    for (const CaseKey& key : case_keys()) {
      if (key.get == nullptr) continue;
      const bool of_shardlab = key.path == "name" || key.path == "model.name" || key.path == "profile" ||
                               key.path.starts_with("machine.") || key.path.starts_with("execution.") ||
                               key.path.starts_with("measure.") || key.path.starts_with("checkpoint.");
      if (of_shardlab) continue;
      for (const std::string& value : other_values(key, base)) {
        Case c = base;
        if (!has_form(key, value) || !key.set(c, value) || key.get(c) == key.get(base)) continue;
        if (c.layout.pp > 1 && (!check_pipeline(c).ok())) continue;
        INFO(f.id << " " << key.path << "=" << value);
        const auto e =
            export_case(c, f.id, {.program = "shardlab", .case_id = "0123456789abcdef", .entry_point = {}, .slurm_account = {}});
        if (!e.ok()) {
          ++refused;
          // Named is the key, or another key that the value does not go with.
          CHECK(e.error().message.find('=') != std::string::npos);
          continue;
        }
        const bool differs = text_of(*e) != text_of(was);
        changed += differs;
        // What has no effect in this case: a rank of a compression that is off, and the like.
        const std::set<std::string_view> inert = {"train.grad_norm",
                                                  "train.loss_scale",
                                                  "train.loss_scale_start",
                                                  "train.loss_scale_interval",
                                                  "train.fp8_scaling",
                                                  "train.guard.loss_factor",
                                                  "train.guard.norm_factor",
                                                  "train.guard.window",
                                                  "train.learning_rate.decay_steps",
                                                  "layout.compression.rank",
                                                  "layout.compression.k",
                                                  "layout.compression.bits",
                                                  "layout.compression.warmup",
                                                  "layout.diloco.learning_rate",
                                                  "layout.diloco.momentum",
                                                  "layout.parameter_server.staleness",
                                                  "layout.recompute_options.every",
                                                  "model.max_positions"};
        // Settings of a layer of experts, which this model does not have: `experts` itself is refused.
        const std::set<std::string_view> of_experts = {"model.top_k",
                                                       "model.moe_ffn",
                                                       "model.router",
                                                       "model.normalise_weights",
                                                       "model.z_loss",
                                                       "model.balance_loss",
                                                       "model.router_factor",
                                                       "model.shared_experts",
                                                       "model.shared_gate",
                                                       "model.dense_layers",
                                                       "model.moe_every",
                                                       "model.router_groups",
                                                       "model.router_groups_chosen",
                                                       "model.bias_update_rate",
                                                       "model.capacity_factor",
                                                       "data.routes"};
        const bool inert_here =
            inert.contains(key.path) || (of_experts.contains(key.path) && !base.model.is_mixture()) ||
            (key.path == "model.vocab_multiple" && c.model.vocab_rows() == base.model.vocab_rows()) ||
            (key.path.starts_with("layout.fsdp.") && base.layout.zero < 3) ||
            (key.path == "layout.fsdp.prefetch") ||  // a note says whose choice it is
            (key.path == "layout.vpp" && base.layout.schedule != Schedule::kInterleaved) ||
            ((key.path == "layout.sequence_parallel" || key.path == "layout.tensor_overlap") && base.layout.tp == 1) ||
            (key.path == "layout.zero_plus_plus.secondary" && value == "1") ||
            (key.path == "layout.bucket_bytes" && value == "0") ||  // the framework's own size
            (key.path == "layout.hybrid_shard" && (value == "0" || std::stoll(value) == base.layout.dp) &&
             base.layout.hybrid_shard == 0) ||
            (key.path == "model.init_deviation" && f.id == "torchtitan");  // a note says whose weights they are
        // The product of the batch's parts, which are written; an order of one stage; what is so already, in other words.
        const bool said_already = key.path == "train.global_batch_tokens" ||
                                  (key.path == "layout.schedule" && base.layout.pp == 1) ||
                                  (key.path == "layout.recompute" && value == "[attn.core]" && f.id == "megatron") ||
                                  (key.path == "layout.stage_layers" && value == "16,16") ||
                                  (key.path == "layout.bucket_bytes" && base.layout.zero == 3);  // FSDP has units, no buckets
        if (!inert_here && !said_already) CHECK(differs);
      }
    }
    CHECK(changed > 30);
    CHECK(refused > 30);
  }
}

TEST_CASE("biases of q, k and v and norms over heads go where there is a word for them") {
  Case biased = llama("megatron", "micro_batch: 1\n"), normed = biased;
  biased.model.qkv_biases = true, normed.model.qk_norm = true;
  REQUIRE(text_of(exported(biased, "megatron")).find("--disable-bias-linear\n--add-qkv-bias\n") != std::string::npos);
  REQUIRE(text_of(exported(normed, "megatron")).find("--disable-bias-linear\n--qk-layernorm\n") != std::string::npos);
  for (const char* framework : {"deepspeed", "accelerate"}) {
    REQUIRE(text_of(exported(biased, framework)).find(R"("model_type": "qwen2")") != std::string::npos);
    REQUIRE(text_of(exported(normed, framework)).find(R"("model_type": "qwen3")") != std::string::npos);
    Case both = biased;
    both.model.qk_norm = true;
    REQUIRE(refusal(both, framework).find("model.qkv_biases=true: no model_type of transformers") != std::string::npos);
  }
  REQUIRE(refusal(biased, "nanotron").find("model.qkv_biases=true") != std::string::npos);
  REQUIRE(refusal(normed, "nanotron").find("model.qk_norm=true") != std::string::npos);
  for (const Case& c : {biased, normed}) REQUIRE(refusal(c, "torchtitan").find("no flavour has 32 layers") != std::string::npos);
}

/// Mixtral's shape on as many ranks as Llama's.
Case mixtral(const std::string& profile, const std::string& more) {
  return point_of(
      fmt::format("profile: {}\nname: test\nmodel: mixtral-8x7b\nmachine: {{preset: hgx-h100-ndr, nodes: 2}}\nseq_len: "
                  "4096\nglobal_batch_tokens: 1Mi\nprecision: bf16\nmicro_batch: 1\n{}",
                  profile, more));
}

TEST_CASE("experts go where there are words for them") {
  const Case shared = mixtral("megatron", "zero: 1\nep: 8\n");
  const std::string megatron = text_of(exported(shared, "megatron"));
  REQUIRE(megatron.find("--num-experts 8\n--moe-router-topk 2\n--moe-ffn-hidden-size 14336\n--moe-layer-freq '([1]*32)'\n") !=
          std::string::npos);
  REQUIRE(megatron.find("--expert-model-parallel-size 8\n--expert-tensor-parallel-size 1\n") != std::string::npos);
  REQUIRE(text_of(exported(shared, "deepspeed")).find("\"autoep_size\": 8") != std::string::npos);
  REQUIRE(refusal(shared, "accelerate").find("layout.ep=8: accelerate's files share no experts") != std::string::npos);
  REQUIRE(refusal(shared, "nanotron").find("model.experts=8: nanotron's llama has no experts") != std::string::npos);
  REQUIRE(refusal(shared, "torchtitan").find("no flavour has 32 layers of 4096") != std::string::npos);
  REQUIRE(text_of(exported(mixtral("torchtitan", "zero: 3\n"), "accelerate")).find("\"num_local_experts\": 8") !=
          std::string::npos);
  for (const auto& [key, why] : {std::pair{"model.z_loss: 0.001", "transformers has no such loss"},
                                 {"model.capacity_factor: 1.25", "transformers drops no rows"},
                                 {"model.router: sigmoid", "no ungated shared experts are beside it"}})
    REQUIRE(refusal(mixtral("deepspeed", std::string(key) + "\n"), "deepspeed").find(why) != std::string::npos);
  Case v3 = point_of(
      "profile: torchtitan\nmodel: deepseek-v3\nmachine: {preset: hgx-h100-ndr, nodes: 16}\nseq_len: 4096\n"
      "global_batch_tokens: 4Mi\nmicro_batch: 1\nzero: 3\nep: 64\nprecision: bf16\n");
  REQUIRE(refusal(v3, "torchtitan").find("model.balance_loss=0.001: torchtitan has no such loss") != std::string::npos);
  v3.model.experts.balance = 0, v3.model.norm_epsilon = 1e-5f;
  REQUIRE(text_of(exported(v3, "torchtitan")).find("flavor = \"671B\"") != std::string::npos);
  for (const auto& [key, why] :
       {std::pair{"model.shared_experts: 1\nmodel.shared_gate: true", "model.shared_gate=true: Megatron-LM has no argument"},
        {"model.bias_update_rate: 0.001", "biases of routers go with router: sigmoid there"},
        {"model.router_groups: 4\nmodel.router_groups_chosen: 1", "Megatron-LM scores a group by"},
        {"tp: 2", "experts with tp ask for --sequence-parallel"}})
    REQUIRE(refusal(mixtral("megatron", std::string(key) + "\n"), "megatron").find(why) != std::string::npos);
}

TEST_CASE("what a framework does not have is refused by name, all of it at once") {
  const Case c = llama("shardlab", "dp: 4\npp: 4\nschedule: zb-h1\nzero: 0\ncompression: powersgd\nmicro_batch: 1\n");
  const std::string message = refusal(c, "megatron");
  REQUIRE(message.find("Megatron-LM core_v0.15.3 cannot express this case") != std::string::npos);
  REQUIRE(message.find("layout.schedule=zb-h1: Megatron-LM has 1f1b and interleaved") != std::string::npos);
  REQUIRE(message.find("layout.compression.kind=powersgd: Megatron-LM has no word for it") != std::string::npos);
  const auto trained_by = [](const char* optimizer) {
    return llama("shardlab", fmt::format("dp: 4\nmicro_batch: 1\noptimizer: {}\n", optimizer));
  };
  for (const auto& [framework, has] : {std::pair{"megatron", "Megatron-LM has adam and sgd"},
                                       {"nanotron", "nanotron has adamW and sgd"},
                                       {"torchtitan", "torchtitan has Adam and AdamW"}})
    for (const char* optimizer : {"lion", "adamw8bit"})
      REQUIRE(refusal(trained_by(optimizer), framework).find(fmt::format("train.optimizer={}: {}", optimizer, has)) !=
              std::string::npos);
  REQUIRE(refusal(trained_by("adamw8bit"), "deepspeed").find("train.optimizer=adamw8bit: DeepSpeed has AdamW, SGD and Lion") !=
          std::string::npos);
  REQUIRE(refusal(c, "nanotron").find("layout.schedule=zb-h1: nanotron has afab and 1f1b") != std::string::npos);
  REQUIRE(refusal(c, "accelerate").find("layout.pp=4: accelerate has no pipeline") != std::string::npos);
  REQUIRE(refusal(llama("deepspeed", "cp: 2\nmicro_batch: 1\n"), "deepspeed").find("layout.cp=2") != std::string::npos);
  REQUIRE(
      refusal(point_of("model: gpt2\nmachine: h100\nseq_len: 1Ki\nglobal_batch_tokens: 8Ki\nprofile: torchtitan\n"), "torchtitan")
          .find("no flavour has 12 layers") != std::string::npos);
  REQUIRE(refusal(point_of("model: gpt2\nmachine: h100\nseq_len: 1Ki\nglobal_batch_tokens: 8Ki\nprofile: megatron\n"), "nanotron")
              .find("model.family=gpt: nanotron trains llama") != std::string::npos);
  REQUIRE(refusal(c, "jax").find("no framework is called `jax`") != std::string::npos);
}

TEST_CASE("any pipeline goes to torchtitan as a table of slots") {
  Case c = llama("shardlab", "dp: 8\npp: 2\nzero: 0\nmicro_batch: 1\nsequence_parallel: false\n");
  c.layout.schedule = Schedule::kTable;
  c.layout.schedule_table = to_csv(make_schedule({Schedule::k1F1B, 2, 1, static_cast<int>(c.train.grad_accumulation)}));
  const Exported e = exported(c, "torchtitan");
  const auto csv = std::ranges::find(e.files, "schedule.csv", &interop::File::name);
  REQUIRE(csv != e.files.end());
  REQUIRE(csv->text == c.layout.schedule_table);
}

}  // namespace
}  // namespace shardlab::testing
