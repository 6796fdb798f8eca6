#include "tests/cuda_runtime/host_kernels.h"
#include "plan/base/moment_codes.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernels/experts.h"
#include "kernels/head_norm.h"
#include "kernels/kernels.h"
#include "kernels/latent_heads.h"
#include "plan/base/check.h"
#include "plan/base/tree.h"
#include "runtime/reduction.h"
#include "tests/namespaces.h"

namespace shardlab::testing {

namespace {

const kernels::Kernels& cpu() { return kernels::kernels_for_this_processor(); }

const float* in(const gpu::Input& x) {
  SHARDLAB_CHECK(x.dtype == DType::f32 || x.data == nullptr, "the CPU's kernels are fp32's");
  return static_cast<const float*>(x.data);
}
float* out(const gpu::Output& x) {
  SHARDLAB_CHECK(x.dtype == DType::f32 || x.data == nullptr, "the CPU's kernels are fp32's");
  return static_cast<float*>(x.data);
}

/// Scratch for the length of one call.
class Lent {
 public:
  explicit Lent(int64_t bytes) : data_(::operator new (static_cast<size_t>(bytes) + 1, std::align_val_t{64})) {}
  ~Lent() { ::operator delete (data_, std::align_val_t{64}); }
  Lent(const Lent&) = delete;
  void* get() const { return data_; }

