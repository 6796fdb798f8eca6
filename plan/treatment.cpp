#include "plan/treatment.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "plan/base/check.h"

namespace shardlab {
namespace {

constexpr std::string_view kParked = "@cpu";

Error no_list(std::string_view text, std::string_view why) {
  return {
      ExitCode::kUsage,
      fmt::format("recompute={}: {}", text, why),
      "write runs of layers as COUNT*TREATMENT, separated by spaces: none, full or sub-layers joined by +, with @cpu where they "
      "wait in host memory, as in 3*full@cpu 2*attn.core+mlp.act 5*none",
      {}};
}

/// Of what `check` has accepted.
template <class T>
T checked(Result<T> result) {
  SHARDLAB_CHECK(result.ok(), "{}", to_string(result.error()));
  return std::move(result).value();
}

Result<LayerTreatment> parse_treatment(std::string_view text) {
  LayerTreatment t;
  t.parked = text.ends_with(kParked);
  if (t.parked) text.remove_suffix(kParked.size());
  t.full = text == "full";
  if (t.full || text == "none") return t;
  if (text.empty()) return no_list(text, "a run of layers without a treatment");
  const auto again = sub_layers_named(text, '+');
  if (!again.ok()) return again.error();
  t.again = *again;
  return t;
}

}  // namespace

Result<unsigned> sub_layers_named(std::string_view list, char separator) {
  unsigned set = 0;
  while (!list.empty()) {
    const size_t end = std::min(list.find(separator), list.size());
    const std::string_view label = list.substr(0, end);
    const auto found = std::ranges::find(kSubLayers, label);
    if (found == std::end(kSubLayers))
      return Error{ExitCode::kUsage,
                   fmt::format("recompute of `{}`, which is no sub-layer that can be made again by itself", label),
                   "name some of attn.norm, attn.core, mlp.norm and mlp.act, or set recompute: full",
                   {}};
    set |= 1u << (found - std::begin(kSubLayers));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return set;
}

std::string modules_of(unsigned again) {
  std::string text;
  for (size_t i = 0; i < std::size(kSubLayers); ++i)
    if ((again >> i) & 1) text += (text.empty() ? "" : " ") + std::string(kSubLayers[i]);
  return text;
}

std::string name_of(const LayerTreatment& t) {
  std::string text = t.full ? "full" : t.again == 0 ? "none" : modules_of(t.again);
  std::ranges::replace(text, ' ', '+');
  return t.parked ? text + std::string(kParked) : text;
}

std::string treatments_text(std::span<const LayerTreatment> treatments) {
  std::string text;
  for (size_t i = 0, end = 0; i < treatments.size(); i = end) {
    while (end < treatments.size() && treatments[end] == treatments[i]) ++end;
    text += fmt::format("{}{}*{}", text.empty() ? "" : " ", end - i, name_of(treatments[i]));
  }
  return text;
}

Result<std::vector<LayerTreatment>> parse_treatments(std::string_view text, int64_t layers) {
  std::vector<LayerTreatment> all;
  for (std::string_view left = text; !left.empty();) {
    const size_t end = std::min(left.find(' '), left.size());
    const std::string_view run = left.substr(0, end);
    left.remove_prefix(std::min(end + 1, left.size()));
    const size_t star = std::min(run.find('*'), run.size());
    int64_t count = 0;
    const auto [stop, failed] = std::from_chars(run.data(), run.data() + star, count);
    if (star == run.size() || failed != std::errc() || stop != run.data() + star || count < 1)
      return no_list(text, fmt::format("`{}` is no run of layers", run));
    if (count > layers - static_cast<int64_t>(all.size()))
      return no_list(text, fmt::format("more layers than the model's {}", layers));
    const auto treatment = parse_treatment(run.substr(star + 1));
    if (!treatment.ok()) return treatment.error();
    all.insert(all.end(), static_cast<size_t>(count), *treatment);
  }
  if (static_cast<int64_t>(all.size()) != layers)
    return no_list(text, fmt::format("{} layers, and the model has {}", all.size(), layers));
  return all;
}

LayerTreatment common_treatment(const Case& c) {
  const Layout& l = c.layout;
  LayerTreatment t;
  t.full = l.recompute == Recompute::kFull;
  t.parked = l.offload.activations != OffloadTo::kNone;
  if (l.recompute == Recompute::kSelective) {
    const std::string& named = l.recompute_options.modules;
    t.again = checked(sub_layers_named(named.empty() ? "attn.core" : named, ' '));
  }
  return t;
}

std::vector<LayerTreatment> treatments_of(const Case& c) {
  const RecomputeOptions& options = c.layout.recompute_options;
  SHARDLAB_CHECK(is_decided(c), "recompute within {} bytes has not been decided", options.budget_bytes);
  if (c.layout.recompute == Recompute::kByLayer) return checked(parse_treatments(options.layers, c.model.layers));
  const LayerTreatment common = common_treatment(c);
  std::vector<LayerTreatment> all(static_cast<size_t>(c.model.layers), common);
  for (size_t layer = 0; layer < all.size(); ++layer)
    all[layer].full = common.full && layer % static_cast<size_t>(options.every) == 0;
  return all;
}

bool parks_activations(const Case& c) {
  if (c.layout.recompute != Recompute::kByLayer) return c.layout.offload.activations != OffloadTo::kNone;
  return c.layout.recompute_options.layers.find(kParked) != std::string::npos;
}

}  // namespace shardlab
