#include "sweeps/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>

#include "plan/base/files.h"
#include "plan/base/values.h"
#include "sweeps/expression_keys.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"
#include "sweeps/synonyms.h"

namespace shardlab::sweeps {

namespace {

constexpr std::array<std::string_view, 6> kSources = {"model.preset", "model.hf",      "machine.preset",
                                                      "machine.file", "machine.local", "machine.inline"};

/// Keys that are derived where nothing is given, so that `auto` means something.
constexpr std::array<std::string_view, 7> kDerived = {"layout.dp",      "layout.schedule",           "layout.bucket_bytes",
                                                      "train.seq_len",  "train.global_batch_tokens", "train.grad_accumulation",
                                                      "train.precision"};

template <size_t N>
bool contains(const std::array<std::string_view, N>& list, std::string_view word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

bool looks_like_path(std::string_view text, std::string_view ending) {
  return text.find('/') != std::string_view::npos || text.ends_with(ending);
}

/// Where a bare `model: X` or `machine: X` comes from.
std::string source_path(std::string_view group, std::string_view text, const std::string& folder) {
  if (group == "model") return is_model_path(std::string(text), folder) ? "model.hf" : "model.preset";
  if (text == "local") return "machine.local";
  return looks_like_path(text, ".yaml") || text.ends_with(".yml") ? "machine.file" : "machine.preset";
}

bool takes_more_than_a_scalar(const CaseKey& key) { return key.form == Form::kAny || key.form == Form::kMap; }

/// The words that a value may be.
std::vector<std::string> words_for(const CaseKey& key) {
  return key.form == Form::kBool ? std::vector<std::string>{"true", "false"} : words_of(key);
}

/// "; write it without a unit", where words follow a number.
std::string unit_too_many(const CaseKey& key, std::string_view text) {
  const bool number = key.form == Form::kInteger || key.form == Form::kCount || key.form == Form::kNumber;
  const size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const auto in_words = [](unsigned char c) { return std::isalpha(c) || c == ' '; };
  const bool unit = end > 0 && end < text.size() && std::ranges::all_of(text.substr(end), in_words) && !parse_number(text);
  return number && unit ? "; write it without a unit" : "";
}

/// How a list that stands where a value is expected becomes an axis; nothing of what is no list.
std::string as_axis(std::string_view word, const YamlNode& value) {
  if (!value.is_sequence()) return "";
  if (value.items.size() > 8) return "; a sweep varies it under `axes`";
  return fmt::format("; a sweep varies it as `axes: {{{}: {}}}`", word, to_flow(value));
}

/// Keys of which `word` is the last part, by their short forms in quotes: "steps" is that of `measure.steps` and `diloco.steps`.
std::vector<std::string> keys_ending_in(std::string_view word) {
  std::vector<std::string> found;
  for (const CaseKey& key : case_keys()) {
    const size_t dot = key.path.rfind('.');
    if (dot != std::string_view::npos && key.path.substr(dot + 1) == word) found.push_back(fmt::format("`{}`", key.word()));
  }
  return found;
}

/// Keys that are meant by a word that stands where it is none; of synonyms those that the section cannot say.
std::vector<std::string> keys_named(std::string_view word, std::string_view section) {
  if (const CaseKey* key = find_key(word)) return {fmt::format("`{}`", key->path)};
  if (const CaseKey* key = find_key(meant_by(word))) {
    const bool here = section.empty() ? !key->aliases.empty() : key->path.starts_with(fmt::format("{}.", section));
    if (!here) return {fmt::format("`{}`", key->path)};
  }
  return keys_ending_in(word);
}

/// What to do where keys of another section stand under `section`.
std::string elsewhere(const std::vector<std::string>& keys, std::string_view section) {
  if (section.empty()) return "write it in full, or in its section";
  if (keys.size() > 1) return "write it in its section";
  const std::string_view key = keys.front();  // in backticks
  const size_t dot = key.rfind('.');
  return dot == std::string_view::npos ? "write it at the top of the file" : fmt::format("write it under {}`", key.substr(0, dot));
}

std::vector<std::string> keys_of_section(const std::string& section) {
  std::vector<std::string> words = keys_under(section);
  if (section == "model") words.insert(words.begin(), {"preset", "hf", "assume", "inline"});
  if (section == "machine") words.insert(words.begin(), {"preset", "file", "local", "inline"});
  return words;
}

}  // namespace

bool is_derived(std::string_view path) { return contains(kDerived, path); }

std::string_view source_group(std::string_view path) {
  if (!contains(kSources, path)) return {};
  return path.substr(0, path.find('.'));
}

void put(Settings& into, const std::string& path, const Setting& setting) {
  if (const std::string_view group = source_group(path); !group.empty())
    std::erase_if(into, [&](const auto& entry) { return source_group(entry.first) == group; });
  into[path] = setting;
}

void merge(Settings& into, const std::string& path, const Setting& setting) {
  if (setting.text == "auto" && is_derived(path))
    into.erase(path);
  else
    put(into, path, setting);
}

void merge(Settings& into, const Settings& from) {
  for (const auto& [path, setting] : from) merge(into, path, setting);
}

void SettingsReader::read(const YamlNode& map, Settings& out, const std::vector<std::string>& skip,
                          const std::vector<std::string>& listed) {
  if (map.is_null()) return;
  if (!map.is_map()) {
    problems_.add(map.mark, fmt::format("what stands here {}, and a map of keys is expected", is_what(map)),
                  "write `{key: value}`");
    return;
  }
  read_section(map, "", out, skip, listed);
}

void SettingsReader::read_section(const YamlNode& map, const std::string& section, Settings& out,
                                  const std::vector<std::string>& skip, const std::vector<std::string>& listed) {
  for (const YamlEntry& entry : map.entries)
    if (std::find(skip.begin(), skip.end(), entry.key) == skip.end()) read_entry(entry, section, out, listed);
}

void SettingsReader::read_entry(const YamlEntry& entry, const std::string& section, Settings& out,
                                const std::vector<std::string>& listed) {
  const std::string path = section.empty() ? entry.key : section + "." + entry.key;
  if (path == "model.assume") return;  // was read before everything
  const bool group = path == "model" || path == "machine";
  if ((group && entry.value.is_scalar()) || contains(kSources, path) || path == "model.inline")
    return read_source(entry, path, out);
  const CaseKey* key = find_key(path);
  if (key && (entry.value.is_scalar() || (takes_more_than_a_scalar(*key) && !entry.value.is_null())))
    return assign(out, std::string(key->path), entry.key, entry.value);
  if (is_section(path) && (entry.value.is_map() || entry.value.is_null())) return read_section(entry.value, path, out, {}, {});
  if (key)
    problems_.add(entry.value.mark, fmt::format("`{}` {}", entry.key, is_what(entry.value)),
                  fmt::format("expected {}{}", expected(*key), as_axis(key->word(), entry.value)));
  else if (is_section(path))
    problems_.add(entry.value.mark, fmt::format("`{}` {}", entry.key, is_what(entry.value)),
                  fmt::format("expected {}a map with keys of: {}{}", group ? "a name, or " : "",
                              fmt::join(keys_of_section(path), " "), group ? as_axis(path, entry.value) : ""));
  else if (const auto meant = keys_named(entry.key, section); !meant.empty() && !problems_.is_full())
    problems_.add(entry.mark,
                  fmt::format("unknown key `{}`{}, did you mean {}?", entry.key,
                              section.empty() ? "" : fmt::format(" under `{}`", section), fmt::join(meant, " or ")),
                  elsewhere(meant, section));
  else
    add_unknown_key(problems_, entry.mark, entry.key, section, listed.empty() ? keys_of_section(section) : listed,
                    section.empty() ? keys_under("") : std::vector<std::string>{});
}

void SettingsReader::read_source(const YamlEntry& entry, const std::string& path, Settings& out) {
  const YamlNode& value = entry.value;
  if (path == "model.inline") {
    if (value.is_map())
      read_section(value, "model", sources_.inline_model, {}, {});
    else
      problems_.add(value.mark, fmt::format("`inline` {}", is_what(value)), "a map of the model's sizes is expected");
  } else if (path == "machine.inline") {
    sources_.inline_machine = read_machine(value, problems_);
    out[path] = {"true", value.mark};
  } else if (!value.is_scalar()) {
    problems_.add(value.mark, fmt::format("`{}` {}", entry.key, is_what(value)), "a name or a path is expected");
  } else {
    const bool group = path == "model" || path == "machine";
    assign(out, group ? source_path(path, value.text, folder_) : path, entry.key, value);
  }
}

void SettingsReader::assign(Settings& out, const std::string& path, std::string_view word, const YamlNode& value) {
  const std::string_view group = source_group(path);
  for (const auto& [other, setting] : out)
    if (other == path || (!group.empty() && source_group(other) == group)) {
      problems_.add(value.mark,
                    other == path
                        ? fmt::format("`{}` is set a second time: line {} sets it as `{}`", word, setting.mark.line, other)
                        : fmt::format("`{}` and `{}` (line {}) both choose the {}", word, other, setting.mark.line, group),
                    "keep one of the two");
      return;
    }
  if (auto setting = value_of(path, word, value)) out[path] = *setting;
}

std::string SettingsReader::path_of(std::string_view word, const std::string& text, Mark mark) {
  if (word == "model" || word == "machine") return source_path(word, text, folder_);
  if (contains(kSources, word) && word != "machine.inline") return std::string(word);
  if (const CaseKey* key = find_key(word); key && key->path != "name") return std::string(key->path);
  if (const auto meant = keys_ending_in(word); word != "name" && !meant.empty() && !problems_.is_full()) {
    problems_.add(mark, fmt::format("unknown key `{}`, did you mean {}?", word, fmt::join(meant, " or ")), "write it in full");
    return {};
  }
  std::vector<std::string> listed = keys_under("");
  std::erase(listed, "name");
  listed.insert(listed.begin(), {"model", "machine"});
  listed.emplace_back("and paths (model.layers, machine.nodes, ...)");
  add_unknown_key(problems_, mark, word, "", listed, expression_vocabulary().keys);
  return {};
}

std::optional<Setting> SettingsReader::value_of(const std::string& path, std::string_view word, const YamlNode& value) {
  Setting setting{value.is_scalar() ? value.text : to_flow(value), value.mark};
  if (!source_group(path).empty()) return source_value(path, std::move(setting));
  const CaseKey* key = find_key(path);
  SHARDLAB_CHECK(key != nullptr, "no key has the path {}", path);
  if (setting.text == "auto" && is_derived(path)) return setting;
  if (path == "layout.schedule" && value.is_scalar() && setting.text.ends_with(".csv") && !read_table(setting)) return std::nullopt;
  const bool scalar = value.is_scalar() || (takes_more_than_a_scalar(*key) && !value.is_null());
  if (key->form == Form::kMap && value.is_map() && !check_map(*key, word, value)) return std::nullopt;
  if (!scalar || !has_form(*key, setting.text)) {
    problems_.add(value.mark,
                  value.is_null() ? fmt::format("`{}` has no value", word)
                                  : fmt::format("`{}` is `{}`{}", word, setting.text, did_you_mean(setting.text, words_for(*key))),
                  fmt::format("expected {}{}", expected(*key), unit_too_many(*key, setting.text)));
    return std::nullopt;
  }
  if (key->form == Form::kPath) setting.text = absolute(setting.text);
  return setting;
}

/// A file of slots is read here and stands in the case itself, its name first, with ";" between its rows.
bool SettingsReader::read_table(Setting& setting) {
  const std::string path = absolute(setting.text);
  const auto refuse = [&](const Error& e) {
    problems_.add(setting.mark, e.where.empty() ? e.message : e.where + ": " + e.message, e.hint);
    return false;
  };
  const Result<std::string> text = read_file_within(path, limits::kScheduleBytes);
  if (!text) return refuse(text.error());
  const Result<PipelineSchedule> table = from_csv(*text, path);
  if (!table) return problems_.add(table.error()), false;  // at its place in the table
  setting.shown = std::move(setting.text);
  std::string file = std::filesystem::path(path).filename().string();
  std::ranges::replace_if(  // plain in YAML, and no end of a row
      file, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '-'; }, '_');
  setting.text = file + '\n' + to_csv(*table);
  setting.text.pop_back();
  std::ranges::replace(setting.text, '\n', ';');
  return true;
}

bool SettingsReader::check_map(const CaseKey& key, std::string_view word, const YamlNode& map) {
  const MapForm form = map_form(key);
  bool good = true;
  for (auto entry = map.entries.begin(); entry != map.entries.end(); ++entry) {
    const std::string text = entry->value.is_scalar() ? entry->value.text : to_flow(entry->value);
    const auto refuse = [&](Mark mark, std::string message, std::string hint) {
      problems_.add(mark, std::move(message), std::move(hint));
      good = false;
    };
    const auto again = [&](const YamlEntry& e) { return e.key == entry->key; };
    if (std::ranges::find(form.parts, entry->key) == form.parts.end()) {
      add_unknown_key(problems_, entry->mark, entry->key, word, form.parts);
      good = false;
    } else if (std::any_of(map.entries.begin(), entry, again)) {
      refuse(entry->mark, fmt::format("`{}.{}` is said twice", word, entry->key), "keep one of the two");
    } else if (std::ranges::find(form.words, text) == form.words.end()) {
      refuse(entry->value.mark, fmt::format("`{}.{}` is `{}`{}", word, entry->key, text, did_you_mean(text, form.words)),
             fmt::format("expected one of: {}", fmt::join(form.words, " ")));
    }
  }
  return good;
}

/// Loads what a source names; a model or machine that cannot be loaded is a problem where it is named.
std::optional<Setting> SettingsReader::source_value(const std::string& path, Setting setting) {
  // "org/name" that is no folder here stays what it is, for the message.
  const bool published = path == "model.hf" && !setting.text.ends_with(".json") && !is_there(absolute(setting.text));
  if ((path == "model.hf" || path == "machine.file") && !published) setting.text = absolute(setting.text);
  const bool path_to = path == "machine.file" || (path == "model.hf" && !published);
  if (path_to && !is_there(setting.text)) {
    problems_.add(setting.mark, fmt::format("{} does not exist", setting.text),
                  fmt::format("check the path; a relative path begins in {}",
                              folder_.empty() ? "the current folder" : "the folder " + folder_));
    return std::nullopt;
  }
  // A preset is a word, whatever it looks like: `./x.json` under `preset` is a slip.
  const auto refuse = [&](const Error& e) {
    problems_.add(setting.mark, e.where.empty() ? e.message : e.where + ": " + e.message, e.hint);
    return std::nullopt;
  };
  if (path.starts_with("model.")) {
    if (sources_.models.contains(setting.text)) return setting;
    auto model = load_model_config(setting.text, assume_);
    if (!model.ok()) return refuse(model.error());
    sources_.models.emplace(setting.text, *std::move(model));
    return setting;
  }
  if (path == "machine.local") {
    if (setting.text != "true" && setting.text != "local") {
      problems_.add(setting.mark, fmt::format("`local` is `{}`", setting.text),
                    "write `local: true`, or name a machine with `preset` or `file`");
      return std::nullopt;
    }
    setting.text = "local";
  }
  if (sources_.machines.contains(setting.text)) return setting;
  if (path == "machine.local" && !local_machine_)
    return refuse(Error{ExitCode::kUsage,
                        "this machine is not known here",
                        "run `shardlab calibrate`, or name a machine with `preset` or `file`",
                        {}});
  auto machine = path == "machine.local" ? local_machine_() : load_machine(setting.text);
  if (!machine.ok()) return refuse(machine.error());
  sources_.machines.emplace(setting.text, *std::move(machine));
  return setting;
}

std::string SettingsReader::absolute(const std::string& path) const {
  std::error_code ignored;
  const std::filesystem::path full = std::filesystem::absolute(std::filesystem::path(folder_) / path, ignored);
  std::string text = full.lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

}  // namespace shardlab::sweeps
