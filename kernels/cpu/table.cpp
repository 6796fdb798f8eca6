// One variant's table.
#include "kernels/cpu/variant.h"
#include "kernels/cpu/vector.h"

namespace shardlab::kernels::SHARDLAB_VARIANT {

extern const Kernels table;
const Kernels table = {
    .name = SHARDLAB_VARIANT_NAME,
    .linear_forward = linear_forward,
    .linear_input = linear_input,
    .linear_weight = linear_weight,
    .norm_forward = norm_forward,
    .norm_input = norm_input,
    .norm_weight = norm_weight,
    .rope = rope,
    .attention_forward = attention_forward,
    .attention_input = attention_input,
    .attention_block_forward = attention_block_forward,
    .attention_block_input = attention_block_input,
    .attention_merge_forward = attention_merge_forward,
    .attention_merge_input = attention_merge_input,
    .activation_forward = activation_forward,
    .activation_input = activation_input,
    .residual_forward = residual_forward,
    .bias_weight = bias_weight,
    .dropout = dropout,
    .embed_forward = embed_forward,
    .embed_weight = embed_weight,
    .positions_forward = positions_forward,
    .positions_weight = positions_weight,
    .cross_entropy_fused = cross_entropy_fused,
    .cross_entropy_loss_only = cross_entropy_loss_only,
    .cross_entropy_max = cross_entropy_max,
    .cross_entropy_sum = cross_entropy_sum,
    .cross_entropy_grad = cross_entropy_grad,
    .sgd = sgd,
    .adamw = adamw,
    .lion = lion,
    .adamw8bit = adamw8bit,
    .add = add,
    .maximum = maximum,
    .tree_combine = tree_combine,
    .sum_scalars = sum_scalars,
    .fill = fill,
    .squared_norm = squared_norm,
    .exp = exp,
    .log = log,
    .tanh = tanh,
};

}  // namespace shardlab::kernels::SHARDLAB_VARIANT
