// Parameters under the names and layouts of transformers' GPT-2, Llama, mixtures of experts and latent attention, and back: a bijection of rows.
//
//   ours                                                 theirs
//   attn.wqkv, rows grouped by kv head (q heads, k, v)   Llama q_proj, k_proj, v_proj; GPT-2 c_attn with columns q | k | v
//   mlp.wup of Llama, rows gate and up in turn           gate_proj, up_proj
//   moe.wup[e, 2f, h], moe.wdown[e, h, f]                an expert's gate_proj, up_proj, down_proj; Mixtral's w1, w3, w2
//   moe.router, moe.shared.gate                          mlp.gate, mlp.shared_expert_gate; Mixtral's block_sparse_moe.gate
//   router_bias.layers.N, of the run's state             mlp.gate.e_score_correction_bias (GLM-4.5, as DeepSeek-V3)
//   weights [out, in]                                    GPT-2's Conv1D [in, out]
//   attn.wq_a, attn.q_a.norm, attn.wq_b                  q_a_proj, q_a_layernorm, q_b_proj; attn.wq without q_lora_rank: q_proj
//   attn.wkv_a, then attn.wk_rope                        kv_a_proj_with_mqa
//   attn.kv_a.norm, attn.wkv_b                           kv_a_layernorm, kv_b_proj
//
// Rotary pairs (i, i + d/2) are those of transformers' rotate_half, so that no row moves for them. DeepSeek's rotary rows have the pairs
// (2i, 2i + 1): row 2i there is our row i, and row 2i + 1 our row i + d/2. Both turn pair i by the same angle. The rows are the last
// qk_rope_head_dim of each head of q, and those of attn.wk_rope.
// Source: huggingface/transformers, models/gpt2/modeling_gpt2.py, models/llama/modeling_llama.py; of mixtures models/mixtral, qwen2_moe,
// qwen3_moe and glm4_moe; of latent attention models/deepseek_v2 (apply_rotary_emb) and deepseek_v3 (apply_rotary_pos_emb_interleave).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/model.h"

namespace shardlab::interop {

/// Consecutive rows of a tensor of transformers that are rows of one parameter of ours.
struct ForeignRows {
  std::string parameter;      ///< ours
  std::vector<int64_t> rows;  ///< of ours, in the order of their rows (of their columns, where transposed)
};

/// One tensor of transformers, and the rows of ours that it is made of.
struct ForeignTensor {
  std::string name;                ///< "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;      ///< as transformers has it
  std::vector<ForeignRows> parts;  ///< one after another; more than one of kv_a_proj_with_mqa alone
  bool transposed = false;         ///< theirs is [in, out]
};

/// What files of weights carry: `parameters_of`, and behind them the biases of routers, called by their buffers (plan/run_state.h).
std::vector<ModelParameter> carried_by_files(const Model& model);

/// The `model_type` of transformers that the model is. Refuses one that is none of those known here, with what sets it apart.
Result<std::string> hugging_face_type(const Model& model);

/// Columns of a tensor whose leading dims all count rows.
inline int64_t columns_of(const ModelParameter& p) { return p.shape.size() >= 2 ? p.shape.back() : 1; }

/// Every tensor of the model, in the order of `carried_by_files` (of parts that are one tensor, of the first). Each row of each parameter is in exactly one of them. A tied head has
/// none of its own.
std::vector<ForeignTensor> foreign_tensors(const Model& model);

/// The values of part `part` of the tensor, made of our parameter's values, row-major. Those of the parts follow one another.
std::vector<float> to_foreign(const ForeignTensor& tensor, size_t part, const std::vector<float>& ours, int64_t columns);

/// Puts the values of part `part` of the whole tensor `theirs` where they belong in our parameter's.
void from_foreign(const ForeignTensor& tensor, size_t part, const std::vector<float>& theirs, int64_t columns,
                  std::vector<float>& ours);

/// Names under which published files have a tensor too: GPT-2's without "transformer.".
std::vector<std::string> other_names(const ForeignTensor& tensor);

/// Whether transformers reads no weight of the model from a tensor of a file: buffers that it makes again (masks, rotary frequencies, a
/// tied head's copy), and DeepSeek's layers behind the last, which predict further tokens.
bool is_derived_tensor(const std::string& name, const Model& model);

}  // namespace shardlab::interop
