// What the estimate makes of a case's layout and training keys. A key that is not copied here is not known, and refused: one that
// comes later cannot be left out of a prediction without a word.
#include <fmt/format.h>

#include <string_view>

#include "simulator/estimator/analytic/known.h"

namespace shardlab::simulator::analytic {
namespace {

/// What points and studies take over (point_of, prepare, and the cases of shardlab's own executor).
void copy_known(const Layout& from, Layout& to) {
  to.dp = from.dp, to.tp = from.tp, to.pp = from.pp, to.vpp = from.vpp, to.cp = from.cp, to.ep = from.ep;
  to.zero = from.zero, to.hybrid_shard = from.hybrid_shard, to.fsdp = from.fsdp;
  to.schedule = from.schedule, to.sequence_parallel = from.sequence_parallel;
  to.recompute = from.recompute, to.recompute_options = from.recompute_options;
  to.offload = from.offload, to.compression = from.compression;
  to.overlap = from.overlap, to.bucket_bytes = from.bucket_bytes, to.collective_algorithm = from.collective_algorithm;
}

void copy_known(const Train& from, Train& to) {
  to.seq_len = from.seq_len, to.global_batch_tokens = from.global_batch_tokens;
  to.micro_batch = from.micro_batch, to.grad_accumulation = from.grad_accumulation;
  to.precision = from.precision, to.reduce_dtype = from.reduce_dtype, to.accumulate_dtype = from.accumulate_dtype;
  to.loss_scale = from.loss_scale, to.fp8_scaling = from.fp8_scaling;
  to.optimizer = from.optimizer, to.dropout = from.dropout;
  to.grad_norm = from.grad_norm, to.clip_norm = from.clip_norm, to.guard = from.guard;
  // Numbers that change neither memory nor time.
  to.loss_scale_start = from.loss_scale_start, to.loss_scale_interval = from.loss_scale_interval;
  to.learning_rate = from.learning_rate, to.weight_decay = from.weight_decay;
  to.beta1 = from.beta1, to.beta2 = from.beta2, to.epsilon = from.epsilon, to.seed = from.seed;
}

struct Unknown {
  std::string_view key;
  bool (*set)(const Case& c);
};

/// Keys that no estimate has a form for.
constexpr Unknown kUnknown[] = {
    {"zero_plus_plus", [](const Case& c) { return c.layout.zero_plus_plus != ZeroPlusPlus{}; }},
    {"parameter_server", [](const Case& c) { return c.layout.parameter_server != ParameterServer{}; }},
    {"diloco", [](const Case& c) { return c.layout.diloco != Diloco{}; }},
    {"schedule", [](const Case& c) { return c.layout.schedule >= Schedule::kNaive; }},  // naive, auto, a table
    {"stage_layers", [](const Case& c) { return !c.layout.stage_layers.empty(); }},
};

/// Keys of shardlab's executor, of which a framework's profile says nothing.
constexpr Unknown kOwn[] = {
    {"canonical", [](const Case& c) { return c.canonical; }},
    {"guard", [](const Case& c) { return c.train.guard.any(); }},
};

}  // namespace

Result<void> check_known(const Case& c) {
  for (const Unknown& key : kUnknown)
    if (key.set(c))
      return Error{ExitCode::kUsage, fmt::format("{} has no closed form", key.key), "leave it out, or resolution: timeline", {}};
  for (const Unknown& key : kOwn)
    if (c.profile != "shardlab" && key.set(c))
      return Error{ExitCode::kUsage, fmt::format("{} is not told apart by the profile {}", key.key, c.profile), "leave it out", {}};
  Case known;
  copy_known(c.layout, known.layout);
  copy_known(c.train, known.train);
  if (known.layout == c.layout && known.train == c.train) return {};
  return Error{ExitCode::kUsage,
               "a key of layout or train is set that the estimate has not been told of",
               "resolution: timeline, or say in simulator/estimator/analytic/known.cpp what becomes of it",
               {}};
}

}  // namespace shardlab::simulator::analytic
