#include "answers/case_flags.h"

#include <fmt/format.h>

#include <algorithm>

#include "answers/namespaces.h"
#include "plan/base/values.h"
#include "sweeps/machines.h"

namespace shardlab::answers {

std::string hyphenated(std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  return key;
}

bool given(const CaseFlags& flags, std::string_view key) {
  for (const auto& [k, v] : flags.layout)
    if (k == key && !v.empty()) return true;
  for (const std::string& s : flags.set)
    if (s.starts_with(std::string(key) + "=")) return true;
  return false;
}

namespace {

/// As many nodes of the machine as the devices need, unless the command line says how many there are.
Result<void> add_nodes(const CaseFlags& flags, int64_t devices, std::vector<std::string>& words) {
  if (flags.machine == "local" || given(flags, "machine.nodes")) return {};
  const auto machine = load_machine(flags.machine);
  if (!machine.ok()) return machine.error();
  devices = std::min<int64_t>(devices, 1 << 20);  // more ranks are refused in words when the case is read
  if (devices > machine->devices())
    words.push_back(fmt::format("machine.nodes={}", (devices + machine->devices_per_node - 1) / machine->devices_per_node));
  return {};
}

}  // namespace

Result<std::vector<std::string>> words_from_flags(const CaseFlags& flags) {
  std::vector<std::string> words{"model=" + flags.model, "machine=" + flags.machine};
  if (!flags.assume.empty()) words.push_back("model.assume=" + flags.assume);
  for (const auto& [key, value] : flags.layout)
    if (!value.empty()) words.push_back(key + "=" + value);
  // What is no rank count is 1 here, and refused in words when the case is read.
  const auto size = [&](const char* key) -> int64_t {
    for (const auto& [k, v] : flags.layout)
      if (k == key && !v.empty()) return std::clamp<int64_t>(parse_count(v).value_or(1), 1, 1 << 15);
    return 1;
  };
  if (flags.devices > 0 && !given(flags, "dp")) {
    const int64_t model_parallel = size("tp") * size("pp") * size("cp");
    if (flags.devices % model_parallel != 0)
      return Error{ExitCode::kUsage,
                   fmt::format("--devices {} is not a multiple of tp*pp*cp = {}", flags.devices, model_parallel),
                   fmt::format("set tp, pp and cp so that tp*pp*cp divides {}, or give dp in place of --devices", flags.devices),
                   {}};
    words.push_back(fmt::format("dp={}", flags.devices / model_parallel));
  } else if (!given(flags, "dp")) {
    words.emplace_back("dp=1");
  }
  SHARDLAB_TRY(add_nodes(flags, flags.devices > 0 ? flags.devices : size("dp") * size("tp") * size("pp") * size("cp"), words));
  words.insert(words.end(), flags.set.begin(), flags.set.end());
  return words;
}

Result<Case> case_from_flags(const CaseFlags& flags) {
  auto words = words_from_flags(flags);
  if (!words.ok()) return words.error();
  auto config = case_from_words(options_around(flags.around, flags.machine_file, std::move(*words)));
  if (config.ok() && flags.devices > 0 && config->layout.world_size() != flags.devices)
    return Error{ExitCode::kUsage,
                 fmt::format("--devices {} and a layout of dp*tp*pp*cp = {} ranks", flags.devices, config->layout.world_size()),
                 "leave out --devices, or --dp, which then follows from it",
                 {}};
  return config;
}

LoadOptions options_around(const Surroundings& around, const std::string& machine_file, std::vector<std::string> overrides) {
  LoadOptions options;
  options.overrides = std::move(overrides);
  if (around.local_machine) options.local_machine = [around, machine_file] { return around.local_machine(machine_file); };
  return options;
}

}  // namespace shardlab::answers
