// schema, completions, man: the program's own words for editors, shells and manuals, from the tables that parse them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "cases/environment.h"
#include "cli/common.h"
#include "cli/help.h"
#include "cli/namespaces.h"
#include "cli/schema.h"
#include "cli/verbs.h"
#include "interop/frameworks.h"
#include "plan/base/pending_file.h"
#include "sweeps/machines.h"
#include "sweeps/models.h"
#include "sweeps/yaml.h"

namespace shardlab::cli {
namespace {

struct ReferenceFlags {
  std::string what, out;
};

// ---- what the command line has ----------------------------------------------------------------------------------------------

struct OptionWords {
  std::vector<std::string> names;  ///< "--model", "-o"
  std::string help;                ///< one line
  bool takes_value = false;
  std::vector<std::string> values;  ///< words that the value may be; empty: a file, or anything
};

struct VerbWords {
  std::string path;  ///< "model list"
  std::string help;
  std::vector<OptionWords> options;
  std::vector<std::string> positional;    ///< names of arguments in order
  std::vector<std::string> first, parts;  ///< words that the first argument may be; verbs below it
};

std::string first_line(std::string text) {
  text = text.substr(0, text.find('\n'));
  return text;
}

/// The words that an option's value may be, from the tables that know them.
std::vector<std::string> values_of(const std::string& path, const std::string& name) {
  if (path == "trace convert" && name == "--to") return {"chrome", "kineto"};
  static const std::map<std::string, std::vector<std::string>, std::less<>> words = [] {
    std::map<std::string, std::vector<std::string>, std::less<>> all;
    for (const CaseKey& key : case_keys()) {
      if (key.has_flag == Flag::kNone) continue;
      std::vector<std::string> list = key.form == Form::kBool ? std::vector<std::string>{"true", "false"} : words_of(key);
      const std::string word(key.word());
      all["--" + word] = all["--" + hyphenated(word)] = std::move(list);
    }
    all["--model"] = sweeps::list_models();
    all["--machine"] = sweeps::list_machines();
    all["--machine"].push_back("local");
    all["--format"] = {"table", "json", "csv", "markdown"};
    all["--of"] = {"measured", "predicted"};
    all["--columns"] = {"nanotron"};
    all["--mode"] = {"simulate", "measure", "both"};
    all["--resolution"] = {"timeline", "segments", "analytic"};
    for (const interop::Framework& f : interop::frameworks()) {
      all["--to"].emplace_back(f.id);
      if (f.imports) all["--from"].emplace_back(f.id);
    }
    return all;
  }();
  const auto found = words.find(name);
  return found == words.end() ? std::vector<std::string>{} : found->second;
}

std::vector<std::string> first_argument(const std::string& path) {
  if (path == "model show") return sweeps::list_models();
  if (path == "machine show") return sweeps::list_machines();
  if (path == "schema") return {"sweep", "case"};
  if (path == "completions") return {"bash", "zsh", "fish"};
  return {};
}

void add_verb(const CLI::App& verb, const std::string& path, std::vector<VerbWords>& verbs) {
  VerbWords words{path, first_line(verb.get_description()), {}, {}, first_argument(path), {}};
  for (const CLI::Option* option : verb.get_options()) {
    OptionWords o;
    for (const std::string& name : option->get_lnames()) o.names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) o.names.push_back("-" + name);
    if (o.names.empty()) {
      words.positional.push_back(option->get_single_name());
      continue;
    }
    o.help = first_line(option->get_description());
    o.takes_value = option->get_items_expected_max() > 0;
    for (const std::string& name : o.names)
      if (o.values.empty()) o.values = values_of(path, name);
    words.options.push_back(std::move(o));
  }
  const size_t at = verbs.size();
  verbs.push_back(std::move(words));
  for (const CLI::App* part : verb.get_subcommands({})) {
    if (part->get_group().empty()) continue;  // what the program starts for itself
    verbs[at].parts.push_back(part->get_name());
    add_verb(*part, path.empty() ? part->get_name() : path + " " + part->get_name(), verbs);
  }
}

std::vector<VerbWords> verbs_of(const CLI::App& app) {
  std::vector<VerbWords> verbs;
  add_verb(app, "", verbs);
  return verbs;
}

// ---- completions ------------------------------------------------------------------------------------------------------------

std::string shell_quoted(std::string_view text, char within = '\'') {
  std::string out(1, within);
  for (const char c : text) out += c == within ? std::string(within == '\'' ? "'\\''" : "\\\"") : std::string(1, c);
  return out + within;
}

std::string joined(const std::vector<std::string>& words) { return fmt::format("{}", fmt::join(words, " ")); }

std::string bash_completions(const std::vector<VerbWords>& verbs) {
  std::string text =
      "# Completions of shardlab for bash: source <(shardlab completions bash)\n"
      "_shardlab() {\n"
      "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} verb= part= i\n"
      "  COMPREPLY=()\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    [[ ${COMP_WORDS[i]} == -* ]] && continue\n"
      "    if [[ -z $verb ]]; then verb=${COMP_WORDS[i]}; elif [[ -z $part ]]; then part=${COMP_WORDS[i]}; fi\n"
      "  done\n"
      "  local options= words= first=\n"
      "  case \"$verb $part\" in\n";
  // Verbs with verbs below them first: `model list` before `model`.
  std::vector<const VerbWords*> order;
  for (const VerbWords& v : verbs) order.push_back(&v);
  std::ranges::stable_sort(order, std::greater{}, [](const VerbWords* v) { return std::ranges::count(v->path, ' '); });
  std::map<std::string, std::vector<std::string>> valued;  ///< by list of words: the patterns "VERB OPTION"
  std::string without_words;
  for (const VerbWords* v : order) {
    std::string options;
    for (const OptionWords& o : v->options) {
      for (const std::string& name : o.names) options += (options.empty() ? "" : " ") + name;
      for (const std::string& name : o.names)
        if (o.takes_value) valued[joined(o.values)].push_back(name);
    }
    const std::string pattern = v->path.empty()                          ? "\" \""
                                : v->path.find(' ') != std::string::npos ? shell_quoted(v->path, '"')
                                                                         : fmt::format("{}\\ *", v->path);
    std::vector<std::string> first = v->parts.empty() ? v->first : v->parts;
    text += fmt::format("    {}) options={} first={} ;;\n", pattern, shell_quoted(options), shell_quoted(joined(first)));
  }
  text += "  esac\n  case \"$before\" in\n";
  for (const auto& [words, names] : valued) {
    std::set<std::string> patterns(names.begin(), names.end());
    text += fmt::format("    {}) {} ;;\n", fmt::join(patterns, "|"),
                        words.empty() ? std::string("COMPREPLY=($(compgen -f -- \"$word\")); return")
                                      : fmt::format("COMPREPLY=($(compgen -W {} -- \"$word\")); return", shell_quoted(words)));
  }
  text +=
      "  esac\n"
      "  if [[ $word == -* ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$options\" -- \"$word\"))\n"
      "  elif [[ -n $first && ( -z $verb || -z $part ) ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$first\" -- \"$word\"))\n"
      "  else\n"
      "    COMPREPLY=($(compgen -W \"$first\" -- \"$word\") $(compgen -f -- \"$word\"))\n"
      "  fi\n"
      "}\n"
      "complete -o filenames -F _shardlab shardlab\n";
  return text;
}

/// Characters that zsh's _arguments gives a meaning.
std::string zsh_text(std::string text) {
  std::string out;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    if (c == '\'') {
      out += "'\\''";
      continue;
    }
    out += c;
  }
  return out;
}

