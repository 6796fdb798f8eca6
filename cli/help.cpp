#include "cli/help.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cli/namespaces.h"
#include "plan/base/nearest.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

constexpr int kWidth = 100, kColumn = 30;

constexpr std::array kExamples{
    Examples{"run",
             {"run sweeps/quickstart.yaml --machine-file runs/local.yaml", "run sweeps/examples/llama8b-hgx-h100.yaml --dry-run"}},
    Examples{"launch",
             {"launch -n 2 run sweeps/quickstart.yaml", "launch --ranks-per-process 2 run sweeps/quickstart.yaml --transport tcp"}},
    Examples{"comm",
             {"comm --transport tcp -n 4 --collectives all_reduce -b 1Ki -e 64Mi",
              "comm --import all_reduce_perf.txt --machine hgx-h100-ndr -o mine.yaml"}},
    Examples{"merge",
             {"merge runs/sweep.shard-1-of-2 runs/sweep.shard-2-of-2 -o runs/sweep", "merge runs/sweep.shard-* -o runs/all"}},
    Examples{"report", {"report runs/quickstart", "report runs/quickstart --html report.html --csv cases.csv"}},
    Examples{"memory",
             {"memory --model llama-3.1-8b --machine hgx-h100-ndr --devices 8 --profile torchtitan",
              "memory --model gpt2 --machine a100 --devices 8 --zero 0..3 --tokens 300G"}},
    Examples{"search",
             {"search --model llama-3.1-8b --machine hgx-h100-ndr --devices 64 --global-batch-tokens 4Mi",
              "search --model gpt3-175b --machine hgx-h100-ndr --devices 512,1024 --tokens 300G \\\n"
              "      --global-batch-tokens 3Mi --seq-len 2Ki --profile megatron --objective cost --max-days 60"}},
    Examples{"plan", {"plan runs/quickstart/CASE", "plan runs/quickstart/CASE/plan.txt"}},
    Examples{"diff",
             {"diff case.yaml best.yaml --set profile=shardlab", "diff runs/quickstart/CASE best.yaml --set profile=shardlab"}},
    Examples{"compare", {"compare runs/before runs/quickstart", "compare runs/before runs/quickstart --fail-if step_s:+5%"}},
    Examples{"export", {"export runs/quickstart/CASE --to megatron,sbatch --out job", "export best.yaml --to deepspeed"}},
    Examples{"import",
             {"import ds_config.json --model gpt2 --machine h100 --seq-len 1Ki",
              "import pretrain.sh --machine h100 --devices 64 -o case.yaml"}},
    Examples{"weights",
             {"weights import public --out checkpoint",
              "weights export checkpoint --model public/config.json --dtype bf16 --out again"}},
    Examples{"what-if",
             {"what-if runs/quickstart/CASE", "what-if best.yaml --set profile=shardlab --free all_reduce --speed-up linear=2"}},
    Examples{"trace", {"trace summary runs/quickstart/CASE", "trace convert runs/quickstart/CASE --as kineto -o kineto"}},
    Examples{"explain", {"explain runs/quickstart", "explain runs/quickstart/CASE --rows 0"}},
    Examples{"calibrate", {"calibrate", "calibrate --scale 0.5 -o runs/local.yaml"}},
    Examples{"model", {"model list", "model show llama-3.1-70b"}},
    Examples{"machine", {"machine list", "machine show hgx-h100-ndr"}},
    Examples{"validate", {"validate", "validate rows.csv --out runs/scores"}},
    Examples{"strategies", {"strategies", "strategies --pairs"}},
    Examples{"keys", {"keys", "keys bucket"}},
    Examples{"schema", {"schema sweep > sweep.schema.json", "schema case"}},
    Examples{"completions", {"completions bash", "completions fish > shardlab.fish"}},
    Examples{"man", {"man search", "man --out man"}},
    Examples{"doctor", {"doctor", "doctor --format json"}},
};

/// CLI11's help with its lines broken: options go on under their descriptions.
class Help final : public CLI::Formatter {
 public:
  Help() { column_width(kColumn); }
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    const std::string text = CLI::Formatter::make_help(app, name, mode);
    std::string out;
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      const std::string line = text.substr(at, end - at);
      out += wrapped(line, kWidth, line.starts_with("  ") ? kColumn : 0) + "\n";
      at = end + 1;
    }
    return out;
  }
};

}  // namespace

