// Settings of techniques: their ranges, and whatever a rule counts. plan/techniques.cpp says which technique asks which. Each refuses
// with the value and what to set instead.
#pragma once

#include "plan/base/result.h"
#include "plan/case.h"

namespace shardlab::settings {

/// Instances of a layer that a step's plan may hold: each has calls, buffers and instructions of its own.
inline constexpr double kMostLayerRuns = 1 << 17;

Result<void> check_zero(const Case& c);
Result<void> check_device_libraries(const Case& c);
Result<void> check_execution(const Case& c);
Result<void> check_gradient_dtypes(const Case& c);
Result<void> check_mirrored(const Case& c);
Result<void> check_budget(const Case& c);
Result<void> check_by_layer(const Case& c);
Result<void> check_recompute(const Case& c);
Result<void> check_secondary(const Case& c);
Result<void> check_one_bit_adam(const Case& c);
Result<void> check_codes(const Case& c);
Result<void> check_powersgd(const Case& c);
Result<void> check_selection(const Case& c);
Result<void> check_server_settings(const Case& c);
Result<void> check_servers(const Case& c);
Result<void> check_diloco(const Case& c);
Result<void> check_tensor_parallel(const Case& c);
Result<void> check_sequence_parallel(const Case& c);
Result<void> check_tensor_overlap(const Case& c);
Result<void> check_context_parallel(const Case& c);
Result<void> check_expert_slices(const Case& c);
Result<void> check_expert_parallel(const Case& c);
Result<void> check_head_norm(const Case& c);
Result<void> check_latent_attention(const Case& c);
Result<void> check_head_exchange(const Case& c);
Result<void> check_loss_chunks(const Case& c);
Result<void> check_documents(const Case& c);
Result<void> check_routing(const Case& c);
/// Refuses an `expert_placement` of no experts, of experts that no ranks share, by rows that nobody knows, or that is no permutation.
Result<void> check_placement(const Case& c);
Result<void> check_hybrid_shard(const Case& c);
Result<void> check_fsdp(const Case& c);
Result<void> check_halving_doubling(const Case& c);
Result<void> check_hierarchical(const Case& c);
bool sets_loss_scale(const Case& c);
Result<void> check_loss_scale(const Case& c);
Result<void> check_fp8_blocks(const Case& c);
Result<void> check_unused(const Case& c);
Result<void> check_guard(const Case& c);
Result<void> check_post_validation(const Case& c);
Result<void> check_expert_bound(const Case& c);
Result<void> check_canonical(const Case& c);
Result<void> check_checkpoint(const Case& c);

}  // namespace shardlab::settings
