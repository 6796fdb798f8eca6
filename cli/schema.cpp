#include "cli/schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/namespaces.h"
#include "plan/keys.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"
#include "sweeps/settings.h"

namespace shardlab::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kNumberText = R"(^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$)";
constexpr const char* kDurationText = R"(^[+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?(ms|s|m|h)?$)";

/// The words of a list: those that YAML reads as numbers or truths are allowed as such too.
Json words_schema(const std::vector<std::string>& words) {
  Json list = Json::array();
  for (const std::string& word : words) {
    list.push_back(word);
    if (!word.empty() && std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; })) list.push_back(std::stoll(word));
    if (word == "true" || word == "false") list.push_back(word == "true");
  }
  return Json{{"enum", list}};
}

/// A number in the key's range, or a text with a suffix, whose value only the loader knows.
Json number_schema(const CaseKey& key) {
  const Range range = range_of(key);
  Json number{{"type", key.form == Form::kInteger || key.form == Form::kCount ? "integer" : "number"}};
  number[range.above ? "exclusiveMinimum" : "minimum"] = range.least;
  number[range.below ? "exclusiveMaximum" : "maximum"] = range.most;
  // A count may be written as 1e6, which YAML reads as a number that is whole.
  return Json{{"anyOf", {number, Json{{"type", "string"}, {"pattern", kNumberText}}}}};
}

Json value_schema(const CaseKey& key) {
  Json schema;
  switch (key.form) {
    case Form::kInteger:
    case Form::kCount:
    case Form::kNumber: schema = number_schema(key); break;
    case Form::kBool: schema = words_schema({"true", "false"}); break;
    case Form::kWord: schema = words_schema(words_of(key)); break;
    case Form::kText: schema = Json{{"type", {"string", "number", "boolean"}}}; break;
    case Form::kPath: schema = Json{{"type", {"string", "number", "boolean"}}, {"minLength", 1}}; break;  // a file called 2
    case Form::kDuration:
      schema = Json{
          {"anyOf", {Json{{"type", "number"}, {"exclusiveMinimum", 0}}, Json{{"type", "string"}, {"pattern", kDurationText}}}}};
      break;
    case Form::kMap: {
      const MapForm form = map_form(key);
      Json parts = Json::object();
      for (const std::string& part : form.parts) parts[part] = words_schema(form.words);
      schema = Json{
          {"anyOf",
           {words_schema({"none", "false"}), Json{{"type", "object"}, {"properties", parts}, {"additionalProperties", false}}}}};
      break;
    }
    case Form::kAny:
      schema = Json{{"anyOf", {words_schema(words_of(key))}}};
      if (key.texts.empty()) {
        schema["anyOf"].push_back(number_schema(key));
      } else {
        schema["anyOf"].push_back(Json{{"type", "string"}, {"pattern", key.texts}});
        schema["anyOf"].push_back(Json{{"type", "array"}, {"items", Json{{"type", "string"}}}, {"minItems", 1}});
      }
      break;
  }
  if (sweeps::is_derived(key.path)) schema = Json{{"anyOf", {schema, Json{{"const", "auto"}}}}};
  schema["description"] = fmt::format("{} ({})", key.help, key.path);
  return schema;
}

/// Names that may follow `prefix`, of canonical paths and of short forms, in the order of the table: `layout`, and
/// `layout.tp`, which stands on one line.
std::vector<std::string> names_under(const std::string& prefix) {
  std::vector<std::string> names;
  std::set<std::string, std::less<>> seen;
  const auto add = [&](std::string_view word) {
    if (!prefix.empty() && (!word.starts_with(prefix) || word.size() <= prefix.size() || word[prefix.size()] != '.')) return;
    const std::string_view rest = prefix.empty() ? word : word.substr(prefix.size() + 1);
    for (size_t dot = rest.find('.');; dot = rest.find('.', dot + 1)) {
      const std::string_view name = rest.substr(0, dot);
      if (seen.emplace(name).second) names.emplace_back(name);
      if (dot == std::string_view::npos) break;
    }
  };
  for (const CaseKey& key : case_keys()) {
    add(key.path);
    for_each_word(key.aliases, add);
  }
  return names;
}

