#include "strategies/build_step.h"

#include <cmath>
#include <set>

#include "plan/base/tree.h"
#include "strategies/diloco.h"
#include "strategies/router_bias.h"

namespace shardlab::strategies {
namespace {

/// The places of tokens in packed documents.
constexpr std::string_view kPositionsSlot = "positions";

/// Adds the slots and ops of one unit kind's segments. Shapes: b sequences of a micro-batch, s tokens of each on this rank, h hidden.
class UnitBuilder {
 public:
  UnitBuilder(Draft& draft, UnitKind kind)
      : draft_(draft),
        config_(draft.config),
        model_(config_.model),
        unit_(draft.of(kind)),
        mixture_(draft.is_mixture(kind)),
        local_(kind == UnitKind::kLocal || kind == UnitKind::kLocalDense || model_.local_layers() == model_.layers) {
    unit_.forward.segment.name = std::string(name_of(kind)) + ".F";
    unit_.backward.segment.name = std::string(name_of(kind)) + ".B";
  }

  void build_embed();
  void build_layer();
  void build_head();

 private:
  using P = ModelParameter::Kind;
  static constexpr BufferClass kActivation = BufferClass::kActivation;
  static constexpr BufferClass kTemporary = BufferClass::kTemporary;

  Type data(Shape shape, DType dtype = DType::f32) const {
    Type t;
    t.dtype = dtype;
    t.shape = shape;
    t.micro = Micro::kSlice;
    return t;
  }
  Type tokens_by(int64_t width) const { return data({b(), s(), width}); }
  int64_t b() const { return config_.train.micro_batch; }
  int64_t s() const { return config_.train.seq_len / config_.layout.cp; }
  int64_t h() const { return model_.hidden; }

  int parameter(std::string name, Shape shape, P kind, bool residual_projection = false) {
    Type t;
    t.shape = shape;
    unit_.parameters.push_back({std::move(name), t, kind, residual_projection});
    return static_cast<int>(unit_.parameters.size()) - 1;
  }
  /// The slot of parameter `p` in a segment, made at first use.
  SlotId value(DraftSegment& seg, int p) {
    const UnitParameter& up = unit_.parameters[static_cast<size_t>(p)];
    if (const auto found = seg.find_if(up.name)) return *found;
    return seg.add(up.name, up.type, Use::kParameter, BufferClass::kParameter, p);
  }
  SlotId gradient(DraftSegment& seg, int p) {
    const UnitParameter& up = unit_.parameters[static_cast<size_t>(p)];
    Type t = up.type;
    t.micro = Micro::kSum;
    return seg.add("d." + up.name, t, Use::kGradient, BufferClass::kGradient, p);
  }
  /// Rows of all experts that this rank's tokens go to.
  Type rows_by(int64_t width) const { return data({1, rows_of_experts(), width}); }
  int64_t rows_of_experts() const {
    return b() * model_.experts.most_rows(config_.train.seq_len, model_.experts.count, config_.layout.cp);
  }
  int64_t even_rows() const { return even_rows_of_experts(config_); }
  /// Rows that an expert takes of a sequence; 0 of a model whose experts take all.
  int64_t capacity() const { return model_.experts.drops() ? model_.experts.capacity(config_.train.seq_len) : 0; }
  /// SwiGLU of the rows of experts. Without a capacity every row of the buffer holds something.
  Activation activation(Phase phase) const {
    return {.phase = phase, .swiglu = true, .counted = capacity() > 0, .rows = capacity() > 0 ? even_rows() : 0};
  }
  std::vector<SlotId> with_counts(std::vector<SlotId> reads, SlotId counts) const {
    if (capacity() > 0) reads.push_back(counts);
    return reads;
  }
  Route route(Phase phase) const {
    const Experts& e = model_.experts;
    return {.phase = phase,
            .sigmoid = e.sigmoid,
            .normalise = e.normalise,
            .factor = e.factor,
            .balance = e.balance,
            .z_loss = e.z_loss,
            .groups = static_cast<int>(e.groups),
            .groups_chosen = static_cast<int>(e.groups_chosen),
            .tokens = config_.sequences_per_step() * config_.train.seq_len,
            .biased = e.has_bias(),
            .capacity = capacity()};
  }
  GroupedLinear grouped(Phase phase) const { return {.phase = phase, .rows = even_rows()}; }

  /// A slot that forward saves, in both segments.
  SlotId saved(std::string name, Type type, BufferClass cls = kActivation) {
    bwd().add(name, type, Use::kSaved, cls);
    return fwd().add(std::move(name), type, Use::kSaved, cls);
  }
  bool packed() const { return config_.data.packed; }
  /// Positions in packed documents, of whole sequences on every rank: what the rank has of a sequence goes by its place. Loaded at the
  /// first use in a forward segment, and kept for backward.
  SlotId positions() {
    if (const auto found = fwd().find_if(kPositionsSlot)) return *found;
    const SlotId slot = saved(std::string(kPositionsSlot), data({b(), config_.train.seq_len}, DType::i32), BufferClass::kInput);
    fwd().op(LoadBatch{.packed = true, .positions = true}, {}, {slot}, "load.positions");
    return slot;
  }
  /// The operands of an op, with positions where documents are packed.
  std::vector<SlotId> with_positions(std::vector<SlotId> reads) {
    if (packed()) reads.push_back(positions());
    return reads;
  }
  std::vector<SlotId> with_positions_back(std::vector<SlotId> reads) {
    if (packed()) reads.push_back(in_backward(kPositionsSlot));
    return reads;
  }
  Attention attention(Phase phase) const {
    return {.phase = phase,
            .heads = static_cast<int>(model_.heads),
            .kv_heads = static_cast<int>(model_.kv_heads),
            .head_dim = static_cast<int>(model_.head_dim),
            .packed = packed(),
            .document = packed() ? config_.data.document_tokens : 0,
            .v_dim = model_.is_latent() ? static_cast<int>(model_.latent.v) : 0,
            .window = local_ ? model_.window.tokens : 0};
  }
  float rope_theta() const { return local_ ? model_.local_rope_theta() : model_.rope_theta; }
  LatentHeads latent_heads(Phase phase) const {
    const LatentAttention& l = model_.latent;
    return {.phase = phase,
            .heads = static_cast<int>(model_.heads),
            .nope = static_cast<int>(l.nope),
            .rope = static_cast<int>(l.rope),
            .v_dim = static_cast<int>(l.v),
            .theta = rope_theta(),
            .packed = packed()};
  }
  Rope rope(Phase phase) const {
    return {.phase = phase,
            .heads = static_cast<int>(model_.heads),
            .kv_heads = static_cast<int>(model_.kv_heads),
            .head_dim = static_cast<int>(model_.head_dim),
            .theta = rope_theta(),
            .packed = packed()};
  }

