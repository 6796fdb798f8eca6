#include "cli/pairs.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/namespaces.h"
#include "plan/case.h"
#include "plan/treatment.h"

namespace shardlab::cli {
namespace {

/// A value of a key that turns something on. What it cannot be without (a schedule without stages) it brings along.
struct Choice {
  std::string_view name;
  void (*set)(Case&);
};

void stages(Case& c, Schedule schedule) {
  c.layout.pp = 2;
  c.layout.schedule = schedule;
  c.layout.vpp = is_looped(schedule) ? 2 : 1;
}

void shard(Case& c, int zero) {
  c.layout.zero = zero;
  if (c.layout.dp == 1) c.layout.dp = 2;
}

/// Beside what is set of it already.
void plus_plus(Case& c, const ZeroPlusPlus& part) {
  ZeroPlusPlus& z = c.layout.zero_plus_plus;
  z = {.weights = z.weights || part.weights,
       .secondary = std::max(z.secondary, part.secondary),
       .gradients = z.gradients || part.gradients};
  if (c.layout.dp == 1) c.layout.dp = 4;
  if (z.secondary > 0) c.layout.dp = std::max(c.layout.dp, 2 * z.secondary);
  if (c.layout.zero == 0) c.layout.zero = 3;
}

void compress(Case& c, CompressionKind kind) {
  c.layout.compression.kind = kind;
  if (c.layout.dp == 1) c.layout.dp = 2;
}

void serve(Case& c) {
  c.layout.parameter_server.servers = 2;
  if (c.layout.dp == 1) c.layout.dp = 2;
}

void narrow(Case& c, Precision precision) {
  if (c.train.precision == Precision::kFp32) c.train.precision = precision;
}

void stream_parameters(Case& c, OffloadTo where) {
  c.layout.offload.parameters = where;
  if (c.layout.offload.optimizer == OffloadTo::kNone) c.layout.offload.optimizer = where;
  if (c.layout.zero == 0) c.layout.zero = 3;
}

constexpr std::array kChoices{
    Choice{"dp: 2", [](Case& c) { c.layout.dp = std::max(c.layout.dp, 2); }},
    Choice{"tp: 2", [](Case& c) { c.layout.tp = 2; }},
    Choice{"sequence_parallel",
           [](Case& c) {
             c.layout.tp = std::max(c.layout.tp, 2);
             c.layout.sequence_parallel = true;
           }},
    Choice{"pp: 2, afab", [](Case& c) { stages(c, Schedule::kAfab); }},
    Choice{"pp: 2, 1f1b", [](Case& c) { stages(c, Schedule::k1F1B); }},
    Choice{"pp: 2, interleaved", [](Case& c) { stages(c, Schedule::kInterleaved); }},
    Choice{"pp: 2, zb-h1", [](Case& c) { stages(c, Schedule::kZbH1); }},
    Choice{"pp: 2, zb-v", [](Case& c) { stages(c, Schedule::kZbV); }},
    Choice{"grad_accumulation: 4", [](Case& c) { c.train.grad_accumulation = 4; }},
    Choice{"bucket_bytes: 1Mi", [](Case& c) { c.layout.bucket_bytes = 1 << 20; }},
    Choice{"zero: 1", [](Case& c) { shard(c, 1); }},
    Choice{"zero: 2", [](Case& c) { shard(c, 2); }},
    Choice{"zero: 3", [](Case& c) { shard(c, 3); }},
    Choice{"hybrid_shard: 2",
           [](Case& c) {
             c.layout.dp = 4;
             c.layout.hybrid_shard = 2;
             if (c.layout.zero == 0) c.layout.zero = 3;
           }},
    Choice{"zero_plus_plus.weights", [](Case& c) { plus_plus(c, {.weights = true}); }},
    Choice{"zero_plus_plus.secondary: 2", [](Case& c) { plus_plus(c, {.secondary = 2}); }},
    Choice{"zero_plus_plus.gradients", [](Case& c) { plus_plus(c, {.gradients = true}); }},
    Choice{"recompute: full", [](Case& c) { c.layout.recompute = Recompute::kFull; }},
    Choice{"recompute_options.every: 2",
           [](Case& c) {
             c.layout.recompute_options.every = 2;
             if (c.layout.recompute == Recompute::kNone) c.layout.recompute = Recompute::kFull;
           }},
    Choice{"recompute: selective", [](Case& c) { c.layout.recompute = Recompute::kSelective; }},
    Choice{"recompute: layer by layer",
           [](Case& c) {
             std::vector<LayerTreatment> layers(static_cast<size_t>(c.model.layers));
             layers.front() = {.full = true, .parked = true};
             c.layout.recompute = Recompute::kByLayer;
             c.layout.recompute_options.layers = treatments_text(layers);
           }},
    Choice{"offload.activations: cpu", [](Case& c) { c.layout.offload.activations = OffloadTo::kCpu; }},
    Choice{"offload.optimizer: cpu", [](Case& c) { c.layout.offload.optimizer = OffloadTo::kCpu; }},
    Choice{"parameter_server.servers: 2", [](Case& c) { serve(c); }},
    Choice{"parameter_server.staleness: 1",
           [](Case& c) {
             serve(c);
             c.layout.parameter_server.staleness = 1;
           }},
    Choice{"offload.activations: nvme", [](Case& c) { c.layout.offload.activations = OffloadTo::kNvme; }},
    Choice{"offload.optimizer: nvme", [](Case& c) { c.layout.offload.optimizer = OffloadTo::kNvme; }},
    Choice{"delayed_update",
           [](Case& c) {
             c.layout.offload.delayed_update = true;
             if (c.layout.offload.optimizer == OffloadTo::kNone) c.layout.offload.optimizer = OffloadTo::kCpu;
           }},
    Choice{"offload.parameters: cpu", [](Case& c) { stream_parameters(c, OffloadTo::kCpu); }},
    Choice{"offload.parameters: nvme", [](Case& c) { stream_parameters(c, OffloadTo::kNvme); }},
    Choice{"compression: bf16", [](Case& c) { compress(c, CompressionKind::kBf16); }},
    Choice{"compression: int8", [](Case& c) { compress(c, CompressionKind::kInt8); }},
    Choice{"compression: top-k", [](Case& c) { compress(c, CompressionKind::kTopK); }},
    Choice{"compression: random-k", [](Case& c) { compress(c, CompressionKind::kRandomK); }},
    Choice{"compression: powersgd", [](Case& c) { compress(c, CompressionKind::kPowerSgd); }},
    Choice{"compression: one-bit-adam",
           [](Case& c) {
             compress(c, CompressionKind::kOneBitAdam);
             c.layout.compression.warmup = 1;
           }},
    Choice{"diloco.steps: 4",
           [](Case& c) {
             c.layout.diloco.steps = 4;
             if (c.layout.dp == 1) c.layout.dp = 2;
           }},
    Choice{"precision: bf16", [](Case& c) { c.train.precision = Precision::kBf16; }},
    Choice{"precision: fp16", [](Case& c) { c.train.precision = Precision::kFp16; }},
    Choice{"precision: fp8", [](Case& c) { c.train.precision = Precision::kFp8; }},
    Choice{"fp8_scaling: delayed",
           [](Case& c) {
             c.train.fp8_scaling = Fp8Scaling::kDelayed;
             narrow(c, Precision::kFp8);
           }},
    Choice{"fp8_scaling: block",
           [](Case& c) {
             c.train.fp8_scaling = Fp8Scaling::kBlock;
             narrow(c, Precision::kFp8);
           }},
    Choice{"loss_scale: 1024",
           [](Case& c) {
             c.train.loss_scale = 1024;
             narrow(c, Precision::kFp16);
           }},
    Choice{"accumulate_dtype: bf16",
           [](Case& c) {
             c.train.accumulate_dtype = "bf16";
             narrow(c, Precision::kBf16);
           }},
    Choice{"tied_embeddings", [](Case& c) { c.model.tied_embeddings = true; }},
    Choice{"dropout: 0.1", [](Case& c) { c.train.dropout = 0.1f; }},
    Choice{"clip_norm: 1", [](Case& c) { c.train.clip_norm = 1; }},
    Choice{"guard.nonfinite: skip", [](Case& c) { c.train.guard.nonfinite = GuardAction::kSkip; }},
    Choice{"guard.spike: skip", [](Case& c) { c.train.guard.spike = GuardAction::kSkip; }},
    Choice{"canonical", [](Case& c) { c.canonical = true; }},
    Choice{"collective_algorithm: ring", [](Case& c) { c.layout.collective_algorithm = AlgorithmChoice::kRing; }},
    Choice{"checkpoint.save_every: 10", [](Case& c) { c.checkpoint.save_every = 10; }},
    Choice{"backend: cuda",
           [](Case& c) {
             c.backend = BackendKind::kCuda;
             if (c.transport == TransportKind::kThreads) c.transport = TransportKind::kOneGpu;
           }},
    Choice{"transport: nccl",
           [](Case& c) {
             c.backend = BackendKind::kCuda;
             c.transport = TransportKind::kNccl;
           }},
    Choice{"transport: processes", [](Case& c) { c.transport = TransportKind::kProcesses; }},
    Choice{"transport: tcp", [](Case& c) { c.transport = TransportKind::kTcp; }},
};

/// Sizes that no choice by itself is refused for.
Case base_case() {
  Case c;
  c.model = {.name = "small",
             .family = Family::kGpt,
             .layers = 4,
             .hidden = 64,
             .heads = 4,
             .kv_heads = 4,
             .head_dim = 16,
             .ffn = 256,
             .vocab = 128,
             .max_positions = 64};
  c.train.seq_len = 64;
  c.train.micro_batch = 2;
  return c;
}

/// Both choices on one case; or why they do not go together, in neither order: what one brings along may give way to the other.
Result<Case> judge(const Choice& a, const Choice& b) {
  Case c = base_case();
  a.set(c);
  b.set(c);
  if (check(c).ok()) return c;
  Case other = base_case();
  b.set(other);
  a.set(other);
  const Result<void> verdict = check(other);
  if (!verdict.ok()) return verdict.error();
  return other;
}

/// Choices of one key exclude one another.
std::string_view key_of(const Choice& choice) {
  const std::string_view name = choice.name;
  return name.substr(0, std::min(name.find(':'), name.size()));
}

template <class Visit>
void for_each_pair(const Visit& visit) {
  for (size_t a = 0; a < kChoices.size(); ++a)
    for (size_t b = a + 1; b < kChoices.size(); ++b)
      if (key_of(kChoices[a]) != key_of(kChoices[b])) visit(a, b, judge(kChoices[a], kChoices[b]));
}

}  // namespace

std::vector<LegalPair> legal_pairs() {
  std::vector<LegalPair> pairs;
  for_each_pair([&](size_t a, size_t b, const Result<Case>& verdict) {
    if (verdict.ok()) pairs.push_back({std::string(kChoices[a].name), std::string(kChoices[b].name), *verdict});
  });
  return pairs;
}

Table pair_matrix() {
  Table table{{{"with"}}, {}};
  for (size_t i = 0; i < kChoices.size(); ++i) table.columns.push_back({std::to_string(i + 1)});
  for (size_t i = 0; i < kChoices.size(); ++i) {
    std::vector<Value> row(kChoices.size() + 1);
    row[0] = std::to_string(i + 1) + " `" + std::string(kChoices[i].name) + "`";
    table.rows.push_back(std::move(row));
  }
  int number = 0;
  for_each_pair([&](size_t a, size_t b, const Result<Case>& verdict) {
    const std::string word = verdict.ok() ? "yes" : "(" + std::to_string(++number) + ")";
    table.rows[a][b + 1] = table.rows[b][a + 1] = word;
  });
  return table;
}

Table refused_pairs() {
  Table table{{{"number"}, {"choice"}, {"with"}, {"why"}, {"instead"}}, {}};
  int64_t number = 0;
  for_each_pair([&](size_t a, size_t b, const Result<Case>& verdict) {
    if (verdict.ok()) return;
    table.rows.push_back(
        {++number, std::string(kChoices[a].name), std::string(kChoices[b].name), verdict.error().message, verdict.error().hint});
  });
  return table;
}

Table pair_list() {
  Table table{{{"choice"}, {"with"}, {"legal"}, {"why"}, {"instead"}}, {}};
  for_each_pair([&](size_t a, size_t b, const Result<Case>& verdict) {
    table.rows.push_back({std::string(kChoices[a].name), std::string(kChoices[b].name), verdict.ok(),
                          verdict.ok() ? Value() : Value(verdict.error().message),
                          verdict.ok() ? Value() : Value(verdict.error().hint)});
  });
  return table;
}

}  // namespace shardlab::cli
