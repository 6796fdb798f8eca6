// `export`, `import` and `weights`: files that a framework takes, and the way back, as a user types it.
#include <fmt/format.h>

#include <cstring>

#include "runtime/checkpoint.h"
#include "sweeps/models.h"
#include "tests/cli/program.h"
#include "tests/cli/public_model.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

const std::string kLlama =
    "model: llama-3.1-8b\nmachine: {preset: hgx-h100-ndr, nodes: 2}\nseq_len: 8192\nglobal_batch_tokens: 1Mi\nprecision: "
    "bf16\nprofile: megatron\n"
    "tp: 4\nsequence_parallel: true\nzero: 1\nmicro_batch: 1\n";

TEST_CASE("a layout goes to a framework and comes back as the same case") {
  const Scratch scratch;
  const std::string file = scratch.write("case.yaml", kLlama);
  const Output out =
      shardlab_program(scratch, fmt::format("export {} --to megatron,sbatch --account physics --out {}", file, scratch / "job"));
  INFO(out.err);
  REQUIRE(out.code == 0);
  for (const char* name : {"arguments.txt", "launch.sh", "job.sbatch", "EXPORT.md"}) {
    REQUIRE(fs::exists(scratch / "job/" + name));
    REQUIRE(out.out.find(name) != std::string::npos);
  }
  const std::string batch = slurp(scratch / "job/job.sbatch");
  REQUIRE(batch.find("#SBATCH --nodes=2\n") != std::string::npos);
  REQUIRE(batch.find("#SBATCH --account=physics\n") != std::string::npos);
  REQUIRE(slurp(scratch / "job/arguments.txt").find("core_v0.15.3 (commit 309ffca6, 2026-02-06)") !=
          std::string::npos);  // the stamp
  for (const char* script : {"launch.sh", "job.sbatch"})
    REQUIRE(std::system(fmt::format("bash -n {}/{}", scratch / "job", script).c_str()) == 0);
  // What the script hands to torchrun: one word an argument, and no quotes or comments among them.
  scratch.write("torchrun", "#!/bin/bash\nprintf '%s\\n' \"$@\"\n");
  fs::permissions(scratch / "torchrun", fs::perms::owner_all);
  REQUIRE(
      std::system(fmt::format("PATH={}:$PATH NODE_RANK=1 bash {} > {}", scratch / ".", scratch / "job/launch.sh", scratch / "words")
                      .c_str()) == 0);
  const std::string words = slurp(scratch / "words");
  REQUIRE(words.find("--nnodes\n2\n--nproc_per_node\n8\n--node_rank\n1\n") != std::string::npos);
  REQUIRE(words.find("pretrain_gpt.py\n--num-layers\n32\n") != std::string::npos);
  REQUIRE(words.find('#') == std::string::npos);

  const Output back = shardlab_program(
      scratch, fmt::format("import {} --machine h100 --devices 16 -o {}", scratch / "job/arguments.txt", scratch / "back.yaml"));
  INFO(back.err);
  REQUIRE(back.code == 0);
  const Output again =
      shardlab_program(scratch, fmt::format("export {} --to megatron --out {}", scratch / "back.yaml", scratch / "again"));
  INFO(again.err << slurp(scratch / "back.yaml"));
  REQUIRE(again.code == 0);
  CHECK(back.err.find("how many ranks") == std::string::npos);
  // Nothing in the arguments is a number of ranks: a case of fewer than were meant says so.
  const Output fewer = shardlab_program(scratch, fmt::format("import {} --machine h100", scratch / "job/arguments.txt"));
  CHECK(fewer.code == 0);
  CHECK(fewer.err.find("does not say how many ranks train") != std::string::npos);
  const auto without_stamp = [](const std::string& text) { return text.substr(text.find("--num-layers")); };
  REQUIRE(without_stamp(slurp(scratch / "again/arguments.txt")) == without_stamp(slurp(scratch / "job/arguments.txt")));
}

