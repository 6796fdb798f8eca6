#include "tests/agreement/cases.h"

#include "plan/base/hash.h"
#include "simulator/analytic/analytic.h"

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

}  // namespace

uint64_t CaseDealer::draw(uint64_t n) { return mix(drawn_++) % n; }

Case CaseDealer::next() {
  for (;; ++refused_) {
    Case c = deal();
    if (check(c).ok() && analytic::point_of(c).ok()) return c;
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
    l.recompute_options.modules = of<const char*>({"", "attn.core", "mlp.act", "attn.core mlp.act"});
}

void CaseDealer::deal_training(Case& c) {
  Train& t = c.train;
  t.micro_batch = of({1, 1, 2, 4});
  t.grad_accumulation = c.layout.pp * of({1, 1, 2, 3}) - (one_in(4) && c.layout.pp > 1 ? 1 : 0);
  t.precision = of<const char*>({"fp32", "bf16", "bf16", "bf16", "fp16", "fp8"});
  if (t.precision == "fp8") t.fp8_scaling = of<const char*>({"current", "delayed", "block"});
  if (t.precision != "fp32" && one_in(4)) t.reduce_dtype = t.accumulate_dtype = "bf16";
  t.optimizer = one_in(5) ? Optimizer::kSgd : Optimizer::kAdamW;
  t.dropout = one_in(4) ? 0.1f : 0;
  t.clip_norm = one_in(4) ? 1.0f : 0;
  t.grad_norm = one_in(4);
  if (one_in(6)) t.guard.nonfinite = GuardAction::kSkip;
}

void CaseDealer::deal_techniques(Case& c) {
  Layout& l = c.layout;
  if (one_in(8)) l.offload.activations = of({OffloadTo::kCpu, OffloadTo::kNvme});
  if (one_in(8)) l.offload.optimizer = of({OffloadTo::kCpu, OffloadTo::kNvme});
  if (l.zero == 3 && one_in(6)) l.offload.parameters = of({OffloadTo::kCpu, OffloadTo::kNvme});
  if (l.dp > 1 && one_in(8)) {
    l.compression.kind =
        of({CompressionKind::kInt8, CompressionKind::kTopK, CompressionKind::kPowerSgd, CompressionKind::kOneBitAdam});
    if (l.compression.kind == CompressionKind::kTopK) l.compression.k = of({0.01, 0.05});
  }
}

void CaseDealer::deal_machine(Case& c) {
  Machine& m = c.machine;
  m.device = one_in(2) || c.train.precision == "fp8" ? hopper() : ampere();
  m.id = "nodes-of-eight";
  m.devices_per_node = 8;
  m.nodes = (c.layout.world_size() + 7) / 8;
  m.inter_bytes_per_s = of({25e9, 50e9});
}

}  // namespace shardlab::testing
