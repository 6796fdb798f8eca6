#include "cli/help.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>

#include "cli/namespaces.h"
#include "reports/format.h"

namespace shardlab::cli {
namespace {

constexpr int kWidth = 100, kColumn = 30;

constexpr std::array kExamples{
    Examples{"run",
             {"run sweeps/quickstart.yaml --machine-file runs/local.yaml",
              "run sweeps/examples/llama8b-hgx-h100.yaml --dry-run"}},
    Examples{"report", {"report runs/quickstart", "report runs/quickstart --html report.html --csv cases.csv"}},
    Examples{"memory",
             {"memory --model llama-3.1-8b --machine hgx-h100-ndr --devices 8 --profile torchtitan",
              "memory --model gpt2 --machine a100-sxm4-80gb --devices 8 --zero 0..3 --tokens 300G"}},
    Examples{"search",
             {"search --model llama-3.1-8b --machine hgx-h100-ndr --devices 64 --global-batch-tokens 4Mi",
              "search --model gpt3-175b --machine hgx-h100-ndr --devices 512,1024 --tokens 300G \\\n"
              "      --global-batch-tokens 3Mi --seq-len 2Ki --profile megatron --objective cost --max-days 60"}},
    Examples{"plan", {"plan runs/quickstart/CASE/case.yaml", "plan runs/quickstart/CASE/plan.txt"}},
    Examples{"diff", {"diff a.yaml b.yaml", "diff a.yaml b.yaml --set train.precision=bf16"}},
    Examples{"explain", {"explain runs/quickstart", "explain runs/quickstart/CASE --rows 0"}},
    Examples{"calibrate", {"calibrate", "calibrate --scale 0.5 -o runs/local.yaml"}},
    Examples{"model", {"model list", "model show llama-3.1-70b"}},
    Examples{"machine", {"machine list", "machine show hgx-h100-ndr"}},
    Examples{"validate", {"validate", "validate rows.csv --out runs/scores"}},
    Examples{"strategies", {"strategies", "strategies --pairs"}},
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
    verb->footer(footer + "\n" + verb->get_footer());
  }
}

}  // namespace shardlab::cli
