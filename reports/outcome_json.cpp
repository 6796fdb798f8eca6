#include "reports/outcome_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "plan/base/json_depth.h"
#include "plan/base/limits.h"
#include "plan/keys.h"

namespace shardlab::reports {

namespace {

using Parsed = nlohmann::json;  ///< finds a key among many in good time

constexpr std::array<std::string_view, 4> kProvenances{"datasheet", "measured", "fitted", "transferred"};

std::string_view word_of(Provenance v) { return kProvenances[static_cast<size_t>(v)]; }
template <class E>
std::string_view word_of(E v) {
  return name_of(v);
}

template <class E>
inline constexpr int kValues = 0;  ///< enumerators of E
template <>
inline constexpr int kValues<Provenance> = 4;
template <>
inline constexpr int kValues<Status> = 5;

template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <class T>
inline constexpr bool kIsShared = false;
template <class T>
inline constexpr bool kIsShared<std::shared_ptr<const T>> = true;
template <class T>
inline constexpr bool kIsVector = false;
template <class T>
inline constexpr bool kIsVector<std::vector<T>> = true;
template <class T>
inline constexpr bool kIsMap = false;
template <class T>
inline constexpr bool kIsMap<ByName<T>> = true;

// The fields of each struct, once, for writing and for reading. V is Writer or Reader; T is const when writing.

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, MemoryByClass>
void visit_fields(V& v, T& x) {
  for (int c = 0; c < kBufferClasses; ++c)
    v(std::string(name_of(static_cast<BufferClass>(c))).c_str(), x.bytes[static_cast<size_t>(c)]);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, StepParts>
void visit_fields(V& v, T& x) {
  for (const StepPartField& part : kStepParts) v(part.name.data(), x.*part.seconds);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, IdleBreakdown>
void visit_fields(V& v, T& x) {
  v("idle_s", x.idle_s);
  v("peer_s", x.peer_s);
  v("dependency_s", x.dependency_s);
  v("host_s", x.host_s);
  v("latency_s", x.latency_s);
  v("tail_s", x.tail_s);
  v("other_s", x.other_s);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, StageNeed>
void visit_fields(V& v, T& x) {
  v("device", x.device);
  v("layers", x.layers);
  v("peak_bytes", x.peak_bytes);
  v("arena_bytes", x.arena_bytes);
  v("capacity_bytes", x.capacity_bytes);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, Prediction>
void visit_fields(V& v, T& x) {
  v("step_s", x.step_s);
  v("compute_s", x.compute_s);
  v("exposed_comm_s", x.exposed_comm_s);
  v("exposed_copy_s", x.exposed_copy_s);
  v("bubble_fraction", x.bubble_fraction);
  v("idle", x.idle);
  v("parts", x.parts);
  v("peak_bytes", x.peak_bytes);
  v("arena_bytes", x.arena_bytes);
  v("wire_bytes", x.wire_bytes);
  v("memory", x.memory);
  v("host_memory", x.host_memory);
  v("nvme_memory", x.nvme_memory);
  v("extrapolated", x.extrapolated);
  v("calibration_id", x.calibration_id);
  v("model_flops", x.model_flops);
  v("expert_imbalance", x.expert_imbalance);
  v("expert_rank_imbalance", x.expert_rank_imbalance);
  v("expert_rank_imbalance_contiguous", x.expert_rank_imbalance_contiguous);
  v("expert_rank_imbalance_peak", x.expert_rank_imbalance_peak);
  v("expert_reruns", x.expert_reruns);
  v("expert_exchange_bytes", x.expert_exchange_bytes);
  if (!std::is_const_v<T> || !x.stages.empty()) v("stages", x.stages);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, MemoryItem>
void visit_fields(V& v, T& x) {
  v("name", x.name);
  v("bytes", x.bytes);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, Measurement>
void visit_fields(V& v, T& x) {  // the losses are kept apart
  v("step_s", x.step_s);
  v("step_spread", x.step_spread);
  v("samples", x.samples);
  v("repeats", x.repeats);
  v("compute_s", x.compute_s);
  v("exposed_comm_s", x.exposed_comm_s);
  v("exposed_copy_s", x.exposed_copy_s);
  v("bubble_fraction", x.bubble_fraction);
  v("unplanned_time_s", x.unplanned_time_s);
  v("idle", x.idle);
  v("parts", x.parts);
  v("peak_bytes", x.peak_bytes);
  v("memory", x.memory);
  v("host_memory", x.host_memory);
  v("nvme_memory", x.nvme_memory);
  v("arena_bytes", x.arena_bytes);
  v("resident_bytes", x.resident_bytes);
  v("unplanned_memory_bytes", x.unplanned_memory_bytes);
  v("unplanned_memory", x.unplanned_memory);
  v("wire_bytes", x.wire_bytes);
  v("skipped_steps", x.skipped_steps);
  v("rolled_back_steps", x.rolled_back_steps);
  v("expert_reruns", x.expert_reruns);
  v("staleness_mean", x.staleness_mean);
  v("staleness_worst", x.staleness_worst);
  v("expert_imbalance", x.expert_imbalance);
  v("expert_imbalance_last", x.expert_imbalance_last);
  v("expert_rank_imbalance", x.expert_rank_imbalance);
  v("expert_rank_imbalance_last", x.expert_rank_imbalance_last);
  v("expert_rank_imbalance_contiguous", x.expert_rank_imbalance_contiguous);
  v("expert_rank_imbalance_peak", x.expert_rank_imbalance_peak);
  v("expert_dropped", x.expert_dropped);
  v("expert_dropped_last", x.expert_dropped_last);
  v("loss_scale", x.loss_scale);
  v("loss_unigram", x.loss_unigram);
  v("val_loss", x.val_loss);
  v("energy_j", x.energy_j);
  v("recorder_overhead_s", x.recorder_overhead_s);
  v("trace_gaps", x.trace_gaps);
  v("kernel_variant", x.kernel_variant);
  v("peak_by_rank", x.peak_by_rank);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, LossTarget>
void visit_fields(V& v, T& x) {
  v("loss", x.loss);
  v("mean_of", x.mean_of);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, CaseOutcome>
void visit_fields(V& v, T& x) {
  v("case_id", x.case_id);
  v("program_version", x.program_version);
  v("config", x.config);
  v("status", x.status);
  v("reason", x.reason);
  v("parameters", x.parameters);
  v("predicted", x.predicted);
  v("measured", x.measured);
  v("loss_target", x.loss_target);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, RatePoint>
void visit_fields(V& v, T& x) {
  v("kernel", x.kernel);
  v("shape", x.shape);
  v("concurrency", x.concurrency);
  v("seconds", x.seconds);
  v("spread", x.spread);
  v("repeats", x.repeats);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, Calibration>
void visit_fields(V& v, T& x) {
  v("id", x.id);
  v("date", x.date);
  v("command", x.command);
  v("processor", x.processor);
  v("kernel_variant", x.kernel_variant);
  v("points", x.points);
  v("op_overhead_s", x.op_overhead_s);
  v("wake_latency_s", x.wake_latency_s);
  v("handover_s", x.handover_s);
  v("turn_s", x.turn_s);
  v("launch_ahead", x.launch_ahead);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, Device>
void visit_fields(V& v, T& x) {
  v("id", x.id);
  v("memory_bytes", x.memory_bytes);
  v("memory_bytes_per_s", x.memory_bytes_per_s);
  v("peak_flops", x.peak_flops);
  v("link_bytes_per_s", x.link_bytes_per_s);
  v("power_w", x.power_w);
  v("provenance", x.provenance);
  if (!std::is_const_v<T> || !x.architecture.empty()) v("architecture", x.architecture);
  if (!std::is_const_v<T> || !x.constants.empty()) v("constants", x.constants);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, Machine>
void visit_fields(V& v, T& x) {
  v("id", x.id);
  v("device", x.device);
  v("devices_per_node", x.devices_per_node);
  v("nodes", x.nodes);
  v("inter_bytes_per_s", x.inter_bytes_per_s);
  v("local", x.local);
  v("cores", x.cores);
  v("calibration", x.calibration);
  if (!std::is_const_v<T> || !x.fabric.empty()) v("fabric", x.fabric);
  if (!std::is_const_v<T> || x.is_mixed()) v("kinds", x.kinds);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, Claim>
void visit_fields(V& v, T& x) {
  v("says", x.says);
  v("source", x.source);
  v("check", x.check);
  v("why", x.why);
}

template <class V, class T>
requires std::is_same_v<std::remove_const_t<T>, RunMetadata>
void visit_fields(V& v, T& x) {
  v("program_version", x.program_version);
  v("commit", x.commit);
  v("compiler", x.compiler);
  v("libraries", x.libraries);
  v("command", x.command);
  v("sweep", x.sweep);
  v("date", x.date);
  v("host", x.host);
  v("processor", x.processor);
  v("system", x.system);
  v("cores", x.cores);
  v("memory_bytes", x.memory_bytes);
  v("calibration_id", x.calibration_id);
  v("recorder_overhead_s", x.recorder_overhead_s);
  v("dropped_events", x.dropped_events);
  v("traces", x.traces);
  v("claims", x.claims);
  v("loss_target", x.loss_target);
}

/// Whether a case is kept by the key: by all that it holds but its machine's.
bool is_kept(const CaseKey& key) { return key.get != nullptr && !key.path.starts_with("machine."); }

/// Structs whose zeros are left out: most of their fields are, and every field begins as one.
template <class T>
inline constexpr bool kIsSparse =
    std::is_same_v<T, MemoryByClass> || std::is_same_v<T, StepParts> || std::is_same_v<T, IdleBreakdown>;

/// Writes an object. Left out is what a reader assumes: keys of a case at their defaults, zeros of figures by part, what is absent.
/// JSON has no nan and no infinity: those are written as words.
class Writer {
 public:
  /// `config`: the object of the case within, where it is written already; else it is written with the defaults of this build.
  explicit Writer(std::string& out, std::string_view config = {}, bool sparse = false)
      : out_(out), config_(config), sparse_(sparse) {}

  /// A member that is a text.
  void member(std::string_view key, std::string_view said) { name(key), text(said); }

  template <class T>
  void operator()(const char* key, const T& value) {
    if constexpr (kIsOptional<T> || kIsShared<T>) {
      if (!value) return;
    }
    if constexpr (std::is_arithmetic_v<T>) {
      if (sparse_ && value == T{}) return;
    }
    comma();
    out_.append(1, '"').append(key).append("\":");  // a name of ours, which needs no escape
    write(value);
  }

  template <class T>
  void write(const T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
      text(value);
    } else if constexpr (std::is_same_v<T, bool>) {
      out_ += value ? "true" : "false";
    } else if constexpr (std::is_integral_v<T>) {
      number(value);
    } else if constexpr (std::is_floating_point_v<T>) {
      std::isfinite(value) ? number(double{value}) : text(fmt::format("{}", double{value}));
    } else if constexpr (std::is_enum_v<T>) {
      text(word_of(value));
    } else if constexpr (std::is_same_v<T, Case>) {  // by its keys; the machine is kept apart
      if (!config_.empty()) return void(out_ += config_);
      Writer keys(out_);
      out_ += '{';
      CaseDefaults::of_build().for_each_said(value, [&](std::string_view path, std::string_view said) { keys.member(path, said); });
      out_ += '}';
    } else if constexpr (kIsOptional<T> || kIsShared<T>) {
      write(*value);
    } else if constexpr (kIsVector<T>) {
      out_ += '[';
      for (size_t i = 0; i < value.size(); ++i) {
        if (i > 0) out_ += ',';
        write(value[i]);
      }
      out_ += ']';
    } else if constexpr (kIsMap<T>) {
      Writer map(out_);
      out_ += '{';
      for (const auto& [k, v] : value) map.name(k), map.write(v);
      out_ += '}';
    } else {
      Writer inner(out_, config_, kIsSparse<T>);
      out_ += '{';
      visit_fields(inner, value);
      out_ += '}';
    }
  }

 private:
  void comma() {
    if (!first_) out_ += ',';
    first_ = false;
  }

  void name(std::string_view key) {
    comma();
    text(key);
    out_ += ':';
  }

  void text(std::string_view value) {
    const auto needs_escape = [](char c) { return c < 0x20 || static_cast<unsigned char>(c) >= 0x7f || c == '"' || c == '\\'; };
    if (std::ranges::any_of(value, needs_escape))
      out_ += Parsed(value).dump(-1, ' ', false, Parsed::error_handler_t::replace);
    else
      out_.append(1, '"').append(value).append(1, '"');
  }

  template <class T>
  void number(T value) {
    std::array<char, 32> digits;
    const auto end = std::to_chars(digits.begin(), digits.end(), value).ptr;
    out_.append(digits.begin(), end);
  }

  std::string& out_;
  std::string_view config_;
  bool sparse_, first_ = true;
};

/// Reads an object. The first value of a wrong kind is remembered; everything else keeps its default.
class Reader {
 public:
  Reader(const Parsed& object, std::string& fault, const CaseDefaults& defaults)
      : object_(object), fault_(fault), defaults_(defaults) {}

  template <class T>
  void operator()(const char* key, T& value) {
    const auto found = object_.find(key);
    if (found == object_.end()) return;
    if (!read(*found, value) && fault_.empty()) fault_ = fmt::format("`{}` is {}", key, found->dump().substr(0, 60));
  }

  template <class T>
  bool read(const Parsed& json, T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
      if (json.is_string()) value = json.get<std::string>();
      return json.is_string();
    } else if constexpr (std::is_same_v<T, bool>) {
      if (json.is_boolean()) value = json.get<bool>();
      return json.is_boolean();
    } else if constexpr (std::is_integral_v<T>) {
      if (!json.is_number_integer()) return false;
      const bool fits = json.is_number_unsigned() ? std::in_range<T>(json.get<uint64_t>()) : std::in_range<T>(json.get<int64_t>());
      if (fits) value = json.get<T>();
      return fits;
    } else if constexpr (std::is_floating_point_v<T>) {
      return read_float(json, value);
    } else if constexpr (std::is_enum_v<T>) {
      for (int i = 0; json.is_string() && i < kValues<T>; ++i)
        if (word_of(static_cast<T>(i)) == json.get_ref<const std::string&>()) return value = static_cast<T>(i), true;
      return false;
    } else if constexpr (std::is_same_v<T, Case>) {
      if (!json.is_object()) return false;
      value = defaults_.unsaid();
      for (const auto& [path, text] : json.items()) {
        const CaseKey* key = find_key(path);
        if (key == nullptr || key->get == nullptr || !text.is_string() || !restore(*key, value, text.template get<std::string>())) {
          if (fault_.empty()) fault_ = fmt::format("`{}` is {}", path, text.dump().substr(0, 60));
          return false;
        }
      }
      return true;
    } else if constexpr (kIsOptional<T>) {
      value.reset();
      return json.is_null() || read(json, value.emplace());
    } else if constexpr (kIsShared<T>) {
      auto fresh = std::make_shared<std::remove_const_t<typename T::element_type>>();
      const bool good = json.is_null() || read(json, *fresh);
      value = good && !json.is_null() ? std::move(fresh) : nullptr;
      return good;
    } else if constexpr (kIsVector<T>) {
      if (!json.is_array()) return false;
      value.assign(json.size(), {});
      for (size_t i = 0; i < json.size(); ++i)
        if (!read(json[i], value[i])) return false;
      return true;
    } else if constexpr (kIsMap<T>) {
      if (!json.is_object()) return false;
      for (const auto& [k, v] : json.items())
        if (!read(v, value[k])) return false;
      return true;
    } else {
      if (!json.is_object()) return false;
      Reader inner(json, fault_, defaults_);
      visit_fields(inner, value);
      return true;
    }
  }

 private:
  template <class T>
  static bool read_float(const Parsed& json, T& value) {
    if (json.is_number()) {
      const double number = json.get<double>();
      return std::abs(number) <= std::numeric_limits<T>::max() && (value = static_cast<T>(number), true);
    }
    if (!json.is_string()) return false;
    const std::string& word = json.get_ref<const std::string&>();
    const T infinity = std::numeric_limits<T>::infinity();
    if (word == "inf") return value = infinity, true;
    if (word == "-inf") return value = -infinity, true;
    if (word == "nan" || word == "-nan") return value = std::numeric_limits<T>::quiet_NaN(), true;
    return false;
  }

  const Parsed& object_;
  std::string& fault_;
  const CaseDefaults& defaults_;
};

template <class T>
std::string to_text(const T& value) {
  std::string text;
  Writer(text).write(value);
  return text;
}

template <class T>
Result<T> from_text(std::string_view text, std::string_view what, const CaseDefaults& defaults = CaseDefaults::of_build()) {
  const bool deep = json_depth(text) > limits::kJsonDepth;  // what is quoted of it is printed with recursion
  const Parsed json = deep ? Parsed() : Parsed::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    return Error{ExitCode::kUsage, fmt::format("the stored {} is no JSON object", what),
                 "the store is damaged; run the sweep again into a new directory"};
  T value;
  std::string fault;
  Reader reader(json, fault, defaults);
  visit_fields(reader, value);
  if (!fault.empty())
    return Error{ExitCode::kUsage, fmt::format("the stored {} cannot be read: {}", what, fault),
                 "it was written by another version of shardlab, or damaged; run the sweep again into a new directory"};
  return value;
}

}  // namespace

const CaseDefaults& CaseDefaults::of_build() {
  static const CaseDefaults defaults = [] {
    CaseDefaults of_build;
    for (const CaseKey& key : case_keys())
      if (is_kept(key)) of_build.keys_.push_back({&key, key.get(Case()), true});
    return of_build;
  }();
  return defaults;
}

Result<CaseDefaults> CaseDefaults::of(std::span<const Text> texts) {
  CaseDefaults out = of_build();
  for (Key& key : out.keys_) {
    const auto found = std::ranges::find(texts, key.key->path, &Text::first);
    key.has_text = found != texts.end();
    if (!key.has_text || found->second == key.text) continue;
    key.text = found->second;
    if (!restore(*key.key, out.unsaid_, key.text))
      return Error{ExitCode::kUsage,
                   fmt::format("the stored default of `{}` cannot be read: {}", key.key->path, key.text.substr(0, 60)),
                   "it was written by another version of shardlab, or damaged; run the sweep again into a new directory"};
  }
  return out;
}

std::vector<const CaseKey*> CaseDefaults::keys() const {
  std::vector<const CaseKey*> keys;
  for (const Key& key : keys_) keys.push_back(key.key);
  return keys;
}

std::vector<CaseDefaults::Text> CaseDefaults::texts() const {
  std::vector<Text> texts;
  for (const Key& key : keys_) texts.emplace_back(key.key->path, key.text);
  return texts;
}

std::string outcome_to_json(const CaseOutcome& outcome) { return to_text(outcome); }
void add_outcome_json(const CaseOutcome& outcome, std::string_view config, std::string& text) {
  Writer(text, config).write(outcome);
}
std::string json_member(std::string_view key, std::string_view said) {
  std::string text;
  Writer(text).member(key, said);
  return text;
}
std::string machine_to_json(const Machine& machine) { return to_text(machine); }
std::string run_to_json(const RunMetadata& run) { return to_text(run); }
Result<CaseOutcome> outcome_from_json(std::string_view text, const CaseDefaults& defaults) {
  return from_text<CaseOutcome>(text, "outcome", defaults);
}
Result<Machine> machine_from_json(std::string_view text) { return from_text<Machine>(text, "machine"); }
Result<RunMetadata> run_from_json(std::string_view text) { return from_text<RunMetadata>(text, "run metadata"); }

}  // namespace shardlab::reports
