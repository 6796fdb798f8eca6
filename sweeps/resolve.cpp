#include "sweeps/resolve.h"
#include "sweeps/expression_keys.h"

#include <fmt/format.h>

#include <algorithm>

#include "plan/automatic.h"
#include "plan/base/values.h"
#include "plan/case.h"
#include "plan/optimizers.h"

namespace shardlab::sweeps {

namespace {

constexpr int64_t kLongestDefaultSequence = 4096;
constexpr int64_t kMostMeasuredSteps = 1'000'000;

void take_model(const ModelConfig& model, Draft& draft) {
  draft.config.model = model.model;
  if (!model.unexecuted.empty()) draft.model = std::make_shared<ModelConfig>(model);
}

/// Keys of mixtures of experts of models that no case holds, which every estimate knows.
bool set_experts(std::string_view path, const std::string& text, Draft& draft) {
  int64_t ModelConfig::*const field = path == "model.experts"   ? &ModelConfig::experts
                                      : path == "model.top_k"   ? &ModelConfig::top_k
                                      : path == "model.moe_ffn" ? &ModelConfig::moe_ffn
                                                                : nullptr;
  const bool held = !draft.model && draft.config.model.is_llama();
  if (field == nullptr || held || (!draft.model && parse_count(text).value() <= 1)) return false;
  if (!draft.model) draft.model = std::make_shared<ModelConfig>();
  ModelConfig& m = *draft.model;
  m.*field = parse_count(text).value();
  if (m.unexecuted.empty()) m.unexecuted = kMixture;
  return true;
}

void apply(const Settings& settings, Draft& draft) {
  std::vector<std::pair<const CaseKey*, const std::string*>> said;  // in the order of the table
  for (const auto& [path, setting] : settings)
    if (const CaseKey* key = find_key(path); key != nullptr && setting.text != "auto") said.emplace_back(key, &setting.text);
  std::ranges::sort(said);
  for (const auto& [key, text] : said) {
    if (set_experts(key->path, *text, draft)) continue;
    if (!key->set(draft.config, *text)) draft.unheld.emplace_back(key->path, *text);
  }
}

/// "llama-4L-256d-8h", "llama-4L-256d-8h-16e": what a model without a name is called, by its family, layers, width, heads and experts.
std::string name_by_sizes(const Model& m) {
  return fmt::format("{}-{}L-{}d-{}h{}", name_of(m.family), m.layers, m.hidden, m.heads,
                     m.is_mixture() ? fmt::format("-{}e", m.experts.count) : "");
}

/// A model written inline: what is not said follows from the rest, as in a config.json.
void complete_inline(Model& m, const Settings& said, const Settings& over) {
  const auto given = [&](const char* path) { return said.contains(path) || over.contains(path); };
  if (!given("model.kv_heads")) m.kv_heads = m.heads;
  if (!given("model.head_dim") && m.heads > 0) m.head_dim = m.is_latent() ? m.latent.nope + m.latent.rope : m.hidden / m.heads;
  if (!given("model.ffn") && !m.is_llama()) m.ffn = 4 * m.hidden;
  if (!given("model.ffn") && m.is_mixture() && m.mixture_layers() == m.layers)
    m.ffn = m.experts.ffn;  // as Mixtral's config.json says it
  if (!given("model.tied_embeddings")) m.tied_embeddings = !m.is_llama();
  if (!given("model.name")) m.name = name_by_sizes(m);
}

const Setting* source_of(const Settings& settings, std::string_view group) {
  for (const auto& [path, setting] : settings)
    if (source_group(path) == group) return &setting;
  return nullptr;
}

/// What people train in: 16 bits where the device has them. A local machine's results are compared bit by bit.
Precision default_precision(const Machine& m) {
  const auto bf16 = m.device.peak_flops.find("bf16");
  return !m.local && bf16 != m.device.peak_flops.end() && bf16->second > 0 ? Precision::kBf16 : Precision::kFp32;
}

Result<void> derive_dp(Case& c) {
  const Layout& l = c.layout;
  const int64_t others = int64_t{l.tp} * l.pp * l.cp;
  if (others < 1) return {};  // `check` refuses it with its value
  const std::string product = fmt::format("tp*pp*cp = {}*{}*{} = {}", l.tp, l.pp, l.cp, others);
  if (c.machine.devices() < others)
    return refusal(fmt::format("{} ranks, but {} has {} device{}", product, c.machine.id, c.machine.devices(),
                               c.machine.devices() == 1 ? "" : "s"),
                   "lower tp, pp or cp, or raise machine.nodes", ErrorKind::kTooManyRanks);
  if (c.machine.devices() % others != 0)
    return refusal(fmt::format("{} devices are not a multiple of {}: dp cannot be derived", c.machine.devices(), product),
                   fmt::format("change tp, pp, cp or machine.nodes; or give dp, and leave devices idle: dp={} uses {} of them",
                               c.machine.devices() / others, c.machine.devices() / others * others));
  c.layout.dp = static_cast<int>(c.machine.devices() / others);
  return {};
}

Result<void> check_ranks(const Case& c) {
  const Layout& l = c.layout;
  const double ranks = static_cast<double>(l.dp) * l.tp * l.pp * l.cp;
  if (c.machine.local || ranks <= c.machine.devices()) return {};
  const auto counted = [](int n, const char* what) { return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s"); };
  return refusal(
      fmt::format("dp*tp*pp*cp = {}*{}*{}*{} = {:.0f} ranks, but {} has {} ({} of {})", l.dp, l.tp, l.pp, l.cp, ranks, c.machine.id,
                  counted(c.machine.devices(), "device"), counted(c.machine.nodes, "node"), c.machine.devices_per_node),
      "lower dp, tp, pp or cp, or raise machine.nodes", ErrorKind::kTooManyRanks);
}

Result<void> derive_batch(Case& c, bool accumulation_given, bool tokens_given) {
  Train& t = c.train;
  const double positive = static_cast<double>(t.seq_len) * static_cast<double>(t.micro_batch) * c.layout.dp;
  if (t.seq_len < 1 || t.micro_batch < 1 || c.layout.dp < 1 || positive > 1e18) return {};  // `check` refuses it with its value
  const int64_t tokens = t.seq_len * t.micro_batch * c.layout.dp;
  if (tokens_given && !accumulation_given) {
    if (t.global_batch_tokens < 1 || t.global_batch_tokens % tokens != 0) {
      SHARDLAB_TRY(check_ranks(c));  // more ranks than devices are not cured by another batch
      return refusal(fmt::format("global_batch_tokens={} is not a positive multiple of seq_len {} * micro_batch {} * dp {} = {}",
                                 t.global_batch_tokens, t.seq_len, t.micro_batch, c.layout.dp, tokens),
                     fmt::format("set global_batch_tokens to a multiple of {}, or change micro_batch or dp", tokens),
                     ErrorKind::kBatch);
    }
    t.grad_accumulation = t.global_batch_tokens / tokens;
  }
  if (!tokens_given && t.grad_accumulation > 0 && positive * static_cast<double>(t.grad_accumulation) < 1e18)
    t.global_batch_tokens = tokens * t.grad_accumulation;
  return {};
}

}  // namespace

ExpressionValue Draft::lookup(std::string_view word, const Settings* given) const {
  const CaseKey* key = find_key(word);
  SHARDLAB_CHECK(key != nullptr && key->get != nullptr, "an expression asks for {}", word);
  for (const auto& [path, text] : unheld)
    if (path == key->path) return expression_value(*key, text);
  if (key->path == "train.precision" && given && !given->contains(key->path))
    return std::string(name_of(default_precision(config.machine)));
  if (is_derived(key->path) && given && !given->contains(key->path)) return std::monostate{};
  return expression_value(*key, key->get(config));
}

Draft draft_of(const Settings& settings, const Sources& sources) {
  Draft draft;
  if (const Setting* model = source_of(settings, "model"))
    take_model(sources.models.at(model->text), draft);
  else
    apply(sources.inline_model, draft);
  if (const Setting* machine = source_of(settings, "machine")) {
    const bool written = settings.contains("machine.inline");
    draft.config.machine = written ? *sources.inline_machine : sources.machines.at(machine->text);
  }
  apply(settings, draft);
  if (!source_of(settings, "model")) complete_inline(draft.config.model, sources.inline_model, settings);
  if (draft.model) draft.model->model = draft.config.model;
  return draft;
}

Result<void> derive(Case& c, const Settings& given) {
  if (!given.contains("train.seq_len"))
    c.train.seq_len =
        c.model.max_positions > 0 ? std::min(c.model.max_positions, kLongestDefaultSequence) : kLongestDefaultSequence;
  if (!given.contains("layout.schedule"))
    c.layout.schedule = c.layout.pp == 1 ? Schedule::kNone : c.layout.vpp > 1 ? Schedule::kInterleaved : Schedule::k1F1B;
  if (!given.contains("train.precision")) c.train.precision = default_precision(c.machine);
  if (!given.contains("layout.dp")) SHARDLAB_TRY(derive_dp(c));
  if (!given.contains("train.beta2")) c.train.beta2 = row_of(c.train.optimizer).beta2;
  if (!given.contains("layout.bucket_bytes")) c.layout.bucket_bytes = automatic_bucket_bytes(c);
  return derive_batch(c, given.contains("train.grad_accumulation"), given.contains("train.global_batch_tokens"));
}

Result<void> check_point(const Draft& draft, Mode mode, Resolution resolution) {
  const Case& c = draft.config;
  // shardlab's executor is estimated as it runs.
  const bool estimated = resolution == Resolution::kAnalytic && c.profile != "shardlab";
  if (draft.model && !estimated)
    return refusal(
        fmt::format("{} is not executed: {}", c.model.name, draft.model->unexecuted),
        "it is estimated as a framework runs it: --profile megatron with `shardlab search` or `shardlab memory`; in a sweep "
        "profile: megatron and resolution: analytic",
        ErrorKind::kOnlyEstimated);
  if (!draft.unheld.empty() && !estimated) {
    const auto& [path, text] = draft.unheld.front();
    const CaseKey* key = find_key(path);
    const std::string word(path.substr(path.find('.') + 1));
    return refusal(fmt::format("{}={} is not implemented in this version",
                               path.starts_with("model.") || path.starts_with("machine.") ? path : word, text),
                   fmt::format("implemented: {}", key->holds), ErrorKind::kMissing);
  }
  SHARDLAB_TRY(check_ranks(c));
  if (c.train.learning_rate.kind == LearningRate::Kind::kCosine && c.train.learning_rate.total_steps < 1)
    return refusal("learning_rate.kind=cosine needs total_steps", "set train.learning_rate.total_steps");
  if (c.machine.local && c.machine.cores < 1)
    return refusal(fmt::format("machine.cores={} on a local machine: its ranks run on cores", c.machine.cores),
                   "set machine.cores to 1 or more");
  if (mode == Mode::kSimulate) return {};
  if (!c.machine.local)
    return refusal(fmt::format("mode {} measures this machine, not {}", name_of(mode), c.machine.id),
                   "use machine: {local: true}, or mode: simulate");
  if (c.measure.steps < 1 || c.measure.repeat < 1 || c.measure.warmup < 0)
    return refusal(fmt::format("measure: warmup={} steps={} repeat={}", c.measure.warmup, c.measure.steps, c.measure.repeat),
                   "use at least one step and one repeat, and no fewer than 0 steps of warm-up");
  if (static_cast<double>(c.measure.steps) * static_cast<double>(c.measure.repeat) > kMostMeasuredSteps)
    return refusal(fmt::format("measure: steps={} times repeat={} is more than {} steps", c.measure.steps, c.measure.repeat,
                               kMostMeasuredSteps),
                   "lower measure.steps or measure.repeat");
  return {};
}

}  // namespace shardlab::sweeps
