#include "answers/search_space.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>

#include "answers/case_flags.h"
#include "answers/model_shape.h"
#include "answers/namespaces.h"
#include "answers/planned.h"
#include "answers/trained_keys.h"
#include "answers/words.h"
#include "plan/automatic.h"
#include "plan/base/values.h"
#include "plan/keys.h"
#include "plan/routing.h"
#include "plan/technique_settings.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"

namespace shardlab::answers {
namespace {

using search::Space;

/// Values that an axis of numbers can sensibly take: what a range of a flag stands for.
std::vector<int64_t> sensible_values(const std::string& key, const Space& space, const analytic::ModelShape& shape) {
  std::vector<int64_t> values;
  const auto add_divisors = [&](int64_t n) {
    for (const int32_t d : search::divisors(n)) values.push_back(d);
  };
  if (key == "zero") return {0, 1, 2, 3};
  if (key == "bucket_bytes") {
    for (int64_t n = int64_t{1} << 20; n <= int64_t{1} << 30; n *= 2) values.push_back(n);
    return values;
  }
  if (key == "devices") {
    for (int64_t n = 1; n <= 1 << 20; n *= 2) values.push_back(n);
    return values;
  }
  if (key == "vpp") {
    for (int64_t v = 1; v <= shape.layers; ++v) values.push_back(v);
    return values;
  }
  if (key == "ep") {
    add_divisors(std::max<int64_t>(1, shape.experts));
  } else if (key == "micro_batch" || key == "grad_accumulation") {
    add_divisors(space.sequences);
  } else {
    for (const int32_t devices : space.devices) add_divisors(devices);
    if (key == "hybrid_shard") values.push_back(0);
  }
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

Result<void> read_numbers(const std::string& key, const std::string& text, const std::vector<int64_t>& sensible,
                          std::vector<int32_t>& values) {
  const auto numbers = numbers_of(key, text, sensible);
  if (!numbers.ok()) return numbers.error();
  for (const int64_t n : *numbers) {  // the axes say themselves what is too small
    if (n < std::numeric_limits<int32_t>::min() || n > std::numeric_limits<int32_t>::max())
      return refusal(fmt::format("{} `{}` is too large", key, text), "at most 2^20");
    values.push_back(static_cast<int32_t>(n));
  }
  return {};
}

/// Words of one of the estimate's enumerations.
template <class Enum, class Read>
Result<void> read_words(const std::string& key, const std::string& text, const std::string& known, std::vector<Enum>& values,
                        const Read& read) {
  for (const std::string& word : split(text, ',')) {
    Enum value{};
    if (!read(word, &value)) return refusal(fmt::format("{} `{}` is unknown", key, word), "use " + known);
    values.push_back(value);
  }
  return {};
}

template <class Enum>
Result<void> read_words(const std::string& key, const std::string& text, const std::string& known, std::vector<Enum>& values) {
  return read_words(key, text, known, values, [](const std::string& word, Enum* value) { return analytic::read(word, value); });
}

Result<void> read_algorithms(const std::string& key, const std::string& text, std::vector<AlgorithmChoice>& values) {
  constexpr AlgorithmChoice kAll[] = {AlgorithmChoice::kAuto, AlgorithmChoice::kRing, AlgorithmChoice::kHalvingDoubling,
                                      AlgorithmChoice::kDirect};
  return read_words(key, text, "auto, ring, halving-doubling, direct", values,
                    [&](const std::string& word, AlgorithmChoice* value) {
                      const auto* at = std::ranges::find(kAll, word, [](AlgorithmChoice a) { return name_of(a); });
                      if (at == std::end(kAll)) return false;
                      *value = *at;
                      return true;
                    });
}

/// "none", or "optimizer=cpu,activations=cpu".
Result<void> read_offload(const std::string& text, Space& space) {
  search::Offload offload;
  if (text != "none")
    for (const std::string& word : split(text, ',')) {
      const std::vector<std::string> sides = split(word, '=');
      search::Medium medium{};
      const bool known = sides.size() == 2 && (sides[0] == "activations" || sides[0] == "optimizer" || sides[0] == "parameters");
      if (!known || !analytic::read(sides[1], &medium))
        return refusal(fmt::format("offload `{}` is unknown", word), "use none, or a list like optimizer=cpu,activations=nvme");
      (sides[0] == "activations" ? offload.activations : sides[0] == "optimizer" ? offload.optimizer : offload.parameters) = medium;
    }
  space.offload = {offload};
  return {};
}

Result<void> read_flags(const std::string& key, const std::string& text, std::vector<uint8_t>& values) {
  for (const std::string& word : split(text, ',')) {
    const auto value = parse_bool(word);
    if (!value) return refusal(fmt::format("{} `{}` is neither true nor false", key, word), "use true or false");
    values.push_back(*value ? 1 : 0);
  }
  return {};
}

Result<void> read_axis(const std::string& key, const std::string& text, const analytic::ModelShape& shape, Space& space) {
  const std::pair<const char*, std::vector<int32_t>*> numbers[] = {{"dp", &space.dp},
                                                                   {"tp", &space.tp},
                                                                   {"pp", &space.pp},
                                                                   {"vpp", &space.vpp},
                                                                   {"cp", &space.cp},
                                                                   {"ep", &space.ep},
                                                                   {"expert_tp", &space.expert_tp},
                                                                   {"zero", &space.zero},
                                                                   {"micro_batch", &space.micro_batch},
                                                                   {"grad_accumulation", &space.grad_accumulation},
                                                                   {"hybrid_shard", &space.hybrid_shard}};
  for (const auto& [name, values] : numbers)
    if (key == name) return read_numbers(key, text, sensible_values(key, space, shape), *values);
  if (key == "schedule")
    return read_words(key, text, fmt::format("{}", fmt::join(analytic::schedule_words(), ", ")), space.schedule);
  if (key == "cp_kind") return read_words(key, text, "ring, zigzag, striped, all-gather, ulysses", space.cp_kind);
  if (key == "recompute") return read_words(key, text, "none, selective, full, or modules joined by +", space.recompute);
  if (key == "sequence_parallel") return read_flags(key, text, space.sequence_parallel);
  if (key == "collective_algorithm") return read_algorithms(key, text, space.collective_algorithm);
  if (key == "bucket_bytes") {
    const auto sizes = numbers_of(key, text, sensible_values(key, space, shape));
    if (!sizes.ok()) return sizes.error();
    space.bucket_bytes = *sizes;
    return {};
  }
  if (key == "offload") return read_offload(text, space);
  const auto precision = precision_named(text);
  if (!precision) return refusal(fmt::format("precision `{}` is unknown", text), "use fp32, bf16, fp16, fp8 or fp4");
  space.precision = *precision;
  return {};
}

/// A size in the range of the case's key, so that sizes can be multiplied.
Result<int64_t> read_size(const char* flag, const char* key, const std::string& text) {
  const CaseKey& bounds = *find_key(key);
  if (has_form(bounds, text)) return *parse_count(text);
  return refusal(fmt::format("{} {} is not a size", flag, text), fmt::format("expected {}", expected(bounds)));
}

Result<void> read_batch(const SearchFlags& flags, const Model& model, Space& space) {
  space.seq_len = std::min<int64_t>(model.max_positions > 0 ? model.max_positions : 4096, 4096);
  if (!flags.seq_len.empty()) {
    const auto value = read_size("--seq-len", "seq_len", flags.seq_len);
    if (!value.ok()) return value.error();
    space.seq_len = *value;
  }
  if (model.max_positions > 0 && space.seq_len > model.max_positions)
    return refusal(fmt::format("--seq-len {}, and {} has {} positions", space.seq_len, model.name, model.max_positions),
                   "lower --seq-len");
  const auto tokens = read_size("--global-batch-tokens", "global_batch_tokens", flags.global_batch_tokens);
  if (!tokens.ok()) return tokens.error();
  const bool thousands = flags.seq_len.ends_with('k') || flags.seq_len.ends_with('K');  // where 1024 may have been meant
  if (*tokens % space.seq_len != 0)
    return refusal(
        fmt::format("--global-batch-tokens {} is not a multiple of seq_len {}", *tokens, space.seq_len),
        fmt::format(
            "set {}{}{}", *tokens < space.seq_len ? "" : fmt::format("{} or ", *tokens / space.seq_len * space.seq_len),
            (*tokens / space.seq_len + 1) * space.seq_len,
            thousands ? fmt::format("; {0}k is {0}000, and {0}Ki is {1}", space.seq_len / 1000, space.seq_len / 1000 * 1024) : ""));
  space.sequences = *tokens / space.seq_len;
  return {};
}

Result<Space> space_of(const SearchFlags& flags, const Model& model, const analytic::ModelShape& shape,
                       const analytic::Abilities& can) {
  Space space;
  space.can = can;
  SHARDLAB_TRY(read_numbers("devices", flags.devices, sensible_values("devices", space, shape), space.devices));
  std::sort(space.devices.begin(), space.devices.end());
  space.devices.erase(std::unique(space.devices.begin(), space.devices.end()), space.devices.end());
  for (const int32_t devices : space.devices)
    if (devices < 1 || devices > 1 << 20) return refusal(fmt::format("devices {}", devices), "from 1 to 2^20");
  SHARDLAB_TRY(read_batch(flags, model, space));
  for (const auto& [key, text] : flags.axes)
    if (!text.empty()) SHARDLAB_TRY(read_axis(key, text, shape, space));
  SHARDLAB_TRY(check(space));
  return space;
}

/// Refuses an axis that is pinned to nothing but what the framework does not have.
template <class Values, class Set>
Result<void> check_pin(const analytic::FrameworkProfile& profile, const Values& values, const Set& set) {
  Result<void> first;
  for (const auto& value : values) {
    search::Point p;
    p.dp = 2;
    set(p, value);
    auto had = explain_ability(profile, p);
    if (had.ok()) return {};
    if (first.ok()) first = std::move(had);
  }
  return first;
}

/// Refuses sizes of buckets that no stage of ZeRO of the space has.
Result<void> check_buckets(const Space& space, const analytic::FrameworkProfile& profile) {
  if (space.bucket_bytes.empty()) return {};
  if (std::ranges::count(space.bucket_bytes, 0) > 0 && !profile.model.own_collectives)
    return refusal(fmt::format("bucket_bytes 0 with the profile {}, whose buckets have a size", profile.name),
                   "write 1 for buckets that are full after each tensor");
  std::vector<int32_t> stages = space.zero;
  if (stages.empty()) stages = {0, 1, 2};
  std::erase_if(stages, [&](int32_t v) { return v >= 0 && v <= 3 && (profile.can.zero >> v & 1) == 0; });
  return check_pin(profile, stages, [&](search::Point& p, int32_t v) { p.zero = v, p.bucket_bytes = space.bucket_bytes.front(); });
}

Result<void> check_pins(const Space& space, const analytic::FrameworkProfile& profile) {
  using search::Point;
  SHARDLAB_TRY(check_pin(profile, space.tp, [](Point& p, int32_t v) { p.tp = v; }));
  SHARDLAB_TRY(check_pin(profile, space.pp, [](Point& p, int32_t v) { p.pp = v; }));
  SHARDLAB_TRY(check_pin(profile, space.cp, [](Point& p, int32_t v) { p.cp = v; }));
  SHARDLAB_TRY(check_pin(profile, space.ep, [](Point& p, int32_t v) { p.ep = v; }));
  SHARDLAB_TRY(check_pin(profile, space.zero, [](Point& p, int32_t v) { p.zero = v; }));
  SHARDLAB_TRY(check_pin(profile, space.hybrid_shard, [](Point& p, int32_t v) { p.hybrid_shard = v; }));
  SHARDLAB_TRY(check_buckets(space, profile));
  SHARDLAB_TRY(check_pin(profile, space.collective_algorithm, [](Point& p, AlgorithmChoice v) { p.algorithm = v; }));
  SHARDLAB_TRY(check_pin(profile, space.recompute, [](Point& p, analytic::Recompute v) { p.recompute = v; }));
  SHARDLAB_TRY(
      check_pin(profile, space.offload, [](Point& p, const search::Offload& v) { p = with(p, search::State{.offload = v}); }));
  SHARDLAB_TRY(check_pin(profile, std::vector{space.precision}, [](Point& p, Precision v) { p.precision = v; }));
  SHARDLAB_TRY(check_pin(profile, space.schedule,
                         [](Point& p, analytic::Schedule v) { p.pp = v == analytic::Schedule::kNone ? 1 : 2, p.schedule = v; }));
  return {};
}

Result<double> tokens_of(const SearchFlags& flags) {
  if (flags.tokens.empty()) return 0.0;
  const auto tokens = parse_tokens(flags.tokens);
  if (!tokens) return refusal(fmt::format("--tokens {} is not a number of tokens", flags.tokens), "for example 1.4T, or 300B");
  return *tokens;
}

/// Bytes of a device that are to stay free: "5%", "4Gi".
Result<int64_t> margin_of(const std::string& text, int64_t capacity_bytes) {
  const bool share = text.ends_with('%');
  const auto value = parse_number(share ? std::string_view(text).substr(0, text.size() - 1) : text);
  const bool known = value && *value >= 0 && (share ? *value < 100 : *value == 0 || *value >= 1 << 20);
  if (!known)
    return refusal(fmt::format("--margin {} is neither a share of the device's memory nor bytes", text),
                   "write --margin 5%, or 4Gi");
  return static_cast<int64_t>(share ? static_cast<double>(capacity_bytes) * *value / 100 : std::min(*value, 9e18));
}

/// The longest step that ends the run in time. 0: no end.
Result<double> most_seconds(const SearchFlags& flags, double tokens, const Space& space) {
  if (flags.max_days <= 0) return 0.0;
  if (tokens <= 0)
    return refusal(fmt::format("--max-days {} without --tokens", flags.max_days), "say how long the run is: --tokens 1T");
  return flags.max_days * 86400 / tokens * static_cast<double>(space.sequences) * static_cast<double>(space.seq_len);
}

std::string text_of(bool v) { return v ? "true" : "false"; }

}  // namespace

std::string price_note(double given, const Price& listed) {
  if (given > 0) return fmt::format("${:.2f} a device-hour", given);
  if (listed.usd_per_hour <= 0) return "";
  return fmt::format("${:.2f} a device-hour ({}, read {})", listed.usd_per_hour, listed.source, listed.date);
}

const search::Study& SearchTask::study_of(const search::Point& point) const {
  for (const search::Study& study : studies)
    if (study.devices == point.world_size()) return study;
  return studies.front();
}

namespace {

/// Model and machine of the flags, with what `--set` and `--assume` change of them.
Result<sweeps::Point> searched_point(const SearchFlags& flags) {
  std::vector<std::string> words{"model=" + flags.model, "machine=" + flags.machine, "dp=1"};
  if (!flags.assume.empty()) words.push_back("model.assume=" + flags.assume);
  for (const std::string& word : flags.set) {
    const bool of_trained = std::ranges::find(kTrainedKeys, std::string_view(word).substr(0, word.find('='))) != kTrainedKeys.end();
    if (word.starts_with("layout.expert_bound="))
      return refusal(fmt::format("--set {}: a search estimates room for all rows that may come to a rank", word),
                     "ask `shardlab memory --profile shardlab --expert-bound F` of a layout that it finds, or sweep expert_bound");
    if (!word.starts_with("model.") && !word.starts_with("machine.") && !word.starts_with("data.rout") &&
        word != "layout.expert_placement=balanced" && !of_trained)
      return refusal(fmt::format("--set {}", word),
                     "--set model.KEY=VALUE, machine.KEY=VALUE, data.routing=VALUE, data.routes=FILE or "
                     "layout.expert_placement=balanced; layouts and what is trained have flags of their own");
    words.push_back(word);
  }
  return point_from_words(options_around(flags.around, flags.machine_file, std::move(words)));
}

/// How full the fullest rank is, for each number of ranks that may share the experts. `moe`: the model has experts, which its case need
/// not hold.
Result<void> read_skew(const Case& config, bool moe, Space& space) {
  if (config.data.routing.empty() && config.data.routes.empty() && config.layout.expert_placement.empty()) return {};
  if (!moe) {
    SHARDLAB_TRY(settings::check_placement(config));
    return settings::check_routing(config);
  }
  if (!config.model.is_mixture())
    return refusal("a routing of a model whose experts no case holds", "leave data.routing, data.routes and expert_placement out");
  Case shared = config;  // by as many ranks as can be: how many there are is searched
  shared.layout.ep = static_cast<int>(config.model.experts.count);
  SHARDLAB_TRY(settings::check_placement(shared));
  const auto routing = routing_of(config);
  if (!routing.ok()) return routing.error();
  for (const int32_t ep : search::divisors(config.model.experts.count))
    space.expert_skew[ep] = expected_imbalance(*routing, config.model, ep, placements_of(config, *routing, ep));
  return {};
}

/// Refuses a model that shardlab trains in other precisions only: no layout would be left, one by one.
Result<void> check_trains(const Model& model, const Space& space) {
  Case one;
  one.model = model;
  one.train.precision = space.precision, one.train.seq_len = space.seq_len;
  return check(one);
}

}  // namespace

Result<SearchTask> search_task(const SearchFlags& flags) {
  const auto objective = search::objective_named(flags.objective);
  if (!objective) return refusal(fmt::format("--objective {} is unknown", flags.objective), "use time, memory or cost");
  const auto said = searched_point(flags);
  if (!said.ok()) return said.error();
  const Model* model = &said->config.model;
  const Machine* machine = &said->config.machine;
  if (machine->local && !machine->calibration)
    return refusal("this machine is not calibrated, and a search needs its speed",
                   "run `shardlab calibrate` (about a minute), or name its machine file");
  const analytic::ModelShape shape = model_shape(*said);
  const auto profile = profile_meant(flags.profile.empty() ? default_profile(*machine) : flags.profile);
  if (!profile.ok()) return profile.error();
  if (profile->name == "shardlab" && said->model)
    return refusal(fmt::format("{} is not executed by shardlab: {}", model->name, said->model->unexecuted),
                   "name a framework that runs it: --profile megatron");
  if (!said->unheld.empty())  // adapters that cannot be are refused in words
    if (const auto trained = estimated_layout(*said); !trained.ok()) return trained.error();
  if (profile->name == "shardlab" && shape.trained.frozen != 0)
    return refusal("adapters and frozen weights are not executed by shardlab",
                   "name a framework that trains them: --profile megatron");
  SHARDLAB_TRY(check(shape));  // before anything is multiplied
  auto space = space_of(flags, *model, shape, profile->can);
  if (!space.ok()) return space.error();
  space->slices_experts = profile->name == "shardlab";
  SHARDLAB_TRY(read_skew(said->config, shape.moe(), *space));
  SHARDLAB_TRY(check_pins(*space, *profile));
  if (profile->name == "shardlab") SHARDLAB_TRY(check_trains(*model, *space));
  const auto tokens = tokens_of(flags);
  if (!tokens.ok()) return tokens.error();

  SearchTask task{.model_name = model->name, .machine = *machine, .parameters = parameter_count(shape), .space = *space};
  task.tokens = *tokens;
  const auto listed = flags.machine == "local" ? Result<Price>(Price{}) : load_price(flags.machine);
  if (!listed.ok()) return listed.error();
  task.price_note = price_note(flags.price_usd, *listed);
  task.price = {flags.price_usd > 0 ? flags.price_usd : listed->usd_per_hour, 0, flags.site_overhead, flags.kg_co2_per_kwh};
  task.options = {.objective = *objective, .top = flags.top, .capacity_bytes = machine->device.memory_bytes};
  task.options.reserved_error = whatif::reserved_error_of(*profile);
  if (!flags.margin.empty()) {
    const auto margin = margin_of(flags.margin, task.options.capacity_bytes);
    if (!margin.ok()) return margin.error();
    task.options.margin_bytes = *margin, task.options.reserved_error = 0;
  }
  const auto most_s = most_seconds(flags, *tokens, *space);
  if (!most_s.ok()) return most_s.error();
  task.options.most_s = *most_s;
  if (profile->name == "shardlab") task.options.lower = lower_unverified;
  for (const int32_t devices : space->devices) {
    task.machine.nodes = (devices + machine->devices_per_node - 1) / machine->devices_per_node;
    if (machine->local && task.machine.nodes > 1)
      return refusal(fmt::format("--devices {} on one machine of {}", devices, machine->devices_per_node), "lower --devices");
    // What shardlab's own executor has besides is as sweep files have it where they do not say.
    auto rest = std::make_shared<Case>();
    rest->model = *model;
    rest->layout.bucket_bytes = kBucketBytes;
    auto prepared = prepare(shape, task.machine, *profile, {}, rest);
    if (!prepared.ok()) return prepared.error();
    if (flags.margin.empty())
      task.options.reserved_error = std::max(task.options.reserved_error, whatif::reserved_error_of(*prepared, space->precision));
    task.studies.push_back({devices, *prepared});
  }
  return task;
}

std::string offload_words(const search::Point& p) {
  std::string text;
  for (const auto& [what, medium] :
       {std::pair{"activations", p.offload_activations}, {"optimizer", p.offload_optimizer}, {"parameters", p.offload_parameters}})
    if (medium != search::Medium::kDevice) text += fmt::format("{}{}={}", text.empty() ? "" : ",", what, name_of(medium));
  return text.empty() ? "none" : text;
}

std::vector<std::pair<std::string, std::string>> words_of(const search::Point& p) {
  std::vector<std::pair<std::string, std::string>> words{{"dp", fmt::to_string(p.dp)},
                                                         {"tp", fmt::to_string(p.tp)},
                                                         {"pp", fmt::to_string(p.pp)},
                                                         {"vpp", fmt::to_string(p.vpp)},
                                                         {"cp", fmt::to_string(p.cp)},
                                                         {"ep", fmt::to_string(p.ep)},
                                                         {"zero", fmt::to_string(p.zero)},
                                                         {"schedule", std::string(name_of(p.schedule))},
                                                         {"sequence_parallel", text_of(p.sequence_parallel)},
                                                         {"recompute", name_of(p.recompute)},
                                                         {"offload", offload_words(p)},
                                                         {"precision", std::string(name_of(p.precision))},
                                                         {"micro_batch", fmt::to_string(p.micro_batch)},
                                                         {"grad_accumulation", fmt::to_string(p.grad_accumulation)},
                                                         {"seq_len", fmt::to_string(p.seq_len)}};
  if (p.cuts_experts_apart()) words.emplace_back("expert_tp", fmt::to_string(p.expert_tp));
  if (p.hybrid_shard > 0) words.emplace_back("hybrid_shard", fmt::to_string(p.hybrid_shard));
  if (p.cp > 1) words.emplace_back("cp_kind", std::string(name_of(p.cp_kind)));
  if (p.bucket_bytes >= 0) words.emplace_back("bucket_bytes", fmt::to_string(p.bucket_bytes));
  if (p.algorithm != AlgorithmChoice::kAuto) words.emplace_back("collective_algorithm", std::string(name_of(p.algorithm)));
  return words;
}

namespace {

/// "25Mi": a size as a flag takes it.
std::string size_word(int64_t bytes) {
  for (const auto& [unit, name] : {std::pair{int64_t{1} << 30, "Gi"}, {int64_t{1} << 20, "Mi"}, {int64_t{1} << 10, "Ki"}})
    if (bytes > 0 && bytes % unit == 0) return fmt::format("{}{}", bytes / unit, name);
  return fmt::to_string(bytes);
}

}  // namespace

std::vector<LayoutWord> layout_parts(const search::Point& p) {
  std::vector<LayoutWord> words{{"dp", fmt::format("dp{}", p.dp)}};
  const auto add = [&](const char* key, bool present, std::string word) {
    if (present) words.push_back({key, std::move(word)});
  };
  for (const auto& [name, size] : {std::pair{"tp", p.tp}, {"pp", p.pp}, {"vpp", p.vpp}, {"cp", p.cp}, {"ep", p.ep}})
    add(name, size > 1, fmt::format("{}{}", name, size));
  add("expert_tp", p.cuts_experts_apart(), fmt::format("etp{}", p.expert_tp));
  add("zero", p.zero > 0, fmt::format("zero{}", p.zero));
  add("hybrid_shard", p.hybrid_shard > 0, fmt::format("shard{}", p.hybrid_shard));
  add("schedule", p.pp > 1 || p.schedule != analytic::Schedule::kNone, std::string(name_of(p.schedule)));
  add("sequence_parallel", p.sequence_parallel, "sp");
  add("cp_kind", p.cp > 1, std::string(name_of(p.cp_kind)));
  add("recompute", p.recompute.modules != 0, "recompute-" + name_of(p.recompute));
  std::string offloads;  // short: it is one of many words of a line
  for (const auto& [what, medium] :
       {std::pair{"act", p.offload_activations}, {"opt", p.offload_optimizer}, {"par", p.offload_parameters}})
    if (medium != search::Medium::kDevice)
      offloads += (offloads.empty() ? "" : "+") + std::string(what) + (medium == search::Medium::kNvme ? "-nvme" : "");
  add("offload", !offloads.empty(), "offload:" + offloads);
  add("bucket_bytes", p.bucket_bytes >= 0, "bucket-" + size_word(p.bucket_bytes));
  add("collective_algorithm", p.algorithm != AlgorithmChoice::kAuto, std::string(name_of(p.algorithm)));
  add("micro_batch", true, fmt::format("mb{}", p.micro_batch));
  add("grad_accumulation", true, fmt::format("x{}", p.grad_accumulation));
  return words;
}

std::string layout_words(const search::Point& p) {
  std::string text;
  for (const LayoutWord& part : layout_parts(p)) text += (text.empty() ? "" : " ") + part.word;
  return text;
}

std::string sweep_of(const SearchFlags& flags, const SearchTask& task, const search::Point& point) {
  // Paths in a sweep file are relative to its folder.
  const auto named = [](const std::string& name, bool is_path) {
    return is_path ? std::filesystem::absolute(name).string() : name;
  };
  const bool model_file = is_model_path(flags.model, "");
  const bool machine_file =
      flags.machine.find('/') != std::string::npos || flags.machine.ends_with(".yaml") || flags.machine.ends_with(".yml");
  const Machine& machine = task.study_of(point).prepared.machine();
  std::string text = fmt::format("version: 1\nname: {}-on-{}\nmode: simulate\n", task.model_name, point.world_size());
  text += flags.assume.empty() ? fmt::format("model: {}\n", named(flags.model, model_file))
                               : fmt::format("model: {{hf: {}, assume: {}}}\n", named(flags.model, model_file), flags.assume);
  if (flags.machine == "local")
    text += "machine: {local: true}\n";
  else
    text += fmt::format("machine: {{{}: {}, nodes: {}}}\n", machine_file ? "file" : "preset", named(flags.machine, machine_file),
                        machine.nodes);
  const std::string& profile = task.study_of(point).prepared.profile().name;
  text += fmt::format("profile: {}\n", profile);
  for (const std::string& word : flags.set) {
    const size_t equals = std::min(word.find('='), word.size());
    if (equals < word.size()) text += fmt::format("{}: {}\n", word.substr(0, equals), word.substr(equals + 1));
  }
  // No plan is made of another framework's run.
  if (profile != "shardlab") text += "resolution: analytic\n";
  for (const auto& [key, value] : words_of(point)) {
    if (key == "offload" && value != "none") {
      std::string map = value;
      std::string yaml;
      for (const char c : map) yaml += c == '=' ? ": " : c == ',' ? ", " : std::string(1, c);
      text += fmt::format("offload: {{{}}}\n", yaml);
    } else {
      text += fmt::format("{}: {}\n", key, value);
    }
  }
  return text;
}

std::string options_of(const SearchFlags& flags, const search::Point& point) {
  std::string text =
      fmt::format("--model {} --machine {} --devices {}", shell_word(flags.model), shell_word(flags.machine), point.world_size());
  if (!flags.machine_file.empty()) text += " --machine-file " + shell_word(flags.machine_file);
  if (!flags.profile.empty()) text += " --profile " + flags.profile;
  if (!flags.assume.empty()) text += " --assume " + flags.assume;
  for (const std::string& word : flags.set) text += " --set " + shell_word(word);
  for (const auto& [key, value] : words_of(point)) {
    // What is left out is what it is without a flag, under every profile.
    const bool plain = (value == "1" && (key == "vpp" || key == "cp" || key == "ep")) || value == "none" ||
                       (key == "sequence_parallel" && point.tp == 1);
    if (!plain) text += fmt::format(" --{} {}", hyphenated(key), shell_word(value));
  }
  return text;
}

}  // namespace shardlab::answers
