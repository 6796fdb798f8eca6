#include "plan/technique_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "plan/automatic.h"
#include "plan/base/tree.h"
#include "plan/expert_placement.h"
#include "plan/limits.h"
#include "plan/pipeline_case.h"
#include "plan/routing.h"
#include "plan/techniques.h"
#include "plan/treatment.h"

namespace shardlab::settings {
namespace {

/// `whole` must be a positive multiple of `parts`.
Result<void> divides(std::string_view what, int64_t whole, std::string_view key, int64_t parts) {
  if (whole % parts == 0) return {};
  std::string fitting;
  for (int64_t p = 1; p <= std::min<int64_t>(whole, 64); ++p)
    if (whole % p == 0) fitting += fmt::format("{}{}", fitting.empty() ? "" : " ", p);
  return refusal(fmt::format("{} {} is not divisible by {}={}", what, whole, key, parts),
                 fmt::format("choose {} among {}, or another model", key, fitting));
}

/// Most inner steps that a period is planned of: its program is as long as all of them.
constexpr int kMostInnerSteps = 4096;

/// A period of `steps` steps, which `key` asks for, is short enough to be planned.
Result<void> check_period(const Case& c, std::string_view key, int64_t steps) {
  const double runs = static_cast<double>(steps) * static_cast<double>(c.model.layers * c.train.grad_accumulation);
  if (runs <= kMostLayerRuns) return {};
  return refusal(fmt::format("{}={} with layers {} and grad_accumulation {} = {:.0f} runs of a layer in one period", key, steps,
                             c.model.layers, c.train.grad_accumulation, runs),
                 fmt::format("at most {:.0f} are planned: lower {}", kMostLayerRuns, key));
}

}  // namespace

Result<void> check_zero(const Case& c) {
  if (c.layout.zero < 0 || c.layout.zero > 3) return refusal(fmt::format("zero={}", c.layout.zero), "use 0 to 3");
  return {};
}

/// Which of a GPU's libraries may be asked for.
Result<void> check_device_libraries(const Case& c) {
  if (c.attention == AttentionBy::kCudnn &&
      (c.backend != BackendKind::kCuda || c.canonical || c.train.precision == Precision::kFp32))
    return refusal(
        fmt::format("attention=cudnn with backend={}, canonical={}, precision={}: cuDNN runs on GPUs, in an order of its own, "
                    "on 2-byte elements",
                    name_of(c.backend), c.canonical, name_of(c.train.precision)),
        "use attention: auto, or backend: cuda with precision: bf16 and canonical: false");
  constexpr int64_t kMostHeadDim = 256;  // kernels/cuda/geometry.cpp
  if (c.backend == BackendKind::kCuda && (c.model.head_dim > kMostHeadDim || c.model.head_dim % 2 != 0))
    return refusal(
        fmt::format("head_dim={} with backend=cuda: attention on a GPU takes even ones up to {}", c.model.head_dim, kMostHeadDim),
        "use backend: cpu, or a model with other heads");
  if (c.backend == BackendKind::kCuda && c.model.value_dim() > kMostHeadDim)
    return refusal(fmt::format("v_head_dim={} with backend=cuda: attention on a GPU takes values of up to {}", c.model.value_dim(),
                               kMostHeadDim),
                   "use backend: cpu, or a model with other heads");
  constexpr int64_t kMostExperts = 1024;  // kernels/cuda/geometry.h
  if (c.backend == BackendKind::kCuda && c.model.experts.count > kMostExperts)
    return refusal(fmt::format("model.experts={} with backend=cuda: a router on a GPU chooses among up to {}",
                               c.model.experts.count, kMostExperts),
                   "use backend: cpu, or fewer experts");
  constexpr int kMostOnOneGpu = 64;  // kernels/cuda/kernels.h, Combine
  if (const int most = std::max({c.layout.data_ranks(), c.layout.tp, c.layout.pp});
      c.transport == TransportKind::kOneGpu && most > kMostOnOneGpu)
    return refusal(
        fmt::format("a group of {} ranks with transport=one-gpu, which adds up to {} parts at once", most, kMostOnOneGpu),
        "use fewer ranks, or transport: nccl");
  if (c.tf32 && (c.backend != BackendKind::kCuda || c.canonical || c.train.precision != Precision::kFp32))
    return refusal(
        fmt::format("tf32 with backend={}, canonical={}, precision={}: it is a way of the GPU's library to multiply fp32",
                    name_of(c.backend), c.canonical, name_of(c.train.precision)),
        "set tf32: false, or use backend: cuda with precision: fp32 and canonical: false");
  return {};
}

/// Which transports a back end can use.
Result<void> check_execution(const Case& c) {
  const bool on_device = c.transport == TransportKind::kOneGpu || c.transport == TransportKind::kNccl;
  if ((c.backend == BackendKind::kCuda) != on_device)
    return refusal(fmt::format("backend={} with transport={}", name_of(c.backend), name_of(c.transport)),
                   c.backend == BackendKind::kCuda ? "use transport: one-gpu (every rank on one device) or nccl (a device each)"
                                                   : "use transport: threads, processes, tcp, gloo or mpi, or backend: cuda");
  return {};
}

/// Gradients have one storage: what they accumulate in is what travels.
Result<void> check_gradient_dtypes(const Case& c) {
  const Train& t = c.train;
  for (const auto& [key, dtype] : {std::pair{"reduce_dtype", &t.reduce_dtype}, {"accumulate_dtype", &t.accumulate_dtype}}) {
    if (dtype->empty() || *dtype == "fp32") continue;
    if (t.precision == Precision::kFp32)
      return refusal(
          fmt::format("{}={} with precision=fp32: gradients would be narrower than what they are computed from", key, *dtype),
          fmt::format("set {}: fp32, or precision: bf16, or compression.kind: bf16, which keeps what rounding loses", key));
    const std::string_view computed =
        name_of(t.precision == Precision::kFp8 ? Precision::kBf16 : t.precision);  // what matrix products leave
    if (*dtype != computed)
      return refusal(fmt::format("{}={} with precision={}", key, *dtype, name_of(t.precision)),
                     fmt::format("use fp32, or what gradients are computed in: {}: {}", key, computed));
  }
  if (!t.reduce_dtype.empty() && !t.accumulate_dtype.empty() && t.reduce_dtype != t.accumulate_dtype)
    return refusal(fmt::format("reduce_dtype={} with accumulate_dtype={}: gradients are reduced where they accumulate, in one type",
                               t.reduce_dtype, t.accumulate_dtype),
                   "set one of the two, and leave the other out");
  return {};
}

/// Each part on two stages: half of the micro-batches find half of its gradient on either.
Result<void> check_mirrored(const Case& c) {
  const Layout& l = c.layout;
  const int64_t m = c.train.grad_accumulation;
  const auto not_with = [&](std::string what, std::string_view why) {
    return refusal(fmt::format("schedule={} with {}: {}", name_of(l.schedule), what, why), "use schedule: dualpipe-v");
  };
  if (m < 2)
    return not_with(fmt::format("grad_accumulation={}", m), "one half of the micro-batches goes down the stages, the other up");
  if (c.canonical && !std::has_single_bit(static_cast<uint64_t>(m)))
    return not_with(fmt::format("canonical and grad_accumulation={}", m),
                    "two halves are subtrees of the canonical sum of a power of two");
  return {};
}

Result<void> check_budget(const Case& c) {
  const int64_t bytes = c.layout.recompute_options.budget_bytes;
  if (bytes < 0)
    return refusal(fmt::format("recompute_options.budget_bytes={} is negative", bytes), "set the bytes that a rank may use");
  return {};
}

Result<void> check_by_layer(const Case& c) {
  const auto treatments = parse_treatments(c.layout.recompute_options.layers, c.model.layers);
  if (!treatments.ok()) return treatments.error();
  return {};
}

Result<void> check_recompute(const Case& c) {
  const Layout& l = c.layout;
  const std::string& modules = l.recompute_options.modules;
  if (!modules.empty() && l.recompute != Recompute::kSelective)
    return refusal(fmt::format("sub-layers `{}` with recompute={}", modules, name_of(l.recompute)),
                   "name them under recompute alone");
  const int every = l.recompute_options.every;
  if (every < 1) return refusal(fmt::format("recompute_options.every={}", every), "use 1 for every layer, or more");
  if (every > 1 && l.recompute != Recompute::kFull)
    return refusal(fmt::format("recompute_options.every={} with recompute={}", every, name_of(l.recompute)),
                   "set recompute: full, of which every k-th layer is made again");
  const auto named = sub_layers_named(modules, ' ');
  if (!named.ok()) return named.error();
  return {};
}

Result<void> check_secondary(const Case& c) {
  const Layout& l = c.layout;
  const int g = l.zero_plus_plus.secondary;
  if (g < 2 || g >= l.dp || l.dp % g != 0)
    return refusal(fmt::format("zero_plus_plus.secondary={} with dp={}", g, l.dp),
                   "it is the number of ranks that share a second copy of the parameters: a divisor of dp above 1 and below dp, "
                   "or 0 for none");
  return {};
}

Result<void> check_one_bit_adam(const Case& c) {
  const int warmup = c.layout.compression.warmup;
  if (warmup < 1)
    return refusal(
        fmt::format("compression.kind=one-bit-adam with compression.warmup={}: the variance that it freezes would be 0", warmup),
        "set compression.warmup to the steps of plain Adam before that, 1 or more");
  return {};
}

Result<void> check_codes(const Case& c) {
  const int bits = c.layout.compression.bits;
  if (bits != 8 && bits != 4) return refusal(fmt::format("compression.kind=int8 with compression.bits={}", bits), "use 8 or 4");
  return {};
}

Result<void> check_powersgd(const Case& c) {
  const int rank = c.layout.compression.rank;
  if (rank < 1)
    return refusal(fmt::format("compression.kind=powersgd with compression.rank={}", rank), "set compression.rank to 1 or more");
  return {};
}

Result<void> check_selection(const Case& c) {
  const Compression& k = c.layout.compression;
  const std::string what = fmt::format("compression.kind={}", name_of(k.kind));
  if (!(k.k > 0 && k.k <= 1))
    return refusal(fmt::format("{} with compression.k={}", what, k.k),
                   "set the share of elements that is sent, above 0 and up to 1");
  const Model& m = c.model;
  const int64_t largest = m.hidden * std::max({m.vocab_rows(), m.up_rows(), m.qkv_rows()});
  if (largest + c.layout.bucket_bytes / 4 >= (int64_t{1} << 31))
    return refusal(fmt::format("{} with bucket_bytes={} and a parameter of {} elements: an index of 32 bits numbers 2^31", what,
                               c.layout.bucket_bytes, largest),
                   "lower bucket_bytes, or use compression.kind: int8");
  return {};
}

Result<void> check_server_settings(const Case& c) {
  const ParameterServer& p = c.layout.parameter_server;
  if (p.servers < 0 || p.staleness < -1)
    return refusal(fmt::format("parameter_server.servers={} parameter_server.staleness={}", p.servers, p.staleness),
                   "set servers to dp, or 0 for none, and staleness to 0 or more, or -1 for workers in step");
  return {};
}

/// Every data-parallel rank serves one slice.
Result<void> check_servers(const Case& c) {
  const int servers = c.layout.parameter_server.servers, dp = c.layout.dp;
  if (servers != dp)
    return refusal(
        fmt::format("parameter_server.servers={} with dp={}: each worker's rank serves a slice, so that all have one program",
                    servers, dp),
        fmt::format("set parameter_server.servers: {}", dp));
  return {};
}

Result<void> check_diloco(const Case& c) {
  const Diloco& d = c.layout.diloco;
  const std::string what = fmt::format("diloco.steps={}", d.steps);
  if (d.steps < 0 || d.steps > kMostInnerSteps)
    return refusal(what + " is no number of inner steps that can be planned", fmt::format("use 1 to {}", kMostInnerSteps));
  SHARDLAB_TRY(check_period(c, "diloco.steps", d.steps));
  if (!(d.learning_rate > 0) || std::isinf(d.learning_rate))
    return refusal(fmt::format("diloco.learning_rate={} moves nothing, or everything", d.learning_rate),
                   "use a number above 0; 1 without momentum averages");
  if (!(d.momentum >= 0 && d.momentum < 1))
    return refusal(fmt::format("diloco.momentum={} is outside [0, 1)", d.momentum), "set diloco.momentum between 0 and 1");
  return {};
}

namespace {

/// Tensor-parallel ranks of which several share a kv head.
Result<void> check_shared_heads(const Case& c) {
  const Model& m = c.model;
  const int64_t tp = c.layout.tp;
  if (tp % m.kv_heads != 0)
    return refusal(fmt::format("kv_heads {} with tp={}: a rank takes whole kv heads, or several share one", m.kv_heads, tp),
                   "choose a tp that divides the kv heads, or is a multiple of them");
  const int64_t copies = tp / m.kv_heads, queries = m.heads / tp;
  if (copies > kContractionLeaves)
    return refusal(fmt::format("kv_heads {} with tp={}: {} ranks share a kv head", m.kv_heads, tp, copies),
                   fmt::format("at most {} do: lower tp", kContractionLeaves));
  if (m.qkv_rows() % tp != 0)
    return refusal(fmt::format("kv_heads {} with tp={}: the {} rows of wqkv are not divisible by tp", m.kv_heads, tp, m.qkv_rows()),
                   "lower tp");
  if (c.canonical && !std::has_single_bit(static_cast<uint64_t>(queries)))
    return refusal(fmt::format("canonical with kv_heads {} and tp={}: {} query heads a rank for one of {} copies of a kv head",
                               m.kv_heads, tp, queries, copies),
                   "what a rank sums over query heads must be an aligned block of the tree: a power of two of them");
  return {};
}

}  // namespace

Result<void> check_tensor_parallel(const Case& c) {
  const Model& m = c.model;
  const Layout& l = c.layout;
  SHARDLAB_TRY(divides("heads", m.heads, "tp", l.tp));
  if (m.kv_heads % l.tp != 0) SHARDLAB_TRY(check_shared_heads(c));
  SHARDLAB_TRY(divides("ffn", m.ffn, "tp", l.tp));
  if (m.is_mixture() && l.tp % std::max(1, l.expert_slices()) == 0) {  // else `check_expert_slices` says so
    const char* by = l.folds_experts() ? "expert_tp" : "tp";
    SHARDLAB_TRY(divides("moe_ffn", m.experts.ffn, by, l.expert_slices()));
  }
  if (m.experts.shared > 0 && l.folds_experts())
    SHARDLAB_TRY(divides("moe_ffn * shared_experts", m.experts.shared * m.experts.ffn, "tp", l.tp));
  if (m.vocab_rows() % l.tp != 0)
    return refusal(fmt::format("vocab {} of {} rows is not divisible by tp={}", m.vocab, m.vocab_rows(), l.tp),
                   fmt::format("pad the tables of tokens: set model.vocab_multiple: {}", 128 % l.tp == 0 ? 128 : 128 * l.tp));
  return {};
}

Result<void> check_sequence_parallel(const Case& c) {
  const Layout& l = c.layout;
  const int64_t ranks = int64_t{l.tp} * l.cp;  // that share the tokens of a sequence out
  if (c.train.seq_len % ranks != 0)
    return refusal(fmt::format("sequence_parallel with seq_len {}, which is not divisible by {}={}", c.train.seq_len,
                               l.cp > 1 ? "tp*cp" : "tp", ranks),
                   fmt::format("set sequence_parallel: false, or seq_len: {}", (c.train.seq_len + ranks - 1) / ranks * ranks));
  return {};
}

Result<void> check_context_parallel(const Case& c) {
  const Layout& l = c.layout;
  if (l.cp_kind == ContextKind::kUsp && (l.cp_ulysses < 2 || l.cp_ulysses >= l.cp || l.cp % l.cp_ulysses != 0))
    return refusal(fmt::format("cp_kind=usp with cp={} and cp_ulysses={}: rings of cp/cp_ulysses ranks, each of cp_ulysses that "
                               "exchange heads, both at least 2",
                               l.cp, l.cp_ulysses),
                   "set cp_ulysses to a divisor of cp above 1 and below cp, or cp_kind: ulysses or zigzag");
  // A rank's part is of two chunks, one of early tokens and one of late.
  const bool halves = l.cp_kind == ContextKind::kZigzag || l.cp_kind == ContextKind::kAllGather || l.cp_kind == ContextKind::kUsp;
  if (const int64_t parts = (halves ? 2 : 1) * int64_t{l.cp}; c.train.seq_len % parts != 0)
    return refusal(fmt::format("cp_kind={} with cp={} and seq_len={}, which is not divisible by {}", name_of(l.cp_kind), l.cp,
                               c.train.seq_len, parts),
                   fmt::format("choose a multiple of {}, or another cp", parts));
  return {};
}

/// Experts are cut as all else of a layer is, or by ranks of tp that are equal groups of neighbours.
Result<void> check_expert_slices(const Case& c) {
  const int slices = c.layout.expert_tp, tp = c.layout.tp;
  if (!c.model.is_mixture())
    return refusal(fmt::format("expert_tp={} of a model without experts", slices), "leave expert_tp out, or set model.experts");
  if (slices >= 1 && tp % slices == 0) return {};
  return refusal(
      fmt::format("expert_tp={} with tp={}: the ranks of tp are divided into groups that cut each expert", slices, tp),
      tp == 1 ? "leave expert_tp out" : fmt::format("set expert_tp to a divisor of tp, or leave it out, which is {}", tp));
}

/// Groups of `ep` neighbours among the ranks with other tokens share the experts, those that have parts of the same sequences first.
Result<void> check_expert_parallel(const Case& c) {
  const Layout& l = c.layout;
  const int ep = l.ep, parts = l.routed_parts();
  std::string cutting = l.cp > 1 ? "cp" : "", sizes = l.cp > 1 ? fmt::format("cp={}", l.cp) : "";
  if (l.folds_experts()) {
    sizes += fmt::format("{}tp={} and expert_tp={}", l.cp > 1 ? ", " : "", l.tp, l.expert_tp);
    cutting += l.cp > 1 ? "*tp" : "tp";
    if (l.expert_tp > 1) cutting += "/expert_tp";
  }
  if (ep >= 1 && ep % parts != 0)
    return refusal(fmt::format("ep={} with {}: ranks that have the parts of a sequence share the experts together", ep, sizes),
                   fmt::format("set ep to a multiple of {}: {}", cutting, parts));
  if (ep < 1 || l.dp * parts % ep != 0)
    return refusal(parts == 1 ? fmt::format("ep={} with dp={}: experts are shared by groups of data ranks", ep, l.dp)
                              : fmt::format("ep={} with dp={} and {}: experts are shared by groups of the dp*{} {}", ep, l.dp,
                                            sizes, cutting, l.folds_experts() ? "ranks with other tokens" : "data ranks"),
                   parts == 1 ? "set ep to a divisor of dp, or dp to a multiple of ep"
                              : fmt::format("set ep to a divisor of dp*{}, a multiple of {}", cutting, cutting));
  if (c.model.experts.count % ep != 0)
    return refusal(fmt::format("ep={} with model.experts={}: every rank has as many", ep, c.model.experts.count),
                   "set ep to a divisor of model.experts");
  return {};
}

/// A bound saves something where it is below the room for all rows, and where the second run, one sequence at a time, takes smaller pieces.
Result<void> check_expert_bound(const Case& c) {
  const float bound = c.layout.expert_bound;
  if (bound < 1)
    return refusal(fmt::format("expert_bound={}: even routes give each rank one share of the rows", bound),
                   fmt::format("set expert_bound to 1 or more, below ep={}, or to 0", c.layout.ep));
  if (bound >= static_cast<float>(c.layout.ep))
    return refusal(fmt::format("expert_bound={} with ep={}: a rank never gets more than ep even shares, which no bound is room for",
                               bound, c.layout.ep),
                   fmt::format("set expert_bound to 1 or more, below {}, or to 0", c.layout.ep));
  if (c.train.micro_batch == 1)
    return refusal(
        fmt::format("expert_bound={} with micro_batch=1: a step that runs again takes one sequence at a time, as this one does, "
                    "and needs the room for all its rows",
                    bound),
        "set micro_batch to 2 or more, or expert_bound: 0");
  return {};
}

/// Tensor-parallel ranks norm whole heads of their own.
Result<void> check_head_norm(const Case& c) {
  const Model& m = c.model;
  const int tp = c.layout.tp;
  if (tp == 1) return {};
  if (m.kv_heads % tp != 0)
    return refusal(fmt::format("model.qk_norm=true with kv_heads {} and tp={}: ranks that share a kv head would norm it apart",
                               m.kv_heads, tp),
                   "choose a tp that divides the kv heads");
  for (const auto& [what, heads] : {std::pair{"heads", m.heads / tp}, {"kv_heads", m.kv_heads / tp}})
    if (c.canonical && !std::has_single_bit(static_cast<uint64_t>(heads)))
      return refusal(fmt::format("canonical with model.qk_norm=true and tp={}: {} {} a rank", tp, heads, what),
                     "what a rank sums over heads must be an aligned block of the tree: a power of two of them");
  return {};
}

/// Tensor-parallel ranks have whole heads. In canonical mode their sums over heads, of the gradient of the rotated key, are subtrees.
Result<void> check_latent_attention(const Case& c) {
  const int64_t tp = c.layout.tp, heads = c.model.heads / tp;
  if (tp > 1 && c.canonical && !std::has_single_bit(static_cast<uint64_t>(heads)))
    return refusal(
        fmt::format("canonical with model.kv_lora_rank={} and tp={}: {} heads a rank", c.model.latent.kv_rank, tp, heads),
        "what a rank sums over heads must be an aligned block of the tree: a power of two of them");
  return {};
}

/// A piece is some sequences of a micro-batch, or a part of one: memory without a gap.
Result<void> check_tensor_overlap(const Case& c) {
  if (c.layout.tp <= kMaxStrips) return {};
  return refusal(fmt::format("tensor_overlap with tp={}: strips of up to {} ranks are put together", c.layout.tp, kMaxStrips),
                 fmt::format("set tensor_overlap: false, or tp: {} or less", kMaxStrips));
}

Result<void> check_loss_chunks(const Case& c) {
  const int64_t chunks = c.layout.loss_chunks, sequences = c.train.micro_batch, tokens = c.train.seq_len / c.layout.cp;
  const int64_t of_sequence = std::max<int64_t>(1, chunks / sequences);
  if (sequences % chunks != 0 && (chunks % sequences != 0 || tokens % of_sequence != 0))
    return refusal(
        fmt::format("loss_chunks={} with micro_batch={} and {} tokens of a sequence on a rank", chunks, sequences, tokens),
        "a piece is some sequences or a part of one: choose a divisor of micro_batch, or a multiple of it whose quotient "
        "divides the tokens");
  const int64_t leaves = kContractionLeaves / std::min<int64_t>(kContractionLeaves, c.layout.cp);
  if (c.canonical && leaves % of_sequence != 0)
    return refusal(
        fmt::format("canonical with loss_chunks={}: a sequence is cut in {}", chunks, of_sequence),
        fmt::format("a piece must be an aligned block of a rank's {} leaves of a sequence: set loss_chunks: {} or less, a "
                    "power of two",
                    leaves, leaves * sequences));
  return {};
}

/// Where documents end must be known, and is asked for packed data alone.
Result<void> check_documents(const Case& c) {
  const DataSource& d = c.data;
  if (!d.packed && (d.document_end != -1 || d.document_tokens != 0))
    return refusal(fmt::format("{} without data.packed: sequences are not cut at the ends of documents",
                               d.document_end != -1 ? fmt::format("data.document_end={}", d.document_end)
                                                    : fmt::format("data.document_tokens={}", d.document_tokens)),
                   "set data.packed: true, or leave it out");
  if (d.packed && !d.tokens.empty() && d.document_end < 0)
    return refusal("data.packed with data.tokens: which token ends a document is not known",
                   "set data.document_end to its id (50256 in GPT-2's vocabulary)");
  if (d.document_end != -1 && d.tokens.empty())
    return refusal(fmt::format("data.document_end={} without data.tokens: of a text each file is a document", d.document_end),
                   "leave data.document_end out, or name a file in data.tokens");
  if (d.document_end >= c.model.vocab)
    return refusal(fmt::format("data.document_end={} is no id of a vocabulary of {}", d.document_end, c.model.vocab),
                   fmt::format("set data.document_end below {}", c.model.vocab));
  return {};
}

/// Predictions of a mixture take one routing, whose experts are there.
Result<void> check_routing(const Case& c) {
  const DataSource& d = c.data;
  const std::string said = !d.routes.empty() ? fmt::format("data.routes={}", d.routes) : fmt::format("data.routing={}", d.routing);
  if (d.routing.empty() && d.routes.empty()) return {};
  if (!c.model.is_mixture())
    return refusal(fmt::format("{}: the model has no experts", said), "leave it out, or set model.experts");
  if (!d.routing.empty() && !d.routes.empty())
    return refusal(fmt::format("data.routing={} beside data.routes={}: a prediction takes one", d.routing, d.routes),
                   "leave one out");
  const auto named = routing_named(d.routing);
  const Experts& e = c.model.experts;
  if (named && named->kind == Routing::Kind::kForced && (named->experts < e.top_k || named->experts > e.count))
    return refusal(fmt::format("data.routing={} with top_k={} of model.experts={}: a token goes to top_k experts", d.routing,
                               e.top_k, e.count),
                   fmt::format("choose from forced:{} to forced:{}", e.top_k, e.count));
  return {};
}

namespace {

/// The experts by place that `expert_placement` lists, each layer's once.
Result<void> check_listed_placement(const Case& c) {
  const std::string& said = c.layout.expert_placement;
  const auto listed = read_placements(said);
  if (!listed)
    return refusal(fmt::format("expert_placement={}: no experts by place, layer after layer", said),
                   "write balanced, measured, or as 1:2,0,3,1 2:1,3,0,2 the experts by place of layers 1 and 2");
  for (const ExpertPlacement& p : *listed) {
    if (p.layer >= c.model.layers || !c.model.is_mixture(p.layer))
      return refusal(fmt::format("expert_placement names layer {}, and the model has no experts there", p.layer),
                     "name layers that have experts");
    if (const std::string why = placement_fault(p, c.model.experts.count); !why.empty())
      return refusal(fmt::format("expert_placement of layer {}: {}", p.layer, why),
                     fmt::format("name each of the layer's {} experts once", c.model.experts.count));
  }
  return {};
}

}  // namespace

Result<void> check_placement(const Case& c) {
  const std::string& said = c.layout.expert_placement;
  if (said.empty()) return {};
  if (!c.model.is_mixture())
    return refusal(fmt::format("expert_placement={} of a model without experts", said), "leave expert_placement out");
  if (c.layout.ep == 1)
    return refusal(fmt::format("expert_placement={} with ep=1: every rank has all experts", said),
                   "set ep, or leave expert_placement out", ErrorKind::kApart);
  if (said == kMeasured) {
    if (!c.checkpoint.resume.empty()) return {};
    return refusal("expert_placement=measured in a run that begins from its seed: no rows have been counted",
                   "set checkpoint.resume to a checkpoint of a measured run, or expert_placement: balanced with data.routes",
                   ErrorKind::kNotCounted);
  }
  if (said != kBalanced) return check_listed_placement(c);
  const auto routing = routing_named(c.data.routing);
  if (!c.data.routes.empty() || !routing || !routing->is_even()) return {};
  return refusal("expert_placement=balanced with data.routing=balanced: all experts are expected to have as many rows",
                 "set data.routes to a routes.txt or loads.txt of a measured case, or data.routing: zipf:1");
}

/// Every rank attends with whole heads.
Result<void> check_head_exchange(const Case& c) {
  const Layout& l = c.layout;
  const int64_t ranks = l.head_ranks();
  const std::string said = l.cp_kind == ContextKind::kUsp ? fmt::format("cp_kind=usp with cp_ulysses={}", ranks)
                                                          : fmt::format("cp_kind=ulysses with cp={}", ranks);
  const std::string key = l.cp_kind == ContextKind::kUsp ? "cp_ulysses" : "cp";
  // Of a tensor-parallel rank.
  const int64_t heads = c.model.heads / l.tp, kv_heads = std::max<int64_t>(1, c.model.kv_heads / l.tp);
  if (heads % ranks != 0)
    return refusal(fmt::format("{}, tp={} and {} heads: each rank takes whole heads", said, l.tp, c.model.heads),
                   fmt::format("lower {} or tp until {} * tp divides the heads, or use another cp_kind", key, key));
  const int64_t copies = kv_heads >= ranks ? 1 : ranks / kv_heads;
  if (kv_heads % ranks != 0 && ranks % kv_heads != 0)
    return refusal(
        fmt::format("{}, tp={} and {} kv heads: a rank takes whole kv heads, or several share one", said, l.tp, c.model.kv_heads),
        fmt::format("choose a {} that divides the kv heads of a tensor-parallel rank, or is a multiple of them", key));
  if (copies > kContractionLeaves)
    return refusal(fmt::format("{} and {} kv heads: {} copies of each", said, c.model.kv_heads, copies),
                   fmt::format("at most {} are made: lower {}", kContractionLeaves, key));
  if (c.canonical && copies > 1 && !std::has_single_bit(static_cast<uint64_t>(heads / ranks)))
    return refusal(fmt::format("canonical with cp_kind={}, and {} query heads a rank for one of {} copies of a kv head",
                               name_of(l.cp_kind), heads / ranks, copies),
                   "what a rank sums over query heads must be an aligned block of the tree: a power of two of them");
  return {};
}

Result<void> check_hybrid_shard(const Case& c) {
  const Layout& l = c.layout;
  if (l.hybrid_shard < 2 || l.hybrid_shard >= l.dp || l.dp % l.hybrid_shard != 0)
    return refusal(
        fmt::format("hybrid_shard={} with dp={}", l.hybrid_shard, l.dp),
        "it is the number of ranks that share one set of shards: a divisor of dp above 1 and below dp, or 0 for all of them");
  return {};
}

Result<void> check_fsdp(const Case& c) {
  const Layout& l = c.layout;
  if (l.fsdp.unit < 1 || l.fsdp.prefetch < 0)
    return refusal(fmt::format("fsdp.unit={} fsdp.prefetch={}", l.fsdp.unit, l.fsdp.prefetch),
                   "a unit has at least one layer, and nothing can be fetched after its use");
  return {};
}

Result<void> check_halving_doubling(const Case& c) {
  const Layout& l = c.layout;
  for (const auto& [key, size] :
       {std::pair{"dp", l.replicas()},
        {l.hybrid_shard > 0 ? "hybrid_shard" : "dp", l.shard_ranks()},
        {"cp", l.cp},
        {"tp", l.tp},
        {"pp", c.train.grad_norm || c.train.clip_norm > 0 || may_skip(c) ? l.pp : 1}})  // stages add their norms
    if (!std::has_single_bit(static_cast<unsigned>(size)))
      return refusal(fmt::format("collective_algorithm=halving-doubling with {}={}, no power of two", key, size), "use ring");
  return {};
}

/// Groups are even over nodes where the ranks of a node are whole blocks of every axis, or the blocks whole nodes.
Result<void> check_hierarchical(const Case& c) {
  const Layout& l = c.layout;
  const int node = ranks_per_node(c);
  int64_t block = 1;
  for (const auto& [key, size] :
       {std::pair{"tp", l.tp}, {"cp", l.cp}, {"hybrid_shard", l.shard_ranks()}, {"dp", l.replicas()}, {"pp", l.pp}}) {
    block *= size;
    if (size > 1 && block % node != 0 && node % block != 0)
      return refusal(
          fmt::format("collective_algorithm=hierarchical with {}={}: blocks of {} ranks on nodes of {}", key, size, block, node),
          "use sizes that divide a node or that nodes divide, or ring");
  }
  return {};
}

bool sets_loss_scale(const Case& c) {
  const Train &t = c.train, standard;
  return t.loss_scale != standard.loss_scale || t.loss_scale_start != standard.loss_scale_start ||
         t.loss_scale_interval != standard.loss_scale_interval;
}

Result<void> check_loss_scale(const Case& c) {
  const Train& t = c.train;
  const bool dynamic = t.loss_scale == 0;
  constexpr float kLeast = 1, kMost = 16777216;  // of the rule, kernels/loss_scale.h
  if (!dynamic && !(t.loss_scale >= kLeast && t.loss_scale <= kMost))
    return refusal(fmt::format("loss_scale={} is outside [{}, {:.0f}]", t.loss_scale, kLeast, kMost),
                   "use a power of two between, or dynamic");
  if (dynamic && !(t.loss_scale_start >= kLeast && t.loss_scale_start <= kMost))
    return refusal(fmt::format("loss_scale_start={} is outside [{}, {:.0f}]", t.loss_scale_start, kLeast, kMost),
                   "use a power of two between");
  if (t.loss_scale_interval < 1 || t.loss_scale_interval > kMost)
    return refusal(fmt::format("loss_scale_interval={}", t.loss_scale_interval), "use 1 step or more, and at most 2^24");
  return {};
}

/// Blocks of a slice are blocks of the whole, so that the scales do not depend on the layout.
Result<void> check_fp8_blocks(const Case& c) {
  const Train& t = c.train;
  if (t.fp8_scaling != Fp8Scaling::kBlock || c.layout.tp == 1) return {};
  constexpr int64_t kBlock = 128;
  const Model& m = c.model;
  std::vector<std::pair<std::string_view, int64_t>> widths{{"rows of q, k and v", m.qkv_rows()},
                                                           {"heads * head_dim", m.attention_rows()}};
  if (!m.is_mixture() || m.mixture_layers() < m.layers) {
    widths.emplace_back("rows of the feed-forward", m.up_rows());
    widths.emplace_back("ffn", m.ffn);
  }
  if (const int slices = c.layout.expert_slices(); m.is_mixture() && c.layout.folds_experts() && slices > 1) {
    if (m.experts.ffn / slices % kBlock != 0)
      return refusal(fmt::format("fp8_scaling=block with expert_tp={}: a rank's {} of the {} moe_ffn are no whole blocks of {}",
                                 slices, m.experts.ffn / slices, m.experts.ffn, kBlock),
                     "set expert_tp: 1, or use precision: bf16");
  } else if (m.is_mixture() && slices > 1) {
    widths.emplace_back("moe_ffn", m.experts.ffn);  // and the rows of gate and up, twice as many
  }
  if (m.is_mixture() && m.experts.shared > 0) widths.emplace_back("moe_ffn * shared_experts", m.experts.shared * m.experts.ffn);
  for (const auto& [what, width] : widths)
    if (width / c.layout.tp % kBlock != 0)
      return refusal(fmt::format("fp8_scaling=block with tp={}: a rank's {} of the {} {} are no whole blocks of {}", c.layout.tp,
                                 width / c.layout.tp, width, what, kBlock),
                     m.is_mixture() ? "lower tp, or use precision: bf16" : "lower tp, or use fp8_scaling: current or delayed");
  return {};
}

/// A setting of a technique that is off would change the case's id and nothing else: what is asked for and not done is refused.
Result<void> check_unused(const Case& c) {
  const Layout& l = c.layout;
  const auto unused = [](std::string_view settings, std::string_view without, std::string_view remedy) {
    return refusal(fmt::format("{} without {}: they would change nothing", settings, without),
                   fmt::format("{}, or leave them out (in a sweep `when` sets them where they count)", remedy));
  };
  Compression compression = l.compression;
  compression.kind = CompressionKind::kNone;
  if (l.compression.kind == CompressionKind::kNone && !(compression == Compression{}))
    return unused("settings of compression", "compression.kind", "name a compression.kind");
  if (l.diloco.steps == 0 && !(l.diloco == Diloco{})) return unused("settings of diloco", "diloco.steps", "set diloco.steps");
  if (l.parameter_server.servers == 0 && !(l.parameter_server == ParameterServer{}))
    return unused("settings of parameter_server", "parameter_server.servers", "set parameter_server.servers");
  if (l.offload.delayed_update && l.offload.optimizer == OffloadTo::kNone)
    return unused("offload.delayed_update", "offload.optimizer", "set offload.optimizer: cpu");
  if (c.train.precision != Precision::kFp8 && c.train.fp8_scaling != Train{}.fp8_scaling)
    return unused("fp8_scaling", "precision: fp8", "set precision: fp8");
  if (!c.train.guard.any() && !(c.train.guard == Guard{}))
    return unused("settings of guard", "guard.nonfinite and guard.spike", "set one of them to skip or stop");
  return {};
}

Result<void> check_guard(const Case& c) {
  const Guard& g = c.train.guard;
  for (const auto& [key, factor] : {std::pair{"loss_factor", g.loss_factor}, {"norm_factor", g.norm_factor}})
    if (!(factor == 0 || factor > 1) || std::isinf(factor))
      return refusal(fmt::format("guard.{}={}: a spike is above the mean", key, factor),
                     "use a number above 1, or 0 to judge it not");
  if (g.spike != GuardAction::kNone && g.loss_factor == 0 && g.norm_factor == 0)
    return refusal(fmt::format("guard.spike={} with neither guard.loss_factor nor guard.norm_factor", name_of(g.spike)),
                   "set one of them above 1");
  if (g.window < 1 || g.window > 16777216) return refusal(fmt::format("guard.window={}", g.window), "use 1 step or more");
  return {};
}

Result<void> check_post_validation(const Case& c) {
  const int64_t steps = c.train.post_validation, saved = c.checkpoint.save_every;
  if (steps < 2 || steps > kMostInnerSteps)
    return refusal(fmt::format("post_validation={}: one step alone waits for its own norm", steps),
                   fmt::format("use 2 to {}, or 0", kMostInnerSteps));
  SHARDLAB_TRY(check_period(c, "post_validation", steps));
  if (saved % steps != 0)
    return refusal(
        fmt::format("checkpoint.save_every={} with post_validation={}: nothing is valid until a period ends", saved, steps),
        fmt::format("set checkpoint.save_every to {}, or another multiple", (saved + steps - 1) / steps * steps));
  return {};
}

Result<void> check_canonical(const Case& c) {
  const Train& t = c.train;
  const auto power_of_two = [](int64_t n) { return std::has_single_bit(static_cast<uint64_t>(n)); };
  if (!power_of_two(t.micro_batch))
    return refusal(fmt::format("canonical with micro_batch={}, no power of two", t.micro_batch),
                   "canonical sums are binary trees over sequences");
  // Each micro-batch is summed over the ranks by itself.
  const bool scattered = (c.layout.zero >= 2 || c.layout.expert_shards_of_dp() > 1) && t.grad_accumulation > 1;
  if (!power_of_two(c.layout.ep))
    return refusal(fmt::format("canonical with ep={}, no power of two", c.layout.ep),
                   "what the ranks that share experts sum must be an aligned block of the tree over sequences");
  if (scattered && !power_of_two(t.micro_batch * c.layout.shard_ranks()))
    return refusal(fmt::format("canonical with {} and micro_batch*{}={}, no power of two",
                               c.layout.zero >= 2 ? fmt::format("zero={}", c.layout.zero) : fmt::format("ep={}", c.layout.ep),
                               c.layout.hybrid_shard > 0 ? "hybrid_shard" : "dp", t.micro_batch * c.layout.shard_ranks()),
                   "every micro-batch must be an aligned block of the tree over sequences");
  if (scattered && c.layout.replicas() > 1 && !power_of_two(t.micro_batch * t.grad_accumulation))
    return refusal(fmt::format("canonical with {} sets of shards and micro_batch*grad_accumulation={}, no power of two",
                               c.layout.replicas(), t.micro_batch * t.grad_accumulation),
                   "what one set of shards sums must be an aligned block of the tree over sequences");
  if (c.layout.dp > 1 && !scattered && !power_of_two(t.micro_batch * t.grad_accumulation))
    return refusal(fmt::format("canonical with dp={} and micro_batch*grad_accumulation={}, no power of two", c.layout.dp,
                               t.micro_batch * t.grad_accumulation),
                   "every data-parallel rank must hold an aligned block of the tree over sequences");
  const int cp = c.layout.cp, parts = c.layout.routed_parts();
  if (parts > 1 && t.micro_batch != 1)
    return refusal(
        fmt::format("canonical with {} and micro_batch={}",
                    cp > 1 ? fmt::format("cp={}", cp) : fmt::format("tp={}, expert_tp={}", c.layout.tp, c.layout.expert_tp),
                    t.micro_batch),
        "the tree over sequences stands above that over parts of each: set micro_batch: 1 and raise grad_accumulation");
  if (c.layout.folds_experts() && kContractionLeaves % (cp * c.layout.tp) != 0)
    return refusal(fmt::format("canonical with expert_tp={} and cp*tp={}, which does not divide {}", c.layout.expert_tp,
                               cp * c.layout.tp, kContractionLeaves),
                   "lower tp or cp");
  if (cp > 1) {
    if (kContractionLeaves % cp != 0)
      return refusal(fmt::format("canonical with cp={}, which does not divide {}", cp, kContractionLeaves),
                     "use cp 1, 2, 4, 8 or 16");
    if (c.layout.zero == 1 && t.grad_accumulation > 1)
      return refusal(fmt::format("canonical with cp={}, zero=1 and grad_accumulation={}", cp, t.grad_accumulation),
                     "each micro-batch is summed over the parts of its sequences by itself: set zero: 0, 2 or 3");
  }
  if (kContractionLeaves % c.layout.tp != 0)
    return refusal(fmt::format("canonical with tp={}, which does not divide {}", c.layout.tp, kContractionLeaves),
                   "use tp 1, 2, 4, 8 or 16");
  return {};
}

Result<void> check_checkpoint(const Case& c) {
  if (c.checkpoint.save_every < 0)
    return refusal(fmt::format("checkpoint.save_every={} is negative", c.checkpoint.save_every), "use 0 to save nothing");
  if (!c.checkpoint.folder.empty() && c.checkpoint.save_every == 0)
    return refusal("checkpoint.folder with checkpoint.save_every=0: nothing is saved", "set checkpoint.save_every");
  return {};
}

}  // namespace shardlab::settings
