// Points that are no layouts at all, and the reasons.
#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "simulator/estimator/analytic/inside.h"

namespace shardlab::simulator::analytic {
namespace {

bool within(int64_t v, int64_t least, int64_t most) { return v >= least && v <= most; }

bool sizes_ok(const Point& p) {
  constexpr int64_t kRanks = 1 << 20;
  for (const int64_t v : {p.dp, p.tp, p.pp, p.vpp, p.cp, p.ep, p.expert_tp})
    if (!within(v, 1, kRanks)) return false;
  return within(p.micro_batch, 1, kRanks) && within(p.grad_accumulation, 1, kRanks) && within(p.seq_len, 1, int64_t{1} << 27) &&
         within(p.zero, 0, 3) && within(p.hybrid_shard, 0, kRanks) && within(p.micro_batch_group, 0, kRanks) &&
         within(p.compression_rank, 0, kRanks) && p.expert_skew >= 1 && p.expert_skew <= 1e6 &&
         p.world_size() <= (int64_t{1} << 24) && static_cast<double>(p.micro_batch) * static_cast<double>(p.seq_len) <= 1e12;
}

bool schedule_ok(const ModelShape& s, const Point& p) {
  if ((p.pp == 1) != (p.schedule == Schedule::kNone)) return false;
  const bool looped = p.schedule == Schedule::kInterleaved || p.schedule == Schedule::kBreadthFirst;
  if (!looped && p.vpp != 1) return false;
  // Parts of a looped pipeline may be an end of the model alone, where that counts as a layer.
  const int64_t parts = s.layers + (p.embedding_as_layer ? 1 : 0) + (p.head_as_layer ? 1 : 0);
  if (looped && (p.vpp < 2 || int64_t{p.pp} * p.vpp > parts)) return false;
  if (p.schedule == Schedule::kInterleaved && p.grad_accumulation < p.pp) return false;
  if (is_folded(p.schedule) && 2 * int64_t{p.pp} > s.layers) return false;
  return p.schedule != Schedule::kDualPipe || (p.pp % 2 == 0 && p.grad_accumulation % 2 == 0 && p.grad_accumulation >= 2 * p.pp);
}

bool stages_ok(const ModelShape& s, const Point& p) {
  if (p.first_layers < 0 || p.last_layers < 0 || p.offload_layers < 0) return false;
  if (p.first_layers == 0 && p.last_layers == 0 && !p.embedding_as_layer && !p.head_as_layer) return true;
  const StageLayers split(s, p);
  return split.sound && split.layers(0) >= 0 && split.layers(p.pp - 1) >= 0;
}

bool experts_ok(const ModelShape& s, const Point& p) {
  if (!s.moe()) return p.ep == 1 && p.expert_tp == 1;
  const int64_t ranks = int64_t{p.dp} * p.cp * p.tp;
  return s.experts % p.ep == 0 && s.moe_ffn % p.expert_tp == 0 && ranks % (int64_t{p.ep} * p.expert_tp) == 0;
}

bool sequence_ok(const Point& p) {
  const int64_t parts = int64_t{p.cp} * (p.cp > 1 && (p.cp_kind == CpKind::kZigzag) ? 2 : 1);
  if (p.seq_len % parts != 0) return false;
  return !p.sequence_parallel || p.tp == 1 || (p.seq_len / p.cp) % p.tp == 0;
}

bool zero_ok(const Point& p) { return p.hybrid_shard == 0 || (p.zero > 0 && (int64_t{p.dp} * p.cp) % p.hybrid_shard == 0); }

bool combination_ok(const Prepared::Inside& in, const Point& p) {
  if (p.offload_parameters != Medium::kDevice && p.zero != 3) return false;
  // shardlab's executor compresses what each micro-batch scatters, too.
  const int most = in.profile.name == "shardlab" ? 2 : 1;
  if (p.compression != Compression::kNone && p.zero > most) return false;
  return p.compression != Compression::kPowerSgd && p.compression != Compression::kTopK ? true : p.compression_rank > 0;
}

/// NCCL has rings beside what it chooses itself.
bool has_algorithm(const FrameworkProfile& profile, const Point& p) {
  return profile.model.own_collectives || p.algorithm == AlgorithmChoice::kAuto || p.algorithm == AlgorithmChoice::kRing;
}

std::string no_algorithm_text(const FrameworkProfile& profile, const Point& p) {
  return fmt::format("{} leaves collectives to NCCL, which has no {}", profile.name, name_of(p.algorithm));
}
constexpr std::string_view kNoAlgorithmHint =
    "collective_algorithm auto (what NCCL chooses), ring (NCCL_ALGO=Ring), or the profile shardlab";

/// Halving-doubling wants groups of a power of two.
bool algorithm_ok(const Prepared::Inside& in, const Point& p) {
  if (p.algorithm != AlgorithmChoice::kHalvingDoubling) return has_algorithm(in.profile, p);
  if (!in.profile.model.own_collectives) return false;
  for (const int64_t size : {int64_t{p.dp} * p.cp, int64_t{std::max(1, p.hybrid_shard)}, int64_t{p.tp}})
    if (!std::has_single_bit(static_cast<uint64_t>(size))) return false;
  return true;
}

/// "megatron has no zb-h1 among its schedules: 1f1b, interleaved".
std::string missing_text(const FrameworkProfile& profile, const Point& p) {
  const Missing what = missing(profile.can, p);
  const std::string kind = what.key == "axes"              ? "axes"
                           : what.key == "zero_with_pp"    ? "stages of ZeRO in a pipeline"
                           : what.key == "zero"            ? "stages of ZeRO"
                           : what.key == "offload_with_pp" ? "offloads in a pipeline"
                           : what.key == "cp_kind"         ? "kinds of context parallelism"
                           : what.key == "compression"     ? "compressions of gradients"
                           : what.key == "bucket_bytes"    ? "stages of ZeRO whose buckets have a size to choose"
                                                           : std::string(what.key) + (what.key.ends_with('s') ? "" : "s");
  return fmt::format("{} has no {} among its {}: {}", profile.name, what.word, kind,
                     what.allowed.empty() ? "none" : fmt::format("{}", fmt::join(what.allowed, ", ")));
}

/// The shipped profiles, read once: a sweep asks for them at every point that its framework lacks.
const std::vector<FrameworkProfile>& every_profile() {
  static const std::vector<FrameworkProfile> profiles = [] {
    std::vector<FrameworkProfile> all;
    for (const std::string_view name : profile_names())
      if (auto found = profile_named(name); found.ok()) all.push_back(std::move(*found));
    return all;
  }();
  return profiles;
}

/// Profiles that have what is missing.
std::string missing_hint(const FrameworkProfile& profile, const Point& p) {
  std::string names;
  for (const FrameworkProfile& other : every_profile())
    // Of versions of one framework the first is enough.
    if (other.name != profile.name && has(other.can, p) && other.name.find("-20") == std::string::npos)
      names += (names.empty() ? "" : ", ") + other.name;
  return names.empty() ? "choose another; simulator/profiles lists what each framework has"
                       : fmt::format("choose another, or a profile that has all of it: {}", names);
}

}  // namespace

Refusal refusal_of(const Prepared::Inside& in, const Point& p) {
  const ModelShape& s = in.shape;
  if (!sizes_ok(p)) return Refusal::kSize;
  if (p.world_size() > in.machine.devices()) return Refusal::kDevices;
  if (!has(in.profile.can, p)) return Refusal::kAbility;
  if (s.heads % p.tp != 0 || (s.kv_heads % p.tp != 0 && p.tp % s.kv_heads != 0)) return Refusal::kHeads;
  if (p.cp > 1 && p.cp_kind == CpKind::kUlysses && (s.heads / p.tp) % p.cp != 0) return Refusal::kHeads;
  if (s.ffn % p.tp != 0 || s.hidden % p.tp != 0) return Refusal::kWidth;
  if (p.pp > s.layers + (p.embedding_as_layer ? 1 : 0) + (p.head_as_layer ? 1 : 0) || !stages_ok(s, p)) return Refusal::kLayers;
  if (!schedule_ok(s, p)) return Refusal::kSchedule;
  if (!sequence_ok(p)) return Refusal::kSequence;
  if (!experts_ok(s, p)) return Refusal::kExperts;
  if (!zero_ok(p)) return Refusal::kZero;
  if ((p.precision == Precision::kFp8 && !in.has_fp8) || (p.precision == Precision::kFp4 && !in.has_fp4))
    return Refusal::kPrecision;
  if (!algorithm_ok(in, p)) return Refusal::kAlgorithm;
  return combination_ok(in, p) ? Refusal::kNone : Refusal::kCombination;
}

Result<void> explain_ability(const FrameworkProfile& profile, const Point& p) {
  if (!has(profile.can, p))
    return Error{.code = ExitCode::kUsage, .message = missing_text(profile, p), .hint = missing_hint(profile, p), .where = {}};
  if (has_algorithm(profile, p)) return {};
  return Error{
      .code = ExitCode::kUsage, .message = no_algorithm_text(profile, p), .hint = std::string(kNoAlgorithmHint), .where = {}};
}

namespace {

/// The rule of experts that the point breaks (`experts_ok`).
Error experts_refused(const ModelShape& s, const Point& p) {
  const auto no = [](std::string message, std::string hint) {
    return Error{.code = ExitCode::kNo, .message = std::move(message), .hint = std::move(hint), .where = {}};
  };
  if (!s.moe())
    return no(fmt::format("{}: the model has no experts",
                          p.ep > 1 ? fmt::format("ep {}", p.ep) : fmt::format("expert_tp {}", p.expert_tp)),
              "leave it out");
  if (s.experts % p.ep != 0)
    return no(fmt::format("ep {} ranks do not share {} experts evenly", p.ep, s.experts),
              fmt::format("set ep to a divisor of {}", s.experts));
  if (s.moe_ffn % p.expert_tp != 0)
    return no(fmt::format("expert_tp {} does not cut experts of width {} evenly", p.expert_tp, s.moe_ffn),
              fmt::format("set expert_tp to a divisor of {}", s.moe_ffn));
  const int64_t ranks = int64_t{p.dp} * p.cp * p.tp;
  return no(fmt::format("ep {} times expert_tp {} is {} ranks for each copy of the experts, and dp {} cp {} tp {} are {}", p.ep,
                        p.expert_tp, int64_t{p.ep} * p.expert_tp, p.dp, p.cp, p.tp, ranks),
            p.expert_tp > 1 ? fmt::format("set ep to a divisor of {}, or expert_tp: 1", std::max<int64_t>(1, ranks / p.expert_tp))
                            : fmt::format("set ep to a divisor of {}, or take more dp", ranks));
}

/// The rule of a pipeline schedule that the point breaks (`schedule_ok`).
Error schedule_refused(const ModelShape& s, const Point& p) {
  const std::string name(name_of(p.schedule));
  const auto no = [](std::string message, std::string hint) {
    return Error{.code = ExitCode::kNo, .message = std::move(message), .hint = std::move(hint), .where = {}};
  };
  const auto few = [&](int64_t least, const char* more) {
    return no(fmt::format("schedule {} with pp {} needs at least {} micro-batches{}, and the step has {}", name, p.pp, least, more,
                          p.grad_accumulation),
              fmt::format("raise grad_accumulation to {}, or global_batch_tokens", least));
  };
  const bool looped = p.schedule == Schedule::kInterleaved || p.schedule == Schedule::kBreadthFirst;
  if (p.pp == 1)
    return no(fmt::format("{} needs a pipeline, and pp is 1",
                          p.schedule == Schedule::kNone ? fmt::format("vpp {}", p.vpp) : fmt::format("schedule {}", name)),
              p.vpp > 1 ? "raise pp and set schedule interleaved, or leave out vpp" : "raise pp, or leave out schedule");
  if (p.schedule == Schedule::kNone) return no(fmt::format("pp {} without a pipeline schedule", p.pp), "set schedule, as 1f1b");
  if (!looped && p.vpp != 1)
    return no(fmt::format("schedule {} has one part of the model on each stage, and vpp is {}", name, p.vpp),
              "leave out vpp, or set schedule interleaved");
  if (looped && p.vpp < 2) return no(fmt::format("schedule {} needs vpp of 2 or more, and vpp is {}", name, p.vpp), "set vpp to 2");
  if (looped && int64_t{p.pp} * p.vpp > s.layers)
    return no(fmt::format("schedule {} with pp {} and vpp {} has {} parts, and the model {} layers", name, p.pp, p.vpp,
                          int64_t{p.pp} * p.vpp, s.layers),
              "lower vpp or pp");
  if (p.schedule == Schedule::kInterleaved && p.grad_accumulation < p.pp) return few(p.pp, "");
  if (is_folded(p.schedule) && 2 * int64_t{p.pp} > s.layers)
    return no(fmt::format("schedule {} puts two parts on each of {} stages, and the model has {} layers", name, p.pp, s.layers),
              "lower pp");
  if (p.pp % 2 != 0) return no(fmt::format("schedule {} needs an even pp, and pp is {}", name, p.pp), "change pp");
  return few(2 * int64_t{p.pp}, ", an even number");
}

}  // namespace

Result<void> explain(const Prepared& prepared, const Point& p) {
  const Prepared::Inside& in = prepared.inside();
  const ModelShape& s = in.shape;
  const auto no = [](std::string message, std::string hint) {
    return Error{.code = ExitCode::kNo, .message = std::move(message), .hint = std::move(hint), .where = {}};
  };
  switch (refusal_of(in, p)) {
    case Refusal::kNone: {
      ExecutorCases executor(in);
      return executor.refuses(p) ? Result<void>(executor.refusal(p)) : Result<void>();
    }
    case Refusal::kSize:
      return no(
          fmt::format(
              "dp {} tp {} pp {} vpp {} cp {} ep {}, zero {}, micro_batch {}, grad_accumulation {}, seq_len {}, skew {}: one is "
              "out of range",
              p.dp, p.tp, p.pp, p.vpp, p.cp, p.ep, p.zero, p.micro_batch, p.grad_accumulation, p.seq_len, p.expert_skew),
          "sizes are from 1 to 2^20, seq_len to 2^27, zero from 0 to 3, skew from 1");
    case Refusal::kDevices:
      return no(fmt::format("dp {} x tp {} x pp {} x cp {} is {} ranks; {} has {} devices", p.dp, p.tp, p.pp, p.cp, p.world_size(),
                            in.machine.id, in.machine.devices()),
                "lower a size, or raise machine.nodes");
    case Refusal::kAbility: return no(missing_text(in.profile, p), missing_hint(in.profile, p));
    case Refusal::kHeads:
      return no(
          fmt::format("{} heads and {} kv heads cannot be cut by tp {} (and cp {} under ulysses)", s.heads, s.kv_heads, p.tp, p.cp),
          "choose a tp that divides both");
    case Refusal::kWidth:
      return no(fmt::format("ffn {} and hidden {} are not both multiples of tp {}", s.ffn, s.hidden, p.tp), "change tp");
    case Refusal::kLayers:
      return no(fmt::format("{} layers cannot fill {} stages", s.layers, p.pp),
                p.pp > s.layers ? fmt::format("lower pp to {} or less", s.layers)
                                : "lower pp, or give the stages at the ends fewer layers");
    case Refusal::kSchedule: return schedule_refused(s, p);
    case Refusal::kSequence:
      return no(fmt::format("seq_len {} cannot be cut by cp {} ({}) and tp {}", p.seq_len, p.cp, name_of(p.cp_kind), p.tp),
                "seq_len is a multiple of cp (2 cp under zigzag), times tp under sequence parallelism");
    case Refusal::kExperts: return experts_refused(s, p);
    case Refusal::kZero:
      if (p.zero == 0)
        return no(fmt::format("hybrid_shard {} without ZeRO: there are no shards to share", p.hybrid_shard),
                  "set zero to 1, 2 or 3, or leave out hybrid_shard");
      return no(
          fmt::format("hybrid_shard {} does not divide the {} ranks of dp {} x cp {}", p.hybrid_shard, p.dp * p.cp, p.dp, p.cp),
          "choose a hybrid_shard that divides dp * cp");
    case Refusal::kPrecision:
      return no(fmt::format("{} does not multiply in {}", in.machine.device.id, name_of(p.precision)), "choose a wider precision");
    case Refusal::kAlgorithm:
      if (!has_algorithm(in.profile, p)) return no(no_algorithm_text(in.profile, p), std::string(kNoAlgorithmHint));
      return no(fmt::format("collective_algorithm {} with dp {} cp {} hybrid_shard {} tp {}: not all are powers of two",
                            name_of(p.algorithm), p.dp, p.cp, p.hybrid_shard, p.tp),
                "use ring or direct");
    case Refusal::kCombination:
      return no(fmt::format("zero {}, offloaded parameters {}, compression {} of rank {}", p.zero, name_of(p.offload_parameters),
                            name_of(p.compression), p.compression_rank),
                "parameters are offloaded under zero 3; gradients are compressed under zero 0 and 1 (shardlab: 2 too); powersgd "
                "and top-k need a rank");
  }
  return {};
}

}  // namespace shardlab::simulator::analytic
