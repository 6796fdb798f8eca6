#include "sweeps/synonyms.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

namespace shardlab::sweeps {
namespace {

// clang-format off
constexpr auto kSynonyms = std::to_array<Synonym>({
    // Keys of Megatron-LM, DeepSpeed, torchtitan, nanotron, Accelerate and Hugging Face's trainer.
    {"tensor_model_parallel_size", "layout.tp"}, {"tensor_parallel_size", "layout.tp"}, {"tensor_parallel_degree", "layout.tp"},
    {"tensor_parallel", "layout.tp"}, {"tp_size", "layout.tp"}, {"tp_degree", "layout.tp"},
    {"pipeline_model_parallel_size", "layout.pp"}, {"pipeline_parallel_size", "layout.pp"}, {"pipeline_parallel_degree", "layout.pp"},
    {"pipeline_parallel", "layout.pp"}, {"pp_size", "layout.pp"}, {"pp_degree", "layout.pp"},
    {"virtual_pipeline_model_parallel_size", "layout.vpp"}, {"virtual_pipeline_parallel_size", "layout.vpp"},
    {"context_parallel_size", "layout.cp"}, {"context_parallel_degree", "layout.cp"}, {"context_parallel", "layout.cp"}, {"cp_size", "layout.cp"},
    {"expert_model_parallel_size", "layout.ep"}, {"expert_parallel_size", "layout.ep"}, {"expert_parallel_degree", "layout.ep"},
    {"expert_parallel", "layout.ep"}, {"ep_size", "layout.ep"},
    {"expert_tensor_parallel_size", "layout.expert_tp"}, {"expert_tensor_parallel_degree", "layout.expert_tp"}, {"etp", "layout.expert_tp"},
    {"data_parallel_size", "layout.dp"}, {"data_parallel_degree", "layout.dp"}, {"data_parallel", "layout.dp"}, {"dp_size", "layout.dp"},
    {"zero_stage", "layout.zero"}, {"zero_optimization", "layout.zero"}, {"pipeline_parallel_schedule", "layout.schedule"},
    {"recompute_granularity", "layout.recompute"}, {"activation_checkpointing", "layout.recompute"},
    {"activation_checkpoint", "layout.recompute"}, {"gradient_checkpointing", "layout.recompute"},
    {"micro_batch_size", "train.micro_batch"}, {"train_micro_batch_size_per_gpu", "train.micro_batch"},
    {"per_device_train_batch_size", "train.micro_batch"}, {"local_batch_size", "train.micro_batch"},
    {"global_batch_size", "train.global_batch_tokens"}, {"train_batch_size", "train.global_batch_tokens"},
    {"gradient_accumulation_steps", "train.grad_accumulation"}, {"batch_accumulation_per_replica", "train.grad_accumulation"},
    {"seq_length", "train.seq_len"}, {"sequence_length", "train.seq_len"}, {"max_seq_len", "train.seq_len"}, {"max_seq_length", "train.seq_len"},
    {"lr", "train.learning_rate.peak"}, {"clip_grad", "train.clip_norm"}, {"gradient_clipping", "train.clip_norm"},
    {"max_grad_norm", "train.clip_norm"}, {"max_norm", "train.clip_norm"}, {"adam_beta1", "train.beta1"}, {"adam_beta2", "train.beta2"},
    {"adam_eps", "train.epsilon"}, {"adam_epsilon", "train.epsilon"}, {"hidden_dropout", "train.dropout"},
    {"dtype", "train.precision"}, {"params_dtype", "train.precision"}, {"mixed_precision", "train.precision"},
    {"num_nodes", "machine.nodes"}, {"nnodes", "machine.nodes"}, {"num_machines", "machine.nodes"},
    {"gpus_per_node", "machine.devices_per_node"}, {"num_gpus_per_node", "machine.devices_per_node"}, {"nproc_per_node", "machine.devices_per_node"},
    {"num_layers", "model.layers"}, {"num_hidden_layers", "model.layers"}, {"n_layers", "model.layers"}, {"n_layer", "model.layers"},
    {"hidden_size", "model.hidden"}, {"n_embd", "model.hidden"}, {"d_model", "model.hidden"},
    {"num_attention_heads", "model.heads"}, {"n_heads", "model.heads"}, {"n_head", "model.heads"},
    {"num_query_groups", "model.kv_heads"}, {"num_key_value_heads", "model.kv_heads"}, {"n_kv_heads", "model.kv_heads"},
    {"ffn_hidden_size", "model.ffn"}, {"intermediate_size", "model.ffn"}, {"vocab_size", "model.vocab"},
    {"max_position_embeddings", "model.max_positions"}, {"tie_word_embeddings", "model.tied_embeddings"},
    {"moe_expert_capacity_factor", "model.capacity_factor"}, {"capacity_factor", "model.capacity_factor"},
    {"num_experts", "model.experts"}, {"num_local_experts", "model.experts"}, {"num_experts_per_tok", "model.top_k"},
    {"moe_router_topk", "model.top_k"}, {"moe_ffn_hidden_size", "model.moe_ffn"}, {"moe_intermediate_size", "model.moe_ffn"},
    // Values.
    {"gpu", "cuda"}, {"nvidia", "cuda"},
    {"float32", "fp32"}, {"float", "fp32"}, {"single", "fp32"}, {"bfloat16", "bf16"}, {"float16", "fp16"}, {"half", "fp16"},
    {"float8", "fp8"}, {"float4", "fp4"},
    {"host", "cpu"}, {"ram", "cpu"}, {"dram", "cpu"}, {"ssd", "nvme"}, {"disk", "nvme"},
    {"yes", "true"}, {"on", "true"}, {"no", "false"}, {"off", "false"},
    {"then", "set"}, {"condition", "if"},
});
// clang-format on

}  // namespace

std::span<const Synonym> synonyms() { return kSynonyms; }

std::string_view meant_by(std::string_view word) {
  word.remove_prefix(std::min(word.find_first_not_of('-'), word.size()));
  std::string said(word);
  std::ranges::transform(said, said.begin(), [](unsigned char c) { return c == '-' ? '_' : static_cast<char>(std::tolower(c)); });
  const auto found = std::ranges::find(kSynonyms, said, &Synonym::said);
  return found == kSynonyms.end() ? std::string_view() : found->meant;
}

}  // namespace shardlab::sweeps