std::string zsh_options(const VerbWords& v, const std::string& indent) {
  std::string text;
  for (const OptionWords& o : v.options)
    for (const std::string& name : o.names)
      text += fmt::format("{}'{}[{}]{}' \\\n", indent, name, zsh_text(o.help),
                          !o.takes_value     ? std::string()
                          : o.values.empty() ? std::string(":value:_files")
                                             : fmt::format(":value:({})", joined(o.values)));
  if (v.parts.empty())
    text += fmt::format("{}'*:{}:{}'\n", indent, v.positional.empty() ? "file" : v.positional.front(),
                        v.first.empty() ? std::string("_files") : fmt::format("({})", joined(v.first)));
  return text;
}

std::string zsh_completions(const std::vector<VerbWords>& verbs) {
  std::string text =
      "#compdef shardlab\n# Completions of shardlab for zsh: a file _shardlab in a folder of $fpath\n_shardlab() {\n  local -a "
      "verbs parts\n  verbs=(\n";
  for (const VerbWords& v : verbs)
    if (!v.path.empty() && v.path.find(' ') == std::string::npos) text += fmt::format("    '{}:{}'\n", v.path, zsh_text(v.help));
  text +=
      "  )\n  if (( CURRENT == 2 )); then\n    _describe verb verbs\n    return\n  fi\n  local verb=$words[2] part=$words[3]\n  "
      "case \"$verb\" in\n";
  for (const VerbWords& v : verbs) {
    if (v.path.empty() || v.path.find(' ') != std::string::npos) continue;
    if (v.parts.empty()) {
      text += fmt::format("    {})\n      _arguments -s -S \\\n{}      ;;\n", v.path, zsh_options(v, "        "));
      continue;
    }
    text += fmt::format(
        "    {})\n      if (( CURRENT == 3 )); then\n        parts=({})\n        _describe part parts\n        return\n      fi\n  "
        "    case \"$part\" in\n",
        v.path, joined(v.parts));
    for (const VerbWords& part : verbs)
      if (part.path.starts_with(v.path + " "))
        text += fmt::format("        {})\n          _arguments -s -S \\\n{}          ;;\n", part.path.substr(v.path.size() + 1),
                            zsh_options(part, "            "));
    text += "      esac\n      ;;\n";
  }
  // A file of $fpath is the function's first call; where a shell sources the text, the function is registered.
  return text + "  esac\n}\nif [[ ${funcstack[1]} == _shardlab ]]; then _shardlab \"$@\"; else compdef _shardlab shardlab; fi\n";
}

