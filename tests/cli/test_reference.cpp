// `schema`, `completions` and `man`: held to the loader, to a real shell, and to man itself.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "cli/help.h"
#include "cli/schema.h"
#include "plan/keys.h"
#include "sweeps/sweep.h"
#include "sweeps/yaml.h"
#include "tests/cli/program.h"
#include "tests/namespaces.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

using Json = nlohmann::json;

/// As much of JSON Schema as `file_schema` uses. Says where a value breaks it; empty: it does not.
class Validator {
 public:
  explicit Validator(const std::string& schema) : root_(Json::parse(schema)) {}

  std::string check(const Json& value) const { return check(value, root_, "$"); }
  const Json& root() const { return root_; }

 private:
  static bool has_type(const Json& value, const std::string& type) {
    if (type == "object") return value.is_object();
    if (type == "array") return value.is_array();
    if (type == "string") return value.is_string();
    if (type == "boolean") return value.is_boolean();
    if (type == "null") return value.is_null();
    if (type == "number") return value.is_number();
    if (type == "integer") return value.is_number() && value.get<double>() == std::floor(value.get<double>());
    FAIL("unknown type " << type);
    return false;
  }
  std::string check(const Json& value, const Json& schema, const std::string& at) const {
    static const std::set<std::string> known = {"$schema",
                                                "title",
                                                "description",
                                                "$ref",
                                                "type",
                                                "enum",
                                                "const",
                                                "anyOf",
                                                "properties",
                                                "additionalProperties",
                                                "required",
                                                "items",
                                                "minItems",
                                                "maxItems",
                                                "minimum",
                                                "maximum",
                                                "exclusiveMinimum",
                                                "exclusiveMaximum",
                                                "pattern",
                                                "minLength",
                                                "definitions"};
    for (const auto& [word, rule] : schema.items()) REQUIRE(known.contains(word));
    if (schema.contains("$ref")) {
      const std::string name = schema["$ref"].get<std::string>().substr(std::strlen("#/definitions/"));
      return check(value, root_["definitions"][name], at);
    }
    if (schema.contains("type")) {
      bool fits = false;
      for (const Json& type : schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]}))
        fits = fits || has_type(value, type);
      if (!fits) return at + " has another type";
    }
    if (schema.contains("enum") && std::ranges::find(schema["enum"], value) == schema["enum"].end())
      return at + " is none of the words";
    if (schema.contains("const") && schema["const"] != value) return at + " is another word";
    if (schema.contains("anyOf")) {
      std::string first;
      bool fits = false;
      for (const Json& choice : schema["anyOf"]) {
        const std::string wrong = check(value, choice, at);
        fits = fits || wrong.empty();
        if (first.empty() || wrong.size() > first.size()) first = wrong;
      }
      if (!fits) return first;
    }
    if (value.is_number()) {
      const double v = value;
      if ((schema.contains("minimum") && v < schema["minimum"].get<double>()) ||
          (schema.contains("maximum") && v > schema["maximum"].get<double>()) ||
          (schema.contains("exclusiveMinimum") && v <= schema["exclusiveMinimum"].get<double>()) ||
          (schema.contains("exclusiveMaximum") && v >= schema["exclusiveMaximum"].get<double>()))
        return at + " is out of range";
    }
    if (value.is_string()) {
      if (schema.contains("pattern") &&
          !std::regex_search(value.get<std::string>(), std::regex(schema["pattern"].get<std::string>())))
        return at + " has another form";
      if (schema.contains("minLength") && value.get<std::string>().size() < schema["minLength"].get<size_t>())
        return at + " is too short";
    }
    if (value.is_array()) {
      if (schema.contains("minItems") && value.size() < schema["minItems"].get<size_t>()) return at + " is too short";
      if (schema.contains("items"))
        for (size_t i = 0; i < value.size(); ++i)
          if (const std::string wrong = check(value[i], schema["items"], fmt::format("{}[{}]", at, i)); !wrong.empty())
            return wrong;
    }
    if (value.is_object()) {
      if (schema.contains("required"))
        for (const Json& name : schema["required"])
          if (!value.contains(name.get<std::string>())) return at + " lacks " + name.get<std::string>();
      if (schema.contains("properties"))
        for (const auto& [name, item] : value.items()) {
          if (!schema["properties"].contains(name)) {
            if (schema.value("additionalProperties", true)) continue;
            return at + "." + name + " is unknown";
          }
          if (const std::string wrong = check(item, schema["properties"][name], at + "." + name); !wrong.empty()) return wrong;
        }
    }
    return "";
  }

  Json root_;
};