  /// What the norm with that gamma adds to the mean square.
  float epsilon_of(int gamma) const {
    return gamma == norm_q_a_ || gamma == norm_kv_a_ ? LatentAttention::kNormEpsilon : model_.norm_epsilon;
  }

  SlotId local(DraftSegment& seg, std::string name, Type type) { return seg.add(std::move(name), type, Use::kLocal, kTemporary); }
  SlotId in_backward(std::string_view name) { return bwd().find(name); }

  DraftSegment& fwd() { return unit_.forward; }
  DraftSegment& bwd() { return unit_.backward; }

  SlotId norm_forward(std::string_view name, SlotId x, int gamma, int beta) { return norm_forward(name, x, gamma, beta, h()); }
  SlotId norm_forward(std::string_view name, SlotId x, int gamma, int beta, int64_t width);
  SlotId norm_backward(std::string_view name, SlotId dy, SlotId x, int gamma, int beta, SlotId residual, SlotId dx);
  SlotId branch_dropout_forward(SlotId z, int site);
  SlotId branch_dropout_backward(SlotId dy, int site, std::string name);
  SlotId residual_forward(std::string_view label, SlotId x, SlotId z, int bias, SlotId y);
  SlotId project_forward(SlotId n1);
  void project_backward(SlotId dqkv, SlotId dn1);
  SlotId project_latent_forward(SlotId n1);
  void project_latent_backward(SlotId dqkv, SlotId dn1);
  SlotId narrow_forward(std::string_view name, SlotId n1, int down, int gamma, int up, int64_t rank, SlotId out);
  void narrow_backward(std::string_view name, SlotId dout, int down, int gamma, int up, int64_t rank, SlotId dn1);
  void attention_forward(SlotId x, SlotId x1);
  void feed_forward_forward(SlotId x1, SlotId y);
  void feed_forward_backward(SlotId dy, SlotId dx1);
  void experts_forward(SlotId x1, SlotId y);
  void experts_backward(SlotId dy, SlotId dx1);
  void shared_forward(SlotId n2, SlotId z);
  SlotId shared_backward(SlotId dz, SlotId d_n2);
  void attention_backward(SlotId dx1, SlotId dx);

