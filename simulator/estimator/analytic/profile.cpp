#include "simulator/estimator/analytic/profile.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <array>
#include <cmath>
#include <set>
#include <span>
#include <utility>
#include <variant>

#include "simulator/estimator/analytic/shipped.h"

namespace shardlab::simulator::analytic {
namespace {

using P = FrameworkProfile;
using Member = std::variant<double P::*, bool P::*, int64_t P::*, Recompute P::*>;

struct Field {
  std::string_view section, key;
  Member member;
};

constexpr std::array kFields{
    Field{"state", "parameter", &P::state_parameter},
    Field{"state", "gradient", &P::state_gradient},
    Field{"state", "gradient_fresh", &P::state_gradient_fresh},
    Field{"state", "gradient_fresh_stage", &P::state_gradient_fresh_stage},
    Field{"state", "gradient_ends", &P::state_gradient_ends},
    Field{"state", "master", &P::state_master},
    Field{"state", "moments", &P::state_moments},
    Field{"state", "gradient_wire", &P::state_gradient_wire},
    Field{"state", "weight_wire", &P::state_weight_wire},
    Field{"state", "fp8_weight", &P::state_fp8_weight},
    Field{"state", "fp8_alone", &P::state_fp8_alone},
    Field{"state", "fp8_gather", &P::state_fp8_gather},
    Field{"state", "fp8_exchange", &P::state_fp8_exchange},
    Field{"state", "fp8_shared", &P::state_fp8_shared},
    Field{"state", "context_gradient", &P::state_context_gradient},
    Field{"state", "gradient_with_step", &P::state_gradient_with_step},
    Field{"saved", "input", &P::saved_input},
    Field{"saved", "norm", &P::saved_norm},
    Field{"saved", "statistics", &P::saved_statistics},
    Field{"saved", "qkv", &P::saved_qkv},
    Field{"saved", "rotated", &P::saved_rotated},
    Field{"saved", "repeated_kv", &P::saved_repeated_kv},
    Field{"saved", "scores", &P::saved_scores},
    Field{"saved", "attention", &P::saved_attention},
    Field{"saved", "log_sum_exp", &P::saved_log_sum_exp},
    Field{"saved", "residual", &P::saved_residual},
    Field{"saved", "up", &P::saved_up},
    Field{"saved", "gate", &P::saved_gate},
    Field{"saved", "activated", &P::saved_activated},
    Field{"saved", "fp8_inputs", &P::saved_fp8_inputs},
    Field{"saved", "mask", &P::saved_mask},
    Field{"saved", "norm_fp32", &P::saved_norm_fp32},
    Field{"saved", "logits", &P::saved_logits},
    Field{"saved", "logits_kept", &P::saved_logits_kept},
    Field{"saved", "logits_forward", &P::saved_logits_forward},
    Field{"saved", "logits_gradient", &P::saved_logits_gradient},
    Field{"saved", "logits_output", &P::saved_logits_output},
    Field{"saved", "logits_parallel", &P::saved_logits_parallel},
    Field{"saved", "head_input", &P::saved_head_input},
    Field{"saved", "head_chunks", &P::saved_head_chunks},
    Field{"saved", "result", &P::saved_result},
    Field{"saved", "gathered", &P::saved_gathered},
    Field{"saved", "permuted", &P::saved_permuted},
    Field{"saved", "expert_output", &P::saved_expert_output},
    Field{"saved", "router", &P::saved_router},
    Field{"transient", "backward", &P::transient_backward},
    Field{"transient", "ffn", &P::transient_ffn},
    Field{"transient", "gathered", &P::transient_gathered},
    Field{"passes", "norm", &P::passes_norm},
    Field{"passes", "norm_persistent", &P::passes_norm_persistent},
    Field{"passes", "norm_backward", &P::passes_norm_backward},
    Field{"passes", "residual", &P::passes_residual},
    Field{"passes", "residual_backward", &P::passes_residual_backward},
    Field{"passes", "rotation", &P::passes_rotation},
    Field{"passes", "rotation_backward", &P::passes_rotation_backward},
    Field{"passes", "layout", &P::passes_layout},
    Field{"passes", "layout_backward", &P::passes_layout_backward},
    Field{"passes", "activation", &P::passes_activation},
    Field{"passes", "activation_backward", &P::passes_activation_backward},
    Field{"passes", "bias", &P::passes_bias},
    Field{"passes", "merge", &P::passes_merge},
    Field{"passes", "merge_backward", &P::passes_merge_backward},
    Field{"passes", "exchanged", &P::passes_exchanged},
    Field{"passes", "gathered", &P::passes_gathered},
    Field{"passes", "reduced", &P::passes_reduced},
    Field{"passes", "bucketed", &P::passes_bucketed},
    Field{"passes", "summed", &P::passes_summed},
    Field{"passes", "summed_sent", &P::passes_summed_sent},
    Field{"passes", "loss", &P::passes_loss},
    Field{"passes", "table", &P::passes_table},
    Field{"passes", "loss_parallel", &P::passes_loss_parallel},
    Field{"passes", "cast", &P::passes_cast},
    Field{"passes", "quantise", &P::passes_quantise},
    Field{"passes", "quantise_columns", &P::passes_quantise_columns},
    Field{"passes", "quantise_gradient", &P::passes_quantise_gradient},
    Field{"passes", "quantise_weight", &P::passes_quantise_weight},
    Field{"passes", "quantise_gathered", &P::passes_quantise_gathered},
    Field{"passes", "rescale", &P::passes_rescale},
    Field{"passes", "permute", &P::passes_permute},
    Field{"passes", "permute_backward", &P::passes_permute_backward},
    Field{"launch", "norm", &P::launch_norm},
    Field{"launch", "norm_backward", &P::launch_norm_backward},
    Field{"launch", "residual", &P::launch_residual},
    Field{"launch", "residual_backward", &P::launch_residual_backward},
    Field{"launch", "rotation", &P::launch_rotation},
    Field{"launch", "rotation_backward", &P::launch_rotation_backward},
    Field{"launch", "layout", &P::launch_layout},
    Field{"launch", "layout_backward", &P::launch_layout_backward},
    Field{"launch", "activation", &P::launch_activation},
    Field{"launch", "activation_backward", &P::launch_activation_backward},
    Field{"launch", "core", &P::launch_core},
    Field{"launch", "core_backward", &P::launch_core_backward},
    Field{"launch", "matmul_extra", &P::launch_matmul_extra},
    Field{"launch", "experts", &P::launch_experts},
    Field{"host", "forward_s", &P::host_forward_s},
    Field{"host", "backward_s", &P::host_backward_s},
    Field{"host", "layer_s", &P::host_layer_s},
    Field{"host", "collective_s", &P::host_collective_s},
    Field{"host", "exchange_s", &P::host_exchange_s},
    Field{"host", "step_s", &P::host_step_s},
    Field{"host", "micro_batch_s", &P::host_micro_batch_s},
    Field{"host", "sync", &P::host_sync},
    Field{"host", "sync_sends", &P::host_sync_sends},
    Field{"host", "serial", &P::host_serial},
    Field{"host", "graphs", &P::host_graphs},
    Field{"host", "send_s", &P::host_send_s},
    Field{"attention", "fused", &P::attention_fused},
    Field{"attention", "softmax_keys", &P::attention_softmax_keys},
    Field{"attention", "softmax_multiple", &P::attention_softmax_multiple},
    Field{"attention", "causal_half", &P::attention_causal_half},
    Field{"attention", "rate", &P::attention_rate},
    Field{"attention", "flash2", &P::attention_flash2},
    Field{"attention", "repeats_kv", &P::attention_repeats_kv},
    Field{"overlap", "gradients", &P::overlap_gradients},
    Field{"overlap", "zero", &P::overlap_zero},
    Field{"overlap", "zero_scatters", &P::overlap_zero_scatters},
    Field{"overlap", "weights", &P::overlap_weights},
    Field{"overlap", "pipeline", &P::overlap_pipeline},
    Field{"overlap", "scatter_gather", &P::overlap_scatter_gather},
    Field{"overlap", "bucket_bytes", &P::overlap_bucket_bytes},
    Field{"overlap", "tensor", &P::overlap_tensor},
    Field{"overlap", "tensor_hidden", &P::overlap_tensor_hidden},
    Field{"overlap", "gather_hidden", &P::overlap_gather_hidden},
    Field{"overlap", "regathers", &P::overlap_regathers},
    Field{"overlap", "context", &P::overlap_context},
    Field{"overlap", "by_tensor", &P::overlap_by_tensor},
    Field{"overlap", "unit_layers", &P::overlap_unit_layers},
    Field{"overlap", "prefetch", &P::overlap_prefetch},
    Field{"overlap", "keeps_gathered", &P::overlap_keeps_gathered},
    Field{"overlap", "offload_residual", &P::overlap_offload_residual},
    Field{"overlap", "offload_waits", &P::overlap_offload_waits},
    Field{"overlap", "reshard", &P::overlap_reshard},
    Field{"overlap", "gather_copies", &P::overlap_gather_copies},
    Field{"overlap", "ends_last", &P::overlap_ends_last},
    Field{"overlap", "wgrad_fused", &P::overlap_wgrad_fused},
    Field{"overlap", "wgrad_added", &P::overlap_wgrad_added},
    Field{"update", "passes", &P::update_passes},
    Field{"update", "norm_passes", &P::update_norm_passes},
    Field{"update", "zero_passes", &P::update_zero_passes},
    Field{"update", "gathered", &P::update_gathered},
    Field{"update", "launches", &P::update_launches},
    Field{"update", "launches_per_layer", &P::update_launches_per_layer},
    Field{"update", "gather_passes", &P::update_gather_passes},
    Field{"update", "gather_host_s", &P::update_gather_host_s},
    Field{"update", "tensors_per_layer", &P::update_tensors_per_layer},
    Field{"memory", "context", &P::memory_context},
    Field{"memory", "nccl_channel", &P::memory_nccl_channel},
    Field{"memory", "workspace", &P::memory_workspace},
    Field{"memory", "buckets", &P::memory_buckets},
    Field{"memory", "reducer", &P::memory_reducer},
    Field{"memory", "rows", &P::memory_rows},
    Field{"memory", "pipeline_buffers", &P::memory_pipeline_buffers},
    Field{"memory", "dummy_gradients", &P::memory_dummy_gradients},
    Field{"memory", "workspace_hopper", &P::memory_workspace_hopper},
    Field{"memory", "held", &P::memory_held},
    Field{"memory", "held_pipeline", &P::memory_held_pipeline},
    Field{"memory", "held_most", &P::memory_held_most},
    Field{"memory", "fragmentation", &P::memory_fragmentation},
    Field{"memory", "fragmentation_base", &P::memory_fragmentation_base},
    Field{"memory", "caching", &P::memory_caching},
    Field{"memory", "expandable", &P::memory_expandable},
    Field{"model", "selective", &P::selective},
    Field{"model", "remakes_unread", &P::remakes_unread},
    Field{"model", "balanced_stages", &P::balanced_stages},
    Field{"model", "split_projections", &P::split_projections},
    Field{"model", "vocab_parallel", &P::vocab_parallel},
    Field{"model", "vocab_multiple", &P::vocab_multiple},
    Field{"model", "dropout", &P::dropout},
    Field{"model", "fp32_head", &P::fp32_head},
    Field{"model", "fp32_tensor_cores", &P::fp32_tensor_cores},
    Field{"model", "own_collectives", &P::own_collectives},
};

struct ModuleName {
  Recompute::Module module;
  std::string_view name;
};
constexpr std::array kModules{
    ModuleName{Recompute::kNorms, "norms"},
    ModuleName{Recompute::kAttentionCore, "attention-core"},
    ModuleName{Recompute::kQkv, "qkv"},
    ModuleName{Recompute::kAttentionOut, "attention-out"},
    ModuleName{Recompute::kActivation, "activation"},
    ModuleName{Recompute::kUp, "up"},
    ModuleName{Recompute::kExperts, "experts"},
    ModuleName{Recompute::kAlternate, "alternate"},
};

std::string keys_of(std::string_view section) {
  std::set<std::string_view> keys;
  for (const Field& f : kFields) keys.insert(section.empty() ? f.section : f.section == section ? f.key : std::string_view{});
  keys.erase(std::string_view{});
  return fmt::format("allowed: {}", fmt::join(keys, ", "));
}

/// Sets one member from a scalar; false when the text is not of the member's kind.
bool set(P& profile, const Member& member, const YAML::Node& value) {
  try {
    if (const auto* m = std::get_if<double P::*>(&member)) {
      const double x = value.as<double>();
      profile.*(*m) = x;
      return std::isfinite(x) && x >= 0;
    }
    if (const auto* m = std::get_if<bool P::*>(&member)) return profile.*(*m) = value.as<bool>(), true;
    if (const auto* m = std::get_if<int64_t P::*>(&member)) {
      profile.*(*m) = value.as<int64_t>();
      return profile.*(*m) >= 0;
    }
    return read(value.as<std::string>(), &(profile.*std::get<Recompute P::*>(member)));
  } catch (const YAML::BadConversion&) { return false; }
}

Result<void> read_section(P& profile, std::string_view section, const YAML::Node& body, const std::string& where) {
  if (!body.IsMap()) return refusal_at(where, body.Mark(), fmt::format("`{}` is no section of keys", section));
  std::set<std::string> seen;
  for (const auto& entry : body) {
    const std::string key = entry.first.as<std::string>();
    const Field* field = nullptr;
    for (const Field& f : kFields)
      if (f.section == section && f.key == key) field = &f;
    if (field == nullptr)
      return refusal_at(where, entry.first.Mark(), fmt::format("`{}.{}` is no key of a profile", section, key), keys_of(section));
    if (!seen.insert(key).second) return refusal_at(where, entry.first.Mark(), fmt::format("`{}.{}` is there twice", section, key));
    if (!entry.second.IsScalar() || !set(profile, field->member, entry.second))
      return refusal_at(where, entry.second.Mark(),
                        fmt::format("the value of `{}.{}` is not of its kind or negative", section, key));
  }
  return {};
}

Result<P> read_root(const YAML::Node& root, const std::string& where) {
  if (!root.IsMap()) return Error{.message = "a profile is a map of sections", .where = where};
  P profile;
  if (const YAML::Node base = root["based_on"]) {
    Result<P> found = profile_named(base.as<std::string>());
    if (!found) return found.error();
    profile = *found;
  }
  std::set<std::string> seen;
  for (const auto& entry : root) {
    const std::string key = entry.first.as<std::string>();
    if (!seen.insert(key).second) return refusal_at(where, entry.first.Mark(), fmt::format("`{}` is there twice", key));
    if (key == "based_on") continue;
    if (key == "can") {
      SHARDLAB_TRY(read_abilities(entry.second, where, profile.can));
      continue;
    }
    if (key == "name" || key == "describes") {
      (key == "name" ? profile.name : profile.describes) = entry.second.as<std::string>();
      continue;
    }
    bool known = false;
    for (const Field& f : kFields) known = known || f.section == key;
    if (!known) return refusal_at(where, entry.first.Mark(), fmt::format("`{}` is no section of a profile", key), keys_of({}));
    SHARDLAB_TRY(read_section(profile, key, entry.second, where));
  }
  if (profile.selective.modules & Recompute::kSelective)
    return Error{.message = "model.selective cannot be `selective`: name the modules", .where = where};
  return profile;
}

}  // namespace

std::string name_of(Recompute v) {
  if (v.modules == 0) return "none";
  if (v.full()) return "full";
  std::string text;
  const auto add = [&](std::string_view name) { text += (text.empty() ? "" : "+") + std::string(name); };
  if (v.modules & Recompute::kSelective) add("selective");
  for (const ModuleName& m : kModules)
    if (v.modules & m.module) add(m.name);
  return text;
}

bool read(std::string_view word, Recompute* v) {
  Recompute result;
  if (word == "none") return *v = result, true;
  while (!word.empty()) {
    const size_t end = std::min(word.find('+'), word.size());
    const std::string_view one = word.substr(0, end);
    uint16_t found = one == "full" ? Recompute::kLayer : one == "selective" ? Recompute::kSelective : 0;
    for (const ModuleName& m : kModules)
      if (m.name == one) found = m.module;
    if (found == 0) return false;
    result.modules |= found;
    if (end + 1 == word.size()) return false;  // nothing after the last sign
    word.remove_prefix(std::min(end + 1, word.size()));
  }
  if (result.modules == 0) return false;
  return *v = result, true;
}

Result<FrameworkProfile> read_profile(std::string_view yaml, const std::string& where) {
  try {
    return read_root(YAML::Load(std::string(yaml)), where);
  } catch (const YAML::Exception& e) { return refusal_at(where, e.mark, e.msg); }
}

std::vector<std::string_view> profile_names() {
  std::vector<std::string_view> names;
  for (const ShippedProfile& p : shipped_profiles()) names.push_back(p.name);
  return names;
}

Result<FrameworkProfile> profile_named(std::string_view name) {
  for (const ShippedProfile& p : shipped_profiles())
    if (p.name == name) return read_profile(p.yaml, fmt::format("simulator/profiles/{}.yaml", name));
  return Error{.message = fmt::format("no framework profile `{}`", name),
               .hint = fmt::format("profiles: {}", fmt::join(profile_names(), ", "))};
}

}  // namespace shardlab::simulator::analytic