TEST_CASE("the launch script of an export is imported by the settings and the model beside it") {
  const Scratch scratch;
  for (const char* framework : {"megatron", "deepspeed", "torchtitan"}) {
    const std::string layout = framework == std::string("megatron") ? "tp: 4\nsequence_parallel: true\nzero: 1\n" : "zero: 3\n";
    const std::string file = scratch.write(
        "case.yaml", fmt::format("model: {}\nmachine: {{preset: hgx-h100-ndr, nodes: 2}}\nseq_len: 4096\nglobal_batch_tokens: 1Mi\n"
                                 "precision: bf16\nmicro_batch: 1\nprofile: {}\n{}{}",
                                 framework == std::string("torchtitan") ? "llama-3.1-8b" : "mixtral-8x7b", framework, layout,
                                 framework == std::string("megatron") ? "ep: 4\n" : ""));
    const std::string first = scratch / (std::string(framework) + "-1"), second = scratch / (std::string(framework) + "-2");
    const Output out = shardlab_program(scratch, fmt::format("export {} --to {} --out {}", file, framework, first));
    INFO(framework << out.err);
    REQUIRE(out.code == 0);
    const Output back = shardlab_program(
        scratch, fmt::format("import {}/launch.sh --machine hgx-h100-ndr --seq-len 4Ki -o {}", first, scratch / "back.yaml"));
    INFO(back.err);
    REQUIRE(back.code == 0);
    CHECK(back.err.find("how many ranks") == std::string::npos);
    CHECK(back.err.find("warning") == std::string::npos);
    const Output again =
        shardlab_program(scratch, fmt::format("export {} --to {} --out {}", scratch / "back.yaml", framework, second));
    INFO(again.err << slurp(scratch / "back.yaml"));
    REQUIRE(again.code == 0);
    const auto settings = [&](const std::string& folder) {
      for (const char* name : {"arguments.txt", "ds_config.json", "train.toml"})
        if (fs::exists(folder + "/" + name)) {
          const std::string text = slurp(folder + "/" + name);
          return text.substr(text.starts_with("#") ? text.find("\n", text.find("id ")) : 0);
        }
      return std::string();
    };
    CHECK_FALSE(settings(first).empty());
    CHECK(settings(second) == settings(first));
  }
  fs::remove(scratch / "megatron-1/arguments.txt");
  const Output alone = shardlab_program(scratch, fmt::format("import {} --machine h100", scratch / "megatron-1/launch.sh"));
  CHECK(alone.code == 2);
  CHECK(alone.err.find("starts megatron with the settings of") != std::string::npos);
}

TEST_CASE("a mixture that is imported is estimated as its framework runs it, and trains here") {
  const Scratch scratch;
  const std::string script = scratch.write(
      "small.sh",
      "torchrun --nproc_per_node 4 --nnodes 1 pretrain_gpt.py --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 "
      "--num-attention-heads 4 --seq-length 64 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type "
      "rope "
      "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --vocab-size 256 --num-experts 8 "
      "--moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --expert-model-parallel-size 4 "
      "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type alltoall "
      "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant --use-distributed-optimizer\n");
  const Output in =
      shardlab_program(scratch, fmt::format("import {} --machine hgx-h100-ndr -o {}", script, scratch / "small.yaml"));
  INFO(in.err);
  REQUIRE(in.code == 0);
  REQUIRE(shardlab_program(scratch, fmt::format("run {} --out {}", scratch / "small.yaml", scratch / "estimated")).code == 0);
  std::string text = slurp(scratch / "small.yaml");
  for (const auto& [line, other] : {std::pair{"profile: megatron", ""},
                                    {"resolution: analytic", "data: {text: small.sh}\nmeasure: {warmup: 0, steps: 2, repeat: 1}"},
                                    {"machine: ", "machine: {local: true}"},
                                    {"mode: simulate", "mode: measure"}}) {
    const size_t begin = text.find(line);
    REQUIRE(begin != std::string::npos);
    text.replace(begin, text.find('\n', begin) - begin, other);
  }
  const std::string local = scratch.write("local.yaml", text);
  const Output run = shardlab_program(scratch, fmt::format("run {} --out {}", local, scratch / "run"));
  INFO(text << run.err);
  REQUIRE(run.code == 0);
}

TEST_CASE("import warns of a case that the estimate of its framework refuses") {
  const Scratch scratch;
  const std::string file = scratch.write("train.toml", "[model]\nflavor = \"8B\"\n");  // recompute of every second layer
  const Output in = shardlab_program(scratch, fmt::format("import {} --machine h100 --devices 8", file));
  CHECK(in.code == 0);
  CHECK(in.err.find("warning: as it stands the case is refused: recompute of every k-th layer") != std::string::npos);
}

