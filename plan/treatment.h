// The treatment of a layer's activations: kept, made again in backward, or parked in host memory until backward.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"

namespace shardlab {

/// Sub-layers that can be made again by themselves: what costs no matrix product and no collective.
inline constexpr std::string_view kSubLayers[] = {"attn.norm", "attn.core", "mlp.norm", "mlp.act"};
inline constexpr unsigned kSubLayerSets = 1u << std::size(kSubLayers);

/// Treatment of one layer. Activations that are not made again are kept, on the device or parked.
struct LayerTreatment {
  bool full = false;    ///< all but the input is made again
  unsigned again = 0;   ///< else: bit i, sub-layer i of `kSubLayers` is made again
  bool parked = false;  ///< the kept activations, the layer's input included, wait in host memory
  friend bool operator==(const LayerTreatment&, const LayerTreatment&) = default;
};

/// "none", "full", "attn.core+mlp.act"; with "@cpu" where it is parked: "full@cpu".
std::string name_of(const LayerTreatment& treatment);
/// The sub-layers of a set, separated by spaces, as `RecomputeOptions::modules` has them.
std::string modules_of(unsigned again);
/// The set of sub-layers named in a list separated by `separator`. Refuses a word that is none of them.
Result<unsigned> sub_layers_named(std::string_view list, char separator);

/// Runs of layers alike, from the model's first: "3*full@cpu 2*attn.core+mlp.act 5*none".
std::string treatments_text(std::span<const LayerTreatment> treatments);
/// The inverse of `treatments_text`. Refuses a text that is no such list, and a list of another number of layers.
Result<std::vector<LayerTreatment>> parse_treatments(std::string_view text, int64_t layers);

/// The treatment of every layer where the case has no list by layer. Under `recompute_options.every` it is the treatment of
/// the first layer.
LayerTreatment common_treatment(const Case& c);
/// Treatments by layer of the model, for every kind of recompute, with activations offloaded or not. `check` must accept the case,
/// and a case with a budget must be decided (`is_decided`).
std::vector<LayerTreatment> treatments_of(const Case& c);

/// Whether nothing is left to choose: there is no budget, or the choice that it led to is in `layers`.
inline bool is_decided(const Case& c) {
  return c.layout.recompute_options.budget_bytes == 0 || c.layout.recompute == Recompute::kByLayer;
}

/// Whether some layer's activations are parked.
bool parks_activations(const Case& c);

}  // namespace shardlab
