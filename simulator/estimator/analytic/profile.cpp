#include "simulator/estimator/analytic/profile.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <set>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>

#include "plan/base/once_per_name.h"
#include "plan/optimizers.h"
#include "simulator/estimator/analytic/shipped.h"

namespace shardlab::simulator::analytic {
namespace {

using P = FrameworkProfile;

/// A key of the section `Section` of the file, and the member that it sets.
template <typename Section>
struct Field {
  std::string_view key;
  std::variant<double Section::*, bool Section::*, int64_t Section::*, Recompute Section::*> member;
};

constexpr auto kState = std::to_array<Field<P::State>>({
    {"parameter", &P::State::parameter},
    {"gradient", &P::State::gradient},
    {"gradient_fresh", &P::State::gradient_fresh},
    {"gradient_fresh_stage", &P::State::gradient_fresh_stage},
    {"gradient_ends", &P::State::gradient_ends},
    {"master", &P::State::master},
    {"moments", &P::State::moments},
    {"gradient_wire", &P::State::gradient_wire},
    {"weight_wire", &P::State::weight_wire},
    {"fp8_weight", &P::State::fp8_weight},
    {"fp8_alone", &P::State::fp8_alone},
    {"fp8_gather", &P::State::fp8_gather},
    {"fp8_exchange", &P::State::fp8_exchange},
    {"fp8_shared", &P::State::fp8_shared},
    {"context_gradient", &P::State::context_gradient},
    {"gradient_with_step", &P::State::gradient_with_step},
});
constexpr auto kSaved = std::to_array<Field<P::Saved>>({
    {"input", &P::Saved::input},
    {"norm", &P::Saved::norm},
    {"statistics", &P::Saved::statistics},
    {"qkv", &P::Saved::qkv},
    {"rotated", &P::Saved::rotated},
    {"values", &P::Saved::values},
    {"repeated_kv", &P::Saved::repeated_kv},
    {"scores", &P::Saved::scores},
    {"attention", &P::Saved::attention},
    {"log_sum_exp", &P::Saved::log_sum_exp},
    {"residual", &P::Saved::residual},
    {"up", &P::Saved::up},
    {"gate", &P::Saved::gate},
    {"activated", &P::Saved::activated},
    {"fp8_inputs", &P::Saved::fp8_inputs},
    {"mask", &P::Saved::mask},
    {"norm_fp32", &P::Saved::norm_fp32},
    {"logits", &P::Saved::logits},
    {"logits_kept", &P::Saved::logits_kept},
    {"logits_forward", &P::Saved::logits_forward},
    {"logits_gradient", &P::Saved::logits_gradient},
    {"logits_output", &P::Saved::logits_output},
    {"logits_parallel", &P::Saved::logits_parallel},
    {"head_input", &P::Saved::head_input},
    {"head_chunks", &P::Saved::head_chunks},
    {"result", &P::Saved::result},
    {"gathered", &P::Saved::gathered},
    {"permuted", &P::Saved::permuted},
    {"expert_output", &P::Saved::expert_output},
    {"weighted", &P::Saved::weighted},
    {"router", &P::Saved::router},
});
constexpr auto kTransient = std::to_array<Field<P::Transient>>({
    {"backward", &P::Transient::backward},
    {"ffn", &P::Transient::ffn},
    {"gathered", &P::Transient::gathered},
});
constexpr auto kPasses = std::to_array<Field<P::Passes>>({
    {"norm", &P::Passes::norm},
    {"norm_persistent", &P::Passes::norm_persistent},
    {"norm_backward", &P::Passes::norm_backward},
    {"residual", &P::Passes::residual},
    {"residual_backward", &P::Passes::residual_backward},
    {"rotation", &P::Passes::rotation},
    {"rotation_backward", &P::Passes::rotation_backward},
    {"layout", &P::Passes::layout},
    {"layout_backward", &P::Passes::layout_backward},
    {"activation", &P::Passes::activation},
    {"activation_backward", &P::Passes::activation_backward},
    {"bias", &P::Passes::bias},
    {"merge", &P::Passes::merge},
    {"merge_backward", &P::Passes::merge_backward},
    {"exchanged", &P::Passes::exchanged},
    {"gathered", &P::Passes::gathered},
    {"reduced", &P::Passes::reduced},
    {"bucketed", &P::Passes::bucketed},
    {"summed", &P::Passes::summed},
    {"summed_sent", &P::Passes::summed_sent},
    {"loss", &P::Passes::loss},
    {"table", &P::Passes::table},
    {"loss_parallel", &P::Passes::loss_parallel},
    {"cast", &P::Passes::cast},
    {"quantise", &P::Passes::quantise},
    {"quantise_columns", &P::Passes::quantise_columns},
    {"quantise_gradient", &P::Passes::quantise_gradient},
    {"quantise_weight", &P::Passes::quantise_weight},
    {"quantise_gathered", &P::Passes::quantise_gathered},
    {"rescale", &P::Passes::rescale},
    {"permute", &P::Passes::permute},
    {"permute_backward", &P::Passes::permute_backward},
});
constexpr auto kLaunch = std::to_array<Field<P::Launch>>({
    {"norm", &P::Launch::norm},
    {"norm_backward", &P::Launch::norm_backward},
    {"residual", &P::Launch::residual},
    {"residual_backward", &P::Launch::residual_backward},
    {"rotation", &P::Launch::rotation},
    {"rotation_backward", &P::Launch::rotation_backward},
    {"layout", &P::Launch::layout},
    {"layout_backward", &P::Launch::layout_backward},
    {"activation", &P::Launch::activation},
    {"activation_backward", &P::Launch::activation_backward},
    {"core", &P::Launch::core},
    {"core_backward", &P::Launch::core_backward},
    {"matmul_extra", &P::Launch::matmul_extra},
    {"experts", &P::Launch::experts},
    {"expert", &P::Launch::expert},
    {"expert_backward", &P::Launch::expert_backward},
    {"expert_low", &P::Launch::expert_low},
    {"expert_low_backward", &P::Launch::expert_low_backward},
});
constexpr auto kHost = std::to_array<Field<P::Host>>({
    {"forward_s", &P::Host::forward_s},
    {"backward_s", &P::Host::backward_s},
    {"layer_s", &P::Host::layer_s},
    {"collective_s", &P::Host::collective_s},
    {"exchange_s", &P::Host::exchange_s},
    {"step_s", &P::Host::step_s},
    {"micro_batch_s", &P::Host::micro_batch_s},
    {"sync", &P::Host::sync},
    {"sync_sends", &P::Host::sync_sends},
    {"sync_experts", &P::Host::sync_experts},
    {"serial", &P::Host::serial},
    {"graphs", &P::Host::graphs},
    {"send_s", &P::Host::send_s},
    {"view_s", &P::Host::view_s},
});
constexpr auto kAttention = std::to_array<Field<P::Attention>>({
    {"fused", &P::Attention::fused},
    {"softmax_keys", &P::Attention::softmax_keys},
    {"softmax_multiple", &P::Attention::softmax_multiple},
    {"causal_half", &P::Attention::causal_half},
    {"rate", &P::Attention::rate},
    {"flash2", &P::Attention::flash2},
    {"repeats_kv", &P::Attention::repeats_kv},
});
constexpr auto kOverlap = std::to_array<Field<P::Overlap>>({
    {"gradients", &P::Overlap::gradients},
    {"zero", &P::Overlap::zero},
    {"zero_scatters", &P::Overlap::zero_scatters},
    {"weights", &P::Overlap::weights},
    {"pipeline", &P::Overlap::pipeline},
    {"scatter_gather", &P::Overlap::scatter_gather},
    {"bucket_bytes", &P::Overlap::bucket_bytes},
    {"tensor", &P::Overlap::tensor},
    {"tensor_hidden", &P::Overlap::tensor_hidden},
    {"gather_hidden", &P::Overlap::gather_hidden},
    {"regathers", &P::Overlap::regathers},
    {"context", &P::Overlap::context},
    {"by_tensor", &P::Overlap::by_tensor},
    {"reuse_elements", &P::Overlap::reuse_elements},
    {"unit_layers", &P::Overlap::unit_layers},
    {"prefetch", &P::Overlap::prefetch},
    {"keeps_gathered", &P::Overlap::keeps_gathered},
    {"offload_residual", &P::Overlap::offload_residual},
    {"offload_waits", &P::Overlap::offload_waits},
    {"reshard", &P::Overlap::reshard},
    {"gather_copies", &P::Overlap::gather_copies},
    {"ends_last", &P::Overlap::ends_last},
    {"wgrad_fused", &P::Overlap::wgrad_fused},
    {"wgrad_added", &P::Overlap::wgrad_added},
});
constexpr auto kUpdate = std::to_array<Field<P::Update>>({
    {"passes", &P::Update::passes},
    {"norm_passes", &P::Update::norm_passes},
    {"zero_passes", &P::Update::zero_passes},
    {"gathered", &P::Update::gathered},
    {"launches", &P::Update::launches},
    {"launches_per_layer", &P::Update::launches_per_layer},
    {"gather_passes", &P::Update::gather_passes},
    {"gather_host_s", &P::Update::gather_host_s},
    {"tensors_per_layer", &P::Update::tensors_per_layer},
});
constexpr auto kMemory = std::to_array<Field<P::Memory>>({
    {"context", &P::Memory::context},
    {"nccl_channel", &P::Memory::nccl_channel},
    {"workspace", &P::Memory::workspace},
    {"buckets", &P::Memory::buckets},
    {"reducer", &P::Memory::reducer},
    {"rows", &P::Memory::rows},
    {"pipeline_buffers", &P::Memory::pipeline_buffers},
    {"dummy_gradients", &P::Memory::dummy_gradients},
    {"workspace_hopper", &P::Memory::workspace_hopper},
    {"held", &P::Memory::held},
    {"held_pipeline", &P::Memory::held_pipeline},
    {"held_most", &P::Memory::held_most},
    {"fragmentation", &P::Memory::fragmentation},
    {"fragmentation_base", &P::Memory::fragmentation_base},
    {"caching", &P::Memory::caching},
    {"expandable", &P::Memory::expandable},
});
constexpr auto kModel = std::to_array<Field<P::Model>>({
    {"selective", &P::Model::selective},
    {"remakes_unread", &P::Model::remakes_unread},
    {"balanced_stages", &P::Model::balanced_stages},
    {"split_projections", &P::Model::split_projections},
    {"vocab_parallel", &P::Model::vocab_parallel},
    {"vocab_multiple", &P::Model::vocab_multiple},
    {"dropout", &P::Model::dropout},
    {"fp32_head", &P::Model::fp32_head},
    {"fp32_tensor_cores", &P::Model::fp32_tensor_cores},
    {"own_collectives", &P::Model::own_collectives},
});

/// Calls `visit(name, section, fields)` for every section of the file: its name, the member of the profile, the table of its keys.
template <typename Visit>
constexpr void each_section(Visit visit) {
  visit("state", &P::state, kState);
  visit("saved", &P::saved, kSaved);
  visit("transient", &P::transient, kTransient);
  visit("passes", &P::passes, kPasses);
  visit("launch", &P::launch, kLaunch);
  visit("host", &P::host, kHost);
  visit("attention", &P::attention, kAttention);
  visit("overlap", &P::overlap, kOverlap);
  visit("update", &P::update, kUpdate);
  visit("memory", &P::memory, kMemory);
  visit("model", &P::model, kModel);
}

/// Stands for a value of any type, and is never made.
struct Anything {
  template <typename T>
  operator T() const;
};

/// The number of members of a struct: of how many values it can be made.
template <typename Section, typename... Values>
constexpr size_t members_of() {
  if constexpr (requires { Section{Values{}..., Anything{}}; })
    return members_of<Section, Values..., Anything>();
  else
    return sizeof...(Values);
}

constexpr bool every_member_has_a_key() {
  bool all = true;
  each_section([&]<typename Section, size_t keys>(std::string_view, Section P::*, const std::array<Field<Section>, keys>&) {
    all = all && members_of<Section>() == keys;
  });
  return all;
}
static_assert(every_member_has_a_key());

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

std::string allowed(const std::set<std::string_view>& keys) { return fmt::format("allowed: {}", fmt::join(keys, ", ")); }

/// Sets one member from a scalar; false when the text is not of the member's kind.
template <typename Section>
bool set(Section& section, const Field<Section>& field, const YAML::Node& value) {
  const auto read_into = [&](auto member) {
    auto& at = section.*member;
    using Kind = std::remove_reference_t<decltype(at)>;
    if constexpr (std::is_same_v<Kind, Recompute>)
      return read(value.as<std::string>(), &at);
    else
      at = value.as<Kind>();
    if constexpr (std::is_same_v<Kind, double>) return std::isfinite(at) && at >= 0;
    if constexpr (std::is_same_v<Kind, int64_t>) return at >= 0;
    return true;
  };
  try {
    return std::visit(read_into, field.member);
  } catch (const YAML::BadConversion&) { return false; }
}

template <typename Section, size_t keys>
Result<void> read_section(Section& into, std::string_view section, const std::array<Field<Section>, keys>& fields,
                          const YAML::Node& body, const std::string& where) {
  if (!body.IsMap()) return refusal_at(where, body.Mark(), fmt::format("`{}` is not a section of keys", section));
  std::set<std::string> seen;
  for (const auto& entry : body) {
    const std::string key = entry.first.as<std::string>();
    const auto field = std::ranges::find(fields, key, &Field<Section>::key);
    if (field == fields.end()) {
      std::set<std::string_view> known;
      for (const Field<Section>& f : fields) known.insert(f.key);
      return refusal_at(where, entry.first.Mark(), fmt::format("`{}.{}` is not a key of a profile", section, key), allowed(known));
    }
    if (!seen.insert(key).second) return refusal_at(where, entry.first.Mark(), fmt::format("`{}.{}` is there twice", section, key));
    if (!entry.second.IsScalar() || !set(into, *field, entry.second))
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
    std::set<std::string_view> sections;
    std::optional<Result<void>> done;  // of the section that the key names
    each_section([&](std::string_view section, auto member, const auto& fields) {
      sections.insert(section);
      if (section == key) done = read_section(profile.*member, section, fields, entry.second, where);
    });
    if (!done)
      return refusal_at(where, entry.first.Mark(), fmt::format("`{}` is not a section of a profile", key), allowed(sections));
    SHARDLAB_TRY(*done);
  }
  if (profile.model.selective.modules & Recompute::kSelective)
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
    if (p.name == name) {
      static OncePerName<FrameworkProfile> profiles;
      const std::string key(name);
      return profiles.of(key, [&] { return read_profile(p.yaml, fmt::format("simulator/profiles/{}.yaml", key)); });
    }
  return Error{.message = fmt::format("no framework profile `{}`", name),
               .hint = fmt::format("profiles: {}", fmt::join(profile_names(), ", "))};
}

void set_optimizer(Optimizer optimizer, FrameworkProfile& profile) {
  const OptimizerRow &two = row_of(Optimizer::kAdamW), &row = row_of(optimizer);
  const double moments = profile.state.moments * state_bytes_per_parameter(row) / state_bytes_per_parameter(two);
  profile.update.passes -= 2 * (profile.state.moments - moments);  // read and written
  profile.state.moments = moments;
}

}  // namespace shardlab::simulator::analytic
