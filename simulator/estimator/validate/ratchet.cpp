#include "simulator/estimator/validate/ratchet.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "simulator/estimator/validate/csv.h"

namespace shardlab::simulator::validation {
namespace {

constexpr const char* kHeader = "group,figure,value,best,tolerance,reason\n";

/// Values are kept with three decimals, so that a file and a run that agree are equal.
double rounded(double value) { return std::round(value * 1000) / 1000; }

const Recorded* find(std::span<const Recorded> recorded, const Figure& f) {
  const auto same = [&](const Recorded& r) { return r.figure.group == f.group && r.figure.name == f.name; };
  const auto found = std::find_if(recorded.begin(), recorded.end(), same);
  return found == recorded.end() ? nullptr : &*found;
}

bool present(std::span<const Figure> figures, const Figure& f) {
  return std::any_of(figures.begin(), figures.end(), [&](const Figure& g) { return g.group == f.group && g.name == f.name; });
}

/// Nothing for counts, a hundredth for rank correlations, for percentages a twentieth and at least half a
/// point; five points of coverage, since a row more or less of a small set is as many, and a tenth of an interval's width.
double first_tolerance(const Figure& f) {
  if (f.name == "refused_rows") return 0;
  if (f.name == "rank_missing") return 0.01;
  if (f.name.ends_with("_uncovered_pct")) return 5;
  if (f.name.ends_with("_interval_pct")) return rounded(std::max(1.0, 0.1 * f.value));
  return rounded(std::max(0.5, 0.05 * f.value));
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return text.find_first_of(",\"\n") == std::string::npos ? text : out + "\"";
}

}  // namespace

std::vector<Figure> figures_of(const Score& s) {
  std::vector<Figure> figures;
  const auto add = [&](const char* name, double value) { figures.push_back({s.group, name, rounded(value)}); };
  add("refused_rows", static_cast<double>(s.refused));
  if (s.step.rows > 0) {
    add("step_error_pct", 100 * s.step.mean_absolute);
    add("step_bias_pct", 100 * std::fabs(s.step.bias));
    add("step_worst_pct", 100 * std::fabs(s.step.worst));
  }
  if (s.rank) add("rank_missing", 1 - *s.rank);
  if (s.layout_loss) add("layout_loss_pct", 100 * *s.layout_loss);
  for (size_t kind = 0; kind < kMemoryKinds; ++kind)
    if (s.memory[kind].rows > 0)
      add(fmt::format("{}_error_pct", name_of(static_cast<MemoryKind>(kind))).c_str(), 100 * s.memory[kind].mean_absolute);
  if (const auto accuracy = s.fit.accuracy()) add("fit_wrong_pct", 100 * (1 - *accuracy));
  for (const auto& [figure, interval] : {std::pair{"step", &s.step_interval}, {"memory", &s.memory_interval}}) {
    const auto share = interval->share();
    if (!share) continue;
    add(fmt::format("{}_uncovered_pct", figure).c_str(), 100 * (1 - *share));
    add(fmt::format("{}_interval_pct", figure).c_str(), 100 * interval->width);
  }
  return figures;
}

Result<std::vector<Recorded>> read_scores(std::string_view text, const std::string& file) {
  const auto csv = read_csv(text, file);
  if (!csv.ok()) return csv.error();
  if (std::string header = fmt::format("{}\n", fmt::join(csv->columns, ",")); header != kHeader)
    return Error{ExitCode::kUsage, fmt::format("the columns are {}", header), fmt::format("they must be {}", kHeader),
                 file + ":1:1"};
  std::vector<Recorded> scores;
  for (const auto& record : csv->records) {
    Recorded r{{record[0].text, record[1].text, 0}, 0, 0, record[5].text};
    double* const numbers[] = {&r.figure.value, &r.best, &r.tolerance};
    for (size_t i = 0; i < 3; ++i) {
      char* end = nullptr;
      const CsvField& field = record[2 + i];
      *numbers[i] = std::strtod(field.text.c_str(), &end);
      if (field.text.empty() || *end != '\0' || !std::isfinite(*numbers[i]))
        return Error{ExitCode::kUsage, fmt::format("`{}` is no number", field.text), "write digits",
                     fmt::format("{}:{}:{}", file, field.line, field.column)};
    }
    scores.push_back(std::move(r));
  }
  return scores;
}

std::string write_scores(std::span<const Recorded> scores) {
  std::string text = kHeader;
  for (const Recorded& r : scores)
    text += fmt::format("{},{},{:.3f},{:.3f},{:.3f},{}\n", quoted(r.figure.group), r.figure.name, r.figure.value, r.best,
                        r.tolerance, quoted(r.reason));
  return text;
}

std::vector<std::string> compare_scores(std::span<const Recorded> recorded, std::span<const Figure> now) {
  constexpr double kSlack = 1e-9;
  std::vector<std::string> wrong;
  for (const Figure& f : now) {
    const Recorded* r = find(recorded, f);
    if (r == nullptr)
      wrong.push_back(fmt::format("{} {} = {:.3f} is not recorded", f.group, f.name, f.value));
    else if (f.value > r->figure.value + r->tolerance + kSlack)
      wrong.push_back(fmt::format("{} {} worsened from {:.3f} to {:.3f}, more than the tolerance {:.3f}", f.group, f.name,
                                  r->figure.value, f.value, r->tolerance));
  }
  for (const Recorded& r : recorded) {
    if (!present(now, r.figure))
      wrong.push_back(fmt::format("{} {} is recorded and no longer measured", r.figure.group, r.figure.name));
    if (r.figure.value > r.best + r.tolerance + kSlack && r.reason.empty())
      wrong.push_back(fmt::format("{} {} was {:.3f} and is recorded as {:.3f} without a reason", r.figure.group, r.figure.name,
                                  r.best, r.figure.value));
  }
  return wrong;
}

std::vector<Recorded> update_scores(std::span<const Recorded> recorded, std::span<const Figure> now) {
  std::vector<Recorded> updated;
  for (const Figure& f : now) {
    const Recorded* old = find(recorded, f);
    Recorded r = old != nullptr ? *old : Recorded{f, f.value, first_tolerance(f), ""};
    r.figure.value = f.value;
    r.best = std::min(r.best, f.value);
    updated.push_back(std::move(r));
  }
  return updated;
}

}  // namespace shardlab::simulator::validation
