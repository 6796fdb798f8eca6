// Files of frameworks read as settings of a case.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "interop/frameworks.h"
#include "interop/settings.h"

namespace shardlab::interop {

namespace {

/// A file of settings longer than this is none: the longest that ship with the frameworks have 20 KiB.
constexpr size_t kFileBytes = size_t{1} << 20;

/// Sections of a case file, and what stands in each: words, or further sections.
struct Section {
  std::string name;
  std::vector<std::pair<std::string, std::string>> values;
  std::vector<Section> sections;
};

Section& section_of(Section& root, std::string_view path) {
  Section* at = &root;
  while (!path.empty()) {
    const size_t dot = std::min(path.find('.'), path.size());
    const std::string name(path.substr(0, dot));
    auto found = std::ranges::find(at->sections, name, &Section::name);
    if (found == at->sections.end()) found = at->sections.insert(at->sections.end(), {.name = name, .values = {}, .sections = {}});
    at = &*found;
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return *at;
}

void write(const Section& section, int indent, std::string& out) {
  const std::string blanks(static_cast<size_t>(indent), ' ');
  for (const auto& [key, value] : section.values) out += fmt::format("{}{}: {}\n", blanks, key, value);
  for (const Section& inner : section.sections) {
    out += fmt::format("{}{}:\n", blanks, inner.name);
    write(inner, indent + 2, out);
  }
}

}  // namespace

Result<Imported> import_file(std::string_view text, const std::string& name, std::string_view framework, int64_t devices) {
  if (text.size() > kFileBytes)
    return Error{ExitCode::kUsage,
                 fmt::format("{} has {} bytes, more than {}", name, text.size(), kFileBytes),
                 "name a file of settings",
                 {}};
  if (framework == "megatron") return import_megatron(text, name, devices);
  if (framework == "deepspeed") return import_deepspeed(text, name, devices);
  if (framework == "torchtitan") return import_torchtitan(text, name, devices);
  return Error{
      ExitCode::kUsage, fmt::format("files of `{}` are not read", framework), "expected one of: megatron deepspeed torchtitan", {}};
}

std::string case_text(const Imported& imported, const std::string& more) {
  Section root;
  for (const auto& [path, value] : imported.settings) {
    const size_t dot = path.rfind('.');
    const bool is_model = path.starts_with("model.");
    const std::string home = is_model ? "model.inline" : dot == std::string::npos ? "" : path.substr(0, dot);
    // Words of a foreign file may hold anything: quoted, but for plain ones and our own map and list.
    constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.+-";
    const bool plain = path == "layout.offload" || path == "layout.recompute" ||
                       (!value.empty() && value.find_first_not_of(kPlain) == std::string::npos);
    section_of(root, home)
        .values.emplace_back(dot == std::string::npos ? path : path.substr(dot + 1),
                             plain ? value : nlohmann::json(value).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  std::string text = more;
  write(root, 0, text);
  return text;
}

}  // namespace shardlab::interop
