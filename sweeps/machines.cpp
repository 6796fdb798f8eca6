#include "sweeps/machines.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "plan/base/once_per_name.h"
#include "plan/base/values.h"
#include "plan/case.h"
#include "plan/kinds.h"
#include "sweeps/names.h"
#include "sweeps/presets.h"

namespace shardlab::sweeps {

namespace {

constexpr const char* kMachineForm =
    "write at least the keys `id` and `device`; `shardlab machine show hgx-h100-ndr` prints a machine as an example";

/// The unit of a key's number, and a number as it is written. No unit: it has none, or several may do.
struct NumberForm {
  std::string_view unit, example;
};

NumberForm form_of(std::string_view key) {
  if (key == "memory") return {"bytes", "80Gi or 8.6e10"};
  if (key.ends_with("_bandwidth")) return {"bytes/s", "2e12"};
  if (key.starts_with("peak_flops")) return {"flop/s", "1e15"};
  if (key.ends_with("_s") || key == "seconds") return {"seconds", "2e-6"};
  return {"", "0.5"};
}

/// Reads the keys of one map; every key that no `*_at` asked for is unknown at the end.
class MapReader {
 public:
  MapReader(const YamlNode& node, std::string section, Problems& problems)
      : node_(node), section_(std::move(section)), problems_(problems) {
    if (!node.is_map()) {
      if (!node.is_null())
        problems.add(node.mark, fmt::format("{} is {}", where(), seen(node)),
                     section_.empty() ? kMachineForm : "a map of keys is expected");
      empty_ = true;
    }
  }

  const YamlNode* at(const char* key) {
    if (std::find(known_.begin(), known_.end(), key) == known_.end()) known_.emplace_back(key);
    return empty_ ? nullptr : node_.find(key);
  }
  /// `form`: what is to be added, where the key alone does not say it.
  const YamlNode* required(const char* key, std::string form = {}) {
    const YamlNode* value = at(key);
    const auto [unit, example] = form_of(key);
    if (form.empty() && !unit.empty()) form = fmt::format("`{}: ...`, in {}, for example {}", key, unit, example);
    if (form.empty()) form = fmt::format("`{}: ...`", key);
    if (!value && (!empty_ || node_.is_null()))
      problems_.add(node_.mark, fmt::format("{} has no `{}`", where(), key), "add " + form);
    return value;
  }
  void text_at(const char* key, std::string& out) {
    if (const YamlNode* v = at(key); v && expect(*v, v->is_scalar(), key, "a text")) out = v->text;
  }
  void int_at(const char* key, int& out, int least = 0) {
    const YamlNode* v = at(key);
    if (!v) return;
    const int64_t n = v->is_scalar() ? parse_count(v->text).value_or(-1) : -1;
    if (expect(*v, n >= least && n <= std::numeric_limits<int>::max(), key, fmt::format("a whole number of {} or more", least)))
      out = static_cast<int>(n);
  }
  void number_at(const char* key, double& out) {
    if (const YamlNode* v = at(key)) number(*v, key, out);
  }
  bool number(const YamlNode& v, std::string_view key, double& out) {
    const double n = v.is_scalar() ? parse_number(v.text).value_or(-1) : -1;
    const auto [unit, example] = form_of(key == "value" ? std::string_view(section_) : key);
    if (n >= 0) {
      out = n;
      return true;
    }
    problems_.add(
        v.mark, fmt::format("`{}` of {} is {}", key, where(), seen(v)),
        fmt::format("a finite number{}{}, 0 or more, is expected, for example {}", unit.empty() ? "" : " of ", unit, example));
    return false;
  }
  bool expect(const YamlNode& v, bool good, std::string_view key, std::string_view what) {
    if (!good) problems_.add(v.mark, fmt::format("`{}` of {} is {}", key, where(), seen(v)), fmt::format("{} is expected", what));
    return good;
  }
  void finish() {
    if (empty_) return;
    for (const YamlEntry& e : node_.entries)
      if (std::find(known_.begin(), known_.end(), e.key) == known_.end())
        add_unknown_key(problems_, e.mark, e.key, section_, known_);
  }
  Problems& problems() { return problems_; }

 private:
  static std::string seen(const YamlNode& v) { return v.is_scalar() ? fmt::format("`{}`", v.text) : std::string(name_of(v.kind)); }
  std::string where() const { return section_.empty() ? "the machine" : fmt::format("`{}`", section_); }

