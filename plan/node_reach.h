// How many nodes a token of a mixture reaches: what crosses between nodes where a token crosses to a node once (plan/row_levels.h).
#pragma once

#include <span>
#include <vector>

#include "plan/model.h"

namespace shardlab {

/// The chance that a token has one or more of its experts on a node, as a mean over `nodes` nodes with equally many neighbouring experts
/// each, where routes are even: every choice of `groups_chosen` groups, and of top_k experts of these, is as likely as any other.
///
/// Formula: 1 - C(E - E/N, k) / C(E, k) without groups; with g of G groups the mean of it over the choices of groups.
/// Source: DeepSeek-AI, "DeepSeek-V3" (2024), section 2.1.2, bounds the nodes of a token by its groups.
double even_chance_of_node(const Experts& experts, int nodes);

/// By node, the chance that a token has one or more of its experts there. shares: of each expert, the part of the tokens that go to it, by
/// place; they add up to the experts of a token. Nodes have equally many neighbouring places.
///
/// Formula: conditional Poisson sampling: k different experts e are as likely as the product of their s_e / (1 - s_e), s the shares. An
///   expert of share 1 has every token.
/// Source: Hajek 1964, "Asymptotic theory of rejective sampling" (Annals of Mathematical Statistics 35).
/// Valid when: a token's choices depend on each other by their number alone, so not where groups limit them.
std::vector<double> chances_of_nodes(std::span<const double> shares, int nodes);

}  // namespace shardlab
