#include "simulator/estimator/analytic/doubt.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "plan/base/check.h"
#include "plan/base/values.h"
#include "simulator/estimator/analytic/shipped.h"

namespace shardlab::simulator::analytic {
namespace {

constexpr std::array<std::string_view, kDoubtTerms> kNames{"compute",
                                                           "launch",
                                                           "exchange",
                                                           "experts",
                                                           "reduction",
                                                           "pipeline",
                                                           "hidden",
                                                           "state",
                                                           "activations",
                                                           "beyond-live",
                                                           "held",
                                                           "unseen-device",
                                                           "unseen-framework",
                                                           "unseen-precision",
                                                           "unseen-mixture",
                                                           "unseen-techniques",
                                                           "unseen-size",
                                                           "unstated-settings",
                                                           "unseen-allocator"};

/// The shipped profile with the shortest name that begins this one: "megatron" of "megatron-2021". Versions of one framework share it.
std::string framework_of(const std::string& profile) {
  std::string_view framework = profile;
  for (const ShippedProfile& shipped : shipped_profiles())
    if (shipped.name.size() < framework.size() && profile.starts_with(shipped.name) && profile[shipped.name.size()] == '-')
      framework = shipped.name;
  return std::string(framework);
}

/// Ways to spread work and state that a scored run may have had none like.
std::vector<std::string> techniques_of(const Point& p) {
  std::vector<std::string> words;
  const auto add = [&](bool has, const std::string& word) {
    if (has) words.push_back(word);
  };
  add(p.zero > 0, fmt::format("zero {}", p.zero));
  add(p.pp > 1, fmt::format("schedule {}", name_of(p.schedule)));
  add(p.cp > 1, fmt::format("cp {}", name_of(p.cp_kind)));
  add(p.tp > 1, p.sequence_parallel ? "sequence parallelism" : "tensor parallelism");
  add(p.ep > 1, "ep");
  add(p.hybrid_shard > 0, "hybrid_shard");
  add(p.recompute.modules != 0, p.recompute.full() ? "recompute full" : "recompute in part");
  add(p.offload_activations != Medium::kDevice, "offload activations");
  add(p.offload_optimizer != Medium::kDevice, "offload optimizer");
  add(p.offload_parameters != Medium::kDevice, "offload parameters");
  add(p.compression != Compression::kNone, fmt::format("compression {}", name_of(p.compression)));
  return words;
}

Doubt known_by(const Prepared& prepared, const Point& point) {
  const Device& device = prepared.machine().device;
  Doubt d;
  d.device = "device " + device.id;
  d.framework = "framework " + framework_of(prepared.profile().name);
  d.precision = fmt::format("precision {} on {}", name_of(point.precision), device.architecture);
  d.mixture = prepared.shape().experts > 0;
  d.techniques = techniques_of(point);
  const Trained& trained = prepared.shape().trained;
  if (trained.frozen != 0) d.techniques.emplace_back(trained.rank > 0 ? "adapters" : "frozen weights");
  if (trained.frozen_bits < 16) d.techniques.emplace_back("frozen weights of few bits");
  d.ranks = static_cast<double>(point.world_size());
  d.parameters = static_cast<double>(parameter_count(prepared.shape()));
  return d;
}

void set_live(const MemoryBytes& m, double whole, Doubt& d) {
  const auto share = [&](std::initializer_list<MemoryPart> parts) {
    double bytes = 0;
    for (const MemoryPart part : parts) bytes += static_cast<double>(m[part]);
    return whole > 0 ? bytes / whole : 0;
  };
  d[DoubtTerm::kState] = share({MemoryPart::kParameters, MemoryPart::kGradients, MemoryPart::kMaster, MemoryPart::kMoments,
                                MemoryPart::kBuckets, MemoryPart::kGathered});
  d[DoubtTerm::kActivations] =
      share({MemoryPart::kActivations, MemoryPart::kTransient, MemoryPart::kLogits, MemoryPart::kWorkspace});
}

double doublings(double value, double most) { return most > 0 && value > most ? std::log2(value / most) : 0; }

constexpr std::string_view kHeader = "figure,kind,name,value";

}  // namespace

std::string_view name_of(DoubtTerm term) { return kNames[static_cast<size_t>(term)]; }

Doubt step_doubt(const Prepared& prepared, const Point& point, const Estimate& e) {
  Doubt d = known_by(prepared, point);
  const auto share = [&](std::initializer_list<TimePart> parts) {
    double seconds = 0;
    for (const TimePart part : parts) seconds += e.part(part);
    return e.step_s > 0 ? seconds / e.step_s : 0;
  };
  d[DoubtTerm::kCompute] = share({TimePart::kForward, TimePart::kBackward, TimePart::kRecompute, TimePart::kUpdate});
  d[DoubtTerm::kLaunch] = share({TimePart::kLaunch});
  d[DoubtTerm::kExchange] = share({TimePart::kTensorParallel, TimePart::kContextParallel});
  d[DoubtTerm::kExperts] = share({TimePart::kExpertParallel});
  d[DoubtTerm::kReduction] = share({TimePart::kDataParallel});
  d[DoubtTerm::kPipeline] = share({TimePart::kPipeline});
  d[DoubtTerm::kHidden] = e.step_s > 0 ? e.hidden_comm_s / e.step_s : 0;
  return d;
}

Doubt memory_doubt(const Prepared& prepared, const Point& point, const MemoryBytes& m, const HeldBytes& held) {
  Doubt d = known_by(prepared, point);
  if (prepared.profile().memory.caching) d.allocator = "allocator " + framework_of(prepared.profile().name);
  const double whole = static_cast<double>(m.reserved() + held.typical);
  set_live(m, whole, d);
  if (whole <= 0) return d;
  d[DoubtTerm::kBeyond] = static_cast<double>(m[MemoryPart::kFragmented]) / whole;
  d[DoubtTerm::kHeld] = static_cast<double>(std::max(held.typical, held.most - held.typical)) / whole;
  return d;
}

Doubt live_doubt(const Prepared& prepared, const Point& point, const MemoryBytes& m) {
  Doubt d = known_by(prepared, point);
  set_live(m, static_cast<double>(m.live()), d);
  return d;
}

void Seen::add(const Doubt& d, const std::string& source) {
  for (const std::string& word : {d.device, d.framework, d.precision, std::string(d.mixture ? "mixture" : "dense")})
    set_word(word, source);
  for (const std::string& word : d.techniques) set_word(word, source);
  if (!d.allocator.empty()) set_word(d.allocator, source);
  Extent& extent = extents_[source];
  extent.most_ranks = std::max(extent.most_ranks, d.ranks);
  extent.most_parameters = std::max(extent.most_parameters, d.parameters);
  extent.least_parameters = extent.least_parameters > 0 ? std::min(extent.least_parameters, d.parameters) : d.parameters;
}

void Seen::look_up(Doubt& d, const std::set<std::string>& without) const {
  const auto unseen = [&](const std::string& word) {
    const auto found = words_.find(word);
    if (found == words_.end()) return true;
    return std::ranges::all_of(found->second, [&](const std::string& source) { return without.contains(source); });
  };
  d[DoubtTerm::kDevice] = unseen(d.device) ? 1 : 0;
  d[DoubtTerm::kFramework] = unseen(d.framework) ? 1 : 0;
  d[DoubtTerm::kPrecision] = unseen(d.precision) ? 1 : 0;
  d[DoubtTerm::kAllocator] = !d.allocator.empty() && unseen(d.allocator) ? 1 : 0;
  d[DoubtTerm::kMixture] = unseen(d.mixture ? "mixture" : "dense") ? 1 : 0;
  d[DoubtTerm::kTechniques] = std::sqrt(static_cast<double>(std::ranges::count_if(d.techniques, unseen)));
  Extent all;
  for (const auto& [source, extent] : extents_) {
    if (without.contains(source)) continue;
    all.most_ranks = std::max(all.most_ranks, extent.most_ranks);
    all.most_parameters = std::max(all.most_parameters, extent.most_parameters);
    all.least_parameters =
        all.least_parameters > 0 ? std::min(all.least_parameters, extent.least_parameters) : extent.least_parameters;
  }
  d[DoubtTerm::kSize] = doublings(d.ranks, all.most_ranks) + doublings(d.parameters, all.most_parameters) +
                        (d.parameters > 0 ? doublings(1 / d.parameters, 1 / std::max(all.least_parameters, 1.0)) : 0);
  d[DoubtTerm::kUnstated] = std::sqrt(static_cast<double>(d.unstated));
}

double Spread::of(const Doubt& doubt) const {
  double squares = 0;
  for (size_t i = 0; i < kDoubtTerms; ++i) squares += scales[i] * scales[i] * doubt.amounts[i] * doubt.amounts[i];
  return multiplier * std::sqrt(squares);
}

Between Between::around(double value, double spread) { return {value * std::exp(-spread), value * std::exp(spread)}; }

std::string write_learnt(const Learnt& learnt) {
  std::string text = fmt::format("{}\n", kHeader);
  for (const auto& [figure, of] : {std::pair{"step", &learnt.step}, {"memory", &learnt.memory}}) {
    const auto line = [&, figure = figure](std::string_view kind, std::string_view name, const std::string& value) {
      text += fmt::format("{},{},{},{}\n", figure, kind, name, value);
    };
    line("multiplier", "", fmt::format("{:.3f}", of->spread.multiplier));
    for (size_t i = 0; i < kDoubtTerms; ++i)
      if (of->spread.scales[i] > 0) line("scale", kNames[i], fmt::format("{:.3f}", of->spread.scales[i]));
    for (const auto& [word, sources] : of->seen.words())
      for (const std::string& source : sources) line("word", word, source);
    for (const auto& [source, extent] : of->seen.extents()) {
      line("most_ranks", source, fmt::format("{:.0f}", extent.most_ranks));
      line("least_parameters", source, fmt::format("{:.0f}", extent.least_parameters));
      line("most_parameters", source, fmt::format("{:.0f}", extent.most_parameters));
    }
  }
  return text;
}

namespace {

/// One line of the file; false where it says nothing that is known.
bool read_line(std::string_view kind, const std::string& name, const std::string& value, LearntFigure& figure,
               std::map<std::string, Seen::Extent>& extents) {
  if (kind == "word") return figure.seen.set_word(name, value), true;
  const auto number = parse_number(value);
  if (!number || *number < 0) return false;
  const auto term = std::ranges::find(kNames, name);
  if (kind == "multiplier")
    figure.spread.multiplier = *number;
  else if (kind == "scale" && term != kNames.end())
    figure.spread.scales[static_cast<size_t>(term - kNames.begin())] = *number;
  else if (kind == "most_ranks")
    extents[name].most_ranks = *number;
  else if (kind == "least_parameters")
    extents[name].least_parameters = *number;
  else if (kind == "most_parameters")
    extents[name].most_parameters = *number;
  else
    return false;
  return true;
}

}  // namespace

Result<Learnt> read_learnt(std::string_view text) {
  Learnt learnt;
  std::array<std::map<std::string, Seen::Extent>, 2> extents;
  int number = 0;
  for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    const std::string row(text.substr(begin, end - begin));
    std::array<std::string, 4> fields;
    size_t count = 0;
    for (size_t at = 0; count < fields.size() && at <= row.size(); ++count) {
      const size_t comma = std::min(row.find(',', at), row.size());
      fields[count] = row.substr(at, comma - at), at = comma + 1;
    }
    const bool memory = fields[0] == "memory", header = ++number == 1;
    const bool good = header
                          ? row == kHeader
                          : count == fields.size() && (memory || fields[0] == "step") &&
                                read_line(fields[1], fields[2], fields[3], memory ? learnt.memory : learnt.step, extents[memory]);
    if (!good)
      return Error{ExitCode::kUsage, fmt::format("`{}` is no line of learnt intervals", row),
                   "write the file again: shardlab validate --intervals FILE", fmt::format("intervals.csv:{}", number)};
  }
  for (const auto& [source, extent] : extents[0]) learnt.step.seen.set_extent(source, extent);
  for (const auto& [source, extent] : extents[1]) learnt.memory.seen.set_extent(source, extent);
  return learnt;
}

Between step_between(const Prepared& prepared, const Point& point, const Estimate& estimate) {
  return Between::around(estimate.step_s, published_learnt().step.spread_of(step_doubt(prepared, point, estimate)));
}

double spread_apart(const LearntFigure& figure, Doubt a, Doubt b) {
  figure.seen.look_up(a), figure.seen.look_up(b);
  for (size_t i = 0; i < kDoubtTerms; ++i) a.amounts[i] -= b.amounts[i];
  return figure.spread.of(a);
}

const Learnt& published_learnt() {
  static const Learnt learnt = [] {
    auto read = read_learnt(shipped_intervals());
    SHARDLAB_CHECK(read.ok(), "intervals.csv: {}", read.error().message);
    return std::move(*read);
  }();
  return learnt;
}

}  // namespace shardlab::simulator::analytic