 private:
  void* data_;
};

template <class Args>
void with_scratch(void (*kernel)(const Args&), Args args, int64_t bytes) {
  const Lent lent(bytes);
  args.scratch = lent.get();
  kernel(args);
}

// ---- one function a kernel

void embed_forward(const gpu::EmbedForward& a, gpu::Stream) {
  cpu().embed_forward({a.ids, in(a.table), out(a.x), a.rows, a.width, a.row_begin, a.table_rows});
}
void embed_weight(const gpu::EmbedWeight& a, gpu::Stream) {
  std::vector<int32_t> ids;
  for (int64_t b = 0; b < a.sequences && a.ids_stride != 0; ++b)
    ids.insert(ids.end(), a.ids + b * a.ids_stride, a.ids + b * a.ids_stride + a.tokens);
  const kernels::EmbedWeight args{a.ids_stride != 0 ? ids.data() : a.ids,
                                  in(a.dx),
                                  out(a.dtable),
                                  a.sequences,
                                  a.tokens,
                                  a.width,
                                  a.row_begin,
                                  a.table_rows,
                                  a.accumulate,
                                  nullptr,
                                  a.part};
  with_scratch(cpu().embed_weight, args, kernels::embed_scratch_bytes(args));
}
void positions_forward(const gpu::PositionsForward& a, gpu::Stream) {
  for (int64_t i = 0; i < a.sequences * a.tokens && a.positions != nullptr; ++i) {
    const int64_t row = a.positions[i / a.tokens * a.positions_stride + i % a.tokens];
    cpu().positions_forward({in(a.x) + i * a.width, in(a.table) + row * a.width, out(a.y) + i * a.width, 1, 1, a.width});
  }
  if (a.positions != nullptr) return;
  cpu().positions_forward({in(a.x), in(a.table), out(a.y), a.sequences, a.tokens, a.width});
}
void positions_weight(const gpu::PositionsWeight& a, gpu::Stream) {
  cpu().positions_weight({in(a.dx), out(a.dtable), a.sequences, a.tokens, a.width, a.accumulate, a.stride});
}
void norm_forward(const gpu::NormForward& a, gpu::Stream) {
  cpu().norm_forward({in(a.x), in(a.gamma), in(a.beta), out(a.y), a.stats, a.rows, a.width, a.epsilon, a.rms});
}
void norm_input(const gpu::NormInput& a, gpu::Stream) {
  cpu().norm_input({in(a.dy), in(a.x), in(a.gamma), a.stats, in(a.residual), out(a.dx), a.rows, a.width, a.rms});
}
void norm_weight(const gpu::NormWeight& a, gpu::Stream) {
  cpu().norm_weight({in(a.dy), in(a.x), a.stats, out(a.dgamma), out(a.dbeta), a.tokens, a.width, a.rms, a.accumulate});
}
kernels::HeadNormShape shape_of(const gpu::HeadNormShape& s) { return {s.tokens, s.heads, s.kv_heads, s.head_dim}; }
void head_norm_forward(const gpu::HeadNormForward& a, gpu::Stream) {
  kernels::head_norm_forward(cpu(), {shape_of(a.shape), in(a.qkv), in(a.gamma_q), in(a.gamma_k), out(a.y), a.stats, a.epsilon});
}
void head_norm_input(const gpu::HeadNormInput& a, gpu::Stream) {
  kernels::head_norm_input(cpu(), {shape_of(a.shape), in(a.dy), in(a.qkv), in(a.gamma_q), in(a.gamma_k), a.stats, out(a.dqkv)});
}
void head_norm_weight(const gpu::HeadNormWeight& a, gpu::Stream) {
  const kernels::HeadNormShape shape = shape_of(a.shape);
  const Lent lent(kernels::head_norm_scratch_bytes(shape));
  kernels::head_norm_weight(
      cpu(), {shape, in(a.dy), in(a.qkv), a.stats, out(a.dgamma_q), out(a.dgamma_k), a.accumulate, a.apart, lent.get()});
}
void latent_heads(const gpu::LatentHeads& a, gpu::Stream) {
  for (int64_t b = 0; b < a.sequences; ++b) {
    const int64_t row = b * a.tokens;
    const kernels::LatentHeads one{a.tokens,
                                   a.heads,
                                   a.nope,
                                   a.rope,
                                   a.value_dim,
                                   a.table,
                                   a.positions == nullptr ? nullptr : a.positions + b * a.positions_stride};
    float *q = out(a.q) + row * a.q_width(), *kv = out(a.kv) + row * a.kv_width(), *k_rope = out(a.k_rope) + row * a.rope,
          *qkv = out(a.qkv) + row * a.qkv_width();
    if (a.back)
      kernels::latent_heads_input(one, qkv, q, kv, k_rope);
    else
      kernels::latent_heads_forward(one, q, kv, k_rope, qkv);
  }
}
void linear_forward(const gpu::LinearForward& a, gpu::Stream) {
  const kernels::LinearForward args{in(a.x), in(a.w), in(a.bias), out(a.y), a.rows, a.in, a.out, a.in_part, true};
  with_scratch(cpu().linear_forward, args, kernels::linear_scratch_bytes(args));
}
void linear_input(const gpu::LinearInput& a, gpu::Stream) {
  const kernels::LinearInput args{in(a.dy), in(a.w), out(a.dx), a.rows, a.in, a.out, a.out_part, true};
  with_scratch(cpu().linear_input, args, kernels::linear_scratch_bytes(args));
}
void linear_weight(const gpu::LinearWeight& a, gpu::Stream) {
  // The CPU's fixed-order product does not accumulate: plans never ask for it.
  const kernels::LinearWeight args{in(a.x), in(a.dy), out(a.dw), nullptr, a.tokens, a.in, a.out, a.accumulate, !a.accumulate};
  with_scratch(cpu().linear_weight, args, kernels::linear_scratch_bytes(args));
}
void rope(const gpu::Rope& a, gpu::Stream) {
  cpu().rope({.qkv = out(a.qkv),
              .sequences = a.sequences,
              .tokens = a.tokens,
              .heads = a.heads,
              .kv_heads = a.kv_heads,
              .head_dim = a.head_dim,
              .backward = a.backward,
              .table = a.table,
              .positions = a.positions,
              .positions_stride = a.positions_stride});
}
kernels::AttentionShape shape_of(const gpu::AttentionShape& s) {
  return {s.sequences, s.tokens, s.heads, s.kv_heads, s.head_dim, s.order, s.canonical, s.positions, s.value_dim, s.window};
}
void attention_forward(const gpu::AttentionForward& a, gpu::Stream) {
  const kernels::AttentionForward args{shape_of(a.shape), in(a.qkv), out(a.o), a.lse};
  with_scratch(cpu().attention_forward, args, kernels::attention_scratch_bytes(args));
}
void attention_input(const gpu::AttentionInput& a, gpu::Stream) {
  const kernels::AttentionInput args{shape_of(a.shape), in(a.dout), in(a.o), a.lse, in(a.qkv), out(a.dqkv)};
  with_scratch(cpu().attention_input, args, kernels::attention_scratch_bytes(args));
}
void split_heads(const gpu::SplitHeads& a, gpu::Stream) {
  const int64_t queries = int64_t{a.heads / a.kv_heads} * a.head_dim,
                keys = int64_t{a.head_dim} + (a.value_dim == 0 ? a.head_dim : a.value_dim);
  for (int64_t i = 0; i < a.rows * a.kv_heads; ++i) {
    float *whole = out(a.qkv) + i * (queries + keys), *q = out(a.q) + i * queries, *kv = out(a.kv) + i * keys;
    const auto move = [&](float* part, float* at, int64_t n) { std::copy_n(a.back ? part : at, n, a.back ? at : part); };
    move(q, whole, queries);
    move(kv, whole + queries, keys);
  }
}
kernels::AttentionBlockShape shape_of(const gpu::AttentionBlockShape& s) {
  return {s.sequences,   s.queries,   s.keys,  s.heads,     s.kv_heads,  s.head_dim,  s.tokens,
          s.first_query, s.first_key, s.order, s.canonical, s.positions, s.value_dim, s.window};
}
void attention_block_forward(const gpu::AttentionBlockForward& a, gpu::Stream) {
  const kernels::AttentionBlockForward args{shape_of(a.shape), in(a.q), in(a.kv), a.o, a.lse, a.sums, a.carry};
  with_scratch(cpu().attention_block_forward, args, kernels::attention_scratch_bytes(args));
}
void attention_block_input(const gpu::AttentionBlockInput& a, gpu::Stream) {
  const kernels::AttentionBlockInput args{shape_of(a.shape), in(a.dout), in(a.o), a.lse,      in(a.q),  in(a.kv),
                                          out(a.dq),         out(a.dkv), a.carry, a.carry_kv, a.by_head};
  with_scratch(cpu().attention_block_input, args, kernels::attention_scratch_bytes(args));
}
void attention_merge_forward(const gpu::AttentionMergeForward& a, gpu::Stream) {
  kernels::AttentionMergeForward args = a.merge;
  args.o = out(a.o);
  cpu().attention_merge_forward(args);
}
void attention_merge_input(const gpu::AttentionMergeInput& a, gpu::Stream) {
  kernels::AttentionMergeInput args = a.merge;
  args.y = out(a.y);
  cpu().attention_merge_input(args);
}
void activation_forward(const gpu::ActivationForward& a, gpu::Stream) {
  cpu().activation_forward({in(a.u), out(a.a), a.n, a.swiglu});
}
void activation_input(const gpu::ActivationInput& a, gpu::Stream) {
  cpu().activation_input({in(a.da), in(a.u), out(a.du), a.n, a.swiglu});
}
/// A kernel of the CPU's, with scratch of its own.
template <class Args>
void with_table(void (*kernel)(const kernels::Kernels&, const Args&), Args args, int64_t bytes) {
  const Lent lent(bytes);
  args.scratch = lent.get();
  kernel(cpu(), args);
}
void route_forward(const gpu::RouteForward& a, gpu::Stream) {
  with_table(kernels::route_forward, a, kernels::route_scratch_bytes(a.shape.experts, a.capacity > 0));
}
void route_input(const gpu::RouteInput& a, gpu::Stream) {
  with_table(kernels::route_input, a, kernels::route_scratch_bytes(a.shape.experts));
}
void expert_load(const gpu::ExpertLoad& a, gpu::Stream) { kernels::expert_load(a); }
void update_router_bias(const gpu::UpdateRouterBias& a, gpu::Stream) {
  kernels::update_router_bias({a.load, a.bias, a.experts, *a.rate});
}
void fit_rows(const gpu::FitRows& a, gpu::Stream) {
  const auto n = static_cast<size_t>(a.n);
  if (kernels::fit_rows({a.counts, n}, a.room, {a.fitted, n})) *a.overflow = 1;
}
void dispatch(const gpu::Dispatch& a, gpu::Stream) {
  with_scratch(kernels::dispatch, kernels::Dispatch{in(a.from), out(a.to), a.choice, a.tokens, a.top_k, a.experts, a.width, a.back},
               kernels::places_scratch_bytes(a.tokens, a.top_k, a.experts));
}
void combine_forward(const gpu::CombineForward& a, gpu::Stream) {
  with_scratch(kernels::combine_forward,
               kernels::CombineForward{in(a.rows), a.weights, a.choice, out(a.y), a.tokens, a.top_k, a.experts, a.width},
               kernels::places_scratch_bytes(a.tokens, a.top_k, a.experts));
}
void combine_input(const gpu::CombineInput& a, gpu::Stream) {
  with_scratch(kernels::combine_input,
               kernels::CombineInput{in(a.dy), in(a.rows), a.weights, a.choice, out(a.drows), a.dweights, a.tokens, a.top_k,
                                     a.experts, a.width},
               kernels::places_scratch_bytes(a.tokens, a.top_k, a.experts));
}
void gate_forward(const gpu::GateForward& a, gpu::Stream) {
  kernels::gate_forward(cpu(), {in(a.x), in(a.gate), out(a.y), a.tokens, a.width});
}
void gate_input(const gpu::GateInput& a, gpu::Stream) {
  kernels::gate_input(cpu(), {in(a.dy), in(a.x), in(a.gate), out(a.dx), out(a.dgate), a.tokens, a.width});
}
void grouped_linear(const gpu::GroupedLinear& a, gpu::Stream) {
  const kernels::GroupedLinear args{a.rows, in(a.x), in(a.w), out(a.y), a.in, a.out, a.part, a.back, true};
  with_table(kernels::grouped_linear, args, kernels::grouped_scratch_bytes(args));
}
void grouped_linear_weight(const gpu::GroupedLinearWeight& a, gpu::Stream) {
  // The CPU's fixed order does not accumulate: plans never ask for it.
  const kernels::GroupedLinearWeight args{a.rows, in(a.x), in(a.dy), out(a.dw), a.in, a.out, a.accumulate, !a.accumulate};
  with_table(kernels::grouped_linear_weight, args, kernels::grouped_scratch_bytes(args));
}
void grouped_activation(const gpu::GroupedActivation& a, gpu::Stream) {
  kernels::grouped_activation(cpu(), {a.rows, in(a.u), in(a.da), out(a.to), a.width, a.swiglu});
}
void residual_forward(const gpu::ResidualForward& a, gpu::Stream) {
  cpu().residual_forward({in(a.x), in(a.z), in(a.bias), out(a.y), a.rows, a.width});
}
void bias_weight(const gpu::BiasWeight& a, gpu::Stream) {
  cpu().bias_weight({in(a.dy), out(a.dbias), a.tokens, a.width, a.accumulate});
}
void dropout(const gpu::Dropout& a, gpu::Stream) {
  cpu().dropout({out(a.z), a.sequences, a.tokens, a.width, a.sequence_begin, a.token_begin, a.tokens_total, a.width_begin,
                 a.width_total, a.p, a.key});
}
void add(const gpu::Add& a, gpu::Stream s) {
  if (a.a.dtype != a.c.dtype || a.b.dtype != a.c.dtype) return gpu::emulated_kernels().add(a, s);
  if (a.c.dtype == DType::f32) return cpu().add({in(a.a), in(a.b), out(a.c), a.n});
  SHARDLAB_CHECK(a.c.dtype == DType::f64, "the CPU adds fp32 and fp64");
  for (int64_t i = 0; i < a.n; ++i)
    static_cast<double*>(a.c.data)[i] = static_cast<const double*>(a.a.data)[i] + static_cast<const double*>(a.b.data)[i];
}
void fill(const gpu::Fill& a, gpu::Stream) { cpu().fill(out(a.x), a.n, a.value); }
template <void (*kernels::Kernels::*Member)(const kernels::CrossEntropy&)>
void cross_entropy(const gpu::CrossEntropy& a, gpu::Stream) {
  (cpu().*Member)({out(a.logits), a.targets, a.nll, a.max, a.sums, a.tokens, a.vocab, a.vocab_part, a.words, a.loss_tokens});
}
std::vector<const float*> floats(const gpu::ArrayList& list) {
  std::vector<const float*> parts;
  for (int i = 0; i < list.count; ++i) parts.push_back(static_cast<const float*>(list.data[i]));
  return parts;
}
void sum_scalars(const gpu::SumScalars& a, gpu::Stream) {
  const auto parts = floats(a.parts);
  cpu().sum_scalars({parts.data(), a.parts.sizes, a.parts.count, a.factor_num, a.factor_den, a.total});
}
void squared_norm(const gpu::SquaredNorm& a, gpu::Stream) {
  double sum = 0;
  for (int i = 0; i < a.parts.count; ++i) sum += cpu().squared_norm(static_cast<const float*>(a.parts.data[i]), a.parts.sizes[i]);
  *a.total = sum;
}
/// Every out is complete before the first is written: an out may be one of the parts.
void combine(const gpu::Combine& a, gpu::Stream) {
  const size_t bytes = static_cast<size_t>(bytes_of(a.dtype, a.n));
  std::vector<std::byte> sum(bytes + 1);
  tree_combine(cpu(), a.dtype, a.maximum ? ReduceOp::kMax : ReduceOp::kSum, {a.parts, static_cast<size_t>(a.count)}, sum.data(),
               a.n);
  for (int i = 0; i < a.out_count; ++i) std::memcpy(a.outs[i], sum.data(), bytes);
}
void sgd(const gpu::Sgd& a, gpu::Stream s) {
  if (a.factor != nullptr) return gpu::emulated_kernels().sgd(a, s);
  cpu().sgd({in(a.grad), out(a.param), a.n, a.learning_rate, a.weight_decay});
}
void adamw(const gpu::AdamW& a, gpu::Stream s) {
  if (a.factor != nullptr) return gpu::emulated_kernels().adamw(a, s);
  cpu().adamw({in(a.grad), out(a.param), a.m, a.v, a.n, a.step, a.learning_rate, a.beta1, a.beta2, a.epsilon, a.weight_decay});
}
void adamw8bit(const gpu::AdamW8bit& a, gpu::Stream s) {
  if (a.factor != nullptr) return gpu::emulated_kernels().adamw8bit(a, s);
  std::vector<float> scratch(2 * kMomentBlock);
  cpu().adamw8bit({in(a.grad), out(a.param), a.m, a.v, a.m_scale, a.v_scale, scratch.data(), a.n, a.step, a.learning_rate, a.beta1,
                   a.beta2, a.epsilon, a.weight_decay});
}
void lion(const gpu::Lion& a, gpu::Stream s) {
  if (a.factor != nullptr) return gpu::emulated_kernels().lion(a, s);
  cpu().lion({in(a.grad), out(a.param), a.m, a.n, a.learning_rate, a.beta1, a.beta2, a.weight_decay});
}

/// The fixed-order product stands in for a library.
class HostMatmul final : public gpu::Matmul {
 public:
  void forward(const gpu::LinearForward& a, gpu::Stream s) override { linear_forward(a, s); }
  void input(const gpu::LinearInput& a, gpu::Stream s) override { linear_input(a, s); }
  void weight(const gpu::LinearWeight& a, gpu::Stream s) override { linear_weight(a, s); }
  std::string_view name() const override { return "host"; }
};
std::unique_ptr<gpu::Matmul> matmul(const gpu::MatmulOptions&, gpu::LaunchCheck&) { return std::make_unique<HostMatmul>(); }

// What the CPU has no kernel of this form for: the GPU's own sources.
template <auto Member, class Args>
void emulate(const Args& a, gpu::Stream s) {
  (gpu::emulated_kernels().*Member)(a, s);
}
template <auto Member>
constexpr auto emulated =
    []<class Args>(void (*gpu::Kernels::*)(const Args&, gpu::Stream)) { return &emulate<Member, Args>; }(Member);

constexpr gpu::Kernels kTable{
    .name = "host",
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
    .regroup = emulated<&gpu::Kernels::regroup>,
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
    .cast = emulated<&gpu::Kernels::cast>,
    .cross_entropy_fused = cross_entropy<&kernels::Kernels::cross_entropy_fused>,
    .cross_entropy_loss_only = cross_entropy<&kernels::Kernels::cross_entropy_loss_only>,
    .cross_entropy_max = cross_entropy<&kernels::Kernels::cross_entropy_max>,
    .cross_entropy_sum = cross_entropy<&kernels::Kernels::cross_entropy_sum>,
    .cross_entropy_grad = cross_entropy<&kernels::Kernels::cross_entropy_grad>,
    .sum_scalars = sum_scalars,
    .squared_norm = squared_norm,
    .combine = combine,
    .sgd = sgd,
    .adamw = adamw,
    .lion = lion,
    .adamw8bit = adamw8bit,
    .numbers = emulated<&gpu::Kernels::numbers>,
    .amax = emulated<&gpu::Kernels::amax>,
    .multiply = emulated<&gpu::Kernels::multiply>,
    .subtract = emulated<&gpu::Kernels::subtract>,
    .quantise = emulated<&gpu::Kernels::quantise>,
    .dequantise = emulated<&gpu::Kernels::dequantise>,
    .dequantise_sum = emulated<&gpu::Kernels::dequantise_sum>,
    .sum_rows = emulated<&gpu::Kernels::sum_rows>,
    .swap_leading = emulated<&gpu::Kernels::swap_leading>,
    .select = emulated<&gpu::Kernels::select>,
    .scatter = emulated<&gpu::Kernels::scatter>,
    .zero_selected = emulated<&gpu::Kernels::zero_selected>,
    .orthogonalise = emulated<&gpu::Kernels::orthogonalise>,
    .start_basis = emulated<&gpu::Kernels::start_basis>,
    .fold_momentum = emulated<&gpu::Kernels::fold_momentum>,
    .frozen_adam = emulated<&gpu::Kernels::frozen_adam>,
    .outer_step = emulated<&gpu::Kernels::outer_step>,
    .matmul = matmul,
};

}  // namespace

const gpu::Kernels& host_kernels() { return kTable; }

}  // namespace shardlab::testing
