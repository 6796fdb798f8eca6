#include "cli/model_shape.h"
#include "cli/namespaces.h"

namespace shardlab::cli {

analytic::ModelShape model_shape(const ModelConfig& c) {
  analytic::ModelShape s = analytic::shape_of(c.model);
  s.qkv_biases = c.qkv_biases, s.qk_norm = c.qk_norm;
  s.experts = c.experts, s.top_k = c.top_k, s.moe_ffn = c.moe_ffn, s.shared_experts = c.shared_experts;
  s.dense_layers = c.dense_layers, s.router_bias = c.router_bias;
  if (c.kv_rank == 0) return s;
  s.q_rank = c.q_rank, s.kv_rank = c.kv_rank, s.rope_dim = c.rope_dim, s.v_dim = c.v_dim;
  s.head_dim = c.nope_dim;
  return s;
}

}  // namespace shardlab::cli
