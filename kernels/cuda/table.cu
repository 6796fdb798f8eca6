// The table of kernels.
#include "kernels/cuda/launches.h"
#include "kernels/cuda/library_matmul.h"

namespace shardlab::gpu {
namespace SHARDLAB_GPU_VARIANT {

#ifdef __CUDACC__
std::unique_ptr<Matmul> matmul(const MatmulOptions& options, LaunchCheck& check) {
  return library_matmul(options, add_bias, check);
}
#endif

namespace {

constexpr Kernels table(std::string_view name) {
  return {.name = name,
          .embed_forward = embed_forward,
          .embed_weight = embed_weight,
          .positions_forward = positions_forward,
          .positions_weight = positions_weight,
          .norm_forward = norm_forward,
          .norm_input = norm_input,
          .norm_weight = norm_weight,
          .head_norm_forward = head_norm_forward,
          .head_norm_input = head_norm_input,
          .head_norm_weight = head_norm_weight,
          .linear_forward = linear_forward,
          .linear_input = linear_input,
          .linear_weight = linear_weight,
          .rope = rope,
          .latent_heads = latent_heads,
          .attention_forward = attention_forward,
          .attention_input = attention_input,
          .split_heads = split_heads,
          .attention_block_forward = attention_block_forward,
          .attention_block_input = attention_block_input,
          .attention_merge_forward = attention_merge_forward,
          .attention_merge_input = attention_merge_input,
          .regroup = regroup,
          .activation_forward = activation_forward,
          .activation_input = activation_input,
          .route_forward = route_forward,
          .route_input = route_input,
          .expert_load = expert_load,
          .update_router_bias = update_router_bias,
          .fit_rows = fit_rows,
          .dispatch = dispatch,
          .combine_forward = combine_forward,
          .combine_input = combine_input,
          .gate_forward = gate_forward,
          .gate_input = gate_input,
          .grouped_linear = grouped_linear,
          .grouped_linear_weight = grouped_linear_weight,
          .grouped_activation = grouped_activation,
          .residual_forward = residual_forward,
          .bias_weight = bias_weight,
          .dropout = dropout,
          .add = add,
          .fill = fill,
          .cast = cast,
          .cross_entropy_fused = cross_entropy_fused,
          .cross_entropy_loss_only = cross_entropy_loss_only,
          .cross_entropy_max = cross_entropy_max,
          .cross_entropy_sum = cross_entropy_sum,
          .cross_entropy_grad = cross_entropy_grad,
          .sum_scalars = sum_scalars,
          .squared_norm = squared_norm,
          .combine = combine,
          .sgd = sgd,
          .adamw = adamw,
          .lion = lion,
          .adamw8bit = adamw8bit,
          .numbers = numbers,
          .amax = amax,
          .multiply = multiply,
          .subtract = subtract,
          .quantise = quantise,
          .dequantise = dequantise,
          .dequantise_sum = dequantise_sum,
          .sum_rows = sum_rows,
          .swap_leading = swap_leading,
          .select = select,
          .scatter = scatter,
          .zero_selected = zero_selected,
          .orthogonalise = orthogonalise,
          .start_basis = start_basis,
          .fold_momentum = fold_momentum,
          .frozen_adam = frozen_adam,
          .outer_step = outer_step,
          .matmul = matmul};
}

}  // namespace
}  // namespace SHARDLAB_GPU_VARIANT

#ifdef __CUDACC__
const Kernels& cuda_kernels() {
  static constexpr Kernels kernels = cuda::table("cuda");
  return kernels;
}
#else
const Kernels& emulated_kernels() {
  static constexpr Kernels kernels = emulated::table("emulated");
  return kernels;
}
#endif

}  // namespace shardlab::gpu