/// As an editor's YAML reader takes a plain scalar.
Json scalar(const std::string& text) {
  if (text == "true" || text == "false") return text == "true";
  if (std::regex_match(text, std::regex("[-+]?[0-9]+")) && text.size() < 18) return std::stoll(text);
  if (std::regex_match(text, std::regex("[-+]?([0-9]+\\.?[0-9]*|\\.[0-9]+)([eE][-+]?[0-9]+)?"))) return std::stod(text);
  return text;
}

Json json_of(const sweeps::YamlNode& node) {
  if (node.is_null()) return nullptr;
  if (node.is_scalar()) return scalar(node.text);
  Json value = node.is_map() ? Json::object() : Json::array();
  for (const sweeps::YamlNode& item : node.items) value.push_back(json_of(item));
  for (const sweeps::YamlEntry& entry : node.entries) value[entry.key] = json_of(entry.value);
  return value;
}

Json json_of_file(const std::string& path) {
  sweeps::Problems problems(path);
  const sweeps::YamlNode root = sweeps::parse_yaml(slurp(path), problems);
  REQUIRE(problems.empty());
  return json_of(root);
}

TEST_CASE("every shipped sweep and case file follows the schema") {
  const Validator schema(cli::file_schema(cli::SchemaOf::kSweep));
  int files = 0;
  for (const char* folder : {"/sweeps", "/sweeps/claims", "/sweeps/examples"})
    for (const auto& entry : fs::directory_iterator(source_dir() + folder)) {
      if (entry.path().extension() != ".yaml") continue;
      INFO(entry.path());
      CHECK(schema.check(json_of_file(entry.path())) == "");
      ++files;
    }
  CHECK(files > 8);
  const Validator cases(cli::file_schema(cli::SchemaOf::kCase));
  for (const auto& entry : fs::directory_iterator(source_dir() + "/tests/golden/sweeps"))
    if (entry.path().filename().string().starts_with("case_")) {
      INFO(entry.path());
      CHECK(cases.check(json_of_file(entry.path())) == "");
    }
}

TEST_CASE("the schema takes what the loader takes of each key, and refuses what has another form") {
  const Validator schema(cli::file_schema(cli::SchemaOf::kSweep));
  const std::vector<std::string> samples = {"0",         "1",    "2",    "8",    "64k",   "1Mi",   "8Ki",  "3ki",  "-1",
                                            "0.5",       "1e-3", "1e6",  "true", "false", "none",  "auto", "fp32", "bf16",
                                            "selective", "cpu",  "ring", "5m",   "x y",   "1.5.2", "k"};
  for (const CaseKey& key : case_keys()) {
    // A key stands under its path.
    const auto under = [&](const std::string& text) {
      Json value = scalar(text);
      std::string_view path = key.path;
      while (!path.empty()) {
        const size_t dot = path.rfind('.');
        value = Json{{std::string(dot == std::string_view::npos ? path : path.substr(dot + 1)), value}};
        path = dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
      }
      return value;
    };
    std::vector<std::string> texts = samples;
    for (const std::string& word : words_of(key)) texts.push_back(word);
    for (const std::string& text : texts) {
      INFO(key.path << ": " << text);
      const bool takes = schema.check(under(text)).empty();
      if (has_form(key, text)) CHECK(takes);
      // Of texts, any, and numbers with a suffix the schema knows less than the loader.
      const bool exact =
          key.form == Form::kBool || key.form == Form::kWord ||
          ((key.form == Form::kInteger || key.form == Form::kCount || key.form == Form::kNumber) && !scalar(text).is_string());
      if (exact && !has_form(key, text) && text != "auto") CHECK_FALSE(takes);
    }
  }
  for (const char* bad : {R"({"speed": 1})", R"({"axes": {"tpp": [1]}})", R"({"layout": {"tp": [1]}})", R"({"mode": "guess"})",
                          R"({"when": [{"if": "tp == 1"}]})", R"({"include": [{"layuot": {}}]})", R"({"claims": [{"says": "x"}]})",
                          R"({"version": 2})", R"({"axes": {"tp": []}})", R"({"offload": {"optimizer": "disk"}})"}) {
    INFO(bad);
    CHECK_FALSE(schema.check(Json::parse(bad)).empty());
  }
  for (
      const char* good :
      {R"({"axes": {"tp": {"pow2": [1, 8]}, "model": ["gpt2", "./x.json"], "recompute": ["none", ["attn.core"]]}})",
       R"({"zip": [{"schedule": ["1f1b"], "vpp": [1]}]})",
       R"({"model": {"preset": "gpt2", "layers": 4}, "machine": "local", "offload": {"optimizer": "cpu"}, "fsdp": {"unit": 2}, "learning_rate": 0.001})",
       R"({"include": [{"layout.tp": 2, "layout.recompute_options": {"every": 2}, "measure.steps": 2, "train.seq_len": "2Ki"}]})",
       R"({"exclude": [{"tp": 8, "pp": [4, 8]}], "time_to_loss": {"loss": 2.5, "mean_of": 20}})", R"({"search": "goal"})",
       R"({"search": {"kind": "random", "count": 100, "seed": 7}})"}) {
    INFO(good << schema.check(Json::parse(good)));
    CHECK(schema.check(Json::parse(good)).empty());
  }
  // In the case's schema nothing of a sweep.
  CHECK_FALSE(Validator(cli::file_schema(cli::SchemaOf::kCase)).check(Json{{"axes", Json::object()}}).empty());
}

