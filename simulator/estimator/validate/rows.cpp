#include "simulator/estimator/validate/rows.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <sstream>

#include "plan/optimizers.h"
#include "simulator/estimator/analytic/analytic.h"

namespace shardlab::simulator::validation {
namespace {

// The largest value of each size that a training run of this decade can have; beyond it something was mistyped. Their products
// stay below 2^62 where this file forms them.
constexpr int64_t kMostLayers = 10'000, kMostWidth = 4'194'304, kMostHeads = 16'384, kMostHeadDim = 65'536,
                  kMostVocab = 100'000'000;
constexpr int64_t kMostExperts = 65'536, kMostDevices = 4'194'304, kMostSequence = 1'000'000'000, kMostBatch = 16'777'216;
constexpr int64_t kMostTokens = 1'000'000'000'000, kMostBytes = 100'000'000'000'000;
constexpr int64_t kMostDevicesOfHost = 8;
constexpr double kMostSeconds = 1e7, kLeastSeconds = 1e-6, kMostTokensPerSecond = 1e15, kMostBandwidth = 1e5;
constexpr double kMostParameters = 1e15;

constexpr std::array kProfiles = {"shardlab", "megatron", "nanotron", "torchtitan", "deepspeed", "llm-foundry", "llm.c", "llmq"};
constexpr std::array kPrecisions = {"fp32", "bf16", "fp16", "fp8", "fp4"};
constexpr std::array kCpKinds = {"ring", "zigzag", "striped", "all-gather", "ulysses", "usp"};
constexpr std::array kScalings = {"tensorwise", "rowwise", "blockwise", "delayed", "mx"};
constexpr std::array kGraphs = {"none", "layers", "step"};
constexpr std::array kOffloaded = {"activations", "optimizer", "parameters", "master", "m", "v"};
constexpr std::array kMedia = {"cpu", "nvme"};

constexpr std::array kColumns = {
    "profile", "model", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts", "top_k", "moe_ffn",
    "tied_embeddings", "mlp", "norm", "machine", "devices", "dp", "tp", "pp", "vpp", "cp", "ep", "zero", "schedule",
    "sequence_parallel", "recompute", "offload", "precision", "micro_batch", "grad_accumulation", "seq_len", "global_batch_tokens",
    "overlap", "bucket_bytes", "hybrid_shard", "cp_kind", "reduce_dtype", "accumulate_dtype", "optimizer", "dropout",
    "all_reduce_busbw_gbps", "all_gather_busbw_gbps", "reduce_scatter_busbw_gbps", "intra_all_reduce_busbw_gbps",
    "intra_all_gather_busbw_gbps", "intra_reduce_scatter_busbw_gbps", "measured_step_s", "measured_tokens_per_s", "measured_bytes",
    "measured_memory_kind", "measured_status",
    // beyond the fixed contract, for what published runs differ in
    "source", "shared_experts", "dense_layers", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "attention",
    "async_tp", "compile", "fp8_scaling", "fp8_gather", "expandable_segments", "busbw_bytes", "biases", "positions", "expert_tp",
    "stage_split", "master_dtype", "moment_dtype", "gradient_fusion", "tf32", "cuda_graphs", "head_chunks", "offload_layers",
    "micro_batch_group", "expert_overlap", "memory_rank", "assumed"};

std::vector<std::string_view> optimizer_words() {
  std::vector<std::string_view> words;
  for (const OptimizerRow& row : optimizers()) words.push_back(row.name);
  return words;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

/// A finite number and nothing else, or nothing.
std::optional<double> number_of(const std::string& text) {
  double value = 0;
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, failure] = std::from_chars(begin, text.data() + text.size(), value);
  if (failure != std::errc{} || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

/// Reads the fields of one record; the first thing wrong is kept, for the row is then refused.
class RowReader {
 public:
  RowReader(const CsvTable& csv, const std::vector<CsvField>& record, const std::string& file)
      : csv_(csv), record_(record), file_(file) {}

  bool failed() const { return error_.has_value(); }
  Error take_error() { return std::move(*error_); }

  /// The field of a column; empty where the table has none.
  std::string text(std::string_view column) const {
    const int at = csv_.column(column);
    return at < 0 ? std::string() : record_[static_cast<size_t>(at)].text;
  }
  bool stated(std::string_view column) const { return !text(column).empty(); }

  std::optional<double> number(std::string_view column, double least, double most) {
    if (!stated(column)) return std::nullopt;
    const auto value = number_of(text(column));
    if (!value)
      refuse(column, fmt::format("`{}` is not a number", text(column)),
             "write digits, with a point for the fraction and without a unit");
    else if (*value < least || *value > most)
      refuse_range(column, fmt::format("{:g} to {:g}", least, most));
    return failed() ? std::nullopt : value;
  }

  std::optional<int64_t> size(std::string_view column, int64_t least, int64_t most) {
    if (!stated(column)) return std::nullopt;
    const auto value = number_of(text(column));
    if (!value || *value != std::floor(*value))
      refuse(column, fmt::format("`{}` is not a whole number", text(column)), "write digits alone, without a fraction or a unit");
    else if (*value < static_cast<double>(least) || *value > static_cast<double>(most))
      refuse_range(column, fmt::format("{} to {}", least, most));
    return failed() ? std::nullopt : std::optional(static_cast<int64_t>(*value));
  }
  void read_size(std::string_view column, int64_t most, int64_t& out, int64_t least = 1) {
    if (const auto value = size(column, least, most)) out = *value;
  }

  std::optional<bool> truth(std::string_view column) {
    if (!stated(column)) return std::nullopt;
    const std::string word = lower(text(column));
    if (word == "true" || word == "yes" || word == "1") return true;
    if (word == "false" || word == "no" || word == "0") return false;
    refuse(column, fmt::format("`{}` is neither true nor false", text(column)), "write true or false");
    return std::nullopt;
  }

  /// The lower-case word of a column, checked against those allowed; empty where it is not stated.
  template <class Words>
  std::string word(std::string_view column, const Words& allowed) {
    const std::string value = lower(text(column));
    if (value.empty() || std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return value;
    refuse(column, fmt::format("`{}` is unknown", text(column)), fmt::format("expected one of: {}", fmt::join(allowed, " ")));
    return {};
  }

  void refuse(std::string_view column, const std::string& message, const std::string& hint) {
    if (error_) return;
    const int at = csv_.column(column);
    const CsvField& field = record_[static_cast<size_t>(std::max(at, 0))];
    error_ = Error{ExitCode::kUsage, fmt::format("`{}`: {}", column, message), hint,
                   fmt::format("{}:{}:{}", file_, field.line, field.column)};
  }

 private:
  void refuse_range(std::string_view column, const std::string& range) {
    const std::string_view unit = column == "measured_tokens_per_s" ? " tokens/s"
                                  : column.ends_with("_s")          ? " seconds"
                                  : column.ends_with("_gbps")       ? " GB/s"
                                  : column.ends_with("bytes")       ? " bytes"
                                                                    : "";
    refuse(column, fmt::format("{} is outside {}{}", text(column), range, unit), "check the unit, the sign and the digits");
  }

  const CsvTable& csv_;
  const std::vector<CsvField>& record_;
  const std::string& file_;
  std::optional<Error> error_;
};

void fill_from(const Model& model, RunShape& shape) {
  shape.layers = model.layers, shape.hidden = model.hidden, shape.heads = model.heads, shape.kv_heads = model.kv_heads;
  shape.head_dim = model.head_dim, shape.ffn = model.ffn, shape.vocab = model.vocab;
  shape.tied_embeddings = model.tied_embeddings;
  shape.swiglu = shape.rms_norm = model.is_llama();
}

/// The columns that say a whole shape without a preset.
bool states_shape(const RowReader& in) {
  for (const char* column : {"layers", "hidden", "heads", "vocab"})
    if (!in.stated(column)) return false;
  return in.stated("ffn") || in.stated("moe_ffn");
}

void read_experts(RowReader& in, RunShape& shape) {
  in.read_size("experts", kMostExperts, shape.experts, 0);
  in.read_size("top_k", kMostExperts, shape.top_k, 0);
  in.read_size("moe_ffn", kMostWidth, shape.moe_ffn, 0);
  in.read_size("shared_experts", kMostExperts, shape.shared_experts, 0);
  in.read_size("dense_layers", kMostLayers, shape.dense_layers, 0);
  in.read_size("q_lora_rank", kMostWidth, shape.q_lora_rank, 0);
  in.read_size("kv_lora_rank", kMostWidth, shape.kv_lora_rank, 0);
  in.read_size("qk_rope_head_dim", kMostHeadDim, shape.qk_rope_head_dim, 0);
  in.read_size("v_head_dim", kMostHeadDim, shape.v_head_dim, 0);
  if (in.failed() || shape.experts == 0) return;
  if (shape.top_k < 1 || shape.top_k > shape.experts)
    in.refuse("top_k", fmt::format("{} of {} experts for a token", shape.top_k, shape.experts),
              "use 1 up to the number of experts");
  if (shape.moe_ffn == 0) shape.moe_ffn = shape.ffn;
  if (shape.dense_layers > shape.layers)
    in.refuse("dense_layers", fmt::format("{} dense layers of {}", shape.dense_layers, shape.layers),
              "use at most as many as layers");
}

/// Parameters, counted roughly and in floating point: only to tell a model from a mistyped number.
double rough_parameters(const RunShape& s) {
  const double experts = s.experts > 0 ? static_cast<double>(s.experts + s.shared_experts) : 1;
  const double ffn = static_cast<double>(s.experts > 0 ? s.moe_ffn : s.ffn) * experts;
  const double attention = 2.0 * static_cast<double>(s.heads + s.kv_heads) * static_cast<double>(s.head_dim);
  return static_cast<double>(s.hidden) * (static_cast<double>(s.layers) * (attention + 3 * ffn) + 2 * static_cast<double>(s.vocab));
}

void check_shape(RowReader& in, const RunShape& s) {
  if (in.failed()) return;
  for (const auto& [column, value] : {std::pair{"layers", s.layers},
                                      {"hidden", s.hidden},
                                      {"heads", s.heads},
                                      {"kv_heads", s.kv_heads},
                                      {"head_dim", s.head_dim},
                                      {"vocab", s.vocab}})
    if (value < 1) in.refuse(column, "is not stated", "fill the column, or name a preset in `model`");
  if (s.ffn < 1 && s.experts == 0) in.refuse("ffn", "is not stated", "fill the column, or name a preset in `model`");
  if (in.failed()) return;
  if (s.heads % s.kv_heads != 0)
    in.refuse("kv_heads", fmt::format("{} heads do not divide into {} groups", s.heads, s.kv_heads), "kv_heads divides heads");
  if (s.kv_lora_rank > 0 && (s.qk_rope_head_dim < 1 || s.v_head_dim < 1))
    in.refuse("kv_lora_rank", "latent attention without qk_rope_head_dim or v_head_dim", "fill both columns");
  if (rough_parameters(s) > kMostParameters)
    in.refuse("hidden", fmt::format("these sizes make {:.2g} parameters", rough_parameters(s)), "check the digits");
}

void read_shape(RowReader& in, const Resolver& resolver, RunShape& shape) {
  if (const std::string name = in.text("model"); !name.empty()) {
    const auto model = resolver.model(name);
    if (model.ok())
      fill_from(*model, shape);
    else if (!states_shape(in))  // with a shape beside it, the name is only a label
      return in.refuse("model", model.error().message, model.error().hint);
  }
  in.read_size("layers", kMostLayers, shape.layers);
  in.read_size("hidden", kMostWidth, shape.hidden);
  in.read_size("heads", kMostHeads, shape.heads);
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  in.read_size("kv_heads", kMostHeads, shape.kv_heads);
  in.read_size("ffn", kMostWidth, shape.ffn);
  in.read_size("vocab", kMostVocab, shape.vocab);
  if (!in.stated("head_dim") && shape.heads > 0 && (shape.head_dim == 0 || in.stated("hidden") || in.stated("heads"))) {
    if (shape.hidden % shape.heads != 0)
      in.refuse("head_dim", fmt::format("hidden {} is not a multiple of {} heads", shape.hidden, shape.heads), "state head_dim");
    shape.head_dim = shape.hidden / shape.heads;
  }
  in.read_size("head_dim", kMostHeadDim, shape.head_dim);
  if (const auto tied = in.truth("tied_embeddings")) shape.tied_embeddings = *tied;
  constexpr std::array kMlps = {"gelu", "swiglu"};
  constexpr std::array kNorms = {"layer", "rms"};
  if (const std::string mlp = in.word("mlp", kMlps); !mlp.empty()) shape.swiglu = mlp == "swiglu";
  if (const std::string norm = in.word("norm", kNorms); !norm.empty()) shape.rms_norm = norm == "rms";
  shape.biases = in.truth("biases");
  constexpr std::array kPositions = {"learned", "rotary"};
  if (const std::string positions = in.word("positions", kPositions); !positions.empty())
    shape.learned_positions = positions == "learned";
  read_experts(in, shape);
  check_shape(in, shape);
}

/// Words of a list as users write one: "attn,mlp", "[attn, mlp]", "attn mlp".
std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words(1);
  for (const char c : lower(text)) {
    if (std::string_view(" ,;[]{}'\"\t").find(c) != std::string_view::npos)
      words.emplace_back();
    else
      words.back() += c;
  }
  std::erase(words, "");
  return words;
}

void read_recompute(RowReader& in, RunLayout& layout) {
  layout.recompute = words_of(in.text("recompute"));
  if (layout.recompute.empty()) layout.recompute = {"none"};
  for (const std::string& word : layout.recompute) {
    const bool whole = word == "none" || word == "selective" || word == "full";
    const bool name = std::all_of(word.begin(), word.end(), [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-';
    });
    if (!name || (whole && layout.recompute.size() > 1))
      in.refuse("recompute", fmt::format("`{}` is not a kind of recompute", in.text("recompute")),
                "none, selective, full, or a list of sub-layers");
  }
}

void read_offload(RowReader& in, RunLayout& layout) {
  std::string text = in.text("offload");
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '=' || c == ':'; }, ' ');
  const std::vector<std::string> words = words_of(text);
  if (words.empty() || (words.size() == 1 && words[0] == "none")) return;
  for (size_t i = 0; i < words.size(); i += 2) {
    const bool known = std::find(kOffloaded.begin(), kOffloaded.end(), words[i]) != kOffloaded.end() && i + 1 < words.size() &&
                       std::find(kMedia.begin(), kMedia.end(), words[i + 1]) != kMedia.end();
    if (!known)
      return in.refuse("offload", fmt::format("`{}` is unknown", in.text("offload")),
                       "none, or optimizer=cpu,activations=nvme; master, m and v are parts of the optimizer");
    layout.offload.emplace_back(words[i], words[i + 1]);
  }
}

void read_schedule(RowReader& in, RunLayout& layout) {
  const std::string schedule = in.word("schedule", analytic::schedule_words());
  layout.schedule = !schedule.empty() ? schedule : layout.pp == 1 ? "none" : layout.vpp > 1 ? "interleaved" : "1f1b";
  // A pipeline of one stage has no schedule, whatever the run's settings called it; and 1F1B over virtual stages is
  // the interleaved one.
  if (layout.pp == 1) layout.schedule = "none";
  if (layout.schedule == "1f1b" && layout.vpp > 1) layout.schedule = "interleaved";
  if (layout.pp > 1 && layout.schedule == "none")
    in.refuse("schedule", fmt::format("none with pp = {}", layout.pp), "name a schedule, as 1f1b");
  if (layout.pp == 1 && layout.vpp > 1)
    in.refuse("vpp", fmt::format("{} virtual stages without a pipeline", layout.vpp), "use 1 where pp is 1");
}

/// "embedding+head" (each counts as a layer), "first=6 last=4" (layers of the ends of the pipeline), or both.
void read_split(RowReader& in, RunLayout& layout) {
  std::string text = in.text("stage_split");
  std::replace(text.begin(), text.end(), '+', ' ');
  for (const std::string& word : words_of(text)) {
    const size_t equals = word.find('=');
    const auto count = equals == std::string::npos ? std::nullopt : number_of(word.substr(equals + 1));
    const std::string key = word.substr(0, equals);
    const bool whole = count && *count >= 1 && *count <= static_cast<double>(kMostLayers) && *count == std::floor(*count);
    if (!count && word == "embedding")
      layout.embedding_as_layer = true;
    else if (!count && word == "head")
      layout.head_as_layer = true;
    else if (whole && key == "first")
      layout.first_stage_layers = static_cast<int64_t>(*count);
    else if (whole && key == "last")
      layout.last_stage_layers = static_cast<int64_t>(*count);
    else
      return in.refuse("stage_split", fmt::format("`{}` is unknown", word),
                       "embedding+head, or first=6 last=4: layers of the first and the last stage");
  }
}

void read_techniques(RowReader& in, RunLayout& layout) {
  read_split(in, layout);
  layout.expert_tp = in.size("expert_tp", 1, kMostDevices);
  layout.master_dtype = in.word("master_dtype", kPrecisions);
  layout.moment_dtype = in.word("moment_dtype", kPrecisions);
  layout.gradient_fusion = in.truth("gradient_fusion");
  layout.tf32 = in.truth("tf32");
  layout.cuda_graphs = in.word("cuda_graphs", kGraphs);
  layout.head_chunks = in.size("head_chunks", 1, kMostBatch);
  in.read_size("offload_layers", kMostLayers, layout.offload_layers);
  in.read_size("micro_batch_group", kMostBatch, layout.micro_batch_group);
  layout.expert_overlap = in.truth("expert_overlap").value_or(false);
  layout.zero = in.size("zero", 0, 3);
  read_schedule(in, layout);
  layout.sequence_parallel = in.truth("sequence_parallel");
  read_recompute(in, layout);
  read_offload(in, layout);
  if (const std::string precision = in.word("precision", kPrecisions); !precision.empty()) layout.precision = precision;
  layout.overlap = in.truth("overlap");
  layout.async_tp = in.truth("async_tp");
  layout.compile = in.truth("compile");
  layout.expandable_segments = in.truth("expandable_segments");
  layout.fp8_gather = in.truth("fp8_gather");
  constexpr std::array kAttention = {"fused", "unfused"};
  if (const std::string attention = in.word("attention", kAttention); !attention.empty())
    layout.fused_attention = attention == "fused";
  layout.cp_kind = in.word("cp_kind", kCpKinds);
  layout.fp8_scaling = in.word("fp8_scaling", kScalings);
  layout.reduce_dtype = in.word("reduce_dtype", kPrecisions);
  layout.accumulate_dtype = in.word("accumulate_dtype", kPrecisions);
  layout.optimizer = in.word("optimizer", optimizer_words());
  layout.bucket_bytes = in.size("bucket_bytes", 0, kMostBytes);
  layout.hybrid_shard = in.size("hybrid_shard", 0, kMostDevices);
  layout.dropout = in.number("dropout", 0, 1);
}

/// dp from the devices, or the devices from the layout; they must agree.
void read_ranks(RowReader& in, Run& run) {
  RunLayout& l = run.layout;
  for (const auto& [column, out] : {std::pair{"tp", &l.tp}, {"pp", &l.pp}, {"vpp", &l.vpp}, {"cp", &l.cp}, {"ep", &l.ep}})
    in.read_size(column, kMostDevices, *out);
  in.read_size("devices", kMostDevices, run.devices);
  if (in.failed()) return;
  const double model_parallel = static_cast<double>(l.tp) * static_cast<double>(l.pp) * static_cast<double>(l.cp);
  if (model_parallel > static_cast<double>(kMostDevices))
    return in.refuse("tp", fmt::format("tp * pp * cp = {:.0f} ranks", model_parallel), fmt::format("at most {}", kMostDevices));
  const int64_t rest = l.tp * l.pp * l.cp;
  if (!in.stated("dp")) {
    if (!in.stated("devices")) return in.refuse("devices", "neither devices nor dp is stated", "fill one of the two");
    if (run.devices % rest != 0)
      return in.refuse("devices", fmt::format("{} is not a multiple of tp * pp * cp = {}", run.devices, rest), "check the layout");
    l.dp = run.devices / rest;
  }
  in.read_size("dp", kMostDevices, l.dp);
  if (in.failed()) return;
  if (static_cast<double>(l.dp) * model_parallel > static_cast<double>(kMostDevices))
    return in.refuse("dp", fmt::format("dp * tp * pp * cp = {:.0f} ranks", static_cast<double>(l.dp) * model_parallel),
                     fmt::format("at most {}", kMostDevices));
  if (!in.stated("devices")) run.devices = l.world_size();
  if (run.devices != l.world_size())
    in.refuse("devices",
              fmt::format("{}, but dp * tp * pp * cp = {} * {} * {} * {} = {} ranks", run.devices, l.dp, l.tp, l.pp, l.cp,
                          l.world_size()),
              "make the two equal");
  const auto cut = in.size("expert_tp", 1, kMostDevices);
  if (in.failed()) return;
  const int64_t ranks = l.dp * l.cp * l.tp, expert_tp = cut.value_or(l.tp);
  if (ranks % (l.ep * expert_tp) != 0)
    in.refuse("ep", fmt::format("{} times expert_tp {} does not divide dp * cp * tp = {}", l.ep, expert_tp, ranks),
              "ep * expert_tp divides dp * cp * tp; expert_tp is tp where it is not stated");
}

/// global_batch_tokens = seq_len * micro_batch * grad_accumulation * dp: any one of the last follows from the others.
void read_batch(RowReader& in, RunLayout& l) {
  in.read_size("seq_len", kMostSequence, l.seq_len);
  if (!in.stated("seq_len")) in.refuse("seq_len", "is not stated", "fill the column: tokens of a sequence");
  in.read_size("micro_batch", kMostBatch, l.micro_batch);
  in.read_size("grad_accumulation", kMostBatch, l.grad_accumulation);
  const auto tokens = in.size("global_batch_tokens", 1, kMostTokens);
  if (in.failed()) return;
  const double stated = static_cast<double>(l.seq_len) * static_cast<double>(l.dp) * static_cast<double>(l.micro_batch) *
                        static_cast<double>(l.grad_accumulation);
  if (stated > static_cast<double>(kMostTokens))
    return in.refuse("micro_batch", fmt::format("a step of {:.3g} tokens", stated), fmt::format("at most {}", kMostTokens));
  if (!in.stated("micro_batch") && !(tokens && in.stated("grad_accumulation")))
    return in.refuse("micro_batch", "is not stated, and does not follow from global_batch_tokens and grad_accumulation",
                     "fill the column");
  if (!tokens) return;
  const bool derives_micro = !in.stated("micro_batch");
  const int64_t known = l.seq_len * l.dp * (derives_micro ? l.grad_accumulation : l.micro_batch);
  if (derives_micro || !in.stated("grad_accumulation")) {
    if (*tokens % known != 0)
      return in.refuse("global_batch_tokens", fmt::format("{} is not a multiple of {} tokens", *tokens, known),
                       "it is seq_len * micro_batch * grad_accumulation * dp");
    (derives_micro ? l.micro_batch : l.grad_accumulation) = *tokens / known;
  }
  if (l.tokens_per_step() != *tokens)
    in.refuse("global_batch_tokens",
              fmt::format("{} where seq_len * micro_batch * grad_accumulation * dp is {}", *tokens, l.tokens_per_step()),
              "the two must be equal: correct one of them");
}

void read_machine(RowReader& in, const Resolver& resolver, Run& run) {
  const std::string name = in.text("machine");
  if (name.empty()) return in.refuse("machine", "is not stated", "name a preset (`shardlab machine list`) or a machine file");
  auto machine = resolver.machine(name);
  if (!machine.ok()) return in.refuse("machine", machine.error().message, machine.error().hint);
  run.machine = std::move(*machine);
  if (in.failed()) return;
  // The preset of one device, and several of them in the run: one host holds up to eight, joined by the link that
  // the preset states.
  if (run.machine.devices() == 1 && run.machine.inter_bytes_per_s == 0)
    run.machine.devices_per_node = static_cast<int>(std::min(run.devices, kMostDevicesOfHost));
  const int64_t nodes = (run.devices + run.machine.devices_per_node - 1) / run.machine.devices_per_node;
  if (nodes > run.machine.nodes) run.machine.nodes = static_cast<int>(nodes);
}

void read_fabric(RowReader& in, RunFabric& fabric) {
  constexpr double kLeast = 1e-3, kMostMessage = 1e13;
  const auto read = [&](const char* column) { return in.number(column, kLeast, kMostBandwidth); };
  fabric.all_reduce = read("all_reduce_busbw_gbps");
  fabric.all_gather = read("all_gather_busbw_gbps");
  fabric.reduce_scatter = read("reduce_scatter_busbw_gbps");
  fabric.intra_all_reduce = read("intra_all_reduce_busbw_gbps");
  fabric.intra_all_gather = read("intra_all_gather_busbw_gbps");
  fabric.intra_reduce_scatter = read("intra_reduce_scatter_busbw_gbps");
  fabric.bytes = in.number("busbw_bytes", 0, kMostMessage);
}

void read_measured(RowReader& in, const RunLayout& layout, RunMeasured& m) {
  m.step_s = in.number("measured_step_s", kLeastSeconds, kMostSeconds);
  const auto rate = in.number("measured_tokens_per_s", 1e-6, kMostTokensPerSecond);
  if (!m.step_s && rate && !in.failed()) m.step_s = static_cast<double>(layout.tokens_per_step()) / *rate;
  m.bytes = in.size("measured_bytes", 1, kMostBytes);
  constexpr std::array kKinds = {"live", "reserved", "device"};
  const std::string kind = in.word("measured_memory_kind", kKinds);
  m.kind = kind == "reserved" ? MemoryKind::kReserved : kind == "device" ? MemoryKind::kDevice : MemoryKind::kLive;
  const std::string rank = lower(in.text("memory_rank"));
  if (rank == "first" || rank == "last")
    m.stage = rank == "first" ? 0 : layout.pp - 1;
  else if (!rank.empty() && rank != "fullest")
    in.refuse("memory_rank", fmt::format("`{}` is unknown", rank),
              "fullest, first or last: the stage of the pipeline whose bytes were measured");
  if (m.bytes && kind.empty()) in.refuse("measured_memory_kind", "is not stated beside measured_bytes", "live, reserved or device");
  constexpr std::array kStatuses = {"ok", "oom"};
  const std::string status = in.word("measured_status", kStatuses);
  if (!status.empty())
    m.fits = status == "ok";
  else if (m.step_s || m.bytes)
    m.fits = true;
  // What ran out of memory has no step time, and its bytes are those where it broke off.
  if (m.fits == false) m.step_s.reset(), m.bytes.reset();
}

/// A framework, or a version of one: "megatron", "megatron-2022".
void read_profile(RowReader& in, Run& run) {
  const std::string name = lower(in.text("profile"));
  const auto is_of = [&](const std::string& framework) { return name == framework || name.starts_with(framework + "-"); };
  if (!name.empty() && std::none_of(kProfiles.begin(), kProfiles.end(), is_of))
    return in.refuse("profile", fmt::format("`{}` is unknown", in.text("profile")),
                     fmt::format("expected one of: {}", fmt::join(kProfiles, " ")));
  if (!name.empty()) run.profile = name;
}

/// `assumed`: columns whose values nobody stated, with blanks between. Those count that a step's time hangs on whatever the model is.
int unstated_settings(const RowReader& in) {
  constexpr std::array kSettings = {"micro_batch", "recompute", "vpp",         "schedule",    "zero",    "sequence_parallel",
                                    "attention",   "compile",   "fp8_scaling", "cuda_graphs", "cp_kind", "overlap"};
  std::istringstream words(in.text("assumed"));
  int count = 0;
  for (std::string word; words >> word;) count += std::find(kSettings.begin(), kSettings.end(), word) != kSettings.end() ? 1 : 0;
  return count;
}

Result<Run> read_run(RowReader& in, const Resolver& resolver) {
  Run run;
  read_profile(in, run);
  read_shape(in, resolver, run.shape);
  if (!in.failed()) read_ranks(in, run);
  if (!in.failed()) read_techniques(in, run.layout);
  if (!in.failed()) read_batch(in, run.layout);
  if (!in.failed()) read_machine(in, resolver, run);
  if (!in.failed()) read_fabric(in, run.fabric);
  if (!in.failed()) read_measured(in, run.layout, run.measured);
  if (in.failed()) return in.take_error();
  run.unstated = unstated_settings(in);
  return run;
}

Error missing(const std::string& file, std::string_view columns, std::string_view hint) {
  return {ExitCode::kUsage, fmt::format("the header has {}", columns),
          fmt::format("add {}; columns that are read: {}", hint, fmt::join(kColumns, " ")), fmt::format("{}:1:1", file)};
}

}  // namespace

std::string_view name_of(MemoryKind kind) {
  constexpr std::array<std::string_view, kMemoryKinds> kNames = {"live", "reserved", "device"};
  return kNames[static_cast<size_t>(kind)];
}

std::vector<std::string> known_columns() { return {kColumns.begin(), kColumns.end()}; }

Result<RowTable> read_rows(std::string_view text, const std::string& file, const Resolver& resolver) {
  auto csv = read_csv(text, file);
  if (!csv.ok()) return csv.error();
  RowTable table;
  table.name = std::filesystem::path(file).stem().string();
  table.file = file;
  table.csv = std::move(*csv);
  const auto has = [&](std::string_view column) { return table.csv.column(column) >= 0; };
  if (!has("machine"))
    return missing(file, "no column `machine`", "`machine`: a name that `shardlab machine list` prints, or a machine file");
  if (!has("seq_len")) return missing(file, "no column `seq_len`", "`seq_len`: tokens of a sequence");
  if (!has("model") && !has("layers"))
    return missing(file, "neither a column `model` nor a column `layers`",
                   "`model`, a model's name, or `layers`, `hidden`, `heads` and the other sizes");
  if (!has("devices") && !has("dp"))
    return missing(file, "neither a column `devices` nor a column `dp`", "one of the two: all devices, or data-parallel ranks");
  for (const std::string& column : table.csv.columns)
    if (std::find(kColumns.begin(), kColumns.end(), column) == kColumns.end()) table.unread.push_back(column);
  for (const auto& record : table.csv.records) {
    RowReader in(table.csv, record, file);
    Row row;
    row.line = record.front().line;
    row.source = in.text("source");
    if (row.source.empty()) row.source = table.name;
    row.run = read_run(in, resolver);
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace shardlab::simulator::validation