  const YamlNode& node_;
  std::string section_;
  Problems& problems_;
  std::vector<std::string> known_;
  bool empty_ = false;
};

std::optional<Provenance> provenance_named(std::string_view name) {
  for (const Provenance p : {Provenance::kDatasheet, Provenance::kMeasured, Provenance::kFitted, Provenance::kTransferred})
    if (name_of(p) == name) return p;
  return std::nullopt;
}

/// A constant: a number, or {value, provenance, source}. `name` is its key in Device::provenance. Whether `out` was read.
bool read_constant(MapReader& in, const YamlNode& node, const std::string& name, Device& device, double& out) {
  if (!node.is_map()) return in.number(node, name, out);
  MapReader constant(node, name, in.problems());
  const YamlNode* value = constant.required("value");
  const bool read = value != nullptr && constant.number(*value, "value", out);
  std::string provenance, for_readers;
  constant.text_at("provenance", provenance);
  constant.text_at("source", for_readers);
  constant.text_at("note", for_readers);
  constant.finish();
  if (provenance.empty()) return read;
  if (const auto p = provenance_named(provenance))
    device.provenance[name] = *p;
  else
    in.problems().add(node.find("provenance")->mark, fmt::format("provenance `{}` is not known", provenance),
                      "expected one of: datasheet measured fitted transferred");
  return read;
}

/// A map of named constants, as `device.constants` and `fabric` are: the names are the simulator's, which refuses unknown ones.
void read_constants(MapReader& in, const char* key, const std::string& prefix, Device& device, ByName<double>& out) {
  const YamlNode* constants = in.at(key);
  if (!constants || !in.expect(*constants, constants->is_map(), key, "a map from name to number")) return;
  for (const YamlEntry& e : constants->entries) {
    device.provenance.erase(prefix + e.key);
    read_constant(in, e.value, prefix + e.key, device, out[e.key]);
  }
}

/// A machine that ships, by the name of its file.
Result<Machine> shipped_machine(const std::string& name);

/// The device of a shipped machine, on which the keys beside `preset` then build.
void read_device_preset(const YamlNode& preset, Device& device, Problems& problems) {
  const auto name = machine_name(preset.is_scalar() ? preset.text : std::string());
  if (!name.ok()) {
    problems.add(preset.mark, name.error().message, "`shardlab machine list` prints the names");
    return;
  }
  const Result<Machine> machine = shipped_machine(*name);
  if (!machine.ok())
    problems.add(preset.mark, machine.error().message, machine.error().hint);
  else
    device = machine->device;
}

void read_device(const YamlNode& node, bool local, Device& device, Problems& problems) {
  MapReader in(node, "device", problems);
  const YamlNode* preset = in.at("preset");
  if (preset) read_device_preset(*preset, device, problems);
  in.text_at("id", device.id);
  in.text_at("architecture", device.architecture);
  const auto constant = [&](const char* key, double& out, bool needed) {
    if (const YamlNode* v = needed && !preset ? in.required(key) : in.at(key)) {
      device.provenance.erase(key);
      read_constant(in, *v, key, device, out);
    }
  };
  double memory = static_cast<double>(device.memory_bytes);
  constant("memory", memory, true);
  device.memory_bytes = static_cast<int64_t>(std::min(memory, 9e18));
  constant("memory_bandwidth", device.memory_bytes_per_s, !local);
  constant("link_bandwidth", device.link_bytes_per_s, false);
  constant("power_w", device.power_w, false);
  const YamlNode* peaks =
      local || preset ? in.at("peak_flops") : in.required("peak_flops", "`peak_flops: {bf16: 1e15}`, in flop/s by precision");
  if (peaks && in.expect(*peaks, peaks->is_map(), "peak_flops", "a map from precision to flop/s, for example {bf16: 1e15},"))
    for (const YamlEntry& e : peaks->entries) {
      const std::string name = "peak_flops." + e.key;
      if (!precision_named(e.key)) {
        problems.add(e.mark, fmt::format("`peak_flops` of `device` has the unknown precision `{}`", e.key),
                     "expected one of: fp32 bf16 fp16 fp8 fp4");
        continue;
      }
      device.provenance.erase(name);
      if (read_constant(in, e.value, name, device, device.peak_flops[e.key]) && device.peak_flops[e.key] <= 0)
        problems.add(e.value.mark, fmt::format("`{}` of `device` is 0", name),
                     fmt::format("write a rate above 0 in flop/s; leave the key out if the device has no {}", e.key));
    }
  read_constants(in, "constants", "", device, device.constants);
  in.finish();
}

RatePoint read_point(const YamlNode& node, Problems& problems) {
  RatePoint point;
  MapReader in(node, "calibration.points", problems);
  in.required("kernel");
  in.text_at("kernel", point.kernel);
  if (const YamlNode* shape = in.required("shape");
      shape && in.expect(*shape, shape->is_sequence(), "shape", "a list of whole numbers"))
    for (const YamlNode& extent : shape->items) {
      const int64_t n = extent.is_scalar() ? parse_count(extent.text).value_or(-1) : -1;
      if (in.expect(extent, n >= 1, "shape", "a list of whole numbers above 0")) point.shape.push_back(n);
    }
  in.int_at("concurrency", point.concurrency, 1);
  if (const YamlNode* seconds = in.required("seconds")) {
    const bool read = in.number(*seconds, "seconds", point.seconds);
    in.expect(*seconds, !read || point.seconds > 0, "seconds", "a number above 0");  // costs are interpolated in their logarithms
  }
  in.number_at("spread", point.spread);
  in.int_at("repeats", point.repeats);
  in.finish();
  return point;
}

Calibration read_calibration(const YamlNode& node, Problems& problems) {
  Calibration calibration;
  MapReader in(node, "calibration", problems);
  in.required("id");
  in.text_at("id", calibration.id);
  in.text_at("date", calibration.date);
  in.text_at("command", calibration.command);
  in.text_at("processor", calibration.processor);
  in.text_at("kernel_variant", calibration.kernel_variant);
  in.number_at("op_overhead_s", calibration.op_overhead_s);
  in.number_at("wake_latency_s", calibration.wake_latency_s);
  in.number_at("handover_s", calibration.handover_s);
  in.number_at("turn_s", calibration.turn_s);
  in.number_at("unsteadiness", calibration.unsteadiness);
  if (const YamlNode* ahead = in.at("launch_ahead")) {
    const auto truth = ahead->is_scalar() ? parse_bool(ahead->text) : std::nullopt;
    if (in.expect(*ahead, truth.has_value(), "launch_ahead", "true or false")) calibration.launch_ahead = *truth;
  }
  if (const YamlNode* points = in.required("points");
      points && in.expect(*points, points->is_sequence(), "points", "a list of points"))
    for (const YamlNode& point : points->items) calibration.points.push_back(read_point(point, problems));
  in.finish();
  return calibration;
}

/// The kinds of a mixed machine: each `{machine: NAME, nodes: N}` of a shipped machine, or a machine in full.
void read_kinds(const YamlNode& list, MapReader& in, Machine& machine) {
  constexpr const char* kForm =
      "a list of two kinds or more, as [{machine: hgx-h100-ndr, nodes: 1}, {machine: hgx-a100-hdr, nodes: 1}],";
  if (!in.expect(list, list.is_sequence() && list.items.size() > 1, "kinds", kForm)) return;
  Problems& problems = in.problems();
  for (const YamlNode& node : list.items) {
    Machine kind;
    if (const YamlNode* named = node.is_map() ? node.find("machine") : nullptr) {
      MapReader entry(node, "kinds", problems);
      entry.at("machine");
      const Result<std::string> name = machine_name(named->is_scalar() ? named->text : std::string());
      const Result<Machine> shipped = name.ok() ? shipped_machine(*name) : Result<Machine>(name.error());
      if (shipped.ok())
        kind = *shipped;
      else
        problems.add(named->mark, shipped.error().message,
                     "`shardlab machine list` prints the names; any other kind is written in full");
      entry.int_at("nodes", kind.nodes, 1);
      entry.finish();
      if (!shipped.ok()) continue;
    } else {
      kind = read_machine(node, problems);
    }
    if (kind.local || kind.calibration || kind.is_mixed())
      problems.add(node.mark,
                   fmt::format("the kind `{}` is {}", kind.id,
                               kind.is_mixed() ? "a mixed machine"
                               : kind.local    ? "a local machine"
                                               : "a calibrated machine"),
                   "a kind is one sort of device, known by its data sheet");
    else if (!machine.kinds.empty() && kind.devices_per_node != machine.kinds.front().devices_per_node)
      problems.add(
          node.mark,
          fmt::format("the kind `{}` has {} devices a node, and `{}` has {}", kind.id, kind.devices_per_node,
                      machine.kinds.front().id, machine.kinds.front().devices_per_node),
          "ranks are laid out over nodes of one size: write the smaller number under `devices_per_node` of both kinds, in full");
    else
      machine.kinds.push_back(std::move(kind));
  }
}

Price read_price(const YamlNode& node, Problems& problems) {
  Price price;
  MapReader in(node, "price", problems);
  if (const YamlNode* usd = in.required("usd_per_hour")) in.number(*usd, "usd_per_hour", price.usd_per_hour);
  // A price without a date and a place is a rumour.
  in.required("date"), in.required("source");
  in.text_at("date", price.date), in.text_at("source", price.source);
  in.finish();
  return price;
}

Result<Machine> refused(const Problems& problems) {
  Error error = problems.take();
  return error;
}

}  // namespace

std::string_view name_of(Provenance p) {
  switch (p) {
    case Provenance::kDatasheet: return "datasheet";
    case Provenance::kMeasured: return "measured";
    case Provenance::kFitted: return "fitted";
    case Provenance::kTransferred: return "transferred";
  }
  return "?";
}

Machine read_machine(const YamlNode& node, Problems& problems) {
  Machine machine;
  if (node.is_null()) {
    problems.add(node.mark, "the machine is empty", kMachineForm);
    return machine;
  }
  if (node.is_map() && node.find("id") == nullptr && node.find("device") == nullptr &&
      node.find("kinds") == nullptr) {  // one sentence, and not one for each key
    const bool model = node.find("model_type") != nullptr || node.find("hidden_size") != nullptr;
    problems.add(node.mark,
                 model ? "this is a model's config.json, not a machine file"
                       : "this is not a machine file: it has neither `id` nor `device`",
                 "`shardlab machine show h100` prints one");
    return machine;
  }
  MapReader in(node, "", problems);
  int version = kMachineFileVersion;
  in.int_at("version", version);
  if (version != kMachineFileVersion)
    problems.add(in.at("version")->mark,
                 fmt::format("`version` of the machine is {}, and this program reads version {}", version, kMachineFileVersion),
                 fmt::format("write `version: {}`", kMachineFileVersion));
  in.required("id");
  in.text_at("id", machine.id);
  std::string for_readers;
  in.text_at("name", for_readers);
  in.text_at("notes", for_readers);
  if (const YamlNode* local = in.at("local")) {
    const auto truth = local->is_scalar() ? parse_bool(local->text) : std::nullopt;
    if (in.expect(*local, truth.has_value(), "local", "true or false")) machine.local = *truth;
  }
  in.int_at("cores", machine.cores);
  in.int_at("devices_per_node", machine.devices_per_node, 1);
  in.int_at("nodes", machine.nodes, 1);
  // The device first: one taken from a preset brings the provenance of its constants, to which the others are added.
  constexpr const char* kDeviceForm =
      "`device: {memory: 80Gi, memory_bandwidth: 2e12, peak_flops: {bf16: 1e15}}` with the values of the machine (bytes, bytes/s, "
      "flop/s)";
  const YamlNode* kinds = in.at("kinds");
  const YamlNode* device = kinds != nullptr ? in.at("device") : in.required("device", kDeviceForm);
  if (device != nullptr && kinds == nullptr) read_device(*device, machine.local, machine.device, problems);
  if (const YamlNode* inter = kinds != nullptr ? in.required("inter_bandwidth") : in.at("inter_bandwidth"))
    read_constant(in, *inter, "inter_bandwidth", machine.device, machine.inter_bytes_per_s);
  read_constants(in, "fabric", "fabric.", machine.device, machine.fabric);
  if (kinds != nullptr) {
    for (const char* key : {"device", "nodes", "devices_per_node", "cores", "local", "calibration"})
      if (const YamlNode* own = in.at(key))
        problems.add(own->mark, fmt::format("a machine with `kinds` has `{}` of its own", key),
                     "leave it out: each kind says its own, and ranks fill the nodes of one kind after the other");
    read_kinds(*kinds, in, machine);
    if (machine.is_mixed()) join_kinds(machine);
  }
  if (machine.device.id.empty()) machine.device.id = machine.id;
  if (const YamlNode* price = in.at("price")) read_price(*price, problems);  // of money no plan and no prediction knows
  if (const YamlNode* calibration = in.at("calibration"))
    machine.calibration = std::make_shared<const Calibration>(read_calibration(*calibration, problems));
  in.finish();
  if (static_cast<double>(machine.devices_per_node) * machine.nodes > 1 << 30)
    problems.add(node.mark,
                 fmt::format("devices_per_node={} times nodes={} is absurdly large", machine.devices_per_node, machine.nodes),
                 "at most 2^30 devices");
  if (machine.local && machine.cores < 1) problems.add(node.mark, "a local machine without cores", "add `cores: ...`");
  return machine;
}

std::vector<std::string> list_machines() {
  std::vector<std::string> names;
  for (const Preset& preset : machine_presets()) names.emplace_back(preset.name);
  return names;
}

namespace {

/// What people call a machine that has one device of this kind, or several, by the commonest one: nodes of eight, joined by
/// InfiniBand.
constexpr Alias kAliases[] = {{"h100", "hgx-h100-ndr"},     {"dgx-h100", "hgx-h100-ndr"}, {"hgx-h100", "hgx-h100-ndr"},
                              {"h200", "hgx-h200-ndr"},     {"dgx-h200", "hgx-h200-ndr"}, {"a100", "hgx-a100-hdr"},
                              {"dgx-a100", "hgx-a100-hdr"}, {"b200", "hgx-b200-ndr"},     {"dgx-b200", "hgx-b200-ndr"},
                              {"gb200", "gb200-nvl72"},     {"gh200", "gh200-1-ndr"},     {"mi300x", "mi300x-8"},
                              {"mi355x", "mi355x-8"}};

}  // namespace

Result<std::string> machine_name(const std::string& said) {
  auto meant = name_meant(said, list_machines(), kAliases);
  if (meant.ok()) return meant;
  Error error = meant.error();
  error.message = "no machine is " + error.message;
  error.hint =
      "`shardlab machine list` prints the names; a path to a machine file is also a machine (write ./NAME for a file "
      "without .yaml)";
  if (said == "local") error.hint = "the machine at hand is machine: {local: true}";
  return error;
}

Result<std::string> machine_text(const std::string& name) {
  const auto meant = machine_name(name);
  if (!meant.ok()) return meant.error();
  return std::string(std::ranges::find(machine_presets(), *meant, &Preset::name)->text);
}

Result<Machine> parse_machine(std::string_view yaml, const std::string& file) {
  Problems problems(file);
  const YamlNode root = parse_yaml(yaml, problems);
  if (problems.empty() && root.is_null()) problems.add(root.mark, "the file is empty", kMachineForm);
  if (!problems.empty()) return refused(problems);
  Machine machine = read_machine(root, problems);
  if (!problems.empty()) return refused(problems);
  return machine;
}

namespace {

Result<Machine> shipped_machine(const std::string& name) {
  static OncePerName<Machine> machines;
  return machines.of(name, [&] { return parse_machine(*machine_text(name), name + ".yaml"); });
}

bool is_path(const std::string& name) {
  return name.find('/') != std::string::npos || name.ends_with(".yaml") || name.ends_with(".yml");
}

}  // namespace

Result<Price> load_price(const std::string& name_or_path) {
  const bool path = is_path(name_or_path);
  const Result<std::string> text = path ? read_text_file(name_or_path) : machine_text(name_or_path);
  if (!text.ok()) return text.error();
  Problems problems(path ? name_or_path : name_or_path + ".yaml");
  const YamlNode root = parse_yaml(*text, problems);
  const YamlNode* price = root.is_map() ? root.find("price") : nullptr;
  if (price == nullptr) return Price{};
  Price found = read_price(*price, problems);
  if (!problems.empty()) return problems.take();
  return found;
}

Result<Machine> load_machine(const std::string& name_or_path) {
  if (is_path(name_or_path)) {
    const Result<std::string> text = read_text_file(name_or_path);
    if (!text.ok()) return text.error();
    return parse_machine(*text, name_or_path);
  }
  const auto name = machine_name(name_or_path);
  if (!name.ok()) return name.error();
  return shipped_machine(*name);
}

}  // namespace shardlab::sweeps
