#include "interop/said.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/automatic.h"
#include "plan/base/check.h"
#include "plan/optimizers.h"
#include "plan/pipeline_case.h"

namespace shardlab::interop {

namespace {

bool is_one_of(std::string_view path, std::initializer_list<std::string_view> paths) {
  return std::ranges::find(paths, path) != paths.end();
}

/// Sections and keys that speak of shardlab's own program, of names, of what a machine can do, or of predictions.
bool is_of_shardlab(std::string_view path) {
  return path == "name" || path == "profile" || path == "model.name" || path.starts_with("machine.") ||
         path.starts_with("execution.") || path.starts_with("measure.") || path.starts_with("checkpoint.") ||
         path.starts_with("data.rout");
}

}  // namespace

bool is_inert(std::string_view path, const Case& c) {
  const Layout& l = c.layout;
  const Train& t = c.train;
  if (is_of_shardlab(path)) return true;
  if (path.starts_with("layout.compression.") && path != "layout.compression.kind") {
    const CompressionKind kind = l.compression.kind;
    if (path == "layout.compression.rank") return kind != CompressionKind::kPowerSgd;
    if (path == "layout.compression.k") return kind != CompressionKind::kTopK && kind != CompressionKind::kRandomK;
    if (path == "layout.compression.bits") return kind != CompressionKind::kInt8;
    if (path == "layout.compression.warmup") return kind != CompressionKind::kOneBitAdam;
  }
  if (path.starts_with("layout.diloco.") && path != "layout.diloco.steps") return l.diloco.steps == 0;
  if (path.starts_with("layout.fsdp.")) return l.zero < 3;
  if (path == "layout.parameter_server.staleness") return l.parameter_server.servers == 0;
  if (path == "layout.hybrid_shard") return l.zero == 0 || l.hybrid_shard == 0 || l.hybrid_shard == l.dp;
  if (path == "layout.overlap") return l.dp == 1;
  if (path == "layout.bucket_bytes") return !asks_for_buckets(c);
  if (path == "layout.recompute_options.every") return l.recompute != Recompute::kFull;
  if (path == "layout.sequence_parallel" || path == "layout.tensor_overlap") return l.tp == 1;
  if (path.starts_with("train.loss_scale")) {
    if (t.precision != Precision::kFp16) return true;
    return path != "train.loss_scale" && t.loss_scale > 0;
  }
  if (path == "train.fp8_scaling") return t.precision != Precision::kFp8;
  if (path.starts_with("train.guard.") && path != "train.guard.nonfinite" && path != "train.guard.spike")
    return t.guard.spike == GuardAction::kNone;
  if (path == "train.grad_norm") return true;  // a figure that is logged
  if (is_one_of(path, {"train.beta1", "train.beta2"})) return !row_of(t.optimizer).has_betas;
  if (path == "train.epsilon") return !row_of(t.optimizer).has_epsilon;
  if (path == "train.learning_rate.total_steps" || path == "train.learning_rate.floor")
    return t.learning_rate.kind == LearningRate::Kind::kConstant;
  if (path == "train.learning_rate.decay_steps") return t.learning_rate.kind != LearningRate::Kind::kWsd;
  if (path == "train.accumulate_dtype") return t.precision == Precision::kFp32 && t.accumulate_dtype.empty();
  if (path == "model.max_positions") return c.model.is_llama();
  if (path == "model.rope_theta") return !c.model.is_llama();
  return false;
}

bool asks_for_buckets(const Case& c) {
  return c.layout.dp > 1 && c.layout.bucket_bytes > 0 && c.layout.bucket_bytes != automatic_bucket_bytes(c);
}

void Account::say(std::initializer_list<std::string_view> paths) {
  for (const std::string_view path : paths) said_.emplace(path);
}

bool Account::is_said(std::string_view path) const {
  if (said_.contains(path)) return true;
  for (size_t dot = path.find('.'); dot != std::string_view::npos; dot = path.find('.', dot + 1))
    if (said_.contains(path.substr(0, dot + 1))) return true;
  return false;
}

namespace {

std::string value_of(std::string_view path, const Case& c) {
  const CaseKey* key = find_key(path);
  SHARDLAB_CHECK(key != nullptr && key->get != nullptr, "no case has a key `{}`", path);
  const std::string value = key->get(c);
  return value.empty() ? "none" : value;
}

}  // namespace

void Account::by_script(std::string_view path, std::string_view how) {
  say({path});
  const bool is_neutral = value_of(path, case_) == value_of(path, Case{});
  if (is_neutral && (!path.starts_with("train.") || path == "train.dropout")) return;  // nothing is to be done
  if (!is_inert(path, case_)) script_.push_back(fmt::format("{}={}: {}", path, value_of(path, case_), how));
}

void Account::refuse(std::string_view path, std::string why) {
  say({path});
  problems_.push_back(fmt::format("{}={}: {}", path, value_of(path, case_), std::move(why)));
}

void Account::require(bool holds, std::string_view path, std::string why) {
  say({path});
  if (!holds) refuse(path, std::move(why));
}

Result<void> Account::finish() {
  if (const Model& m = case_.model; m.vocab_rows() != m.vocab)
    refuse(
        "model.vocab_multiple",
        fmt::format("the softmax of frameworks sees padded rows too: set model.vocab: {} and vocab_multiple: 1", m.vocab_rows()));
  const Case neutral;
  for (const CaseKey& key : case_keys()) {
    if (key.get == nullptr || is_inert(key.path, case_) || is_said(key.path)) continue;
    if (key.get(case_) != key.get(neutral)) refuse(key.path, fmt::format("{} has no word for it", framework_.name));
  }
  if (problems_.empty()) return {};
  return Error{
      ExitCode::kUsage,
      fmt::format("{} {} cannot express this case:\n    {}", framework_.name, framework_.version, fmt::join(problems_, "\n    ")),
      "change these settings, or export to a framework that has them (`shardlab export --help` lists them)",
      {}};
}

int64_t train_steps(const Case& c) {
  if (c.train.learning_rate.kind != LearningRate::Kind::kConstant && c.train.learning_rate.total_steps > 0)
    return c.train.learning_rate.total_steps;
  return c.measure.warmup + c.measure.steps * c.measure.repeat;
}

std::vector<int> layers_of_parts(const Case& c) {
  const std::vector<int> first = first_layers(c);
  std::vector<int> layers;
  for (size_t i = 0; i + 1 < first.size(); ++i) layers.push_back(first[i + 1] - first[i]);
  return layers;
}

bool recomputes_attention_core(const Case& c) {
  const std::string& modules = c.layout.recompute_options.modules;
  return c.layout.recompute == Recompute::kSelective && (modules.empty() || modules == "attn.core");
}

std::string stamp(const Account& account, const ExportOptions& options) {
  const Framework& f = account.framework();
  return fmt::format("# Written by {} for {} {} (commit {}).\n# Case {}, id {}. What is not in this file stands in EXPORT.md.\n",
                     options.program.empty() ? "shardlab" : options.program, f.name, f.version, f.commit,
                     account.of().name.empty() ? "without a name" : account.of().name,
                     options.case_id.empty() ? "none" : options.case_id);
}

Placement placement_of(const Case& c) {
  const int64_t ranks = c.layout.world_size(), per_node = std::max(1, c.machine.devices_per_node);
  if (ranks <= per_node) return {1, ranks};
  return {(ranks + per_node - 1) / per_node, per_node};
}

}  // namespace shardlab::interop