TEST_CASE("one point of a sweep is exported, and what cannot be is refused with what to do") {
  const Scratch scratch;
  const std::string sweep = scratch.write("sweep.yaml", kLlama + "include: [{name: eight, tp: 8}, {name: four, tp: 4}]\n");
  const auto refused = [&](const std::string& words, int code = 2) {
    const Output o = shardlab_program(scratch, words);
    INFO(words << o.err);
    REQUIRE(o.code == code);
    return o.err;
  };
  REQUIRE(refused("export " + sweep + " --to megatron").find("has 2 points") != std::string::npos);
  REQUIRE(refused("export " + sweep + " --to megatron --case five").find("`five` names 0 points") != std::string::npos);
  REQUIRE(shardlab_program(scratch, fmt::format("export {} --to megatron --case eight --out {}", sweep, scratch / "eight")).code ==
          0);
  REQUIRE(slurp(scratch / "eight/arguments.txt").find("--tensor-model-parallel-size 8\n") != std::string::npos);
  REQUIRE(refused("export " + sweep + " --to sbatch --case eight").find("sbatch starts a framework") != std::string::npos);
  REQUIRE(refused("export " + sweep + " --to jax --case eight").find("no framework is called `jax`") != std::string::npos);
  REQUIRE(refused("export " + sweep + " --to nanotron --case eight --set cp=2").find("layout.cp=2") != std::string::npos);
  REQUIRE(refused("export " + sweep + " --to torchtitan --case eight").find("layout.zero=1: torchtitan has zero 0 and 3") !=
          std::string::npos);
  REQUIRE_FALSE(fs::exists("export-torchtitan"));
  REQUIRE(refused("import " + sweep + " --machine h100").find("none of --num-layers") != std::string::npos);
}

TEST_CASE("public weights train here, and come out as they went in") {
  const Scratch scratch;
  const std::string folder = public_model(scratch, "tiny-llama");
  const Output in = shardlab_program(scratch, fmt::format("weights import {} --out {}", folder, scratch / "checkpoint"));
  INFO(in.err);
  REQUIRE(in.code == 0);
  const std::string file = slurp(folder + "/model.safetensors");
  const auto whole = fmt::format("weights export {} --model tiny-llama --out {}", scratch / "checkpoint", scratch / "whole");
  REQUIRE(shardlab_program(scratch, whole).code == 0);
  REQUIRE(slurp(scratch / "whole/model.safetensors") == file);
  const auto reread = sweeps::load_model(scratch / "whole/config.json");
  REQUIRE(reread.ok());

  // In several files, and back from them.
  const Output shards = shardlab_program(scratch, fmt::format("weights export {} --model tiny-llama --shard-bytes 200Ki --out {}",
                                                              scratch / "checkpoint", scratch / "shards"));
  REQUIRE(shards.code == 0);
  REQUIRE(fs::exists(scratch / "shards/model.safetensors.index.json"));
  REQUIRE_FALSE(fs::exists(scratch / "shards/model.safetensors"));
  REQUIRE(shardlab_program(scratch, fmt::format("weights import {} --out {}", scratch / "shards", scratch / "second")).code == 0);
  REQUIRE(
      shardlab_program(scratch, fmt::format("weights export {} --model tiny-llama --out {}", scratch / "second", scratch / "third"))
          .code == 0);
  REQUIRE(slurp(scratch / "third/model.safetensors") == file);

  // A run begins from them, on one rank and on two, with the same loss, which is not that of its seed's weights.
  scratch.write("text.txt", std::string(4000, 'a') + std::string(4000, 'b'));
  const auto loss = [&](const std::string& name, const std::string& more) {
    const std::string sweep = scratch.write(name + ".yaml",
                                            "mode: measure\nmodel: tiny-llama\nmachine: {local: true}\ndata: {text: "
                                            "text.txt}\nseq_len: 16\nglobal_batch_tokens: 64\ncanonical: true\n"
                                            "measure: {warmup: 0, steps: 2, repeat: 1, timeout: 1m}\n" +
                                                more);
    const Output run = shardlab_program(
        scratch, fmt::format("run {} --machine-file {}/tests/cli/local.yaml --out {}", sweep, source_dir(), scratch / name));
    INFO(run.err);
    REQUIRE(run.code == 0);
    return cell(parse_csv(slurp(scratch / name + "/results.csv")), 1, "loss_first");
  };
  const std::string one = loss("one", "dp: 1\ncheckpoint: {resume: checkpoint}\n");
  REQUIRE(loss("two", "dp: 2\nzero: 3\ncheckpoint: {resume: checkpoint}\n") == one);
  REQUIRE(loss("seed", "dp: 1\n") != one);
}