std::string fish_completions(const std::vector<VerbWords>& verbs) {
  std::string text = "# Completions of shardlab for fish: ~/.config/fish/completions/shardlab.fish\n";
  for (const VerbWords& v : verbs) {
    const size_t blank = v.path.find(' ');
    std::string condition = "__fish_use_subcommand";
    if (!v.path.empty())
      condition = blank == std::string::npos ? fmt::format("__fish_seen_subcommand_from {}", v.path)
                                             : fmt::format("__fish_seen_subcommand_from {}; and __fish_seen_subcommand_from {}",
                                                           v.path.substr(0, blank), v.path.substr(blank + 1));
    for (const std::string& part : v.parts) {
      const auto found = std::ranges::find(verbs, v.path.empty() ? part : v.path + " " + part, &VerbWords::path);
      text += fmt::format("complete -c shardlab -f -n {} -a {} -d {}\n", shell_quoted(condition), part,
                          shell_quoted(found == verbs.end() ? "" : found->help));
    }
    if (!v.first.empty())
      text += fmt::format("complete -c shardlab -f -n {} -a {}\n", shell_quoted(condition), shell_quoted(joined(v.first)));
    for (const OptionWords& o : v.options) {
      std::string names;
      for (const std::string& name : o.names) names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      text += fmt::format("complete -c shardlab -n {}{}{}{} -d {}\n", shell_quoted(condition), names,
                          o.takes_value ? (o.values.empty() ? " -r" : " -x") : " -f",
                          o.values.empty() ? std::string() : " -a " + shell_quoted(joined(o.values)), shell_quoted(o.help));
    }
  }
  return text;
}

// ---- manual -----------------------------------------------------------------------------------------------------------------

