// The kernels of one variant, as kernels/cpu/table.cpp lists them. Docstrings are with their arguments in kernels/*.h.
#pragma once

#include "kernels/kernels.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {

void linear_forward(const LinearForward& a);
void linear_input(const LinearInput& a);
void linear_weight(const LinearWeight& a);
void norm_forward(const NormForward& a);
void norm_input(const NormInput& a);
void norm_weight(const NormWeight& a);
void rope(const Rope& a);
void attention_forward(const AttentionForward& a);
void attention_input(const AttentionInput& a);
void attention_block_forward(const AttentionBlockForward& a);
void attention_block_input(const AttentionBlockInput& a);
void attention_merge_forward(const AttentionMergeForward& a);
void attention_merge_input(const AttentionMergeInput& a);
void activation_forward(const ActivationForward& a);
void activation_input(const ActivationInput& a);
void residual_forward(const ResidualForward& a);
void bias_weight(const BiasWeight& a);
void dropout(const Dropout& a);
void embed_forward(const EmbedForward& a);
void embed_weight(const EmbedWeight& a);
void positions_forward(const PositionsForward& a);
void positions_weight(const PositionsWeight& a);
void cross_entropy_fused(const CrossEntropy& a);
void cross_entropy_loss_only(const CrossEntropy& a);
void cross_entropy_max(const CrossEntropy& a);
void cross_entropy_sum(const CrossEntropy& a);
void cross_entropy_grad(const CrossEntropy& a);
void sgd(const Sgd& a);
void adamw(const AdamW& a);
void lion(const Lion& a);
void adamw8bit(const AdamW8bit& a);
void add(const Add& a);
void maximum(const Add& a);
void tree_combine(const TreeCombine& a);
void sum_scalars(const SumScalars& a);
void fill(float* x, int64_t n, float value);
double squared_norm(const float* x, int64_t n);
void exp(const float* x, int64_t n, float* y);
void log(const float* x, int64_t n, float* y);
void tanh(const float* x, int64_t n, float* y);

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
