#include "answers/model_shape.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <span>
#include <string>
#include <vector>

#include "answers/namespaces.h"
#include "answers/trained_keys.h"
#include "plan/base/values.h"
#include "plan/technique_settings.h"
#include "reports/format.h"
#include "simulator/estimator/analytic/shipped.h"
#include "sweeps/yaml.h"

namespace shardlab::answers {

analytic::ModelShape model_shape(const ModelConfig& c) {
  analytic::ModelShape s = analytic::shape_of(c.model);
  if (c.rotary) s.max_positions = 0;
  s.qkv_biases = c.qkv_biases, s.out_bias = c.out_bias, s.expert_biases = c.expert_biases;
  s.qk_norm = c.qk_norm, s.qk_norm_whole = c.qk_norm_whole, s.post_norms = c.post_norms, s.sinks = c.sinks;
  s.experts = c.experts, s.top_k = c.top_k, s.moe_ffn = c.moe_ffn, s.shared_experts = c.shared_experts,
  s.shared_gate = c.shared_gate;
  s.dense_layers = c.dense_layers, s.router_bias = c.router_bias;
  if (c.kv_rank == 0) return s;
  s.q_rank = c.q_rank, s.kv_rank = c.kv_rank, s.rope_dim = c.rope_dim, s.v_dim = c.v_dim;
  s.head_dim = c.nope_dim;
  return s;
}

namespace {

using analytic::Trained;

/// A word of a list and the bits that it stands for; many of them.
using BitWord = std::pair<std::string_view, int>;
using BitWords = std::span<const BitWord>;

/// The bits of a list of words, separated by spaces or commas; with brackets or without.
Result<uint8_t> bits_of(std::string_view key, std::string_view list, BitWords words) {
  int bits = 0;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find_first_of(" ,[]", begin), list.size());
    const std::string_view word = list.substr(begin, end - begin);
    begin = end + 1;
    if (word.empty()) continue;
    const auto found = std::ranges::find(words, word, [](const auto& w) { return w.first; });
    if (found == words.end()) {
      std::string all;
      for (const auto& [name, mask] : words) all += fmt::format("{}{}", all.empty() ? "" : ", ", name);
      return refusal(fmt::format("{}={}: there is no {}", key, list, word), fmt::format("name some of {}", all));
    }
    bits |= found->second;
  }
  return static_cast<uint8_t>(bits);
}

constexpr int kAttentionProjections = Trained::kQ | Trained::kK | Trained::kV | Trained::kO;
constexpr int kMlpProjections = Trained::kGate | Trained::kUp | Trained::kDown;
constexpr BitWord kProjections[] = {{"q", Trained::kQ},       {"k", Trained::kK},
                                    {"v", Trained::kV},       {"o", Trained::kO},
                                    {"gate", Trained::kGate}, {"up", Trained::kUp},
                                    {"down", Trained::kDown}, {"attention", kAttentionProjections},
                                    {"mlp", kMlpProjections}, {"all", kAttentionProjections | kMlpProjections}};
constexpr BitWord kModules[] = {
    {"embedding", Trained::kEmbedding}, {"head", Trained::kHead},       {"attention", Trained::kAttention},
    {"mlp", Trained::kFeedForward},     {"experts", Trained::kExperts}, {"router", Trained::kRouter},
    {"norms", Trained::kNorms},         {"all", Trained::kAll},         {"none", 0}};

std::string bit_words(uint8_t bits, BitWords words) {
  std::string text;
  for (const auto& [name, mask] : words)
    if (std::has_single_bit(static_cast<unsigned>(mask)) && (bits & mask) != 0)
      text += fmt::format("{}{}", text.empty() ? "" : ", ", name);
  return text;
}

bool is_of_trained(std::string_view path) { return std::ranges::find(kTrainedKeys, path) != kTrainedKeys.end(); }

