// The resolved case as text: what `case.yaml` holds, and what the case id is a hash of.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "plan/base/check.h"
#include "plan/base/files.h"
#include "plan/base/hash.h"
#include "plan/base/limits.h"
#include "plan/base/values.h"
#include "plan/keys.h"
#include "sweeps/document.h"
#include "sweeps/machines.h"
#include "sweeps/sweep.h"
#include "sweeps/yaml.h"

namespace shardlab::sweeps {

namespace {

std::string constant(const Device& device, const std::string& name, const std::string& value) {
  const auto it = device.provenance.find(name);
  return it == device.provenance.end() ? value : fmt::format("{{value: {}, provenance: {}}}", value, name_of(it->second));
}

/// A map of named constants, one a line; nothing for an empty one.
std::string constants(const Device& device, std::string_view indent, std::string_view key, std::string_view prefix,
                      const ByName<double>& values) {
  std::string text = values.empty() ? "" : fmt::format("{}{}:\n", indent, key);
  for (const auto& [name, value] : values)
    text +=
        fmt::format("{}  {}: {}\n", indent, yaml_scalar(name), constant(device, fmt::format("{}{}", prefix, name), to_text(value)));
  return text;
}

/// Writes lines of keys in the order of the table, opening a section where the path enters one.
class KeyWriter {
 public:
  explicit KeyWriter(std::string& text) : text_(text) {}
  void write(std::string_view section, std::string_view line) {
    if (section != section_) enter(section);
    text_ += line;
  }
  void append(std::string_view text) {
    text_ += text;
    open_.clear(), section_ = {};
  }

 private:
  /// Closes what `section` is not in, and opens what it is in.
  void enter(std::string_view section) {
    section_ = section;
    size_t depth = 0;
    while (!section.empty()) {
      const size_t dot = std::min(section.find('.'), section.size());
      const std::string_view name = section.substr(0, dot);
      section.remove_prefix(std::min(dot + 1, section.size()));
      if (depth == open_.size() || open_[depth] != name) {
        open_.resize(depth);
        open_.push_back(name);
        text_.append(2 * depth, ' ').append(name).append(":\n");
      }
      ++depth;
    }
    open_.resize(depth);
  }