TEST_CASE("weights of a mixture that was trained go out and come back, with the biases of its routers") {
  const Scratch scratch;
  scratch.write("text.txt", std::string(4000, 'a') + std::string(4000, 'b'));
  scratch.write("model.json",
                R"({"model_type": "glm4_moe", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "partial_rotary_factor": 1.0, "n_routed_experts": 4,
      "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": true,
      "vocab_size": 256, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
      "tie_word_embeddings": false, "attention_bias": true, "initializer_range": 0.02, "norm_topk_prob": true})");
  const std::string sweep =
      scratch.write("moe.yaml",
                    "mode: measure\nmodel: ./model.json\nmachine: {local: true}\ndata: {text: text.txt}\n"
                    "seq_len: 16\nglobal_batch_tokens: 64\ndp: 2\nep: 2\nname: moe\n"
                    "measure: {warmup: 0, steps: 3, repeat: 1, timeout: 1m}\n"  // after an odd number no bias is 0
                    "checkpoint: {save_every: 2, folder: saved}\n");
  const Output run = shardlab_program(
      scratch, fmt::format("run {} --machine-file {}/tests/cli/local.yaml --out {}", sweep, source_dir(), scratch / "run"));
  INFO(run.err);
  REQUIRE(run.code == 0);
  const std::string results = slurp(scratch / "run/results.csv");
  REQUIRE(std::stod(cell(parse_csv(results), 1, "expert_imbalance")) >= 1);
  REQUIRE(std::stod(cell(parse_csv(results), 1, "expert_rank_imbalance_last")) >= 1);
  const auto exported = [&](const std::string& from, const std::string& to) {
    const Output out = shardlab_program(
        scratch, fmt::format("weights export {} --model {} --out {}", scratch / from, scratch / "model.json", scratch / to));
    INFO(out.err);
    REQUIRE(out.code == 0);
    return slurp(scratch / (to + "/model.safetensors"));
  };
  const std::string first = exported("saved", "one");
  for (const char* name : {"model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.experts.3.down_proj.weight",
                           "model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"})
    REQUIRE(first.find(fmt::format("\"{}\"", name)) != std::string::npos);
  const Output in = shardlab_program(scratch, fmt::format("weights import {} --out {}", scratch / "one", scratch / "again"));
  INFO(in.err);
  REQUIRE(in.code == 0);
  REQUIRE(exported("again", "two") == first);

  // In 16 bits too a bias keeps every step: the files of such models have it in 32.
  const auto tensors_of = [&](const std::string& folder) {
    const std::string file = slurp(scratch / (folder + "/model.safetensors"));
    const auto header = interop::parse_safetensors(file, static_cast<int64_t>(file.size()), folder);
    REQUIRE(header.ok());
    const interop::StoredTensor& bias = header->tensors.at("model.layers.1.mlp.gate.e_score_correction_bias");
    REQUIRE(bias.type == interop::WeightType::kF32);
    return file.substr(static_cast<size_t>(header->data_begin + bias.begin), static_cast<size_t>(bias.end - bias.begin));
  };
  REQUIRE(shardlab_program(scratch, fmt::format("weights export {} --model {} --dtype bf16 --out {}", scratch / "saved",
                                                scratch / "model.json", scratch / "half"))
              .code == 0);
  REQUIRE(tensors_of("half") == tensors_of("one"));
  REQUIRE(tensors_of("half") != std::string(16, '\0'));

  // Of a run whose routers had no biases they are 0.
  const Output plain = shardlab_program(
      scratch,
      fmt::format(
          "run {} --machine-file {}/tests/cli/local.yaml --set model.bias_update_rate=0 --set checkpoint.folder={} --out {}", sweep,
          source_dir(), scratch / "plain", scratch / "run2"));
  INFO(plain.err);
  REQUIRE(plain.code == 0);
  exported("plain", "three");
  REQUIRE(tensors_of("three") == std::string(16, '\0'));
}