/// Which weights are trained. Nothing else is asked of the point.
Result<Trained> trained_of(const sweeps::Point& said, const analytic::ModelShape& shape) {
  Trained t;
  std::string_view targets = "all", frozen;
  for (const auto& [path, value] : said.unheld) {
    if (path == "train.lora_rank") t.rank = parse_count(value).value();
    if (path == "train.frozen_bits") t.frozen_bits = static_cast<int32_t>(parse_count(value).value());
    if (path == "train.lora_targets") targets = value;
    if (path == "train.frozen") frozen = value;
  }
  if (t.rank == 0 && targets != "all")
    return refusal(fmt::format("lora_targets={} without lora_rank", targets), "set lora_rank, as 16");
  if (frozen.empty()) frozen = t.rank > 0 ? "all" : "none";
  const auto modules = bits_of("frozen", frozen, kModules), adapted = bits_of("lora_targets", targets, kProjections);
  if (!modules.ok()) return modules.error();
  if (!adapted.ok()) return adapted.error();
  if (t.frozen_bits != 16 && t.frozen_bits != 8 && t.frozen_bits != 4)
    return refusal(fmt::format("frozen_bits={}: weights are not kept in {} bits", t.frozen_bits, t.frozen_bits), "use 16, 8 or 4");
  t.frozen = *modules;
  if (t.rank > 0) t.adapted = *adapted;
  constexpr int kEnds = Trained::kEmbedding | Trained::kHead;
  if (shape.tied_embeddings && (t.frozen & kEnds) != 0) t.frozen |= kEnds;  // one table
  if (t.frozen_bits < 16 && (t.frozen & (Trained::kAttention | Trained::kFeedForward | Trained::kExperts)) == 0)
    return refusal(fmt::format("frozen_bits={} without frozen projections", t.frozen_bits),
                   "set lora_rank, or frozen=attention,mlp");
  if (t.rank > 0 && t.adapted == 0) return refusal("lora_targets is empty", "name some of q, k, v, o, gate, up, down");
  // Layers of which nothing is trained, with nothing before them, have no backward.
  const int of_layers = Trained::kNorms | Trained::kAttention | (shape.moe() ? Trained::kExperts | Trained::kRouter : 0) |
                        (shape.moe_layers() < shape.layers ? Trained::kFeedForward : 0);
  if (t.adapted == 0 && (t.frozen & of_layers) == of_layers && t.freezes(Trained::kEmbedding))
    return refusal(fmt::format("frozen={}: {}", frozen,
                               t.freezes(Trained::kHead)
                                   ? "nothing is trained"
                                   : "only the head is trained, and layers then have no backward, which is not told apart"),
                   "train something of the layers, or set lora_rank");
  return t;
}

}  // namespace

analytic::ModelShape model_shape(const sweeps::Point& point) {
  analytic::ModelShape shape = point.model ? model_shape(*point.model) : analytic::shape_of(point.config.model);
  if (const auto trained = trained_of(point, shape); trained.ok()) shape.trained = *trained;
  return shape;
}

std::string trained_text(const analytic::ModelShape& shape) {
  const Trained& t = shape.trained;
  if (t.frozen == 0) return {};
  const double trained = static_cast<double>(trained_count(shape)),
               all = static_cast<double>(parameter_count(shape) + adapter_count(shape));
  std::string text = fmt::format("trains {} parameters, {:.3g} % of {}{}", count_words(trained), 100 * trained / all,
                                 count_words(all), t.rank > 0 ? " with the adapters" : "");
  if (t.rank > 0) text += fmt::format(": adapters of rank {} beside {}", t.rank, bit_words(t.adapted, kProjections));
  text += fmt::format("; frozen, without gradients, master copies and moments: {}",
                      t.frozen == Trained::kAll ? "all other weights" : bit_words(t.frozen, kModules));
  if (t.frozen_bits < 16) text += fmt::format(", projections in {} bits", t.frozen_bits);
  return text;
}

Result<analytic::Point> estimated_layout(const sweeps::Point& said) {
  const analytic::ModelShape shape = said.model ? model_shape(*said.model) : analytic::shape_of(said.config.model);
  if (!shape.moe()) {  // in the words that a plan is refused in
    SHARDLAB_TRY(settings::check_routing(said.config));
    SHARDLAB_TRY(settings::check_placement(said.config));
  }
  auto point = analytic::point_of(said.config);
  if (!point.ok()) return point.error();
  if (const auto trained = trained_of(said, shape); !trained.ok()) return trained.error();
  point->expert_tp = analytic::expert_slices_of(said.config.layout, shape.moe());
  for (const auto& [path, value] : said.unheld) {
    if (is_of_trained(path)) continue;
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

Result<analytic::FrameworkProfile> profile_meant(const std::string& name) {
  auto found = analytic::profile_named(name);
  if (found.ok()) return found;
  std::vector<std::string> names;
  for (const analytic::ShippedProfile& profile : analytic::shipped_profiles()) names.emplace_back(profile.name);
  const std::string close = std::ranges::find(names, name) == names.end() ? sweeps::nearest_word(name, names) : std::string();
  return refusal(found.error().message + (close.empty() ? "" : fmt::format(", did you mean `{}`?", close)), found.error().hint);
}

}  // namespace shardlab::answers