  std::string_view section_;            ///< that is open, as "layout.fsdp"
  std::vector<std::string_view> open_;  ///< its parts
  std::string& text_;
};

/// A key as a case file has it.
struct WrittenKey {
  const CaseKey* key;
  std::string_view unset;  ///< a value that says nothing, and is left out; empty values say nothing too
  bool of_experts;         ///< says nothing in a model without experts
  bool of_machine;
  bool of_model;
  std::string_view section;  ///< "layout.fsdp" of layout.fsdp.unit
};

/// The line of a key, with its indentation; empty where the value says nothing.
std::string line_of(const WrittenKey& written, const std::string& value) {
  if (value.empty() || value == written.unset) return {};
  const std::string_view path = written.key->path;
  const auto depth = static_cast<size_t>(std::ranges::count(path, '.'));
  const bool flow = written.key->form == Form::kAny || written.key->form == Form::kMap;  // `get` writes YAML
  return fmt::format("{}{}: {}\n", std::string(2 * depth, ' '), path.substr(path.rfind('.') + 1),
                     flow ? value : yaml_scalar(value));
}

const std::vector<WrittenKey>& written_keys() {
  static const std::vector<WrittenKey> keys = [] {
    static const std::set<std::string_view> of_experts = {"model.experts",           "model.top_k",
                                                          "model.moe_ffn",           "model.router",
                                                          "model.normalise_weights", "model.router_factor",
                                                          "model.balance_loss",      "model.z_loss",
                                                          "model.shared_experts",    "model.shared_gate",
                                                          "model.dense_layers",      "model.moe_every",
                                                          "model.router_groups",     "model.router_groups_chosen",
                                                          "model.bias_update_rate",  "model.capacity_factor"};
    static const std::map<std::string_view, std::string_view> unset = {{"checkpoint.save_every", "0"},
                                                                       {"model.qk_norm", "false"},
                                                                       {"model.kv_lora_rank", "0"},
                                                                       {"model.q_lora_rank", "0"},
                                                                       {"model.qk_nope_head_dim", "0"},
                                                                       {"model.qk_rope_head_dim", "0"},
                                                                       {"model.v_head_dim", "0"},
                                                                       {"model.window", "0"},
                                                                       {"model.global_layers", "0"},
                                                                       {"model.global_every", "0"},
                                                                       {"model.local_rope_theta", "0"},
                                                                       {"model.qkv_biases", "false"},
                                                                       {"model.shared_gate", "false"},
                                                                       {"model.capacity_factor", "0"},
                                                                       {"model.vocab_multiple", "1"},
                                                                       {"data.packed", "false"},
                                                                       {"data.document_end", "-1"},
                                                                       {"data.document_tokens", "0"},
                                                                       {"data.routing", "balanced"},
                                                                       {"layout.expert_overlap", name_of(ExpertOverlap::kNone)},
                                                                       {"layout.expert_bound", "0"},
                                                                       {"layout.loss_chunks", "1"},
                                                                       {"layout.expert_tp", "0"},
                                                                       {"layout.cp_ulysses", "0"},
                                                                       {"layout.cp_kind", name_of(ContextKind::kNone)}};
    std::vector<WrittenKey> written;
    for (const CaseKey& key : case_keys()) {
      const bool of_machine = key.path.starts_with("machine.");
      if (key.get == nullptr && !of_machine) continue;
      const auto empty = unset.find(key.path);
      const size_t last = key.path.rfind('.');
      written.push_back({&key, empty == unset.end() ? std::string_view() : empty->second, of_experts.contains(key.path), of_machine,
                         key.path.starts_with("model."),
                         last == std::string_view::npos ? std::string_view() : key.path.substr(0, last)});
    }
    return written;
  }();
  return keys;
}

constexpr std::string_view kVersionLine = "version: 1\n";

/// Whether the case has something to say about the key.
bool says(const WrittenKey& written, const Case& config, bool with_name) {
  if (!with_name && written.key->path == "name") return false;
  return !written.of_experts || !(config.model.experts == Experts{});
}

}  // namespace

namespace {

/// Links and device of a described machine, each line after `indent`.
std::string described_yaml(const Machine& m, const std::string& indent) {
  const Device& d = m.device;
  std::string text =
      fmt::format("{0}id: {1}\n{0}devices_per_node: {2}\n{0}nodes: {3}\n{0}inter_bandwidth: {4}\n", indent, yaml_scalar(m.id),
                  m.devices_per_node, m.nodes, constant(d, "inter_bandwidth", to_text(m.inter_bytes_per_s)));
  if (m.cores != 0) text += fmt::format("{}cores: {}\n", indent, m.cores);
  text += constants(d, indent, "fabric", "fabric.", m.fabric);
  const std::string inner = indent + "  ";
  text += fmt::format("{0}device:\n{1}id: {2}\n{1}memory: {3}\n{1}memory_bandwidth: {4}\n{1}link_bandwidth: {5}\n{1}power_w: {6}\n",
                      indent, inner, yaml_scalar(d.id), constant(d, "memory", fmt::format("{}", d.memory_bytes)),
                      constant(d, "memory_bandwidth", to_text(d.memory_bytes_per_s)),
                      constant(d, "link_bandwidth", to_text(d.link_bytes_per_s)), constant(d, "power_w", to_text(d.power_w)));
  text += inner + (d.peak_flops.empty() ? "peak_flops: {}\n" : "peak_flops:\n");
  for (const auto& [precision, flops] : d.peak_flops)
    text += fmt::format("{}  {}: {}\n", inner, yaml_scalar(precision), constant(d, "peak_flops." + precision, to_text(flops)));
  if (!d.architecture.empty()) text += fmt::format("{}architecture: {}\n", inner, yaml_scalar(d.architecture));
  return text + constants(d, inner, "constants", "", d.constants);
}

}  // namespace

std::string machine_yaml(const Machine& m) {
  if (m.local)
    return fmt::format(
        "machine:\n  local: true\n  id: {}\n  nodes: {}\n  devices_per_node: {}\n  cores: {}\n  device:\n    memory: {}\n",
        yaml_scalar(m.id), m.nodes, m.devices_per_node, m.cores, m.device.memory_bytes);
  const std::string head = "machine:\n  inline:\n";
  if (!m.is_mixed()) return head + described_yaml(m, "    ");
  // What every device has follows from the kinds.
  std::string text = fmt::format("{}    id: {}\n    inter_bandwidth: {}\n", head, yaml_scalar(m.id),
                                 constant(m.device, "inter_bandwidth", to_text(m.inter_bytes_per_s)));
  text += constants(m.device, "    ", "fabric", "fabric.", m.fabric);
  text += "    kinds:\n";
  for (const Machine& kind : m.kinds) {
    std::string entry = described_yaml(kind, "        ");
    entry[6] = '-';
    text += entry;
  }
  return text;
}

std::string to_yaml(const Case& config) {
  std::string text(kVersionLine);
  KeyWriter out(text);
  bool has_machine = false;
  for (const WrittenKey& written : written_keys()) {
    if (written.of_machine && !std::exchange(has_machine, true)) out.append(machine_yaml(config.machine));
    if (written.of_machine || !says(written, config, true)) continue;
    if (const std::string line = line_of(written, written.key->get(config)); !line.empty()) out.write(written.section, line);
  }
  return text;
}

std::string case_id(const Case& config) { return CaseIds().id(config, machine_yaml(config.machine)); }

namespace {

/// The place of the first key behind the machine.
size_t behind_machine() {
  const std::vector<WrittenKey>& keys = written_keys();
  return static_cast<size_t>(std::ranges::find(keys.rbegin(), keys.rend(), true, &WrittenKey::of_machine).base() - keys.begin());
}

std::vector<const CaseKey*> keys_behind_machine() {
  std::vector<const CaseKey*> keys;
  for (size_t i = behind_machine(); i < written_keys().size(); ++i) {
    SHARDLAB_CHECK(!written_keys()[i].of_experts, "the key {} of experts is behind the machine", written_keys()[i].key->path);
    keys.push_back(written_keys()[i].key);
  }
  return keys;
}

}  // namespace

CaseIds::CaseIds() : values_(keys_behind_machine()) {
  for (size_t i = behind_machine(); i < written_keys().size(); ++i) lines_.emplace_back(i);
}

/// The hash of the text up to the end of the machine: written again where model or machine have changed.
uint64_t CaseIds::hash_head(const Case& config, std::string_view machine) {
  if (has_head_ && machine == machine_ && config.model == model_) return head_hash_;
  std::string text(kVersionLine);
  KeyWriter out(text);
  for (const WrittenKey& written : written_keys()) {
    if (written.of_machine) break;
    SHARDLAB_CHECK(written.of_model || written.key->path == "name", "the key {} is of no model", written.key->path);
    if (!says(written, config, false)) continue;
    if (const std::string line = line_of(written, written.key->get(config)); !line.empty()) out.write(written.section, line);
  }
  out.append(machine);
  machine_ = machine, model_ = config.model, has_head_ = true;
  return head_hash_ = hash_text(text);
}

/// The line of a value. The last values of a key are remembered: an axis comes back to them.
void CaseIds::take(Line& line, const std::string& value) {
  constexpr size_t kRemembered = 64;
  auto known = line.known.find(value);
  if (known == line.known.end()) {
    if (line.known.size() == kRemembered) line.known.clear();
    known = line.known.emplace(value, HashedText(line_of(written_keys()[line.written], value))).first;
  }
  HashedText* text = known->second.text().empty() ? nullptr : &known->second;
  has_openers_ &= (text == nullptr) == (line.text == nullptr);
  line.text = text;
}

void CaseIds::open_sections() {
  std::string text;
  KeyWriter out(text);
  for (Line& line : lines_) {
    if (line.text == nullptr) continue;
    text.clear();
    out.write(written_keys()[line.written].section, "");
    if (text != line.opener.text()) line.opener = HashedText(text);
  }
  has_openers_ = true;
}

std::string CaseIds::id(const Case& config, std::string_view machine) {
  uint64_t hash = hash_head(config, machine);
  for (const size_t changed : values_.read(config)) take(lines_[changed], values_[changed]);
  if (!has_openers_) open_sections();
  for (Line& line : lines_) {
    if (line.text == nullptr) continue;
    if (!line.opener.text().empty()) hash = line.opener.behind(hash);
    hash = line.text->behind(hash);
  }
  // Predictions follow from what the file says: a file that has changed makes another case, whatever its name.
  if (!config.data.routes.empty()) {
    if (config.data.routes != routes_) {
      const auto said = read_file_within(config.data.routes, limits::kRowsBytes);
      routes_ = config.data.routes, routes_hash_ = said.ok() ? hash_text(*said) : 0;
    }
    hash = hash_text(fmt::format("routes {:016x}\n", routes_hash_), hash);
  }
  return fmt::format("{:016x}", hash);
}

}  // namespace shardlab::sweeps
