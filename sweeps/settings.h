// Settings: what a file, an axis, a rule or the command line says of a case, before there is a case. A value is still text; its
// form is checked when it is read, so that every wrong value of a file is reported at once.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/keys.h"
#include "plan/machine.h"
#include "plan/model.h"
#include "sweeps/models.h"
#include "sweeps/yaml.h"

namespace shardlab::sweeps {

struct Setting {
  std::string text;
  Mark mark;
  std::string shown = {};  ///< what stands for `text` in names of cases, where that is not `text`: the file of a table of slots
};

/// By canonical path. Beside the keys of the table: "model.preset" and "model.hf", "machine.preset", "machine.file",
/// "machine.local" and "machine.inline" say where the model and the machine come from; setting one of a group unsets the others.
using Settings = std::map<std::string, Setting, std::less<>>;

/// "model" or "machine" when `path` says where that comes from; else empty.
std::string_view source_group(std::string_view path);

/// Is the key with this path derived where nothing is given, so that `auto` means something?
bool is_derived(std::string_view path);

/// Sets one key; a source unsets the others of its group.
void put(Settings& into, const std::string& path, const Setting& setting);

/// Applies one setting, or all of `from`, over `into`. The text `auto` unsets a key that is derived.
void merge(Settings& into, const std::string& path, const Setting& setting);
void merge(Settings& into, const Settings& from);

/// The models and machines that settings name, loaded once; and those written inline.
struct Sources {
  std::map<std::string, ModelConfig, std::less<>> models;  ///< by text of model.preset or model.hf
  std::map<std::string, Machine, std::less<>> machines;    ///< by text of machine.preset or machine.file; "local"
  std::optional<Machine> inline_machine;
  Settings inline_model;
};

/// Reads settings out of YAML, checks their words and forms, and loads what they name.
class SettingsReader {
 public:
  SettingsReader(Problems& problems, Sources& sources, std::string folder, std::function<Result<Machine>()> local_machine)
      : problems_(problems), sources_(sources), folder_(std::move(folder)), local_machine_(std::move(local_machine)) {}

  /// What models of an unknown model_type are read as (`load_model_config`); to be said before they are named.
  void assume(std::string type) { assume_ = std::move(type); }

  /// Reads every entry of `map`, but for the keys in `skip`, which the caller reads. `listed` are the keys an error message lists
  /// at the top of the map (all keys where empty).
  void read(const YamlNode& map, Settings& out, const std::vector<std::string>& skip = {},
            const std::vector<std::string>& listed = {});

  /// The canonical path that a word of axes, zip, exclude or the command line means; empty (and a problem) when there is none.
  std::string path_of(std::string_view word, const std::string& text, Mark mark);

  /// Checks one value of `path` and returns it as a setting; nothing (and a problem) when it has the wrong form.
  std::optional<Setting> value_of(const std::string& path, std::string_view word, const YamlNode& value);

 private:
  void read_section(const YamlNode& map, const std::string& section, Settings& out, const std::vector<std::string>& skip,
                    const std::vector<std::string>& listed);
  void read_entry(const YamlEntry& entry, const std::string& section, Settings& out, const std::vector<std::string>& listed);
  void read_source(const YamlEntry& entry, const std::string& section, Settings& out);
  void assign(Settings& out, const std::string& path, std::string_view word, const YamlNode& value);
  /// Entry by entry; false (and a problem for each) where one names no part of the key, or none of its words.
  bool read_table(Setting& setting);
  bool check_map(const CaseKey& key, std::string_view word, const YamlNode& map);
  std::optional<Setting> source_value(const std::string& path, Setting setting);
  std::string absolute(const std::string& path) const;

  Problems& problems_;
  Sources& sources_;
  std::string folder_, assume_;
  std::function<Result<Machine>()> local_machine_;
};

}  // namespace shardlab::sweeps
