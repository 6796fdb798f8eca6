#include "simulator/step_kernels.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/automatic.h"
#include "plan/collective_steps.h"
#include "plan/treatment.h"

namespace shardlab::simulator::forms {
namespace {

double of(int64_t v) { return static_cast<double>(v); }

std::vector<int> group(int size, int stride, int first = 0) {
  std::vector<int> ranks(static_cast<size_t>(size));
  for (int i = 0; i < size; ++i) ranks[static_cast<size_t>(i)] = first + i * stride;
  return ranks;
}

/// A ring's steps follow one another around it; other algorithms' are counted where they are listed.
double steps_of(CollectiveKind kind, Algorithm algorithm, int ranks) {
  if (algorithm == Algorithm::kRing && kind != CollectiveKind::kAllToAll && kind != CollectiveKind::kBroadcast)
    return (kind == CollectiveKind::kAllReduce ? 2 : 1) * (ranks - 1);
  return of(static_cast<int64_t>(collective_steps(kind, algorithm, ranks, 0).size()));
}

}  // namespace

Ways::Ways(const Case& c, const DatasheetRates& rates) {
  const Layout& l = c.layout;
  const int shards = l.shard_ranks(), stage = l.dp * l.tp, per_node = c.machine.devices_per_node;
  const auto way = [&](const std::vector<int>& ranks) { return rates.way_between(ranks); };
  const auto slowest = [&](int size, int stride) {
    Way worst = way(group(size, stride));
    for (int s = 1; s < l.pp && stage % per_node != 0; ++s)
      if (const Way other = way(group(size, stride, s * stage)); other.nodes > worst.nodes) worst = other;
    return worst;
  };
  tp = slowest(l.tp, 1);
  data = slowest(shards, l.tp);
  replicas = slowest(l.replicas(), l.tp * shards);
  this->stage = slowest(stage, 1);
  all_stages = way(group(l.pp, stage));
  ends = way(group(std::min(2, l.pp), stage * (l.pp - 1)));
  for (int s = 0; s + 1 < l.pp; ++s) {
    Way worst = way(group(2, stage, s * stage));
    for (int r = 1; r < stage && !worst.network(); ++r) worst = way(group(2, stage, s * stage + r));
    hops.push_back(worst);
  }
}

StepKernels::StepKernels(const Case& c, const DatasheetRates& rates)
    : c_(c),
      rates_(rates),
      ways_(c, rates),
      gpt_(!c.model.is_llama()),
      fp8_(multiplies_in_fp8(c)),
      e_(of(Widths(c).value)),
      g_(of(Widths(c).gradient)),
      tokens_(of(c.train.micro_batch * c.train.seq_len)),
      h_(of(c.model.hidden)),
      x_(tokens_ * h_),
      qkv_(of(c.model.qkv_rows() / c.layout.tp)),
      o_(of(c.model.heads * c.model.head_dim / c.layout.tp)),
      up_(of(c.model.up_rows() / c.layout.tp)),
      f_(of(c.model.ffn / c.layout.tp)),
      vocab_(of(c.model.vocab / c.layout.tp)),
      stats_(tokens_ * (gpt_ ? 2 : 1) * 4),
      lse_(tokens_ * of(c.model.heads / c.layout.tp) * 4),
      sequences_(of(c.train.micro_batch)),
      heads_(of(c.model.heads / c.layout.tp)),
      kv_heads_(of(c.model.kv_heads / c.layout.tp)),
      head_dim_(of(c.model.head_dim)) {}

Task StepKernels::kernel(const DatasheetRates::Kernel& k, Spent spent) const {
  return {.seconds = rates_.kernel_seconds(k), .demand = rates_.kernel_demand(k), .spent = spent};
}

Task StepKernels::exchange(const Exchange& e, const Ways::Way& way, Spent spent) const {
  if (e.ranks == 1) return {.seconds = 0, .spent = spent};
  const Algorithm algorithm = algorithm_of(c_, e.kind, e.ranks);
  const double sent = of(sent_elements(e.kind, algorithm, e.elements, e.ranks, 0) * e.element);
  return {.seconds = rates_.collective_seconds(steps_of(e.kind, algorithm, e.ranks), sent, way),
          .demand = rates_.collective_demand(use_of(e.kind), sent, way),
          .spent = spent};
}

void StepKernels::add(Block& b, double flops, double bytes, Spent spent, bool product) const {
  b.add(kernel({flops, bytes, product}, spent));
}

void StepKernels::norm(Block& b, Spent spent) const {
  add(b, x_ * (gpt_ ? 8 : 4), 2 * x_ * e_ + (gpt_ ? 2 : 1) * h_ * e_ + stats_, spent);
}

void StepKernels::norm_backward(Block& b, bool residual, bool adds) const {
  const double gradients = (gpt_ ? 2 : 1) * h_ * g_;
  add(b, x_ * (gpt_ ? 5 : 3), 2 * x_ * e_ + stats_ + (adds ? 2 : 1) * gradients, Spent::kBackward);
  add(b, x_ * ((gpt_ ? 10 : 7) + (residual ? 1 : 0)), (residual ? 4 : 3) * x_ * e_ + h_ * e_ + stats_, Spent::kBackward);
}

StepKernels::LayerLinears StepKernels::layer_linears() const {
  return {{h_, qkv_, gpt_, false, fp8_, kQkvProduct},
          {o_, h_, false, true, fp8_, kOutProduct},
          {h_, up_, gpt_, false, fp8_, kUpProduct},
          {f_, h_, false, true, fp8_, kDownProduct}};
}

void StepKernels::linear(Block& b, const Linear& l, Spent spent) const {
  const double flops = 2 * tokens_ * l.in * l.out + (l.bias ? tokens_ * l.out : 0), bias = l.bias ? e_ * l.out : 0;
  if (l.narrow) {
    if (spent == Spent::kRecompute) {  // as they were rounded
      quantise(b, input_of(l), spent, input_scale(l.product));
      quantise(b, weight_of(l), spent, weight_scale(l.product));
    } else {
      round(b, input_of(l), spent);
      round(b, weight_of(l), spent);
    }
    return multiply(b, input_of(l), weight_of(l), e_ * tokens_ * l.out + bias, flops, spent);
  }
  add(b, flops, e_ * (tokens_ * (l.in + l.out) + l.in * l.out) + bias, spent, true);
}

void StepKernels::linear_input(Block& b, const Linear& l) const {
  if (l.narrow) {
    round(b, gradient_of(l), Spent::kBackward);
    if (!l.rounded) quantise(b, weight_of(l), Spent::kBackward, weight_scale(l.product));
    return multiply(b, gradient_of(l), weight_of(l), e_ * tokens_ * l.in, 2 * tokens_ * l.in * l.out, Spent::kBackward);
  }
  add(b, 2 * tokens_ * l.in * l.out, e_ * (tokens_ * (l.in + l.out) + l.in * l.out), Spent::kBackward, true);
}
void StepKernels::linear_weight(Block& b, const Linear& l, bool adds) const {
  const double gradients = (adds ? 2 : 1) * g_ * (l.in * l.out + (l.bias ? l.out : 0));
  const double flops = 2 * tokens_ * l.in * l.out + (l.bias ? tokens_ * l.out : 0);
  if (l.narrow) {  // a bias' gradient is a sum of what was not rounded
    b.need(rounded_input(l.product)), b.need(input_scale(l.product));
    const double read = l.bias ? e_ * tokens_ * l.out : 0;
    return multiply(b, input_of(l), gradient_of(l), gradients + read, flops, Spent::kBackward);
  }
  add(b, flops, e_ * tokens_ * (l.in + l.out) + gradients, Spent::kBackward, true);
}

void StepKernels::all_reduce(Block& b, double elements, double element, Spent spent) const {
  if (c_.layout.tp == 1) return;
  b.add(exchange({CollectiveKind::kAllReduce, c_.layout.tp, static_cast<int64_t>(elements), static_cast<int64_t>(element)},
                 ways_.tp, spent));
}

void StepKernels::dropout(Block& b, Spent spent) const {
  if (c_.train.dropout > 0) add(b, x_, 2 * x_ * e_, spent);
}

void StepKernels::attention(Block& b, Spent spent) const {
  const double s = of(c_.train.seq_len), pairs = sequences_ * heads_ * (s * (s + 1) / 2);
  add(b, pairs * (4 * head_dim_ + 5), e_ * tokens_ * (qkv_ + o_) + lse_, spent, true);
}

void StepKernels::activation(Block& b, Spent spent) const {
  add(b, tokens_ * f_ * (gpt_ ? 9 : 5), e_ * tokens_ * (up_ + f_), spent);
}

void StepKernels::forward_ops(Block& b, Spent spent, bool all) const {
  const auto residual = [&] { add(b, x_ * (gpt_ ? 2 : 1), e_ * (3 * x_ + (gpt_ ? h_ : 0)), spent); };
  const LayerLinears l = layer_linears();
  norm(b, spent);
  linear(b, l.qkv, spent);
  if (!gpt_) add(b, tokens_ * head_dim_ * (heads_ + kv_heads_) * 3, 2 * e_ * tokens_ * qkv_, spent);
  attention(b, spent);
  linear(b, l.out, spent);
  all_reduce(b, x_, e_);
  dropout(b, spent);
  residual();
  norm(b, spent);
  linear(b, l.up, spent);
  activation(b, spent);
  if (!all) {
    if (fp8_) quantise(b, input_of(l.down), spent, input_scale(kDownProduct));  // which is what backward reads
    return;
  }
  linear(b, l.down, spent);
  all_reduce(b, x_, e_);
  dropout(b, spent);
  residual();
}

Block StepKernels::layer_forward() const {
  Block b;
  forward_ops(b, Spent::kForward, true);
  return b;
}

/// The gradient of a bias that is added to a whole sum, and the mask of a branch's dropout on a copy of its gradient.
void StepKernels::backward_bias(Block& b, bool adds) const {
  if (c_.train.dropout > 0) add(b, 0, 2 * x_ * e_, Spent::kBackward);
  dropout(b, Spent::kBackward);
  if (gpt_) add(b, x_, x_ * e_ + (adds ? 2 : 1) * h_ * g_, Spent::kBackward);
}

Block StepKernels::layer_backward(bool adds, const LayerTreatment& treatment) const {
  Block b;
  constexpr Spent kBack = Spent::kBackward;
  auto [qkv, out, up, down] = layer_linears();
  qkv.rounded = out.rounded = up.rounded = treatment.full;
  if (treatment.full) b.need(kInput), forward_ops(b, Spent::kRecompute, false);
  b.apart = static_cast<int32_t>(b.tasks.size());
  const auto done = [&](GradientOrder gradient) { b.done[gradient] = static_cast<int32_t>(b.tasks.size()); };
  const auto again = [&](std::string_view word) {
    const auto bit = std::ranges::find(kSubLayers, word) - std::begin(kSubLayers);
    return !treatment.full && (treatment.again >> bit & 1) != 0;
  };
  backward_bias(b, adds);
  done(kDownBias);
  linear_input(b, down);
  if (again("mlp.act")) b.need(kHidden), activation(b, Spent::kRecompute), quantise_input(b, down);
  b.need(kActivated);
  linear_weight(b, down, adds);
  done(kDown);
  b.need(kHidden);
  add(b, tokens_ * f_ * (gpt_ ? 20 : 12), e_ * tokens_ * (f_ + 2 * up_), kBack);
  linear_input(b, up);
  all_reduce(b, x_, e_);
  if (again("mlp.norm")) b.need(kBetweenHalves), norm(b, Spent::kRecompute), quantise_input(b, up);
  b.need(kNormedAgain);
  linear_weight(b, up, adds);
  done(kUp);
  b.need(kBetweenHalves), b.need(kStatisticsAgain);
  norm_backward(b, true, adds);
  b.done[kMlpNorm] = static_cast<int32_t>(b.tasks.size()) - 1;
  backward_bias(b, adds);
  done(kOutBias);
  linear_input(b, out);
  if (again("attn.core")) b.need(kQkvMade), attention(b, Spent::kRecompute), quantise_input(b, out);
  b.need(kAttended);
  linear_weight(b, out, adds);
  done(kOut);
  b.need(kAttended), b.need(kLogSumExp), b.need(kQkvMade);
  const double s = of(c_.train.seq_len), pairs = sequences_ * heads_ * (s * (s + 1) / 2);
  add(b, pairs * (10 * head_dim_ + 6) + 2 * tokens_ * o_, e_ * tokens_ * 2 * (o_ + qkv_) + lse_, kBack, true);
  if (!gpt_) add(b, tokens_ * head_dim_ * (heads_ + kv_heads_) * 3, 2 * e_ * tokens_ * qkv_, kBack);
  linear_input(b, qkv);
  all_reduce(b, x_, e_);
  if (again("attn.norm")) b.need(kInput), norm(b, Spent::kRecompute), quantise_input(b, qkv);
  b.need(kNormed);
  linear_weight(b, qkv, adds);
  done(kQkv);
  b.need(kInput), b.need(kStatistics);
  norm_backward(b, true, adds);
  b.done[kAttentionNorm] = static_cast<int32_t>(b.tasks.size()) - 1;
  return b;
}

std::vector<Kept> StepKernels::kept(const LayerTreatment& treatment) const {
  const auto again = [&](size_t sub_layer) { return treatment.full || (treatment.again >> sub_layer & 1) != 0; };
  const bool norm = !again(0), core = !again(1), second = !again(2), act = !again(3);  // as kSubLayers has them
  std::vector<Kept> all{{kInput, x_ * e_}};
  const auto add = [&](bool there, size_t tensor, double bytes) {
    if (there) all.push_back({tensor, bytes});
  };
  add(!treatment.full, kBetweenHalves, x_ * e_);
  add(norm && !fp8_, kNormed, x_ * e_);
  add(norm, kStatistics, stats_);
  add(!treatment.full, kQkvMade, tokens_ * qkv_ * e_);
  add(core, kAttended, tokens_ * o_ * e_);
  add(core, kLogSumExp, lse_);
  add(second && !fp8_, kNormedAgain, x_ * e_);
  add(second, kStatisticsAgain, stats_);
  add(!treatment.full, kHidden, tokens_ * up_ * e_);
  add(act && !fp8_, kActivated, tokens_ * f_ * e_);
  if (!fp8_) return all;
  const auto [qkv, out, up, down] = layer_linears();
  const bool current = c_.train.fp8_scaling == "current", block = c_.train.fp8_scaling == "block";
  for (const auto& [linear, made] : {std::pair{&qkv, norm}, {&out, core}, {&up, second}, {&down, act}}) {
    const Factor input = input_of(*linear);
    add(made, rounded_input(linear->product), input.elements());
    add(current || (block && made), input_scale(linear->product), scale_bytes(input));
    add(current, weight_scale(linear->product), scale_bytes(weight_of(*linear)));
  }
  return all;
}

Block StepKernels::embed_forward() const {
  Block b;
  constexpr Spent kForward = Spent::kForward;
  add(b, 0, 4 * tokens_, kForward);
  add(b, 0, 4 * tokens_ + 2 * x_ * e_, kForward);
  all_reduce(b, x_, e_);
  if (gpt_) add(b, x_, e_ * (2 * x_ + of(c_.model.max_positions) * h_), kForward);
  dropout(b, kForward);
  return b;
}

Block StepKernels::embed_backward(bool adds) const {
  Block b;
  const double times = adds ? 2 : 1;
  dropout(b, Spent::kBackward);
  if (gpt_) add(b, x_, x_ * e_ + times * of(c_.model.max_positions) * h_ * g_, Spent::kBackward);
  add(b, x_, 4 * tokens_ + x_ * e_ + times * vocab_ * h_ * g_, Spent::kBackward);
  b.done.fill(static_cast<int32_t>(b.tasks.size()));
  return b;
}

Block StepKernels::head_forward() const {
  Block b;
  constexpr Spent kForward = Spent::kForward;
  norm(b, kForward);
  linear(b, {h_, vocab_}, kForward);
  add(b, 0, 4 * tokens_, kForward);
  const double logits = tokens_ * vocab_, losses = 4 * sequences_;
  if (c_.layout.tp == 1) {
    add(b, 8 * logits, 2 * logits * e_ + 4 * tokens_ + losses, kForward);
    return b;
  }
  add(b, logits, logits * e_ + 4 * tokens_, kForward);
  all_reduce(b, tokens_, 4);
  add(b, 3 * logits, logits * e_ + 16 * tokens_, kForward);
  all_reduce(b, 2 * tokens_, 4);
  add(b, 4 * logits, 2 * logits * e_ + 16 * tokens_ + losses, kForward);
  return b;
}

Block StepKernels::head_backward(bool adds) const {
  Block b;
  const Linear head{h_, vocab_};
  linear_input(b, head);
  all_reduce(b, x_, e_);
  linear_weight(b, head, adds);
  b.done[kTable] = static_cast<int32_t>(b.tasks.size());
  norm_backward(b, false, adds);
  b.done[kFinalNorm] = static_cast<int32_t>(b.tasks.size()) - 1;
  return b;
}

void StepKernels::add_update(int64_t elements, Block& b) const {
  const double n = of(elements), moments = c_.train.optimizer == Optimizer::kAdamW && !sends_signs(c_) ? 2 : 0;
  const double decay = c_.train.weight_decay != 0 ? 2 : 0;  // at the most: what has none is little
  add(b, n * ((moments > 0 ? 14 : 2) + decay), n * (g_ + 8 + 8 * moments), Spent::kUpdate);
  if (Widths(c_).master) add(b, 0, n * (4 + e_), Spent::kUpdate);
}

}  // namespace shardlab::simulator::forms