  Draft& draft_;
  const Case& config_;
  const Model& model_;
  UnitTemplate& unit_;
  const bool mixture_;  ///< of a layer: it has experts
  const bool local_;    ///< of a layer: it attends within the window
  // Indices of the layer's parameters; -1 where the family has none.
  int norm1_ = -1, beta1_ = -1, wqkv_ = -1, bqkv_ = -1, wo_ = -1, bo_ = -1;
  int norm2_ = -1, beta2_ = -1, wup_ = -1, bup_ = -1, wdown_ = -1, bdown_ = -1;
  int router_ = -1, shared_up_ = -1, shared_down_ = -1, shared_gate_ = -1;
  int norm_q_ = -1, norm_k_ = -1;
  int wq_ = -1, wq_a_ = -1, norm_q_a_ = -1, wkv_a_ = -1, wk_rope_ = -1, norm_kv_a_ = -1, wkv_b_ = -1;  // wq_ after wq_a_: its "b"
};

SlotId UnitBuilder::norm_forward(std::string_view name, SlotId x, int gamma, int beta, int64_t width) {
  const std::string n(name);
  const SlotId y = saved(n + ".y", tokens_by(width)), stats = saved(n + ".stats", tokens_by(model_.is_llama() ? 1 : 2));
  std::vector<SlotId> reads{x, value(fwd(), gamma)};
  if (beta >= 0) reads.push_back(value(fwd(), beta));
  fwd().op(Norm{Phase::kF, model_.is_llama(), epsilon_of(gamma)}, reads, {y, stats}, n);
  return y;
}

SlotId UnitBuilder::norm_backward(std::string_view name, SlotId dy, SlotId x, int gamma, int beta, SlotId residual, SlotId dx) {
  const std::string n(name);
  const SlotId stats = in_backward(n + ".stats");
  std::vector<SlotId> gradients{gradient(bwd(), gamma)};
  if (beta >= 0) gradients.push_back(gradient(bwd(), beta));
  bwd().op(Norm{Phase::kW, model_.is_llama(), epsilon_of(gamma)}, {dy, x, stats}, gradients, n);
  std::vector<SlotId> reads{dy, x, value(bwd(), gamma), stats};
  if (residual) reads.push_back(residual);
  bwd().op(Norm{Phase::kI, model_.is_llama(), epsilon_of(gamma), static_cast<bool>(residual)}, reads, {dx}, n);
  return dx;
}

SlotId UnitBuilder::branch_dropout_forward(SlotId z, int site) {
  if (config_.train.dropout == 0 || !draft_.training) return z;
  fwd().op(Dropout{Phase::kF, config_.train.dropout, site}, {z}, {z}, "dropout" + std::to_string(site));
  return z;
}

/// The residual stream's gradient is still needed whole, so the branch gets a masked copy.
SlotId UnitBuilder::branch_dropout_backward(SlotId dy, int site, std::string name) {
  if (config_.train.dropout == 0) return dy;
  const SlotId dz = local(bwd(), std::move(name), tokens_by(h()));
  bwd().op(Copy{}, {dy}, {dz}, "dropout" + std::to_string(site) + ".copy");
  bwd().op(Dropout{Phase::kI, config_.train.dropout, site}, {dz}, {dz}, "dropout" + std::to_string(site));
  return dz;
}

SlotId UnitBuilder::residual_forward(std::string_view label, SlotId x, SlotId z, int bias, SlotId y) {
  std::vector<SlotId> reads{x, z};
  if (bias >= 0) reads.push_back(value(fwd(), bias));
  fwd().op(Residual{Phase::kF, bias >= 0}, reads, {y}, std::string(label));
  return y;
}

void UnitBuilder::build_embed() {
  const int table = parameter("embed.tokens", {model_.vocab_rows(), h()}, P::kEmbedding);
  const int learned = model_.is_llama() ? -1 : parameter("embed.positions", {model_.max_positions, h()}, P::kPositions);

  const SlotId tokens = saved("tokens", data({b(), s()}, DType::i32), BufferClass::kInput);
  const SlotId x = fwd().add("x", tokens_by(h()), Use::kActivationOut, kActivation);
  fwd().op(LoadBatch{.packed = packed()}, {}, {tokens}, "load.tokens");
  fwd().op(Embed{Phase::kF}, {tokens, value(fwd(), table)}, {x}, "embed.tokens");
  if (learned >= 0) fwd().op(Positions{Phase::kF, packed()}, with_positions({x, value(fwd(), learned)}), {x}, "embed.positions");
  branch_dropout_forward(x, 0);

  const SlotId dx = bwd().add("d.x", tokens_by(h()), Use::kGradientIn, kActivation);
  if (config_.train.dropout != 0) bwd().op(Dropout{Phase::kI, config_.train.dropout, 0}, {dx}, {dx}, "dropout0");
  if (learned >= 0)
    bwd().op(Positions{Phase::kW, packed()}, with_positions_back({dx}), {gradient(bwd(), learned)}, "embed.positions");
  bwd().op(Embed{Phase::kW}, {in_backward("tokens"), dx}, {gradient(bwd(), table)}, "embed.tokens");
}

/// Rows of q, k and v, rotated: what attention takes.
SlotId UnitBuilder::project_forward(SlotId n1) {
  const int heads = static_cast<int>(model_.heads), kv = static_cast<int>(model_.kv_heads), d = static_cast<int>(model_.head_dim);
  const SlotId qkv = saved("qkv", tokens_by(model_.qkv_rows()));
  std::vector<SlotId> reads{n1, value(fwd(), wqkv_)};
  if (bqkv_ >= 0) reads.push_back(value(fwd(), bqkv_));
  SlotId projected = qkv;
  if (model_.qk_norm) projected = saved("qkv.raw", tokens_by(model_.qkv_rows()));
  fwd().op(Linear{Phase::kF, bqkv_ >= 0}, reads, {projected}, "attn.qkv");
  if (model_.qk_norm)
    fwd().op(HeadNorm{Phase::kF, heads, kv, d, model_.norm_epsilon}, {projected, value(fwd(), norm_q_), value(fwd(), norm_k_)},
             {qkv, saved("attn.qk_norm.stats", tokens_by(model_.heads + model_.kv_heads))}, "attn.qk_norm");
  if (model_.is_llama()) fwd().op(rope(Phase::kF), with_positions({qkv}), {qkv}, "attn.rope");
  return qkv;
}

/// out = w_up norm(w_down n1), by way of `rank` elements a token.
SlotId UnitBuilder::narrow_forward(std::string_view name, SlotId n1, int down, int gamma, int up, int64_t rank, SlotId out) {
  const std::string n(name);
  const SlotId narrow = saved(n + "_a", tokens_by(rank));
  fwd().op(Linear{Phase::kF}, {n1, value(fwd(), down)}, {narrow}, n + "_a");
  const SlotId y = norm_forward(n + "_a.norm", narrow, gamma, -1, rank);
  fwd().op(Linear{Phase::kF}, {y, value(fwd(), up)}, {out}, n + "_b");
  return out;
}

/// What the heads are made of is kept narrow: q, keys and values leave with the op that puts them together.
SlotId UnitBuilder::project_latent_forward(SlotId n1) {
  const LatentAttention& l = model_.latent;
  const SlotId qkv = saved("qkv", tokens_by(model_.qkv_rows()));
  const SlotId q = local(fwd(), "latent.q", tokens_by(model_.heads * model_.head_dim)),
               kv = local(fwd(), "latent.kv", tokens_by(model_.heads * (l.nope + l.v))),
               k_rope = local(fwd(), "latent.k_rope", tokens_by(l.rope));
  if (l.q_rank > 0)
    narrow_forward("attn.q", n1, wq_a_, norm_q_a_, wq_, l.q_rank, q);
  else
    fwd().op(Linear{Phase::kF}, {n1, value(fwd(), wq_)}, {q}, "attn.q");
  narrow_forward("attn.kv", n1, wkv_a_, norm_kv_a_, wkv_b_, l.kv_rank, kv);
  fwd().op(Linear{Phase::kF}, {n1, value(fwd(), wk_rope_)}, {k_rope}, "attn.k_rope");
  fwd().op(latent_heads(Phase::kF), with_positions({q, kv, k_rope}), {qkv}, "attn.latent");
  return qkv;
}

void UnitBuilder::attention_forward(SlotId x, SlotId x1) {
  const SlotId n1 = norm_forward("attn.norm", x, norm1_, beta1_);
  const SlotId qkv = model_.is_latent() ? project_latent_forward(n1) : project_forward(n1);
  const SlotId o = saved("o", tokens_by(model_.attention_rows())), lse = saved("lse", data({b(), model_.heads, s()}));
  fwd().op(attention(Phase::kF), with_positions({qkv}), {o, lse}, "attn.core");
  const SlotId z = local(fwd(), "attn.z", tokens_by(h()));
  fwd().op(Linear{Phase::kF}, {o, value(fwd(), wo_)}, {z}, "attn.out");
  branch_dropout_forward(z, 1);
  residual_forward("attn.residual", x, z, bo_, x1);
}

void UnitBuilder::feed_forward_forward(SlotId x1, SlotId y) {
  const SlotId n2 = norm_forward("mlp.norm", x1, norm2_, beta2_);
  const SlotId u = saved("u", tokens_by(model_.up_rows())), a = saved("a", tokens_by(model_.ffn));
  std::vector<SlotId> reads{n2, value(fwd(), wup_)};
  if (bup_ >= 0) reads.push_back(value(fwd(), bup_));
  fwd().op(Linear{Phase::kF, bup_ >= 0}, reads, {u}, "mlp.up");
  fwd().op(Activation{Phase::kF, model_.is_llama()}, {u}, {a}, "mlp.act");
  const SlotId z = local(fwd(), "mlp.z", tokens_by(h()));
  fwd().op(Linear{Phase::kF}, {a, value(fwd(), wdown_)}, {z}, "mlp.down");
  branch_dropout_forward(z, 2);
  residual_forward("mlp.residual", x1, z, bdown_, y);
}

void UnitBuilder::feed_forward_backward(SlotId dy, SlotId dx1) {
  const SlotId x1 = in_backward("x1"), u = in_backward("u"), a = in_backward("a"), n2 = in_backward("mlp.norm.y");
  if (bdown_ >= 0) bwd().op(Residual{Phase::kW, true}, {dy}, {gradient(bwd(), bdown_)}, "mlp.residual");
  const SlotId dz = branch_dropout_backward(dy, 2, "d.mlp.z");
  const SlotId da = local(bwd(), "d.a", tokens_by(model_.ffn));
  bwd().op(Linear{Phase::kI}, {dz, value(bwd(), wdown_)}, {da}, "mlp.down");
  bwd().op(Linear{Phase::kW}, {a, dz}, {gradient(bwd(), wdown_)}, "mlp.down");
  const SlotId du = local(bwd(), "d.u", tokens_by(model_.up_rows()));
  bwd().op(Activation{Phase::kI, model_.is_llama()}, {da, u}, {du}, "mlp.act");
  const SlotId dn2 = local(bwd(), "d.mlp.norm.y", tokens_by(h()));
  bwd().op(Linear{Phase::kI}, {du, value(bwd(), wup_)}, {dn2}, "mlp.up");
  std::vector<SlotId> gradients{gradient(bwd(), wup_)};
  if (bup_ >= 0) gradients.push_back(gradient(bwd(), bup_));
  bwd().op(Linear{Phase::kW, bup_ >= 0}, {n2, du}, gradients, "mlp.up");
  norm_backward("mlp.norm", dn2, x1, norm2_, beta2_, dy, dx1);
}

/// Rows of experts are [1, rows, width]: `is_rows_of_experts` (strategies/draft.h) knows them by name. They are counted by leaves of the sequences, so that
/// in canonical mode sums over rows are trees over these leaves.
void UnitBuilder::experts_forward(SlotId x1, SlotId y) {
  const Experts& e = model_.experts;
  const int experts = static_cast<int>(e.count);
  const int64_t leaves = config_.canonical ? b() * kContractionLeaves / config_.layout.cp : 1;
  const SlotId n2 = norm_forward("mlp.norm", x1, norm2_, beta2_);
  const SlotId logits = saved("moe.logits", tokens_by(e.count)), weights = saved("moe.weights", tokens_by(e.top_k)),
               choice = saved("moe.choice", data({b(), s(), e.top_k}, DType::i32)),
               counts = saved("rows.counts", data({1, leaves, e.count}, DType::i32));
  fwd().op(Linear{Phase::kF}, {n2, value(fwd(), router_)}, {logits}, "moe.router");
  std::vector<SlotId> routed{logits};
  if (e.has_bias()) {
    Type bias;
    bias.shape = {e.count};
    routed.push_back(fwd().add(std::string(kRouterBiasSlot), bias, Use::kNamed, BufferClass::kOther));
  }
  fwd().op(route(Phase::kF), std::move(routed), {weights, choice, counts}, "moe.route");
  const SlotId in = saved("rows.in", rows_by(h())), u = saved("rows.u", rows_by(2 * e.ffn)), a = saved("rows.a", rows_by(e.ffn)),
               out = saved("rows.out", rows_by(h()));
  fwd().op(Dispatch{Phase::kF, experts, capacity()}, {n2, choice}, {in}, "moe.dispatch");
  fwd().op(grouped(Phase::kF), {in, value(fwd(), wup_), counts}, {u}, "moe.up");
  fwd().op(activation(Phase::kF), with_counts({u}, counts), {a}, "mlp.act");
  fwd().op(grouped(Phase::kF), {a, value(fwd(), wdown_), counts}, {out}, "moe.down");
  const SlotId z = local(fwd(), "mlp.z", tokens_by(h()));
  fwd().op(Combine{Phase::kF, experts, capacity()}, {out, weights, choice}, {z}, "moe.combine");
  if (e.shared > 0) shared_forward(n2, z);
  branch_dropout_forward(z, 2);
  residual_forward("mlp.residual", x1, z, -1, y);
}

void UnitBuilder::experts_backward(SlotId dy, SlotId dx1) {
  const Experts& e = model_.experts;
  const int experts = static_cast<int>(e.count);
  const SlotId x1 = in_backward("x1"), n2 = in_backward("mlp.norm.y"), logits = in_backward("moe.logits"),
               weights = in_backward("moe.weights"), choice = in_backward("moe.choice"), counts = in_backward("rows.counts"),
               in = in_backward("rows.in"), u = in_backward("rows.u"), a = in_backward("rows.a"), out = in_backward("rows.out");
  const SlotId dz = branch_dropout_backward(dy, 2, "d.mlp.z");
  const SlotId d_out = local(bwd(), "d.rows.out", rows_by(h())), d_weights = local(bwd(), "d.moe.weights", tokens_by(e.top_k));
  bwd().op(Combine{Phase::kI, experts, capacity()}, {dz, out, weights, choice}, {d_out, d_weights}, "moe.combine");
  const SlotId d_a = local(bwd(), "d.rows.a", rows_by(e.ffn));
  bwd().op(grouped(Phase::kI), {d_out, value(bwd(), wdown_), counts}, {d_a}, "moe.down");
  bwd().op(grouped(Phase::kW), {a, d_out, counts}, {gradient(bwd(), wdown_)}, "moe.down");
  const SlotId d_u = local(bwd(), "d.rows.u", rows_by(2 * e.ffn));
  bwd().op(activation(Phase::kI), with_counts({d_a, u}, counts), {d_u}, "mlp.act");
  const SlotId d_in = local(bwd(), "d.rows.in", rows_by(h()));
  bwd().op(grouped(Phase::kI), {d_u, value(bwd(), wup_), counts}, {d_in}, "moe.up");
  bwd().op(grouped(Phase::kW), {in, d_u, counts}, {gradient(bwd(), wup_)}, "moe.up");
  const SlotId d_n2 = local(bwd(), "d.mlp.norm.y", tokens_by(h())), d_logits = local(bwd(), "d.moe.logits", tokens_by(e.count)),
               d_routed = local(bwd(), "d.moe.routed", tokens_by(h()));
  bwd().op(Dispatch{Phase::kI, experts, capacity()}, {d_in, choice}, {d_n2}, "moe.dispatch");
  if (e.has_bias()) {
    Type load;
    load.shape = {e.count};
    load.micro = Micro::kSum;
    const SlotId sum = bwd().add(std::string(kRouterLoadSlot), load, Use::kNamed, BufferClass::kOther);
    bwd().op(ExpertLoad{.accumulate = true}, {choice, sum}, {sum}, "moe.count");
  }
  bwd().op(route(Phase::kI), {d_weights, logits, choice}, {d_logits}, "moe.route");
  bwd().op(Linear{Phase::kI}, {d_logits, value(bwd(), router_)}, {d_routed}, "moe.router");
  bwd().op(Linear{Phase::kW}, {n2, d_logits}, {gradient(bwd(), router_)}, "moe.router");
  const SlotId d_gated = e.shared > 0 ? shared_backward(dz, d_n2) : SlotId();
  bwd().op(Add{}, {d_n2, d_routed}, {d_n2}, "moe.norm.y");
  if (d_gated) bwd().op(Add{}, {d_n2, d_gated}, {d_n2}, "moe.norm.y.gated");
  norm_backward("mlp.norm", d_n2, x1, norm2_, beta2_, dy, dx1);
}

/// z is what a token's own experts made; the shared ones add theirs.
void UnitBuilder::shared_forward(SlotId n2, SlotId z) {
  const int64_t width = model_.experts.shared * model_.experts.ffn;
  const SlotId u = saved("shared.u", tokens_by(2 * width)), a = saved("shared.a", tokens_by(width));
  fwd().op(Linear{Phase::kF}, {n2, value(fwd(), shared_up_)}, {u}, "moe.shared.up");
  fwd().op(Activation{Phase::kF, true}, {u}, {a}, "moe.shared.act");
  const bool gated = shared_gate_ >= 0;
  SlotId out = gated ? saved("shared.z", tokens_by(h())) : local(fwd(), "shared.z", tokens_by(h()));
  fwd().op(Linear{Phase::kF}, {a, value(fwd(), shared_down_)}, {out}, "moe.shared.down");
  if (gated) {
    const SlotId gate = saved("shared.gate", tokens_by(1)), y = local(fwd(), "shared.y", tokens_by(h()));
    fwd().op(Linear{Phase::kF}, {n2, value(fwd(), shared_gate_)}, {gate}, "moe.shared.gate");
    fwd().op(Gate{Phase::kF}, {out, gate}, {y}, "moe.shared.gated");
    out = y;
  }
  fwd().op(Add{}, {z, out}, {z}, "moe.shared");
}

/// Adds the gradient of the shared experts' input to d_n2. That of the gate's is left apart, as the router's: none without a gate.
SlotId UnitBuilder::shared_backward(SlotId dz, SlotId d_n2) {
  const int64_t width = model_.experts.shared * model_.experts.ffn;
  const SlotId n2 = in_backward("mlp.norm.y"), u = in_backward("shared.u"), a = in_backward("shared.a");
  SlotId d_gated;
  if (shared_gate_ >= 0) {
    const SlotId out = in_backward("shared.z"), gate = in_backward("shared.gate");
    const SlotId d_out = local(bwd(), "d.shared.z", tokens_by(h())), d_gate = local(bwd(), "d.shared.gate", tokens_by(1));
    bwd().op(Gate{Phase::kI}, {dz, out, gate}, {d_out, d_gate}, "moe.shared.gated");
    d_gated = local(bwd(), "d.shared.gated", tokens_by(h()));
    bwd().op(Linear{Phase::kI}, {d_gate, value(bwd(), shared_gate_)}, {d_gated}, "moe.shared.gate");
    bwd().op(Linear{Phase::kW}, {n2, d_gate}, {gradient(bwd(), shared_gate_)}, "moe.shared.gate");
    dz = d_out;
  }
  const SlotId da = local(bwd(), "d.shared.a", tokens_by(width));
  bwd().op(Linear{Phase::kI}, {dz, value(bwd(), shared_down_)}, {da}, "moe.shared.down");
  bwd().op(Linear{Phase::kW}, {a, dz}, {gradient(bwd(), shared_down_)}, "moe.shared.down");
  const SlotId du = local(bwd(), "d.shared.u", tokens_by(2 * width));
  bwd().op(Activation{Phase::kI, true}, {da, u}, {du}, "moe.shared.act");
  const SlotId d_shared = local(bwd(), "d.shared.norm.y", tokens_by(h()));
  bwd().op(Linear{Phase::kI}, {du, value(bwd(), shared_up_)}, {d_shared}, "moe.shared.up");
  bwd().op(Linear{Phase::kW}, {n2, du}, {gradient(bwd(), shared_up_)}, "moe.shared.up");
  bwd().op(Add{}, {d_n2, d_shared}, {d_n2}, "moe.shared");
  return d_gated;
}

void UnitBuilder::attention_backward(SlotId dx1, SlotId dx) {
  const SlotId x = in_backward("x"), qkv = in_backward("qkv"), o = in_backward("o"), lse = in_backward("lse");
  if (bo_ >= 0) bwd().op(Residual{Phase::kW, true}, {dx1}, {gradient(bwd(), bo_)}, "attn.residual");
  const SlotId dz = branch_dropout_backward(dx1, 1, "d.attn.z");
  const SlotId d_o = local(bwd(), "d.o", tokens_by(model_.attention_rows()));
  bwd().op(Linear{Phase::kI}, {dz, value(bwd(), wo_)}, {d_o}, "attn.out");
  bwd().op(Linear{Phase::kW}, {o, dz}, {gradient(bwd(), wo_)}, "attn.out");
  const SlotId dqkv = local(bwd(), "d.qkv", tokens_by(model_.qkv_rows()));
  bwd().op(attention(Phase::kI), with_positions_back({d_o, o, lse, qkv}), {dqkv}, "attn.core");
  const SlotId dn1 = local(bwd(), "d.attn.norm.y", tokens_by(h()));
  model_.is_latent() ? project_latent_backward(dqkv, dn1) : project_backward(dqkv, dn1);
  norm_backward("attn.norm", dn1, x, norm1_, beta1_, dx1, dx);
}

void UnitBuilder::narrow_backward(std::string_view name, SlotId dout, int down, int gamma, int up, int64_t rank, SlotId dn1) {
  const std::string n(name);
  const SlotId n1 = in_backward("attn.norm.y"), narrow = in_backward(n + "_a"), y = in_backward(n + "_a.norm.y");
  const SlotId dy = local(bwd(), "d." + n + "_a.norm.y", tokens_by(rank)),
               d_narrow = local(bwd(), "d." + n + "_a", tokens_by(rank));
  bwd().op(Linear{Phase::kI}, {dout, value(bwd(), up)}, {dy}, n + "_b");
  bwd().op(Linear{Phase::kW}, {y, dout}, {gradient(bwd(), up)}, n + "_b");
  norm_backward(n + "_a.norm", dy, narrow, gamma, -1, SlotId(), d_narrow);
  bwd().op(Linear{Phase::kI}, {d_narrow, value(bwd(), down)}, {dn1}, n + "_a");
  bwd().op(Linear{Phase::kW}, {n1, d_narrow}, {gradient(bwd(), down)}, n + "_a");
}

/// The gradient of what q, keys and values, and the rotated key are made of: (q + kv) + k_rope.
void UnitBuilder::project_latent_backward(SlotId dqkv, SlotId dn1) {
  const LatentAttention& l = model_.latent;
  const SlotId n1 = in_backward("attn.norm.y");
  const SlotId dq = local(bwd(), "d.latent.q", tokens_by(model_.heads * model_.head_dim)),
               dkv = local(bwd(), "d.latent.kv", tokens_by(model_.heads * (l.nope + l.v))),
               dk_rope = local(bwd(), "d.latent.k_rope", tokens_by(l.rope));
  bwd().op(latent_heads(Phase::kI), with_positions_back({dqkv}), {dq, dkv, dk_rope}, "attn.latent");
  if (l.q_rank > 0) {
    narrow_backward("attn.q", dq, wq_a_, norm_q_a_, wq_, l.q_rank, dn1);
  } else {
    bwd().op(Linear{Phase::kI}, {dq, value(bwd(), wq_)}, {dn1}, "attn.q");
    bwd().op(Linear{Phase::kW}, {n1, dq}, {gradient(bwd(), wq_)}, "attn.q");
  }
  const SlotId of_kv = local(bwd(), "d.attn.norm.y.kv", tokens_by(h()));
  narrow_backward("attn.kv", dkv, wkv_a_, norm_kv_a_, wkv_b_, l.kv_rank, of_kv);
  bwd().op(Add{}, {dn1, of_kv}, {dn1}, "attn.norm.y.kv");
  const SlotId of_rope = local(bwd(), "d.attn.norm.y.k_rope", tokens_by(h()));
  bwd().op(Linear{Phase::kI}, {dk_rope, value(bwd(), wk_rope_)}, {of_rope}, "attn.k_rope");
  bwd().op(Linear{Phase::kW}, {n1, dk_rope}, {gradient(bwd(), wk_rope_)}, "attn.k_rope");
  bwd().op(Add{}, {dn1, of_rope}, {dn1}, "attn.norm.y.k_rope");
}

void UnitBuilder::project_backward(SlotId dqkv, SlotId dn1) {
  const int heads = static_cast<int>(model_.heads), kv = static_cast<int>(model_.kv_heads), d = static_cast<int>(model_.head_dim);
  const SlotId n1 = in_backward("attn.norm.y");
  if (model_.is_llama()) bwd().op(rope(Phase::kI), with_positions_back({dqkv}), {dqkv}, "attn.rope");
  SlotId projected = dqkv;
  if (model_.qk_norm) {
    const SlotId raw = in_backward("qkv.raw"), stats = in_backward("attn.qk_norm.stats");
    projected = local(bwd(), "d.qkv.raw", tokens_by(model_.qkv_rows()));
    bwd().op(HeadNorm{Phase::kW, heads, kv, d, model_.norm_epsilon}, {dqkv, raw, stats},
             {gradient(bwd(), norm_q_), gradient(bwd(), norm_k_)}, "attn.qk_norm");
    bwd().op(HeadNorm{Phase::kI, heads, kv, d, model_.norm_epsilon},
             {dqkv, raw, value(bwd(), norm_q_), value(bwd(), norm_k_), stats}, {projected}, "attn.qk_norm");
  }
  bwd().op(Linear{Phase::kI}, {projected, value(bwd(), wqkv_)}, {dn1}, "attn.qkv");
  std::vector<SlotId> gradients{gradient(bwd(), wqkv_)};
  if (bqkv_ >= 0) gradients.push_back(gradient(bwd(), bqkv_));
  bwd().op(Linear{Phase::kW, bqkv_ >= 0}, {n1, projected}, gradients, "attn.qkv");
}

void UnitBuilder::build_layer() {
  const bool gpt = !model_.is_llama();
  const auto bias = [&](const char* name, int64_t n) { return gpt ? parameter(name, {n}, P::kBias) : -1; };
  norm1_ = parameter("attn.norm.gamma", {h()}, P::kNormWeight);
  beta1_ = bias("attn.norm.beta", h());
  if (const LatentAttention& l = model_.latent; model_.is_latent()) {
    const int64_t query = model_.heads * model_.head_dim;
    if (l.q_rank > 0) {
      wq_a_ = parameter("attn.wq_a", {l.q_rank, h()}, P::kMatrix);
      norm_q_a_ = parameter("attn.q_a.norm.gamma", {l.q_rank}, P::kNormWeight);
      wq_ = parameter("attn.wq_b", {query, l.q_rank}, P::kMatrix);
    } else {
      wq_ = parameter("attn.wq", {query, h()}, P::kMatrix);
    }
    wkv_a_ = parameter("attn.wkv_a", {l.kv_rank, h()}, P::kMatrix);
    wk_rope_ = parameter("attn.wk_rope", {l.rope, h()}, P::kMatrix);
    norm_kv_a_ = parameter("attn.kv_a.norm.gamma", {l.kv_rank}, P::kNormWeight);
    wkv_b_ = parameter("attn.wkv_b", {model_.heads * (l.nope + l.v), l.kv_rank}, P::kMatrix);
  } else {
    wqkv_ = parameter("attn.wqkv", {model_.qkv_rows(), h()}, P::kMatrix);
  }
  if (model_.has_qkv_biases()) bqkv_ = parameter("attn.bqkv", {model_.qkv_rows()}, P::kBias);
  if (model_.qk_norm) {
    norm_q_ = parameter("attn.q_norm.gamma", {model_.head_dim}, P::kNormWeight);
    norm_k_ = parameter("attn.k_norm.gamma", {model_.head_dim}, P::kNormWeight);
  }
  wo_ = parameter("attn.wo", {h(), model_.attention_rows()}, P::kMatrix, true);
  bo_ = bias("attn.bo", h());
  norm2_ = parameter("mlp.norm.gamma", {h()}, P::kNormWeight);
  beta2_ = bias("mlp.norm.beta", h());
  if (const Experts& e = model_.experts; mixture_) {
    router_ = parameter("moe.router", {e.count, h()}, P::kMatrix);
    wup_ = parameter("moe.wup", {e.count, 2 * e.ffn, h()}, P::kMatrix);
    wdown_ = parameter("moe.wdown", {e.count, h(), e.ffn}, P::kMatrix, true);
    if (e.shared > 0) {
      shared_up_ = parameter("moe.shared.wup", {2 * e.shared * e.ffn, h()}, P::kMatrix);
      shared_down_ = parameter("moe.shared.wdown", {h(), e.shared * e.ffn}, P::kMatrix, true);
      if (e.shared_gate) shared_gate_ = parameter("moe.shared.gate", {1, h()}, P::kMatrix);
    }
  } else {
    wup_ = parameter("mlp.wup", {model_.up_rows(), h()}, P::kMatrix);
    bup_ = bias("mlp.bup", model_.up_rows());
    wdown_ = parameter("mlp.wdown", {h(), model_.ffn}, P::kMatrix, true);
    bdown_ = bias("mlp.bdown", h());
  }

  const SlotId x = fwd().add("x", tokens_by(h()), Use::kActivationIn, kActivation);
  const SlotId y = fwd().add("y", tokens_by(h()), Use::kActivationOut, kActivation);
  bwd().add("x", tokens_by(h()), Use::kActivationIn, kActivation);
  const SlotId x1 = saved("x1", tokens_by(h()));
  attention_forward(x, x1);
  mixture_ ? experts_forward(x1, y) : feed_forward_forward(x1, y);

  const SlotId dy = bwd().add("d.y", tokens_by(h()), Use::kGradientIn, kActivation);
  const SlotId dx = bwd().add("d.x", tokens_by(h()), Use::kGradientOut, kActivation);
  const SlotId dx1 = local(bwd(), "d.x1", tokens_by(h()));
  mixture_ ? experts_backward(dy, dx1) : feed_forward_backward(dy, dx1);
  attention_backward(dx1, dx);
}

void UnitBuilder::build_head() {
  const int gamma = parameter("final.norm.gamma", {h()}, P::kNormWeight);
  const int beta = model_.is_llama() ? -1 : parameter("final.norm.beta", {h()}, P::kBias);
  const int weight = parameter(model_.tied_embeddings ? "embed.tokens" : "head.weight", {model_.vocab_rows(), h()}, P::kEmbedding);
  const int64_t shared_by = trains_apart(draft_) ? config_.layout.dp : 1;  // workers divide by their own targets
  const int64_t targets_per_step = config_.sequences_per_step() * config_.train.seq_len / shared_by;

  const SlotId x = fwd().add("x", tokens_by(h()), Use::kActivationIn, kActivation);
  bwd().add("x", tokens_by(h()), Use::kActivationIn, kActivation);
  const SlotId n = norm_forward("final.norm", x, gamma, beta);
  const SlotId logits = saved("logits", tokens_by(model_.vocab_rows()));
  fwd().op(Linear{Phase::kF}, {n, value(fwd(), weight)}, {logits}, "head");
  const SlotId targets = fwd().add("targets", data({b(), s()}, DType::i32), Use::kLocal, BufferClass::kInput);
  fwd().op(LoadBatch{.targets = true, .packed = packed()}, {}, {targets}, "load.targets");
  const SlotId loss = fwd().add("loss", data({b()}), Use::kLoss, BufferClass::kMetric);
  CrossEntropy judge{.part = CrossEntropy::Part::kFused, .tokens = targets_per_step};
  if (model_.vocab < model_.vocab_rows()) judge.words = model_.vocab;
  if (!draft_.training) judge.part = CrossEntropy::Part::kLossOnly;
  fwd().op(judge, {logits, targets}, draft_.training ? std::vector{loss, logits} : std::vector{loss}, "loss");

  const SlotId dlogits = in_backward("logits");
  const SlotId dn = local(bwd(), "d.final.norm.y", tokens_by(h()));
  const SlotId dx = bwd().add("d.x", tokens_by(h()), Use::kGradientOut, kActivation);
  bwd().op(Linear{Phase::kI}, {dlogits, value(bwd(), weight)}, {dn}, "head");
  bwd().op(Linear{Phase::kW}, {in_backward("final.norm.y"), dlogits}, {gradient(bwd(), weight)}, "head");
  norm_backward("final.norm", dn, in_backward("x"), gamma, beta, SlotId(), dx);
}

/// Units in model order, and the plan's parameters numbered as `parameters_of` numbers them.
void add_units(Draft& draft) {
  const Model& model = draft.config.model;
  std::map<std::string, int32_t> number;
  for (const ModelParameter& p : parameters_of(model)) number.emplace(p.name, static_cast<int32_t>(number.size()));
  draft.plan.parameters.resize(number.size());
  const auto add_unit = [&](UnitKind kind, int layer) {
    Unit unit{.kind = kind, .layer = layer, .parameters = {}};
    for (const UnitParameter& up : draft.of(kind).parameters) {
      const std::string name = layer < 0 ? up.name : "layers." + std::to_string(layer) + "." + up.name;
      const auto found = number.find(name);
      SHARDLAB_CHECK(found != number.end(), "the model has no parameter {}", name);
      Parameter& parameter = draft.plan.parameters[static_cast<size_t>(found->second)];
      unit.parameters.emplace_back(found->second);
      if (!parameter.name.empty()) continue;  // the tied head's table is the embedding's
      parameter.name = name;
      parameter.type = up.type;
      parameter.tensor = static_cast<uint32_t>(found->second);
      parameter.decay = up.kind != ModelParameter::Kind::kBias && up.kind != ModelParameter::Kind::kNormWeight;
      parameter.initial = up.kind == ModelParameter::Kind::kNormWeight ? Initial::kOnes
                          : up.kind == ModelParameter::Kind::kBias     ? Initial::kZeros
                                                                       : Initial::kNormal;
      parameter.deviation =
          up.residual_projection ? model.init_deviation / std::sqrt(2.0f * static_cast<float>(model.layers)) : model.init_deviation;
    }
    draft.units.push_back(std::move(unit));
  };
  add_unit(UnitKind::kEmbed, -1);
  for (int layer = 0; layer < model.layers; ++layer) add_unit(layer_kind(model, layer), layer);
  add_unit(UnitKind::kHead, -1);
}

/// Calls f(segment, slot) for every slot of the units' segments.
template <class F>
void for_slots(Draft& draft, F f) {
  for (UnitTemplate& unit : draft.templates)
    for (DraftSegment* segment : {&unit.forward, &unit.backward})
      for (Slot& slot : segment->segment.slots) f(slot);
}

/// Context-parallel ranks hold a part of each sequence: activations are slices of it, and the loss of a sequence, as the gradients of
/// parameters, is a sum over them. The attention core is for the strategy of the case to put right (context_parallel.cpp).
void deal_sequences(Draft& draft) {
  if (draft.config.layout.cp == 1) return;
  const AxisSet axes = context_axes(draft.plan.mesh);
  for_slots(draft, [&](Slot& slot) {
    if (slot.name == kPositionsSlot) return;
    const bool slice = slot.type.micro == Micro::kSlice, tokens = slice && slot.type.shape.rank > 1;
    if (tokens) slot.type = placed(slot.type, axes, Placement::shard(slot.name == "lse" ? 2 : 1));
    if ((slice && !tokens) || slot.type.micro == Micro::kSum) slot.type = placed(slot.type, axes, Placement::partial());
  });
}

/// Every micro-batch is dealt over the data axes by sequences, so activations are slices of it along their first dim and what
/// one rank sums over its tokens is a partial sum. Which reduction makes that whole is for a strategy to say. Workers that train
/// apart (diloco.cpp) share nothing: whatever they compute is their own.
void deal_batch(Draft& draft) {
  for (const std::string_view name : {"replica", "dp", "node", "ep"}) {
    const auto axis = draft.plan.mesh.find(name);
    if (!axis || draft.plan.mesh.size(name) == 1) continue;
    for_slots(draft, [&](Slot& slot) {
      Placement& place = slot.type.place[static_cast<size_t>(*axis)];
      if (slot.type.micro == Micro::kSlice) place = Placement::shard(is_rows_of_experts(slot) ? 1 : 0);
      if (slot.type.micro == Micro::kSum) place = Placement::partial();
      if (trains_apart(draft)) place = Placement::local();
    });
  }
}

}  // namespace

Draft build_step(const Case& config, bool training) {
  Draft draft;
  draft.config = config;
  draft.training = training;
  draft.plan.name = config.name;
  const Layout& l = config.layout;
  draft.plan.mesh.axes = {{"pp", l.pp}, {"dp", l.shard_ranks()}, {"cp", l.cp}, {"tp", l.tp}};
  if (l.folds_experts() && l.expert_tp > 1) {  // "tp" counts groups that share experts then, within which neighbours cut them
    draft.plan.mesh.axes[3].size = l.expert_groups();
    draft.plan.mesh.axes.push_back({std::string(kSlicesAxis), l.expert_tp});
  }
  if (l.cp > 1 && l.cp_kind == ContextKind::kUsp) {  // "cp" counts parts of sequences then, which neighbours share
    draft.plan.mesh.axes[2].size = l.ring_ranks();
    draft.plan.mesh.axes.insert(draft.plan.mesh.axes.begin() + 3, {std::string(kHeadsAxis), l.head_ranks()});
  }
  if (const int node = l.zero_plus_plus.secondary; node > 0) {  // "dp" counts nodes then, within which ranks are neighbours
    draft.plan.mesh.axes[1].size /= node;
    draft.plan.mesh.axes.insert(draft.plan.mesh.axes.begin() + 2, {"node", node});
  }
  if (const int n = l.expert_shards_of_dp(); n > 1) {  // "dp" counts sets of experts then, within which ranks are neighbours
    draft.plan.mesh.axes[1].size /= n;
    draft.plan.mesh.axes.insert(draft.plan.mesh.axes.begin() + 2, {"ep", n});
  }
  if (l.replicas() > 1) draft.plan.mesh.axes.insert(draft.plan.mesh.axes.begin() + 1, {"replica", l.replicas()});
  draft.plan.micro_batches = draft.micro_batches();
  draft.plan.sequences_per_micro_batch = config.train.micro_batch;
  draft.plan.streams = {"compute"};
  // Where each micro-batch is summed over the ranks by itself, in canonical mode they share it out in the order of the tree.
  if (config.canonical && ((l.zero >= 2 && l.shard_ranks() > 1) || l.expert_shards_of_dp() > 1) && draft.micro_batches() > 1)
    draft.plan.together = sequence_axes(draft.plan.mesh);
  UnitBuilder(draft, UnitKind::kEmbed).build_embed();
  UnitBuilder(draft, UnitKind::kHead).build_head();
  std::set<UnitKind> kinds;
  for (int64_t layer = 0; layer < config.model.layers; ++layer) kinds.insert(layer_kind(config.model, layer));
  for (const UnitKind kind : kinds) UnitBuilder(draft, kind).build_layer();
  add_units(draft);
  deal_batch(draft);
  deal_sequences(draft);
  return draft;
}

}  // namespace shardlab::strategies