Json section_schema(const std::string& prefix);

/// The key at a path, the section below it, or either.
Json entry_schema(const std::string& path) {
  const CaseKey* key = find_key(path);
  if (!is_section(path)) return value_schema(*key);
  const Json section = section_schema(path);
  return key == nullptr ? section : Json{{"anyOf", {value_schema(*key), section}}};
}

Json section_schema(const std::string& prefix) {
  Json properties = Json::object();
  for (const std::string& name : names_under(prefix)) properties[name] = entry_schema(prefix.empty() ? name : prefix + "." + name);
  return Json{{"type", {"object", "null"}}, {"properties", properties}, {"additionalProperties", false}};
}

/// A source by name: any text, with the shipped names as what an editor offers.
Json name_schema(const std::vector<std::string>& names, std::string_view description) {
  return Json{{"anyOf", {Json{{"enum", names}}, Json{{"type", "string"}}}}, {"description", description}};
}

Json model_schema() {
  Json section = section_schema("model");
  Json& properties = section["properties"];
  properties["preset"] = name_schema(sweeps::list_models(), "a shipped model");
  properties["hf"] = Json{{"type", "string"}, {"description", "a Hugging Face config.json, or its folder"}};
  properties["assume"] = Json{{"type", "string"}, {"description", "read a config.json of an unknown model_type as this one"}};
  properties["inline"] = section_schema("model");
  return Json{{"anyOf", {name_schema(sweeps::list_models(), "a shipped model, or the path of a config.json"), section}}};
}

Json machine_schema() {
  Json section = section_schema("machine");
  Json& properties = section["properties"];
  properties["preset"] = name_schema(sweeps::list_machines(), "a shipped machine");
  properties["file"] = Json{{"type", "string"}, {"description", "a machine file"}};
  properties["local"] = Json{{"enum", {true, "true", "local"}}, {"description", "this machine, as calibrate measured it"}};
  properties["inline"] = Json{{"type", "object"}, {"description", "a machine file's content"}};
  return Json{{"anyOf", {name_schema(sweeps::list_machines(), "a shipped machine, a machine file, or local"), section}}};
}

/// Every word that names one key: canonical paths, short forms, and the sources.
Json axis_names() {
  Json names = {"model", "machine", "model.preset", "model.hf", "machine.preset", "machine.file", "machine.local"};
  for (const CaseKey& key : case_keys()) {
    if (key.path == "name") continue;
    names.push_back(key.path);
    for_each_word(key.aliases, [&](std::string_view alias) { names.push_back(alias); });
  }
  return names;
}

/// The values of one axis: a list, one value, or a generator.
Json axes_schema() {
  const Json bounds{{"type", "array"}, {"minItems", 2}, {"maxItems", 3}, {"items", Json{{"type", {"integer", "string"}}}}};
  const Json pow2{
      {"type", "object"}, {"properties", Json{{"pow2", bounds}}}, {"required", {"pow2"}}, {"additionalProperties", false}};
  const Json range{
      {"type", "object"}, {"properties", Json{{"range", bounds}}}, {"required", {"range"}}, {"additionalProperties", false}};
  Json properties = Json::object();
  for (const Json& name : axis_names()) {
    const std::string word = name.get<std::string>();
    const Json value = find_key(word) != nullptr ? value_schema(*find_key(word)) : Json{{"type", {"string", "boolean"}}};
    properties[word] = Json{{"anyOf", {Json{{"type", "array"}, {"items", value}, {"minItems", 1}}, value, pow2, range}}};
  }
  return Json{{"type", {"object", "null"}}, {"properties", properties}, {"additionalProperties", false}};
}