/// Text for roff: a hyphen is one, and no line begins with a control character.
std::string roff(std::string_view text) {
  std::string out;
  bool begins = true;
  for (const char c : text) {
    if (begins && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else
      out += c;
    begins = c == '\n';
  }
  return out;
}

std::string page_name(const std::string& path) {
  std::string name = path.empty() ? "shardlab" : "shardlab-" + path;
  std::ranges::replace(name, ' ', '-');
  return name;
}

std::string manual_page(const std::vector<VerbWords>& verbs, const VerbWords& v) {
  const std::string name = page_name(v.path);
  std::string title = name;
  std::ranges::transform(title, title.begin(), [](unsigned char c) { return std::toupper(c); });
  std::string text = fmt::format(".TH {} 1 \"\" {} \"shardlab manual\"\n.ad l\n.SH NAME\n{} \\- {}\n.SH SYNOPSIS\n.B shardlab",
                                 roff(title), shell_quoted(roff(version_line()), '"'), roff(name), roff(v.help));
  if (!v.path.empty()) text += " " + roff(v.path);
  text += "\n";
  if (!v.parts.empty()) text += fmt::format(".I {}\n", roff(fmt::format("{}", fmt::join(v.parts, "|"))));
  for (const std::string& argument : v.positional) text += fmt::format(".I {}\n", roff(argument));
  if (!v.options.empty()) text += ".RI [ options ]\n";
  if (!v.parts.empty()) {
    text += ".SH VERBS\n";
    for (const std::string& part : v.parts) {
      const auto found = std::ranges::find(verbs, v.path.empty() ? part : v.path + " " + part, &VerbWords::path);
      text += fmt::format(".TP\n.BR {} (1)\n{}\n", roff(page_name(v.path.empty() ? part : v.path + " " + part)),
                          roff(found == verbs.end() ? "" : found->help));
    }
  }
  text += ".SH OPTIONS\n";
  for (const OptionWords& o : v.options) {
    text += fmt::format(".TP\n.B {}{}\n{}\n", roff(fmt::format("{}", fmt::join(o.names, ", "))), o.takes_value ? " VALUE" : "",
                        roff(o.help));
  }
  const auto found = std::ranges::find(examples(), v.path, &Examples::verb);
  if (found != examples().end()) {
    text += ".SH EXAMPLES\n.nf\n";
    for (const std::string_view command : found->commands) text += fmt::format("shardlab {}\n", roff(command));
    text += ".fi\n";
  }
  text +=
      ".SH EXIT STATUS\n.TP\n.B 0\ndone\n.TP\n.B 1\na bug of shardlab\n.TP\n.B 2\nusage or configuration error; nothing "
      "ran\n.TP\n.B 3\nthe answer is no\n"
      ".TP\n.B 4\nsome cases failed\n.TP\n.B 5\na \\-\\-fail\\-if threshold was crossed\n.TP\n.B 6\nenvironment not "
      "usable\n.TP\n.B 130\ninterrupted\n";
  if (!v.path.empty()) text += ".SH SEE ALSO\n.BR shardlab (1)\n";
  return text;
}

Result<ExitCode> print_manual(const CLI::App& app, const ReferenceFlags& flags) {
  const std::vector<VerbWords> verbs = verbs_of(app);
  if (!flags.out.empty()) {
    std::filesystem::create_directories(flags.out);
    for (const VerbWords& v : verbs) {
      const std::string file = flags.out + "/" + page_name(v.path) + ".1";
      write_output(file, manual_page(verbs, v));
      fmt::print("{}\n", file);
    }
    return ExitCode::kDone;
  }
  const auto found = std::ranges::find(verbs, flags.what, &VerbWords::path);
  if (found == verbs.end()) {
    std::vector<std::string> names;
    for (const VerbWords& v : verbs)
      if (!v.path.empty()) names.push_back(v.path);
    const std::string close = sweeps::nearest_word(flags.what, names);
    return Error{
        ExitCode::kUsage,
        fmt::format("there is no verb `{}`{}", flags.what, close.empty() ? "" : fmt::format(", did you mean `{}`?", close)),
        fmt::format("verbs: {}", fmt::join(names, ", ")),
        {}};
  }
  fmt::print("{}", manual_page(verbs, *found));
  return ExitCode::kDone;
}

Result<ExitCode> print_completions(const CLI::App& app, const std::string& shell) {
  const std::vector<VerbWords> verbs = verbs_of(app);
  if (shell == "bash")
    fmt::print("{}", bash_completions(verbs));
  else if (shell == "zsh")
    fmt::print("{}", zsh_completions(verbs));
  else if (shell == "fish")
    fmt::print("{}", fish_completions(verbs));
  else
    return Error{ExitCode::kUsage, fmt::format("there are no completions for `{}`", shell), "one of: bash zsh fish", {}};
  return ExitCode::kDone;
}

Result<ExitCode> print_schema(const std::string& what) {
  if (what != "sweep" && what != "case")
    return Error{ExitCode::kUsage, fmt::format("there is no schema of `{}`", what), "one of: sweep case", {}};
  fmt::print("{}", file_schema(what == "sweep" ? SchemaOf::kSweep : SchemaOf::kCase));
  return ExitCode::kDone;
}

}  // namespace

void add_schema(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("schema", "JSON Schema of the sweep or case file, for editors");
  auto flags = std::make_shared<ReferenceFlags>();
  verb->add_option("file", flags->what, "sweep or case")->required();
  verb->footer("At the head of a sweep file: # yaml-language-server: $schema=PATH-OF-THE-SCHEMA");
  verb->callback([&action, flags] { action = [flags] { return print_schema(flags->what); }; });
}

void add_completions(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("completions", "completions of verbs, options and their values for a shell");
  auto flags = std::make_shared<ReferenceFlags>();
  verb->add_option("shell", flags->what, "bash, zsh or fish")->required();
  verb->callback([&action, &app, flags] { action = [&app, flags] { return print_completions(app, flags->what); }; });
}

void add_man(CLI::App& app, Action& action, const Invocation&) {
  auto* verb = app.add_subcommand("man", "manual pages, in the form that man reads");
  auto flags = std::make_shared<ReferenceFlags>();
  verb->add_option("verb", flags->what, "a verb, as \"model list\"; the program itself by default");
  verb->add_option("--out", flags->out, "write every page into this folder");
  verb->callback([&action, &app, flags] { action = [&app, flags] { return print_manual(app, *flags); }; });
}

}  // namespace shardlab::cli