/// What bash offers for a command line that ends in the word to be completed.
std::string offered(const Scratch& scratch, const std::string& line) {
  const std::string script =
      scratch.write("complete.sh", fmt::format("source {}/shardlab.bash\nCOMP_WORDS=({})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - "
                                               "1))\n_shardlab\necho \"${{COMPREPLY[@]}}\"\n",
                                               scratch / ".", line));
  const std::string out = scratch / "offered.txt";
  REQUIRE(std::system(fmt::format("cd {} && bash {} > {}", scratch / ".", script, out).c_str()) == 0);
  std::string text = slurp(out);
  if (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

TEST_CASE("bash offers verbs, options, and the words of values") {
  const Scratch scratch;
  const Output o = shardlab_program(scratch, "completions bash");
  REQUIRE(o.code == 0);
  scratch.write("shardlab.bash", o.out);
  CHECK(offered(scratch, "shardlab comp") == "compare completions");
  CHECK(offered(scratch, "shardlab model ''") == "list show");
  CHECK(offered(scratch, "shardlab model show tiny-") == "tiny-gpt tiny-llama");
  CHECK(offered(scratch, "shardlab memory --zer") == "--zero");
  CHECK(offered(scratch, "shardlab memory --precision f") == "fp32 fp16 fp8 fp4");
  CHECK(offered(scratch, "shardlab search --machine loc") == "local");
  CHECK(offered(scratch, "shardlab export x.yaml --to n") == "nanotron");
  CHECK(offered(scratch, "shardlab schema ''").starts_with("sweep case"));
  CHECK(offered(scratch, "shardlab report complete.s") == "complete.sh");
}

TEST_CASE("completions of every shell and the manual know every verb") {
  const Scratch scratch;
  const std::string zsh = shardlab_program(scratch, "completions zsh").out,
                    fish = shardlab_program(scratch, "completions fish").out;
  CHECK(shardlab_program(scratch, "completions csh").code == 2);
  const Output pages = shardlab_program(scratch, "man --out " + (scratch / "man"));
  REQUIRE(pages.code == 0);
  for (const cli::Examples& e : cli::examples()) {
    INFO(e.verb);
    CHECK(zsh.find(fmt::format("    '{}:", e.verb)) != std::string::npos);
    CHECK(fish.find(fmt::format("-a {} ", e.verb)) != std::string::npos);
    const std::string page = slurp(scratch / fmt::format("man/shardlab-{}.1", e.verb));
    CHECK(page.find(".SH OPTIONS") != std::string::npos);
    CHECK(page.find(".SH EXAMPLES") != std::string::npos);
  }
  CHECK(zsh.find("--precision[") != std::string::npos);
  CHECK(zsh.find(":(fp32 bf16 fp16 fp8 fp4)") != std::string::npos);
  CHECK(fish.find("-l precision -x -a 'fp32 bf16 fp16 fp8 fp4'") != std::string::npos);
  // zsh itself, where it is installed: text that is sourced registers its function, and calls nothing.
  scratch.write("sourced.zsh", zsh);
  const std::string sourcing = fmt::format(
      "autoload -Uz compinit && compinit -D -u && source {} && [[ $_comps[shardlab] == _shardlab ]]", scratch / "sourced.zsh");
  if (std::system("command -v zsh >/dev/null") == 0) CHECK(std::system(fmt::format("zsh -f -c '{}'", sourcing).c_str()) == 0);
  CHECK(shardlab_program(scratch, "man frobnicate").code == 2);
  // man itself reads each page without a warning, where it is installed.
  if (std::system("command -v man >/dev/null && command -v groff >/dev/null") == 0)
    for (const auto& entry : fs::directory_iterator(scratch / "man")) {
      INFO(entry.path());
      CHECK(std::system(
                fmt::format("LC_ALL=C.UTF-8 man --warnings -l {} > /dev/null 2> {}", entry.path().string(), scratch / "warnings")
                    .c_str()) == 0);
      CHECK(slurp(scratch / "warnings").empty());
    }
}

}  // namespace
}  // namespace shardlab::testing
