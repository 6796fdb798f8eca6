// The launch functions that the sources of this folder define for the table, once for CUDA and once for the host.
#pragma once

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/number.h"

namespace shardlab::gpu::SHARDLAB_GPU_VARIANT {

void embed_forward(const EmbedForward& a, Stream s);
void embed_weight(const EmbedWeight& a, Stream s);
void positions_forward(const PositionsForward& a, Stream s);
void positions_weight(const PositionsWeight& a, Stream s);
void norm_forward(const NormForward& a, Stream s);
void norm_input(const NormInput& a, Stream s);
void norm_weight(const NormWeight& a, Stream s);
void head_norm_forward(const HeadNormForward& a, Stream s);
void head_norm_input(const HeadNormInput& a, Stream s);
void head_norm_weight(const HeadNormWeight& a, Stream s);
void linear_forward(const LinearForward& a, Stream s);
void linear_input(const LinearInput& a, Stream s);
void linear_weight(const LinearWeight& a, Stream s);
void rope(const Rope& a, Stream s);
void latent_heads(const LatentHeads& a, Stream s);
void attention_forward(const AttentionForward& a, Stream s);
void attention_input(const AttentionInput& a, Stream s);
void split_heads(const SplitHeads& a, Stream s);
void attention_block_forward(const AttentionBlockForward& a, Stream s);
void attention_block_input(const AttentionBlockInput& a, Stream s);
void attention_merge_forward(const AttentionMergeForward& a, Stream s);
void attention_merge_input(const AttentionMergeInput& a, Stream s);
void regroup(const Regroup& a, Stream s);
void activation_forward(const ActivationForward& a, Stream s);
void activation_input(const ActivationInput& a, Stream s);
void route_forward(const RouteForward& a, Stream s);
void route_input(const RouteInput& a, Stream s);
void expert_load(const ExpertLoad& a, Stream s);
void update_router_bias(const UpdateRouterBias& a, Stream s);
void fit_rows(const FitRows& a, Stream s);
void dispatch(const Dispatch& a, Stream s);
void combine_forward(const CombineForward& a, Stream s);
void combine_input(const CombineInput& a, Stream s);
void gate_forward(const GateForward& a, Stream s);
void gate_input(const GateInput& a, Stream s);
void grouped_linear(const GroupedLinear& a, Stream s);
void grouped_linear_weight(const GroupedLinearWeight& a, Stream s);
void grouped_activation(const GroupedActivation& a, Stream s);
/// The rows that are counted, a number in device memory: of `scratch`, as large as a GroupedActivation's.
const int64_t* count_rows(const RowCounts& rows, const Scratch& scratch, Stream s);
void residual_forward(const ResidualForward& a, Stream s);
void bias_weight(const BiasWeight& a, Stream s);
void dropout(const Dropout& a, Stream s);
void add(const Add& a, Stream s);
void fill(const Fill& a, Stream s);
void cast(const Cast& a, Stream s);
void cross_entropy_fused(const CrossEntropy& a, Stream s);
void cross_entropy_loss_only(const CrossEntropy& a, Stream s);
void cross_entropy_max(const CrossEntropy& a, Stream s);
void cross_entropy_sum(const CrossEntropy& a, Stream s);
void cross_entropy_grad(const CrossEntropy& a, Stream s);
void sum_scalars(const SumScalars& a, Stream s);
void squared_norm(const SquaredNorm& a, Stream s);
void combine(const Combine& a, Stream s);
void sgd(const Sgd& a, Stream s);
void adamw(const AdamW& a, Stream s);
void lion(const Lion& a, Stream s);
void adamw8bit(const AdamW8bit& a, Stream s);
void numbers(const Numbers& a, Stream s);
void amax(const Amax& a, Stream s);
void multiply(const Multiply& a, Stream s);
void subtract(const Subtract& a, Stream s);
void quantise(const Quantise& a, Stream s);
void dequantise(const Dequantise& a, Stream s);
void dequantise_sum(const DequantiseSum& a, Stream s);
void sum_rows(const SumRows& a, Stream s);
void swap_leading(const SwapLeading& a, Stream s);
void select(const Select& a, Stream s);
void scatter(const Scatter& a, Stream s);
void zero_selected(const ZeroSelected& a, Stream s);
void orthogonalise(const Orthogonalise& a, Stream s);
void start_basis(const StartBasis& a, Stream s);
void fold_momentum(const FoldMomentum& a, Stream s);
void frozen_adam(const FrozenAdam& a, Stream s);
void outer_step(const OuterStep& a, Stream s);
/// y[rows,width] += bias[width], each of f32, bf16 or f16: for a library that cannot.
void add_bias(Output y, Input bias, int64_t rows, int64_t width, Stream s);
std::unique_ptr<Matmul> matmul(const MatmulOptions& options, LaunchCheck& check);

/// The tensor-core forms of attention, for bf16 and f16; attention_forward and attention_input choose.
void attention_forward_tensor(const AttentionForward& a, Stream s);
void attention_query_gradient_tensor(const AttentionInput& a, Stream s);
void attention_key_gradient_tensor(const AttentionInput& a, Stream s);
/// Attention over a whole sequence as one block of it.
void attention_forward_in_leaves(const AttentionForward& a, Stream s);
void attention_input_in_leaves(const AttentionInput& a, Stream s);

}  // namespace shardlab::gpu::SHARDLAB_GPU_VARIANT