TEST_CASE("weights of latent attention come out as they went in, and a run begins from them under every layout") {
  const Scratch scratch;
  const std::string config =
      R"({"model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5,
      "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
      "n_group": 2, "topk_group": 1, "vocab_size": 256, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-05,
      "rope_theta": 10000.0, "tie_word_embeddings": false, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
      "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1 MORE})";
  const auto with = [&](const std::string& more) { return std::string(config).replace(config.find(" MORE"), 5, more); };
  const auto model = sweeps::parse_model(with(""), "small");
  REQUIRE(model.ok());
  // The published file has a layer more, which predicts a further token.
  const std::string folder = public_model_of(scratch, *model, with(""), {"model.layers.2.eh_proj.weight"});
  const auto import = [&] {
    return shardlab_program(scratch, fmt::format("weights import {} --out {}", folder, scratch / "checkpoint"));
  };
  const Output in = import();
  INFO(in.err);
  REQUIRE(in.code == 0);
  const auto exported = [&](const std::string& from, const std::string& to) {
    const Output out = shardlab_program(
        scratch, fmt::format("weights export {} --model {}/config.json --out {}", scratch / from, folder, scratch / to));
    INFO(out.err);
    REQUIRE(out.code == 0);
    return slurp(scratch / (to + "/model.safetensors"));
  };
  const std::string first = exported("checkpoint", "one"), given = slurp(folder + "/model.safetensors");
  const auto header_of = [](const std::string& file) { return interop::parse_safetensors(file, std::ssize(file), "f").value(); };
  const interop::SafetensorsHeader ours = header_of(first), theirs = header_of(given);
  REQUIRE(ours.tensors.size() + 1 == theirs.tensors.size());
  for (const auto& [name, tensor] : ours.tensors) {
    INFO(name);
    const interop::StoredTensor& other = theirs.tensors.at(name);
    CHECK(tensor.shape == other.shape);
    CHECK(first.substr(static_cast<size_t>(ours.data_begin + tensor.begin), static_cast<size_t>(tensor.end - tensor.begin)) ==
          given.substr(static_cast<size_t>(theirs.data_begin + other.begin), static_cast<size_t>(other.end - other.begin)));
  }
  REQUIRE(ours.tensors.at("model.layers.1.self_attn.kv_a_proj_with_mqa.weight").shape == std::vector<int64_t>{20, 32});
  Model again = sweeps::load_model(scratch / "one/config.json").value();
  again.name = model->name;
  REQUIRE(again == *model);
  REQUIRE(shardlab_program(scratch, fmt::format("weights import {} --out {}", scratch / "one", scratch / "again")).code == 0);
  REQUIRE(exported("again", "two") == first);

  scratch.write("text.txt", std::string(4000, 'a') + std::string(4000, 'b'));
  const auto loss = [&](const std::string& name, const std::string& more) {
    const std::string sweep =
        scratch.write(name + ".yaml",
                      "mode: measure\nmodel: public/config.json\nmachine: {local: true}\ndata: {text: text.txt}\n"
                      "seq_len: 16\nglobal_batch_tokens: 64\ncanonical: true\ncheckpoint: {resume: checkpoint}\n"
                      "measure: {warmup: 0, steps: 2, repeat: 1, timeout: 1m}\n" +
                          more);
    const Output run = shardlab_program(
        scratch, fmt::format("run {} --machine-file {}/tests/cli/local.yaml --out {}", sweep, source_dir(), scratch / name));
    INFO(run.err);
    REQUIRE(run.code == 0);
    return cell(parse_csv(slurp(scratch / name + "/results.csv")), 1, "loss_first");
  };
  const std::string one = loss("alone", "dp: 1\n");
  CHECK(loss("shared", "dp: 2\nep: 2\n") == one);
  CHECK(loss("cut", "tp: 2\n") == one);

  scratch.write("public/config.json", with(R"(, "rope_interleave": false)"));
  CHECK(import().err.find("`rope_interleave` is false") != std::string::npos);
  scratch.write("public/config.json", with(R"(, "rope_scaling": {"type": "yarn", "factor": 40})"));
  CHECK(import().err.find("its rotary frequencies are scaled") != std::string::npos);
}

