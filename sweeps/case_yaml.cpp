// The resolved case as text: what `case.yaml` holds, and what the case id is a hash of.
#include <fmt/format.h>

#include <algorithm>

#include "plan/base/hash.h"
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
                      const std::map<std::string, double>& values) {
  std::string text = values.empty() ? "" : fmt::format("{}{}:\n", indent, key);
  for (const auto& [name, value] : values)
    text +=
        fmt::format("{}  {}: {}\n", indent, yaml_scalar(name), constant(device, fmt::format("{}{}", prefix, name), to_text(value)));
  return text;
}

/// Writes keys in the order of the table, opening a section where the path enters one.
class KeyWriter {
 public:
  void write(const CaseKey& key, const std::string& value) {
    std::string_view path = key.path;
    size_t depth = 0;
    for (size_t dot; (dot = path.find('.')) != std::string_view::npos; ++depth, path.remove_prefix(dot + 1)) {
      const std::string_view section = path.substr(0, dot);
      if (depth < open_.size() && open_[depth] == section) continue;
      open_.resize(depth);
      open_.push_back(section);
      text_.append(2 * depth, ' ').append(section).append(":\n");
    }
    open_.resize(depth);
    text_.append(2 * depth, ' ').append(path).append(": ").append(value).append("\n");
  }
  void append(std::string_view text) {
    text_ += text;
    open_.clear();
  }
  std::string take() { return std::move(text_); }

 private:
  std::vector<std::string_view> open_;
  std::string text_ = "version: 1\n";
};

/// What says nothing is left out: no path or list, no checkpoints, and no kind of what there is none of.
bool is_unset(const Case& config, const CaseKey& key, const std::string& value) {
  static constexpr std::string_view kOfExperts[] = {"model.experts",
                                                    "model.top_k",
                                                    "model.moe_ffn",
                                                    "model.router",
                                                    "model.normalise_weights",
                                                    "model.router_factor",
                                                    "model.balance_loss",
                                                    "model.z_loss",
                                                    "model.shared_experts",
                                                    "model.dense_layers",
                                                    "model.moe_every",
                                                    "model.router_groups",
                                                    "model.router_groups_chosen"};
  if (config.model.experts == Experts{} && std::ranges::find(kOfExperts, key.path) != std::end(kOfExperts)) return true;
  return value.empty() || (key.path == "checkpoint.save_every" && value == "0") ||
         (key.path == "model.qk_norm" && value == "false") || (key.path == "model.vocab_multiple" && value == "1") ||
         (key.path == "data.packed" && value == "false") || (key.path == "data.document_end" && value == "-1") ||
         (key.path == "data.document_tokens" && value == "0") || (key.path == "layout.loss_chunks" && value == "1") ||
         (key.path == "layout.cp_ulysses" && value == "0") ||
         (key.path == "layout.cp_kind" && value == name_of(ContextKind::kNone));
}

std::string yaml_of(const Case& config, std::string_view machine, bool with_name) {
  KeyWriter out;
  bool machine_written = false;
  for (const CaseKey& key : case_keys()) {
    if (key.path.starts_with("machine.")) {
      if (!machine_written) out.append(machine);
      machine_written = true;
      continue;
    }
    if (key.get == nullptr || (key.path == "name" && !with_name)) continue;
    const std::string value = key.get(config);
    if (!is_unset(config, key, value))
      out.write(key, key.form == Form::kAny || key.form == Form::kMap ? value : yaml_scalar(value));
  }
  return out.take();
}

}  // namespace

std::string machine_yaml(const Machine& m) {
  const Device& d = m.device;
  if (m.local)
    return fmt::format(
        "machine:\n  local: true\n  id: {}\n  nodes: {}\n  devices_per_node: {}\n  cores: {}\n  device:\n    memory: {}\n",
        yaml_scalar(m.id), m.nodes, m.devices_per_node, m.cores, d.memory_bytes);
  std::string text =
      fmt::format("machine:\n  inline:\n    id: {}\n    devices_per_node: {}\n    nodes: {}\n    inter_bandwidth: {}\n",
                  yaml_scalar(m.id), m.devices_per_node, m.nodes, constant(d, "inter_bandwidth", to_text(m.inter_bytes_per_s)));
  if (m.cores != 0) text += fmt::format("    cores: {}\n", m.cores);
  text += constants(d, "    ", "fabric", "fabric.", m.fabric);
  text += fmt::format(
      "    device:\n      id: {}\n      memory: {}\n      memory_bandwidth: {}\n      link_bandwidth: {}\n      power_w: {}\n",
      yaml_scalar(d.id), constant(d, "memory", fmt::format("{}", d.memory_bytes)),
      constant(d, "memory_bandwidth", to_text(d.memory_bytes_per_s)), constant(d, "link_bandwidth", to_text(d.link_bytes_per_s)),
      constant(d, "power_w", to_text(d.power_w)));
  text += d.peak_flops.empty() ? "      peak_flops: {}\n" : "      peak_flops:\n";
  for (const auto& [precision, flops] : d.peak_flops)
    text += fmt::format("        {}: {}\n", yaml_scalar(precision), constant(d, "peak_flops." + precision, to_text(flops)));
  if (!d.architecture.empty()) text += fmt::format("      architecture: {}\n", yaml_scalar(d.architecture));
  return text + constants(d, "      ", "constants", "", d.constants);
}

std::string to_yaml(const Case& config) { return yaml_of(config, machine_yaml(config.machine), true); }

std::string case_id(const Case& config) { return case_id(config, machine_yaml(config.machine)); }

std::string case_id(const Case& config, std::string_view machine) {
  return fmt::format("{:016x}", hash_text(yaml_of(config, machine, false)));
}

}  // namespace shardlab::sweeps
