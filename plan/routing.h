// How the tokens of a prediction choose experts: evenly, by Zipf's law, forced to a few, or as a run recorded it. A prediction takes
// `data.routing` or `data.routes` in place of routers; in a run the routers choose for themselves.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/case.h"
#include "plan/expert_placement.h"
#include "plan/expert_rows.h"

namespace shardlab {

struct Routing {
  enum class Kind : uint8_t { kBalanced, kZipf, kForced, kRecorded } kind = Kind::kBalanced;
  double exponent = 0;               ///< of kZipf: the expert of rank r has a share that falls as r^-exponent
  int64_t experts = 0;               ///< of kForced: all tokens go to the first so many experts, evenly
  std::vector<ExpertRows> recorded;  ///< of kRecorded: the layers of one step, ascending; `by_source` of each is there

  bool is_even() const { return kind == Kind::kBalanced; }
};

/// "balanced", "zipf:1.2", "forced:2"; nothing for any other text. An exponent is above 0 and up to 100.
std::optional<Routing> routing_named(std::string_view text);

/// The routing of the case: `data.routing`, or what the file `data.routes` says. Refuses a file that is none, whose layers or experts are
/// not those of the case's model, or in which an expert has more rows than there are tokens.
Result<Routing> routing_of(const Case& c);

/// By expert of layer `layer`: the share of the tokens that go to it, from 0 to 1. The shares add up to top_k.
///
/// Formula: balanced k/E. forced k/e of the first e experts, 0 of the others. zipf: min(1, c r^-exponent), where c makes the sum k and r is
///   the expert's rank in an order of its own for each layer, which is fixed by the layer's number. recorded: k times the layer's rows of the
///   expert over all rows of the layer.
std::vector<double> shares_of_experts(const Routing& routing, const Experts& experts, int64_t layer);

/// Whether the case's experts are contiguous or listed by place: `expert_placement` is neither `balanced` nor `measured`.
bool is_placement_decided(const Case& c);

/// The placement of experts that the case asks for, over `ranks` ranks: the list of `expert_placement`, or for `balanced` the result of
/// `placement_after` for the shares of `routing`. `measured` gives none before it is decided. `check` must accept the case.
std::vector<ExpertPlacement> placements_of(const Case& c, const Routing& routing, int ranks);

/// Expected imbalance: rows of the fullest of `parts` equal runs of places over the mean, as a mean over the layers with experts. `parts` = ep:
/// imbalance of ranks; `parts` = E: imbalance of experts. A capacity bounds the rows of an expert. 1 for a model without experts.
double expected_imbalance(const Routing& routing, const Model& model, int64_t parts,
                          std::span<const ExpertPlacement> placements = {});

/// The file of `data.routes`: rows of each layer of one step, by source and expert, and how many more were chosen and dropped.
std::string print_routes(std::span<const ExpertRows> layers);
/// Refuses a text that is no such file, with `path` and the line.
Result<std::vector<ExpertRows>> parse_routes(std::string_view text, const std::string& path);

}  // namespace shardlab