TEST_CASE("weights that do not fit the model are refused by name") {
  const Scratch scratch;
  const std::string folder = public_model(scratch, "tiny-llama");
  const auto refused = [&](const std::string& words) {
    const Output o = shardlab_program(scratch, words);
    INFO(words << o.err);
    REQUIRE(o.code == 2);
    return o.err;
  };
  REQUIRE(refused("weights import " + folder + " --model tiny-gpt").find("no file has `transformer.wte.weight`") !=
          std::string::npos);
  REQUIRE(refused("weights import " + (scratch / "nowhere") + " --model tiny-gpt").find("no such folder or file") !=
          std::string::npos);
  REQUIRE(refused("weights export " + folder + " --model tiny-gpt").find("no manifest in this folder") != std::string::npos);
  const std::string bytes = slurp(folder + "/model.safetensors"), config = slurp(folder + "/config.json");
  // Weights whose frequencies are scaled are other weights, whatever model is named.
  const auto with = [&](const std::string& key) { return config.substr(0, config.rfind('}')) + ", " + key + "}"; };
  scratch.write("public/config.json", with(R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0})"));
  REQUIRE(refused("weights import " + folder).find("rotary frequencies are scaled (`rope_type` is \"llama3\")") !=
          std::string::npos);
  REQUIRE(refused("weights import " + folder + " --model tiny-llama").find("rotary frequencies are scaled") != std::string::npos);
  scratch.write("public/config.json", config);
  // A tensor of whole numbers is there, and not read.
  std::string eight = bytes;
  eight.replace(eight.find("\"F32\""), 5, "\"I32\"");
  scratch.write("public/model.safetensors", eight);
  REQUIRE(refused("weights import " + folder).find("is of an element type that is not read") != std::string::npos);
  // Names of tensors cannot write lines of their own.
  std::string forged = bytes;
  const size_t entry = forged.find("\"model.norm.weight\"");
  REQUIRE(entry != std::string::npos);
  forged.replace(entry, 19, R"("mo\nshardlab: ok\u001b")");
  uint64_t length = 0;
  std::memcpy(&length, forged.data(), sizeof length);
  length += std::string_view(R"("mo\nshardlab: ok\u001b")").size() - 19;
  std::memcpy(forged.data(), &length, sizeof length);
  scratch.write("public/model.safetensors", forged);
  const std::string named = refused("weights import " + folder);
  REQUIRE(named.find("\nshardlab: ok") == std::string::npos);
  // What 16 bits would make infinite is not written in them.
  const float large = 1e6f;
  std::string wide = bytes;
  std::memcpy(wide.data() + wide.size() - sizeof large, &large, sizeof large);
  scratch.write("public/model.safetensors", wide);
  REQUIRE(shardlab_program(scratch, fmt::format("weights import {} --out {}", folder, scratch / "wide")).code == 0);
  const std::string narrow =
      fmt::format("weights export {} --model tiny-llama --out {} --dtype ", scratch / "wide", scratch / "narrow");
  REQUIRE(refused(narrow + "fp16").find("has values beyond the range of fp16") != std::string::npos);
  REQUIRE(shardlab_program(scratch, narrow + "bf16").code == 0);
  scratch.write("public/model.safetensors", bytes);
  // Nothing of a checkpoint stays behind.
  REQUIRE(shardlab_program(scratch, fmt::format("weights import {} --out {}", folder, scratch / "checkpoint")).code == 0);
  const size_t layers = config.find("\"num_hidden_layers\": ") + 21;
  scratch.write("shallow.json", config.substr(0, layers) + "1" + config.substr(config.find(',', layers)));
  const std::string left = refused(fmt::format("weights export {} --model {}", scratch / "checkpoint", scratch / "shallow.json"));
  INFO(left);
  REQUIRE(left.find("tensors that shallow has no place for: layers.1.attn.norm.gamma, ") != std::string::npos);
  scratch.write("public/model.safetensors", bytes.substr(0, bytes.size() / 2));
  REQUIRE(refused("weights import " + folder).find("says no tensor of this file") != std::string::npos);
  scratch.write("public/model.safetensors.index.json", R"({"weight_map": {"a": "../x.safetensors"}})");
  REQUIRE(refused("weights import " + folder).find("is not an index of safetensors") != std::string::npos);
}

}  // namespace
}  // namespace shardlab::testing
