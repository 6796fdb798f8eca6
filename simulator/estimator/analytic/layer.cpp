// The kernels of one layer: projections, attention, feed-forward, experts; and the block that they make.
#include "simulator/estimator/analytic/layer.h"

#include <algorithm>
#include <cmath>

#include "plan/node_reach.h"
#include "simulator/estimator/analytic/pricer.h"

namespace shardlab::simulator::analytic {

/// Cost of the rounded arguments of a linear. If tensor-parallel gathers carry one byte, each rank rounds its part of the
/// rows before the gather, once for all projections that read them. From the gathered rows it only makes the copy that the
/// weight gradient reads.
Pricer::Quantised Pricer::quantise(const Linear& l, double input, double result, double weight) const {
  if (!low_) return {};
  Quantised q;
  const bool before = p_.state.fp8_exchange && key_.sequence_parallel && key_.tp > 1;
  const bool made = l.shares_input && (p_.state.fp8_shared || before), made_columns = l.shares_input && p_.state.fp8_shared;
  const double input_parts = before && l.gathered == Gathered::kInput ? n_.t : 1;
  const double gradient_parts = before && l.gathered == Gathered::kGradient ? n_.t : 1;
  if (!made) q.input_s = moved(input / input_parts, p_.passes.quantise, 1);
  if (!made_columns) q.columns_s = moved(input, p_.passes.quantise_columns, 1);
  const double rounded = p_.passes.quantise_gradient - (before ? p_.passes.quantise_columns : 0);
  q.gradient_s = moved(result / gradient_parts, rounded, 1) + (before ? moved(result, p_.passes.quantise_columns, 1) : 0);
  q.weight_s = moved(weight, p_.passes.quantise_weight + (p_.state.fp8_gather ? 0 : p_.passes.quantise_gathered), 1);
  if (key_.tp == 1 || !p_.state.fp8_exchange) return q;
  const double agreed = collective_s(CollectiveUse::kAllReduce, 4, tensor_group_);
  q.agreed_s = (made ? 0 : agreed) + (p_.state.fp8_gather ? 0 : agreed);
  q.gradient_agreed_s = agreed;
  return q;
}

void Pricer::add_state(bool moe, LayerCost& cost) const {
  const LayerParameters all = moe ? moe_layer_parameters(shape_) : dense_layer_parameters(shape_);
  cost.matrix = (all.matrix + key_.tp - 1) / key_.tp;
  cost.replicated = all.replicated;
  const int64_t cut = int64_t{key_.ep} * key_.expert_tp;
  cost.expert = (all.expert + cut - 1) / cut;
  const LayerParameters frozen = frozen_layer_parameters(shape_, moe);
  cost.frozen = (frozen.matrix + key_.tp - 1) / key_.tp + frozen.replicated;
  cost.frozen_expert = (frozen.expert + cut - 1) / cut;
  const auto adapter = [&](int projection, double in, double out) {
    return shape_.trained.adapts(projection) ? shape_.trained.rank * std::llround(in + out) : 0;
  };
  const auto feed_forward = [&](double width) {
    return (shape_.swiglu ? adapter(Trained::kGate, n_.h, width) : 0) + adapter(Trained::kUp, n_.h, width) +
           adapter(Trained::kDown, width, n_.h);
  };
  cost.adapters = adapter(Trained::kQ, n_.h, n_.q) + adapter(Trained::kK, n_.h, n_.k_width) +
                  adapter(Trained::kV, n_.h, n_.v_width) + adapter(Trained::kO, n_.o, n_.h);
  if (!moe) cost.adapters += feed_forward(of(shape_.ffn) / n_.t);
  if (moe && shape_.shared_experts > 0) cost.adapters += feed_forward(of(shape_.shared_experts * shape_.moe_ffn) / n_.t);
  if (moe)
    cost.expert_adapters = std::max<int64_t>(1, shape_.experts / key_.ep) * feed_forward(of(shape_.moe_ffn) / key_.expert_tp);
}

void Pricer::add_attention(LayerCost& cost) const {
  add_projections(cost);
  const double turned = n_.q + n_.k_width;
  const double rotation = shape_.max_positions > 0 ? 0 : moved(n_.tokens * turned, p_.passes.rotation, p_.launch.rotation);
  const double rotation_back =
      shape_.max_positions > 0 ? 0 : moved(n_.tokens * turned, p_.passes.rotation_backward, p_.launch.rotation_backward);
  const double layout = moved(n_.tokens * n_.qkv(), p_.passes.layout, p_.launch.layout);
  const double layout_back = moved(n_.tokens * n_.qkv(), p_.passes.layout_backward, p_.launch.layout_backward);
  cost.forward.compute_s += rotation + layout;
  cost.input.compute_s += rotation_back + layout_back;
  if (remade(Recompute::kQkv) || alternate()) cost.recompute.compute_s += rotation + layout;
  add_core(cost);
}

void Pricer::add_projections(LayerCost& cost) const {
  const bool again = remade(Recompute::kQkv), frozen = shape_.trained.freezes(Trained::kAttention);
  if (shape_.latent()) {
    // Down-projections are whole on each tensor-parallel rank.
    const double down = of(shape_.kv_rank + shape_.rope_dim);
    const double query_in = shape_.q_rank > 0 ? of(shape_.q_rank) : n_.h;
    const auto add = [&](double in, double out) {
      add_linear({.rows = n_.tokens, .in = in, .out = out, .remade = again, .frozen = frozen}, cost);
    };
    if (shape_.q_rank > 0) add(n_.h, query_in);
    add(query_in, n_.q), add(n_.h, down);
    add(of(shape_.kv_rank), of(shape_.heads) * of(shape_.head_dim + shape_.v_dim) / n_.t);
  } else {
    Linear l{.rows = n_.tokens, .in = n_.h, .out = 0, .remade = again, .frozen = frozen, .gathered = Gathered::kInput};
    add_linears(l, {n_.q, n_.k_width, n_.v_width}, cost);
    for (const auto& [projection, width] :
         {std::pair{Trained::kQ, n_.q}, std::pair{Trained::kK, n_.k_width}, std::pair{Trained::kV, n_.v_width}})
      l.out = width, add_adapter(projection, l, cost);
    if (alternate()) cost.recompute.compute_s += matmul(n_.tokens, n_.k_width, n_.h, Product::kForward);
  }
  const bool unread = key_.sequence_parallel && key_.tp > 1 && !p_.model.remakes_unread;  // its scattered sum was kept
  const Linear out{.rows = n_.tokens,
                   .in = n_.o,
                   .out = n_.h,
                   .remade = remade(Recompute::kAttentionOut) || (alternate() && !unread),
                   .frozen = frozen,
                   .gathered = Gathered::kGradient};
  add_linear(out, cost), add_adapter(Trained::kO, out, cost);
}

void Pricer::add_core(LayerCost& cost) const {
  AttentionShape a{.batch = of(key_.micro_batch),
                   .heads = n_.heads,
                   .kv_heads = p_.attention.repeats_kv ? n_.heads
                               : shape_.latent()       ? n_.heads
                                                       : n_.kv_heads,
                   .queries = of(key_.seq_len) / n_.c,
                   .keys = of(key_.seq_len),
                   .head_dim = of(shape_.qk_dim()),
                   .value_dim = of(shape_.value_dim()),
                   .causal = p_.attention.causal_half,
                   .dropout = p_.model.dropout,
                   .kernel = softmax_apart()       ? AttentionKernel::kEager
                             : !p_.attention.fused ? AttentionKernel::kUnfused
                             : p_.attention.flash2 ? AttentionKernel::kFlash2
                                                   : AttentionKernel::kFused,
                   .pass = Pass::kForward,
                   .precision = fp32_ ? Precision::kFp32 : Precision::kBf16};
  if (key_.cp_kind == CpKind::kUlysses)
    a.queries = of(key_.seq_len), a.heads /= n_.c, a.kv_heads = std::max(a.kv_heads / n_.c, 1.0);
  // The last rank of a contiguous ring masks half of one block of c: it does (c - 1/2) / (c/2) of the mean.
  const double uneven = key_.cp > 1 && key_.cp_kind == CpKind::kRing && a.causal ? (2 * n_.c - 1) / n_.c : 1;
  // Fused kernels leave out what a window hides; others compute all scores.
  const double seen = p_.attention.fused ? shape_.attention_share(key_.seq_len) : 1;
  const double slower = uneven * seen / (p_.attention.fused ? attention_rate_ : 1);
  const double forward = slower * device_.attention_seconds(a);
  a.pass = Pass::kBackward;
  const double back = slower * device_.attention_seconds(a);
  cost.forward.compute_s += forward;
  cost.input.compute_s += back;
  if (remade(Recompute::kAttentionCore)) cost.recompute.compute_s += forward;
  if (p_.attention.fused) attention_s_ += (remade(Recompute::kAttentionCore) ? 2 : 1) * forward + back;
  if (key_.cp > 1) add_context_exchange(forward, back, cost);
}

void Pricer::add_mlp(Trained::Module module, double rows, double width, double experts, bool remade_up, bool remade_all,
                     LayerCost& cost) const {
  const bool frozen = shape_.trained.freezes(module);
  const double up = shape_.swiglu ? 2 * width : width;
  const bool dense = experts == 0;  // experts have tokens sent to them, not gathered
  const double batch = dense ? 1 : experts;
  const Linear first{.rows = rows,
                     .in = n_.h,
                     .out = width,
                     .batch = batch,
                     .remade = remade_up,
                     .frozen = frozen,
                     .gathered = dense ? Gathered::kInput : Gathered::kNothing};
  shape_.swiglu ? add_linears(first, {width, width}, cost) : add_linear(first, cost);
  if (shape_.swiglu) add_adapter(Trained::kGate, first, cost);
  add_adapter(Trained::kUp, first, cost);
  if (alternate() && dense) cost.recompute.compute_s += matmul(rows, width, n_.h, Product::kForward);
  const double act = moved(rows * batch * up, p_.passes.activation, p_.launch.activation);
  cost.forward.compute_s += act;
  cost.input.compute_s += moved(rows * batch * up, p_.passes.activation_backward, p_.launch.activation_backward);
  if (remade(Recompute::kActivation) || remade_up || alternate()) cost.recompute.compute_s += act;
  // Under full recompute the last projection's result is not needed again by its own backward, but frameworks run it all.
  const Linear last{.rows = rows,
                    .in = width,
                    .out = n_.h,
                    .batch = batch,
                    .remade = remade_all,
                    .frozen = frozen,
                    .gathered = dense ? Gathered::kGradient : Gathered::kNothing};
  add_linear(last, cost), add_adapter(Trained::kDown, last, cost);
}

void Pricer::add_feed_forward(LayerCost& cost) const {
  add_mlp(Trained::kFeedForward, n_.tokens, of(shape_.ffn) / n_.t, 0, remade(Recompute::kUp), key_.recompute.full(), cost);
}

/// As one exchange of all with all, or, where shardlab's own are asked to go by node, in its two levels.
Pricer::Exchanged Pricer::exchanged(double tokens, double rows, Rows what) const {
  const double bytes = e_ * rows * n_.h;
  const int nodes = expert_group_.nodes;
  if (!p_.model.own_collectives || key_.algorithm != AlgorithmChoice::kHierarchical || nodes < 2 ||
      expert_group_.ranks_per_node < 2)
    return {skew() * collective_s(CollectiveUse::kAllToAll, bytes, expert_group_), ring_bytes(bytes, key_.ep)};
  RowLevels levels{.nodes = nodes,
                   .per_node = expert_group_.ranks_per_node,
                   .goes = what != Rows::kReturn,
                   .rows = std::llround(rows),
                   .row_bytes = std::llround(e_ * n_.h)};
  levels = levels.one_by_one();
  if (what == Rows::kCopies || what == Rows::kWeighed) {
    const double chance = even_chance_of_node({.count = shape_.experts,
                                               .top_k = shape_.top_k,
                                               .groups = shape_.router_groups,
                                               .groups_chosen = shape_.router_groups_chosen},
                                              nodes);
    levels.once = true, levels.weighed = what == Rows::kWeighed;
    levels.even_across = std::min<int64_t>(levels.even_across, std::llround(tokens * chance * (nodes - 1)));
  }
  return {skew() * fabric_.by_node_seconds(levels), static_cast<double>(levels.even_bytes())};
}

void Pricer::add_experts(LayerCost& cost) const {
  const bool again = remade(Recompute::kExperts);
  // With sequence parallelism a rank routes its own part of the sequence; experts cut by tp gather what each other received.
  const auto [own_tokens, sent, received] = routed();
  const bool frozen_router = shape_.trained.freezes(Trained::kRouter);
  add_linear({.rows = own_tokens, .in = n_.h, .out = of(shape_.experts), .remade = again, .frozen = frozen_router}, cost);
  const double local = std::max(of(shape_.experts) / key_.ep, 1.0);
  add_mlp(Trained::kExperts, std::max(received / local, 1.0), of(shape_.moe_ffn) / key_.expert_tp, local, again, again, cost);
  if (shape_.shared_experts > 0)
    add_mlp(Trained::kExperts, n_.tokens, of(shape_.shared_experts * shape_.moe_ffn) / n_.t, 0, again, again, cost);

  const double permute = moved(sent * n_.h, p_.passes.permute, 2, MemoryKernel::kPermute);
  const double permute_back = moved(sent * n_.h, p_.passes.permute_backward, 2, MemoryKernel::kPermute);
  cost.forward.compute_s += 2 * permute;
  cost.input.compute_s += 2 * permute_back;
  if (again) cost.recompute.compute_s += 2 * permute;
  if (key_.ep > 1) {
    // Gradients in 8 bits are rounded products: none is another's times a weight.
    const bool products = key_.precision != Precision::kFp8;
    const Exchanged copies = exchanged(own_tokens, sent, Rows::kCopies), results = exchanged(own_tokens, sent, Rows::kReturn),
                    gradients = exchanged(own_tokens, sent, products ? Rows::kWeighed : Rows::kGo);
    cost.forward.expert_s += copies.seconds + results.seconds;
    cost.input.expert_s += gradients.seconds + results.seconds;
    if (again) cost.recompute.expert_s += copies.seconds + results.seconds;
    cost.wire.expert += (again ? 2 : 1) * (copies.bytes + results.bytes) + gradients.bytes + results.bytes;
  }
  if (key_.expert_tp > 1 && !slices_take_all_tokens()) {
    const Group group = group_of(key_.expert_tp, 1, fabric_.devices_per_node());
    const double bytes = e_ * (slices_route_alike() ? own_tokens : received) * n_.h;
    const double gather = collective_s(CollectiveUse::kAllGather, bytes, group);
    const double scatter = collective_s(CollectiveUse::kReduceScatter, bytes, group);
    // Tokens that were kept cut are gathered again for the router's gradient.
    const int regathers = slices_route_alike() && p_.overlap.regathers ? 1 : 0;
    cost.forward.expert_s += gather + scatter;
    cost.input.expert_s += (1 + regathers) * gather + scatter;
    if (again) cost.recompute.expert_s += gather + scatter;
    cost.wire.expert += ((again ? 6 : 4) + regathers) * ring_bytes(bytes, key_.expert_tp);
  }
}

double Pricer::attention_shapes() const {
  const double out = n_.o * n_.h;
  if (!shape_.latent()) return n_.qkv() * n_.h + out;
  const double query = shape_.q_rank > 0 ? n_.h * of(shape_.q_rank) + of(shape_.q_rank) * n_.q : n_.h * n_.q;
  const double down = of(shape_.kv_rank + shape_.rope_dim) * n_.h;
  return query + down + of(shape_.kv_rank) * of(shape_.heads) * of(shape_.head_dim + shape_.v_dim) / n_.t + out;
}

double Pricer::feed_forward_shapes(bool moe) const {
  const double matrices = shape_.swiglu ? 3 : 2;
  if (!moe) return matrices * of(shape_.ffn) / n_.t * n_.h;
  const double one = of(shape_.moe_ffn) / key_.expert_tp, shared = of(shape_.shared_experts * shape_.moe_ffn) / n_.t;
  return matrices * n_.h * (one == shared ? one : one + shared);
}

LayerKey layer_key(const Point& point, const FrameworkProfile& profile) {
  LayerKey key{.tp = point.tp,
               .cp = point.cp,
               .ep = point.ep,
               .expert_tp = point.expert_tp,
               .micro_batch = point.micro_batch,
               .seq_len = point.seq_len,
               .devices = point.world_size(),
               .expert_skew = point.expert_skew,
               .precision = point.precision,
               .recompute = point.recompute,
               .cp_kind = point.cp_kind,
               .sequence_parallel = point.sequence_parallel && point.tp > 1,
               .tensor_overlap = point.tensor_overlap != 0 && profile.overlap.tensor_hidden + profile.overlap.gather_hidden > 0,
               .algorithm = point.algorithm};
  if (key.recompute.modules & Recompute::kSelective)
    key.recompute.modules =
        static_cast<uint16_t>((key.recompute.modules & ~Recompute::kSelective) | profile.model.selective.modules);
  return key;
}

Block block_cost(const LayerStudy& study, const LayerKey& key) {
  const ModelShape& shape = study.shape;
  const Pricer pricer(study, key);
  Block block;
  if (shape.moe_layers() < shape.layers) block.dense = pricer.layer(false);
  if (shape.moe_layers() > 0) block.moe = pricer.layer(true);
  block.attention_shapes = pricer.attention_shapes();
  block.embedding = pricer.embedding();
  block.head = pricer.head();
  block.loss = pricer.loss();
  block.logits = pricer.logits();
  block.boundary = pricer.boundary();
  block.boundary_gather_s = pricer.boundary_gather_s();
  return block;
}

}  // namespace shardlab::simulator::analytic
