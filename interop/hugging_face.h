// Parameters under the names and layouts of transformers' GPT-2, Llama and mixtures of experts, and back: a bijection of rows.
//
//   ours                                                 theirs
//   attn.wqkv, rows grouped by kv head (q heads, k, v)   Llama q_proj, k_proj, v_proj; GPT-2 c_attn with columns q | k | v
//   mlp.wup of Llama, rows gate and up in turn           gate_proj, up_proj
//   moe.wup[e, 2f, h], moe.wdown[e, h, f]                an expert's gate_proj, up_proj, down_proj; Mixtral's w1, w3, w2
//   moe.router, moe.shared.gate                          mlp.gate, mlp.shared_expert_gate; Mixtral's block_sparse_moe.gate
//   router_bias.layers.N, of the run's state             mlp.gate.e_score_correction_bias (GLM-4.5, as DeepSeek-V3)
//   weights [out, in]                                    GPT-2's Conv1D [in, out]
//
// Rotary pairs (i, i + d/2) are those of transformers' rotate_half, so that no row moves for them.
// Source: huggingface/transformers, models/gpt2/modeling_gpt2.py, models/llama/modeling_llama.py; of mixtures models/mixtral, qwen2_moe,
// qwen3_moe and glm4_moe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/base/result.h"
#include "plan/model.h"

namespace shardlab::interop {

/// One tensor of transformers, and the rows of ours that it is made of.
struct ForeignTensor {
  std::string name;            ///< "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  ///< as transformers has it
  std::string parameter;       ///< ours
  std::vector<int64_t> rows;   ///< of ours, in the order of their rows (of their columns, where transposed)
  bool transposed = false;     ///< theirs is [in, out]
};

/// What files of weights carry: `parameters_of`, and behind them the biases of routers, called by their buffers (plan/run_state.h).
std::vector<ModelParameter> carried_by_files(const Model& model);

/// The `model_type` of transformers that the model is. Refuses one that is none of those known here, with what sets it apart.
Result<std::string> hugging_face_type(const Model& model);

/// Columns of a tensor whose leading dims all count rows.
inline int64_t columns_of(const ModelParameter& p) { return p.shape.size() >= 2 ? p.shape.back() : 1; }

/// Every tensor of the model, in the order of `carried_by_files`. Each row of each parameter is in exactly one of them. A tied head has
/// none of its own.
std::vector<ForeignTensor> foreign_tensors(const Model& model);

/// The tensor made of our parameter's values, row-major.
std::vector<float> to_foreign(const ForeignTensor& tensor, const std::vector<float>& ours, int64_t columns);

/// Puts the tensor's values where they belong in our parameter's.
void from_foreign(const ForeignTensor& tensor, const std::vector<float>& theirs, int64_t columns, std::vector<float>& ours);

/// Names under which published files have a tensor too: GPT-2's without "transformer.".
std::vector<std::string> other_names(const ForeignTensor& tensor);

/// Whether a tensor of a file is a buffer that transformers makes again (masks, rotary frequencies, a tied head's copy).
bool is_derived_tensor(const std::string& name, const Model& model);

}  // namespace shardlab::interop
