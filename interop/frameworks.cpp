#include "interop/frameworks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "interop/hugging_face.h"
#include "interop/said.h"
#include "interop/settings.h"
#include "interop/shell_words.h"
#include "plan/base/values.h"
#include "plan/pipeline_case.h"

namespace shardlab::interop {

namespace {

constexpr std::array kFrameworks{
    Framework{"megatron", "Megatron-LM", "core_v0.15.3", "309ffca6, 2026-02-06", "arguments.txt", true},
    Framework{"deepspeed", "DeepSpeed", "v0.19.5", "cf443004, 2026-08-09", "ds_config.json", true},
    Framework{"torchtitan", "torchtitan", "v0.2.2", "73a0e697, 2026-02-20", "train.toml", true},
    Framework{"nanotron", "nanotron", "0.4", "2411b022, 2026-04-07", "config.yaml", false},
    Framework{"accelerate", "accelerate", "v1.14.0", "beb0672a, 2026-06-11", "accelerate.yaml", false},
};

/// A word of a path as the shell takes it within double quotes is not needed: names of ours have no blanks.
std::string batch_script(const Account& account, const ExportOptions& options) {
  const Placement p = placement_of(account.of());
  std::string text = "#!/bin/bash\n" + stamp(account, options);
  text += fmt::format(
      "#SBATCH --job-name=shardlab\n#SBATCH --nodes={}\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node={}\n#SBATCH "
      "--exclusive\n",
      p.nodes, p.per_node);
  if (!options.slurm_account.empty()) text += fmt::format("#SBATCH --account={}\n", options.slurm_account);
  text +=
      "set -e\n"
      "# The job runs in a copy of this script: sbatch starts in the folder of the export.\n"
      "here=${SLURM_SUBMIT_DIR:-$(pwd)}\n"
      "export MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\n"
      "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))\n"
      "srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec \"$0/launch.sh\"' \"$here\"\n";
  return text;
}

std::string account_text(const Account& account, const ExportOptions& options, const Exported& exported) {
  const Framework& f = account.framework();
  std::string text = fmt::format(
      "# {} {}\n\nWritten by {}. Keys are those of commit {}; other versions may call them otherwise.\nCase {}, id {}.\n", f.name,
      f.version, options.program.empty() ? "shardlab" : options.program, f.commit,
      account.of().name.empty() ? "without a name" : account.of().name, options.case_id.empty() ? "none" : options.case_id);
  text += "\n| file | what |\n|---|---|\n";
  for (const File& file : exported.files)
    text += fmt::format("| `{}` | {} |\n", file.name,
                        file.name == "launch.sh"
                            ? "starts one node; `NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT` where there are several"
                        : file.name == "job.sbatch"        ? "`sbatch job.sbatch` in this folder starts every node"
                        : file.name == "model/config.json" ? "the model, as transformers reads it"
                        : file.name == "schedule.csv"      ? "the pipeline's slots, in PyTorch's format"
                                                           : "the settings");
  if (!exported.by_script.empty()) {
    text += fmt::format("\n## The training script sets\n\n{} leaves these to the script that it runs:\n\n", f.name);
    for (const std::string& line : exported.by_script) text += fmt::format("- {}\n", line);
  }
  if (!exported.notes.empty()) {
    text += "\n## Notes\n\n";
    for (const std::string& line : exported.notes) text += fmt::format("- {}\n", line);
  }
  return text;
}

/// Refuses a model that model/config.json does not say by a model_type of transformers.
void check_config(Account& account) {
  const Model& m = account.of().model;
  account.require(!(m.qk_norm && m.qkv_biases && !m.is_mixture()), "model.qkv_biases",
                  "no model_type of transformers has norms over heads of q and k and biases besides");
  if (!m.is_mixture()) {
    account.require(!m.is_latent(), "model.kv_lora_rank", "no model_type of transformers has latent attention without experts");
    return account.require(account.of().layout.ep == 1, "layout.ep", "the exported model has no experts");
  }
  if (const auto type = hugging_face_type(m); !type.ok()) return account.refuse("model.experts", type.error().message);
  const Experts& e = m.experts;
  account.require(e.z_loss == 0, "model.z_loss", "transformers has no such loss: set model.z_loss: 0");
  account.require(!e.has_bias(), "model.bias_update_rate",
                  "transformers moves no biases of routers: set model.bias_update_rate: 0");
  account.require(!e.drops(), "model.capacity_factor", "transformers drops no rows: set model.capacity_factor: 0");
  account.require(e.balance == 0 || !(m.is_latent() || e.sigmoid), "model.balance_loss",
                  "transformers has no loss for even use of the experts of this model: set model.balance_loss: 0");
  if (e.balance > 0) {
    account.by_script("model.balance_loss", "model.config.output_router_logits = True, so that the loss of the model has it");
    account.note("transformers evens the experts out over all tokens of a micro-batch, and balance_loss over each sequence.");
  }
}

}  // namespace

std::span<const Framework> frameworks() { return kFrameworks; }

const Framework* find_framework(std::string_view id) {
  const auto found = std::ranges::find(kFrameworks, id, &Framework::id);
  return found == kFrameworks.end() ? nullptr : &*found;
}

std::optional<Launch> launch_of(std::string_view script) {
  constexpr std::string_view kStamp = "\n# Written by ";
  const size_t begin = script.find(kStamp);
  if (!script.starts_with("#!") || begin == std::string_view::npos) return std::nullopt;
  const std::string_view line = script.substr(begin + 1, script.find('\n', begin + 1) - begin - 1);
  for (const Framework& f : kFrameworks) {
    if (line.find(fmt::format(" for {} {} (", f.name, f.version)) == std::string_view::npos) continue;
    const Options options = options_of(shell_words(script));
    const auto count = [&](const char* name) {
      const auto found = options.find(name);
      const auto n = found == options.end() || found->second.empty() ? std::nullopt : parse_count(found->second.front());
      return n && *n > 0 && *n <= kMost ? *n : 0;
    };
    const int64_t devices = product(count("nnodes"), count("nproc_per_node"));
    return Launch{.framework = f.id, .settings = f.settings, .devices = devices <= kMost ? devices : 0};
  }
  return std::nullopt;
}

File launch_script(const Account& account, const ExportOptions& options, const std::string& script, const std::string& arguments,
                   const std::string& environment) {
  const Placement p = placement_of(account.of());
  std::string text = "#!/bin/bash\n" + stamp(account, options) + "set -e\nhere=$(cd \"$(dirname \"$0\")\" && pwd)\n" + environment;
  text += fmt::format(
      "exec torchrun --nnodes {} --nproc_per_node {} --node_rank \"${{NODE_RANK:-0}}\" \\\n  --master_addr "
      "\"${{MASTER_ADDR:-localhost}}\" --master_port "
      "\"${{MASTER_PORT:-29500}}\" \\\n  {} {} \"$@\"\n",
      p.nodes, p.per_node, options.entry_point.empty() ? script : options.entry_point, arguments);
  return {"launch.sh", std::move(text), true};
}

Result<Exported> export_case(const Case& c, std::string_view framework, const ExportOptions& options) {
  const Framework* target = find_framework(framework);
  if (target == nullptr) {
    std::string ids;
    for (const Framework& f : kFrameworks) ids += (ids.empty() ? "" : " ") + std::string(f.id);
    return Error{ExitCode::kUsage, fmt::format("no framework is called `{}`", framework), "one of: " + ids, {}};
  }
  if (c.layout.pp > 1) SHARDLAB_TRY(check_pipeline(c));
  Account account(c, *target);
  Exported exported;
  if (placement_of(c).nodes * placement_of(c).per_node != c.layout.world_size())
    account.refuse("layout.dp", fmt::format("{} ranks do not fill nodes of {} devices evenly", c.layout.world_size(),
                                            c.machine.devices_per_node));
  if (framework == "nanotron") {
    account.require(!c.model.qk_norm, "model.qk_norm", "nanotron's llama has no norms over heads of q and k");
    account.require(!c.model.qkv_biases, "model.qkv_biases", "nanotron's llama has no biases of q, k and v");
    account.require(!c.model.is_latent(), "model.kv_lora_rank", "nanotron's llama has no latent attention");
    account.require(!c.model.is_mixture(), "model.experts", "nanotron's llama has no experts");
    account.require(c.layout.ep == 1, "layout.ep", "the exported model has no experts");
  } else if (framework == "deepspeed" || framework == "accelerate") {
    check_config(account);
  }
  for (const auto& [key, width] : {std::pair{"model.q_lora_rank", c.model.latent.q_rank},
                                   {"model.qk_nope_head_dim", c.model.latent.nope},
                                   {"model.qk_rope_head_dim", c.model.latent.rope},
                                   {"model.v_head_dim", c.model.latent.v}})
    account.require(width == 0 || c.model.is_latent(), key, "attention is latent where kv_lora_rank is set");
  for (const auto& [key, value] : {std::pair{"model.window", c.model.window.tokens},
                                   {"model.global_layers", c.model.window.global_layers},
                                   {"model.global_every", c.model.window.global_every}})
    account.require(value == 0, key, "attention within a window is not exported");
  account.require(c.model.window.rope_theta == 0, "model.local_rope_theta", "attention within a window is not exported");
  if (framework == "megatron") write_megatron(account, options, exported.files);
  if (framework == "deepspeed") write_deepspeed(account, options, exported.files);
  if (framework == "torchtitan") write_torchtitan(account, options, exported.files);
  if (framework == "nanotron") write_nanotron(account, options, exported.files);
  if (framework == "accelerate") write_accelerate(account, options, exported.files);
  SHARDLAB_TRY(account.finish());
  if (options.slurm) exported.files.push_back({"job.sbatch", batch_script(account, options), true});
  exported.by_script = account.take_script();
  exported.notes = account.take_notes();
  exported.files.push_back({"EXPORT.md", account_text(account, options, exported)});
  return exported;
}

namespace {

using Json = nlohmann::ordered_json;

Json json_number(float value) { return Json::parse(to_text(value)); }

/// The keys of a mixture of experts of that `model_type`.
void add_experts(const Model& m, const std::string& type, Json& config) {
  const Experts& e = m.experts;
  config["num_experts_per_tok"] = e.top_k;
  config["router_aux_loss_coef"] = json_number(e.balance);
  if (type == "mixtral") {
    config["intermediate_size"] = e.ffn;
    config["num_local_experts"] = e.count;
    return;
  }
  config["moe_intermediate_size"] = e.ffn;
  config["norm_topk_prob"] = e.normalise;
  if (type == "glm4_moe" || m.is_latent()) {
    config["n_routed_experts"] = e.count;
    config["n_shared_experts"] = e.shared;
    config["first_k_dense_replace"] = e.dense_layers;
    config["routed_scaling_factor"] = json_number(e.factor);
    config["n_group"] = e.groups;
    config["topk_group"] = e.groups_chosen;
  }
  if (m.is_latent()) {
    config.erase("router_aux_loss_coef");
    config["aux_loss_alpha"] = json_number(e.balance);
    config["moe_layer_freq"] = 1;
    config["scoring_func"] = e.sigmoid ? "sigmoid" : "softmax";
    config["topk_method"] = e.sigmoid ? "noaux_tc" : e.groups > 1 ? "group_limited_greedy" : "greedy";
    return;
  }
  if (type == "glm4_moe") {
    config["use_qk_norm"] = m.qk_norm;
    config["partial_rotary_factor"] = 1.0;
    return;
  }
  config["num_experts"] = e.count;
  config["decoder_sparse_step"] = e.every;
  config["mlp_only_layers"] = Json::array();
  for (int64_t layer = 0; layer < e.dense_layers; ++layer) config["mlp_only_layers"].push_back(layer);
  if (type != "qwen2_moe") return;
  config["shared_expert_intermediate_size"] = e.shared * e.ffn;
  config["qkv_bias"] = m.qkv_biases;
}

/// Qwen's files have a switch, and name the layers; in Mistral's and Mixtral's the window is of all.
void add_window(const Model& m, const std::string& type, Json& config) {
  config["sliding_window"] = m.window.tokens;
  if (type == "mistral" || type == "mixtral") return;
  config["use_sliding_window"] = true;
  config["max_window_layers"] = m.window.global_layers;
  config["layer_types"] = Json::array();
  for (int64_t layer = 0; layer < m.layers; ++layer)
    config["layer_types"].push_back(m.is_local(layer) ? "sliding_attention" : "full_attention");
}

/// The keys of latent attention. Of transformers' configs of it `head_dim` is the width that is rotated.
void add_latent(const LatentAttention& l, Json& config) {
  config["head_dim"] = l.rope;
  config["q_lora_rank"] = l.q_rank > 0 ? Json(l.q_rank) : Json(nullptr);
  config["kv_lora_rank"] = l.kv_rank;
  config["qk_nope_head_dim"] = l.nope;
  config["qk_rope_head_dim"] = l.rope;
  config["v_head_dim"] = l.v;
}

}  // namespace

std::string hugging_face_config(const Model& m) {
  Json config;
  if (m.is_llama()) {
    const auto known = hugging_face_type(m);
    const std::string type = known.ok() ? *known : "llama";
    constexpr std::pair<std::string_view, const char*> kArchitectures[] = {
        {"llama", "LlamaForCausalLM"},           {"mistral", "MistralForCausalLM"},  {"qwen2", "Qwen2ForCausalLM"},
        {"qwen3", "Qwen3ForCausalLM"},           {"mixtral", "MixtralForCausalLM"},  {"qwen2_moe", "Qwen2MoeForCausalLM"},
        {"qwen3_moe", "Qwen3MoeForCausalLM"},    {"glm4_moe", "Glm4MoeForCausalLM"}, {"deepseek_v2", "DeepseekV2ForCausalLM"},
        {"deepseek_v3", "DeepseekV3ForCausalLM"}};
    const auto* architecture = std::ranges::find(kArchitectures, type, &std::pair<std::string_view, const char*>::first)->second;
    config = {{"architectures", {architecture}},
              {"model_type", type},
              {"attention_bias", type == "glm4_moe" && m.qkv_biases},
              {"head_dim", m.head_dim},
              {"hidden_act", "silu"},
              {"hidden_size", m.hidden},
              {"initializer_range", json_number(m.init_deviation)},
              {"intermediate_size", m.ffn},
              {"max_position_embeddings", m.max_positions > 0 ? m.max_positions : 2048},
              {"mlp_bias", false},
              {"num_attention_heads", m.heads},
              {"num_hidden_layers", m.layers},
              {"num_key_value_heads", m.kv_heads},
              {"rms_norm_eps", json_number(m.norm_epsilon)},
              {"rope_theta", json_number(m.rope_theta)},
              {"tie_word_embeddings", m.tied_embeddings},
              {"torch_dtype", "float32"},
              {"vocab_size", m.vocab}};
    if (m.is_mixture()) add_experts(m, type, config);
    if (m.has_windows()) add_window(m, type, config);
    if (m.is_latent()) add_latent(m.latent, config);
  } else {
    config = {{"architectures", {"GPT2LMHeadModel"}},
              {"model_type", "gpt2"},
              {"activation_function", "gelu_new"},
              {"attn_pdrop", 0.0},
              {"embd_pdrop", 0.0},
              {"initializer_range", json_number(m.init_deviation)},
              {"layer_norm_epsilon", json_number(m.norm_epsilon)},
              {"n_embd", m.hidden},
              {"n_head", m.heads},
              {"n_inner", m.ffn},
              {"n_layer", m.layers},
              {"n_positions", m.max_positions},
              {"resid_pdrop", 0.0},
              {"tie_word_embeddings", m.tied_embeddings},
              {"torch_dtype", "float32"},
              {"vocab_size", m.vocab}};
  }
  return config.dump(2) + "\n";
}

}  // namespace shardlab::interop
