#include "tests/agreement/cases.h"

#include <array>

#include "plan/base/hash.h"
#include "plan/treatment.h"
#include "tests/namespaces.h"

namespace shardlab::testing {
namespace {

/// Data sheets of two generations; constants are the defaults of DeviceModel and Fabric.
Device ampere() {
  Device d;
  d.id = "ampere-like", d.architecture = "ampere", d.memory_bytes = 80'000'000'000, d.memory_bytes_per_s = 2.039e12;
  d.link_bytes_per_s = 300e9, d.power_w = 400;
  d.peak_flops = {{"fp32", 19.5e12}, {"bf16", 312e12}, {"fp16", 312e12}};
  return d;
}
Device hopper() {
  Device d;
  d.id = "hopper-like", d.architecture = "hopper", d.memory_bytes = 80'000'000'000, d.memory_bytes_per_s = 3.35e12;
  d.link_bytes_per_s = 450e9, d.power_w = 700;
  d.peak_flops = {{"fp32", 67e12}, {"bf16", 989.4e12}, {"fp16", 989.4e12}, {"fp8", 1978.9e12}};
  return d;
}

/// Every number as "#", so that refusals of one kind count as one.
std::string without_numbers(const std::string& message) {
  std::string out;
  for (const char c : message) {
    const bool digit = (c >= '0' && c <= '9') || (c == '.' && !out.empty() && out.back() == '#');
    if (!digit)
      out += c;
    else if (out.empty() || out.back() != '#')
      out += '#';
  }
  return out;
}

}  // namespace

uint64_t CaseDealer::draw(uint64_t n) { return mix(drawn_++) % n; }

Case CaseDealer::next() {
  for (;;) {
    Case c = deal();
    const auto legal = check(c);
    if (legal.ok()) return c;
    ++refused_[without_numbers(legal.error().message)];
  }
}

Case CaseDealer::deal() {
  Case c;
  deal_layout(c);
  deal_model(c);
  deal_state(c);
  deal_training(c);
  deal_techniques(c);
  deal_machine(c);
  c.train.global_batch_tokens = c.sequences_per_step() * c.train.seq_len;
  if (sequences_) deal_sequences(c);
  return c;
}

void CaseDealer::deal_layout(Case& c) {
  Layout& l = c.layout;
  l.dp = of({1, 1, 2, 2, 4, 8});
  l.tp = of({1, 1, 2, 4, 8});
  l.pp = of({1, 1, 2, 3, 4});
  if (l.pp > 1) l.schedule = of({Schedule::kAfab, Schedule::k1F1B});
}

void CaseDealer::deal_model(Case& c) {
  Model& m = c.model;
  m.name = "dealt";
  m.family = of({Family::kGpt, Family::kLlama});
  m.head_dim = of<int64_t>({64, 128});
  m.heads = of<int64_t>({8, 16, 32, 64});
  m.hidden = m.heads * m.head_dim;
  m.kv_heads = m.is_llama() ? m.heads / of<int64_t>({1, 2, 4}) : m.heads;
  m.ffn = m.is_llama() ? (m.hidden * 8 / 3 + 255) / 256 * 256 : 4 * m.hidden;
  m.vocab = of<int64_t>({1024, 32000, 50304, 128256});
  m.layers = c.layout.pp * of({1, 2}) + of({0, 0, 1, 2});
  m.tied_embeddings = one_in(3);
  c.train.seq_len = of<int64_t>({128, 512, 1024, 2048, 4096});
  m.max_positions = m.is_llama() ? 0 : c.train.seq_len * of({1, 2});
}

void CaseDealer::deal_state(Case& c) {
  Layout& l = c.layout;
  if (l.dp > 1) l.zero = of({0, 1, 2, 3, 3});
  if (l.zero == 3) l.fsdp = {of({1, 1, 2, 3}), of({0, 1, 1, 2}), of({true, true, false})};
  if (l.zero > 0 && l.dp > 2 && one_in(4)) l.hybrid_shard = l.dp / 2;
  l.overlap = !one_in(3);
  if (l.zero != 3) l.bucket_bytes = of<int64_t>({0, 4 << 20, 25 << 20, 200 << 20});
  l.recompute = of({Recompute::kNone, Recompute::kNone, Recompute::kSelective, Recompute::kFull});
  if (l.recompute == Recompute::kSelective)
    l.recompute_options.modules = of<const char*>(
        {"", "attn.core", "mlp.act", "attn.core mlp.act", "attn.norm mlp.norm", "attn.norm attn.core mlp.norm mlp.act"});
  if (l.recompute == Recompute::kFull && one_in(6)) l.recompute_options.every = of({2, 3});
  if (one_in(12)) deal_layers(c);
  if (one_in(6)) l.collective_algorithm = of({AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling, AlgorithmChoice::kDirect});
}

/// A treatment for each layer by itself.
void CaseDealer::deal_layers(Case& c) {
  std::vector<LayerTreatment> treatments(static_cast<size_t>(c.model.layers));
  for (LayerTreatment& t : treatments) {
    t.full = one_in(3);
    if (!t.full) t.again = static_cast<unsigned>(draw(kSubLayerSets));
    t.parked = one_in(3);
  }
  c.layout.recompute = Recompute::kByLayer;
  c.layout.recompute_options = {};
  c.layout.recompute_options.layers = treatments_text(treatments);
}

void CaseDealer::deal_training(Case& c) {
  Train& t = c.train;
  t.micro_batch = of({1, 1, 2, 4});
  t.grad_accumulation = c.layout.pp * of({1, 1, 2, 3}) - (one_in(4) && c.layout.pp > 1 ? 1 : 0);
  t.precision =
      of<Precision>({Precision::kFp32, Precision::kBf16, Precision::kBf16, Precision::kBf16, Precision::kFp16, Precision::kFp8});
  if (t.precision == Precision::kFp8)
    t.fp8_scaling = of<Fp8Scaling>({Fp8Scaling::kCurrent, Fp8Scaling::kDelayed, Fp8Scaling::kBlock});
  if (t.precision != Precision::kFp32 && one_in(4)) t.reduce_dtype = t.accumulate_dtype = "bf16";
  constexpr Optimizer kOthers[] = {Optimizer::kSgd, Optimizer::kLion, Optimizer::kAdamW8bit};
  t.optimizer = one_in(5) ? kOthers[t.grad_accumulation % 3] : Optimizer::kAdamW;
  t.dropout = one_in(4) ? 0.1f : 0;
  t.clip_norm = one_in(4) ? 1.0f : 0;
  t.grad_norm = one_in(4);
  if (one_in(6)) t.guard.nonfinite = GuardAction::kSkip;
  if (one_in(8)) {
    t.guard.spike = of({GuardAction::kSkip, GuardAction::kStop});
    t.guard.loss_factor = of({0.0f, 2.0f}), t.guard.norm_factor = of({0.0f, 10.0f});
  }
  if (one_in(2)) t.weight_decay = 0.1f;
  if (one_in(2)) t.loss_scale = t.precision == Precision::kFp16 ? 1024.0f : 0;
}

void CaseDealer::deal_techniques(Case& c) {
  Layout& l = c.layout;
  if (one_in(8)) l.offload.activations = of({OffloadTo::kCpu, OffloadTo::kNvme});
  if (one_in(8)) l.offload.optimizer = of({OffloadTo::kCpu, OffloadTo::kNvme});
  if (l.offload.optimizer == OffloadTo::kCpu) l.offload.delayed_update = one_in(3);
  if (l.zero == 3 && one_in(6)) l.offload.parameters = of({OffloadTo::kCpu, OffloadTo::kNvme});
  if (l.dp > 1 && one_in(6)) deal_compression(c);
  c.canonical = one_in(10);
  // Half of what can have it, without a draw: the other cases stay those that they were.
  const bool scatters = l.collective_algorithm == AlgorithmChoice::kAuto || l.collective_algorithm == AlgorithmChoice::kDirect;
  l.sequence_parallel = l.tp > 1 && scatters && mix(~drawn_) % 2 == 0;
}

/// Products in strips, parts of sequences, head and loss in pieces, without a draw too: each where the case is legal with it.
void CaseDealer::deal_sequences(Case& c) {
  const auto chosen = [&](uint64_t salt, uint64_t n) { return mix(~drawn_ + salt) % n; };
  const auto set = [&](auto change) {
    Case with = c;
    change(with.layout);
    with.machine.nodes = (with.layout.world_size() + 7) / 8;
    if (check(with).ok()) c = with;
  };
  if (chosen(1, 3) == 0) set([](Layout& l) { l.tensor_overlap = l.tp > 1; });
  if (chosen(2, 6) == 0) set([&](Layout& l) { l.loss_chunks = chosen(3, 2) == 0 ? 2 : 4; });
  constexpr std::array kKinds{ContextKind::kAllGather, ContextKind::kRing,    ContextKind::kZigzag,
                              ContextKind::kStriped,   ContextKind::kUlysses, ContextKind::kUsp};
  if (chosen(4, 4) == 0)
    set([&](Layout& l) {
      l.cp_kind = kKinds[chosen(5, kKinds.size())];
      const bool usp = l.cp_kind == ContextKind::kUsp;
      l.cp = usp || chosen(6, 2) == 0 ? 4 : 2;
      l.cp_ulysses = usp ? 2 : 0;
    });
}

void CaseDealer::deal_compression(Case& c) {
  Compression& k = c.layout.compression;
  using Kind = CompressionKind;
  k.kind = of({Kind::kBf16, Kind::kInt8, Kind::kTopK, Kind::kRandomK, Kind::kPowerSgd, Kind::kOneBitAdam});
  if (k.kind == Kind::kInt8) k.bits = of({8, 4});
  if (k.kind == Kind::kTopK || k.kind == Kind::kRandomK) k.k = of({0.01, 0.05});
  if (k.kind == Kind::kPowerSgd) k.rank = of({1, 4, 32});
  if (k.kind == Kind::kOneBitAdam) k.warmup = 10;
}

void CaseDealer::deal_machine(Case& c) {
  Machine& m = c.machine;
  m.device = one_in(2) || c.train.precision == Precision::kFp8 ? hopper() : ampere();
  m.id = "nodes-of-eight";
  m.devices_per_node = 8;
  m.nodes = (c.layout.world_size() + 7) / 8;
  m.inter_bytes_per_s = of({25e9, 50e9});
}

}  // namespace shardlab::testing