std::span<const Examples> examples() { return kExamples; }

namespace {

/// "--model" and "-o" of a verb, and of its own verbs.
void add_options(const CLI::App& verb, std::vector<std::string>& names) {
  for (const CLI::Option* option : verb.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  for (const CLI::App* part : verb.get_subcommands({})) add_options(*part, names);
}

/// The first word that looks like an option and is none; empty: there is none such.
std::string unknown_option(std::span<const std::string> words, const std::vector<std::string>& known) {
  for (const std::string& word : words) {
    if (word == "--") return {};
    const std::string name = word.substr(0, word.find('='));
    if (name.starts_with("--") && std::ranges::find(known, name) == known.end()) return name;
  }
  return {};
}

/// "list or show"; "run, memory or search".
std::string alternatives(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) text += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  return text;
}

/// "`memory` needs --model: ..." where the library says "--model is required".
std::string missing(const CLI::App& verb, const std::string& name) {
  if (name == "A subcommand") {
    std::vector<std::string> parts;
    for (const CLI::App* part : verb.get_subcommands({}))
      if (!part->get_group().empty()) parts.push_back(part->get_name());  // one without a group is for the program's own use
    return fmt::format("`{}` needs a verb{}: {}", verb.get_name(), verb.get_parent() == nullptr ? "" : " of its own",
                       alternatives(parts));
  }
  const CLI::Option* option = verb.get_option_no_throw(name);
  const std::string meaning = option == nullptr ? "" : option->get_description();
  return fmt::format("`{}` needs {}{}{}", verb.get_name(), name.starts_with("-") ? name : fmt::format("<{}>", name),
                     meaning.empty() ? "" : ": ", meaning);
}

}  // namespace

Error usage_error(const CLI::App& app, const CLI::ParseError& end, std::span<const std::string> words) {
  constexpr std::string_view kMissing = " is required", kExtra = "not expected: ", kTwice = ": At Most 1 required but received ";
  const CLI::App* verb = &app;
  while (!verb->get_subcommands().empty()) verb = verb->get_subcommands().front();
  std::vector<std::string> known;
  add_options(*verb, known);
  std::string path = "shardlab";
  for (const CLI::App* at = verb; at != &app; at = at->get_parent()) path.insert(8, " " + at->get_name());
  Error error{ExitCode::kUsage, end.what(), fmt::format("`{} --help` lists what it takes", path), {}};
  const std::string text = end.what();
  if (const std::string unknown = unknown_option(words, known); !unknown.empty()) {
    const std::string close = nearest(unknown, known);
    error.message = fmt::format("`{}` has no option {}{}", verb->get_name(), unknown,
                                close.empty() ? "" : fmt::format("; did you mean {}?", close));
  } else if (text.ends_with(kMissing)) {
    error.message = missing(*verb, text.substr(0, text.size() - kMissing.size()));
  } else if (const size_t twice = text.find(kTwice); twice != std::string::npos) {
    error.message = fmt::format("`{}` takes {} once, and it is given several times", verb->get_name(), text.substr(0, twice));
  } else if (const size_t at = text.find(kExtra); at != std::string::npos) {
    error.message = fmt::format("`{}` does not take `{}`", verb->get_name(), text.substr(at + kExtra.size()));
  }
  const auto found =
      std::ranges::find_if(kExamples, [&](const Examples& e) { return path.starts_with(fmt::format("shardlab {}", e.verb)); });
  if (found != kExamples.end()) error.hint += fmt::format("; for example: shardlab {}", found->commands[0]);
  return error;
}

void add_help(CLI::App& app) {
  const auto help = std::make_shared<Help>();
  app.formatter(help);
  for (CLI::App* verb : app.get_subcommands({})) {
    verb->formatter(help);
    for (CLI::App* part : verb->get_subcommands({})) part->formatter(help);
    const auto found = std::ranges::find(kExamples, verb->get_name(), &Examples::verb);
    if (found == kExamples.end()) continue;
    std::string footer = "Examples:\n";
    for (const std::string_view command : found->commands) footer += fmt::format("  shardlab {}\n", command);
    const std::string own = verb->get_footer();  // that of the program where the verb has none of its own
    verb->footer(footer + "\n" + own + (own == app.get_footer() ? "" : "\n\n" + app.get_footer()));
  }
}

}  // namespace shardlab::cli
