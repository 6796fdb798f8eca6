#include "answers/model_shape.h"

#include <fmt/format.h>
#include "answers/namespaces.h"

namespace shardlab::answers {

analytic::ModelShape model_shape(const ModelConfig& c) {
  analytic::ModelShape s = analytic::shape_of(c.model);
  if (c.rotary) s.max_positions = 0;
  s.qkv_biases = c.qkv_biases, s.out_bias = c.out_bias, s.expert_biases = c.expert_biases;
  s.qk_norm = c.qk_norm, s.qk_norm_whole = c.qk_norm_whole, s.post_norms = c.post_norms, s.sinks = c.sinks;
  s.window = c.window, s.windowed_layers = c.windowed_layers;
  s.experts = c.experts, s.top_k = c.top_k, s.moe_ffn = c.moe_ffn, s.shared_experts = c.shared_experts;
  s.dense_layers = c.dense_layers, s.router_bias = c.router_bias;
  if (c.kv_rank == 0) return s;
  s.q_rank = c.q_rank, s.kv_rank = c.kv_rank, s.rope_dim = c.rope_dim, s.v_dim = c.v_dim;
  s.head_dim = c.nope_dim;
  return s;
}

analytic::ModelShape model_shape(const sweeps::Point& point) {
  return point.model ? model_shape(*point.model) : analytic::shape_of(point.config.model);
}

Result<analytic::Point> estimated_layout(const sweeps::Point& said) {
  auto point = analytic::point_of(said.config);
  if (!point.ok()) return point.error();
  if (said.model ? said.model->experts > 0 : said.config.model.is_mixture()) point->expert_tp = point->tp;
  for (const auto& [path, value] : said.unheld) {
    const bool known = path == "layout.schedule"  ? analytic::read(value, &point->schedule)
                       : path == "layout.cp_kind" ? value == "none" || analytic::read(value, &point->cp_kind)
                                                  : false;
    if (!known)
      return Error{
          ExitCode::kUsage,
          fmt::format("{}={} cannot be told by the profile {}", path.substr(path.find('.') + 1), value, said.config.profile),
          "leave it out",
          {}};
  }
  return *point;
}

std::string default_profile(const Machine& machine) { return machine.local ? "shardlab" : "megatron"; }

}  // namespace shardlab::answers