Json list_of(Json item) { return Json{{"type", {"array", "null"}}, {"items", std::move(item)}}; }

Json object_of(std::initializer_list<std::pair<const char*, Json>> fields, std::initializer_list<const char*> required) {
  Json properties = Json::object();
  for (const auto& [name, schema] : fields) properties[name] = schema;
  Json object{{"type", "object"}, {"properties", properties}, {"additionalProperties", false}};
  object["required"] = Json::array();
  for (const char* name : required) object["required"].push_back(name);
  return object;
}

Json text(std::string_view description) { return Json{{"type", {"string", "number", "boolean"}}, {"description", description}}; }

}  // namespace

std::string file_schema(SchemaOf what) {
  const bool sweep = what == SchemaOf::kSweep;
  Json root{{"$schema", "http://json-schema.org/draft-07/schema#"},
            {"title", sweep ? "shardlab sweep file" : "shardlab case file"},
            {"description", "The reference is sweeps/README.md, and `shardlab keys`."}};
  Json settings = section_schema("");
  settings["properties"]["model"] = Json{{"$ref", "#/definitions/model"}};
  settings["properties"]["machine"] = Json{{"$ref", "#/definitions/machine"}};
  Json properties = Json::object();
  properties["version"] = Json{{"enum", {1, "1"}}, {"description", "of the file's form"}};
  for (const auto& [name, schema] : settings["properties"].items()) properties[name] = schema;
  Json definitions{{"model", model_schema()}, {"machine", machine_schema()}};
  if (sweep) {
    definitions["settings"] = settings;
    definitions["axes"] = axes_schema();
    const Json reference{{"$ref", "#/definitions/settings"}}, axes{{"$ref", "#/definitions/axes"}};
    properties["description"] = text("what the sweep asks");
    properties["mode"] = Json{{"enum", {"simulate", "measure", "both"}}, {"description", "predict, train, or both"}};
    properties["resolution"] =
        Json{{"enum", {"timeline", "segments", "analytic"}}, {"description", "how finely a step is predicted"}};
    properties["traces"] = Json{{"enum", {"none", "measured", "all"}}, {"description", "which cases keep their traces"}};
    properties["axes"] = axes;
    properties["zip"] = list_of(axes);
    properties["when"] = list_of(object_of({{"if", text("an expression")}, {"set", reference}}, {"if", "set"}));
    properties["constraints"] =
        list_of(object_of({{"expr", text("an expression that must hold")}, {"why", text("the reason of a refusal")}}, {"expr"}));
    properties["exclude"] = list_of(axes);
    properties["include"] = list_of(reference);
    properties["claims"] = list_of(object_of({{"says", text("the sentence")},
                                              {"source", text("paper and section")},
                                              {"check", text("an expression over figures of cases")},
                                              {"why", text("the reason where it does not hold")}},
                                             {"says", "source", "check"}));
    const Json loss{
        {"anyOf", {Json{{"type", "number"}, {"exclusiveMinimum", 0}}, Json{{"type", "string"}, {"pattern", kNumberText}}}}};
    const Json share{{"type", {"number", "string"}}}, whole{{"type", {"integer", "string"}}},
        kinds{{"enum", {"grid", "random", "halving", "goal"}}};
    properties["search"] = Json{
        {"anyOf",
         {kinds, object_of({{"kind", kinds}, {"count", whole}, {"seed", whole}, {"keep", share}, {"margin", share}}, {"kind"})}},
        {"description", "which points are run: all, a sample, or those that can be the fastest"}};
    properties["time_to_loss"] =
        Json{{"anyOf", {loss, object_of({{"loss", loss}, {"mean_of", Json{{"type", {"integer", "string"}}}}}, {"loss"})}},
             {"description", "the training loss whose time is asked for"}};
  }
  root["type"] = "object";
  root["properties"] = properties;
  root["additionalProperties"] = false;
  root["definitions"] = definitions;
  return root.dump(1) + "\n";
}

}  // namespace shardlab::cli
