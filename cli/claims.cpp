#include "cli/claims.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <variant>

#include "cli/namespaces.h"
#include "reports/columns.h"
#include "reports/format.h"
#include "sweeps/expression.h"

namespace shardlab::cli {
namespace {

/// Bytes at the peak of the classes that `what` names, or nothing.
std::optional<double> bytes_of_class(const CaseOutcome& outcome, std::string_view what) {
  if (!outcome.predicted) return std::nullopt;
  const auto of = [&](BufferClass c) { return static_cast<double>(outcome.predicted->memory.bytes[static_cast<size_t>(c)]); };
  if (what == "states_bytes")
    return of(BufferClass::kParameter) + of(BufferClass::kGradient) + of(BufferClass::kMaster) + of(BufferClass::kMoment);
  for (int c = 0; c < kBufferClasses; ++c)
    if (what == fmt::format("{}_bytes", name_of(static_cast<BufferClass>(c)))) return of(static_cast<BufferClass>(c));
  return std::nullopt;
}

/// Figures of time and loss are predicted by a model or measured with noise: sides of a comparison that are nearer than this, as a
/// share of the larger, are not told apart. Bytes and counts are exact.
constexpr double kMargin = 0.005;

class Judge {
 public:
  explicit Judge(std::span<const CaseOutcome> cases) : cases_(cases) {}

  /// The verdict has a margin where it stays the same whichever way the comparisons without one go.
  Statement judge(const Claim& claim) {
    Vocabulary vocabulary;
    vocabulary.figures = true;
    const auto parsed = Expression::parse(claim.check, vocabulary);
    if (const auto* error = std::get_if<ExpressionError>(&parsed)) return undecided(claim, error->message);
    figures_.clear();
    missing_.clear();
    near_.clear();
    inexact_ = neither_ = false;
    const auto& check = std::get<Expression>(parsed);
    const auto truth = holds(check, Near::kAsTheyAre);
    if (const auto* error = std::get_if<ExpressionError>(&truth))
      return undecided(claim, missing_.empty() ? error->message : missing_);
    if (neither_)
      return undecided(claim, fmt::format("neither side reached its loss ({}): give time_to_loss a higher one", figures_));
    const auto stays = [&](Near near) {
      const auto other = holds(check, near);
      return std::holds_alternative<bool>(other) && std::get<bool>(other) == std::get<bool>(truth);
    };
    const bool firm = near_.empty() || (stays(Near::kTrue) && stays(Near::kFalse));
    return verdict(claim, std::get<bool>(truth), firm);
  }

 private:
  enum class Near : uint8_t { kAsTheyAre, kTrue, kFalse };

  std::variant<bool, ExpressionError> holds(const Expression& check, Near near) {
    const auto compared = [&](double a, double b, bool by_size, bool truth) {
      neither_ = neither_ || (std::isinf(a) && std::isinf(b));
      const double size = std::max(std::abs(a), std::abs(b)), apart = size > 0 ? std::abs(a - b) / size : 0;
      if (!std::exchange(inexact_, false) || !by_size || !(apart < kMargin)) return truth;
      const std::string entry = fmt::format("{:.4g} against {:.4g}, {:.2g} % apart", a, b, 100 * apart);
      if (near_.find(entry) == std::string::npos) near_ += (near_.empty() ? "" : "; ") + entry;
      return near == Near::kAsTheyAre ? truth : near == Near::kTrue;
    };
    return check.holds([this](std::string_view key) { return figure(key); }, compared);
  }

  Statement verdict(const Claim& claim, bool holds, bool firm) const {
    const auto mood = !firm ? Statement::Mood::kNote : holds ? Statement::Mood::kGood : Statement::Mood::kBad;
    std::string text = fmt::format("{}{}: \"{}\" ({}).", holds ? "Holds here" : "Does not hold here",
                                   firm ? "" : ", without margin", claim.says, claim.source);
    if (!holds && !claim.why.empty()) text += fmt::format(" Why: {}.", claim.why);
    text += fmt::format(" Tested: {}, where {}.", claim.check, figures_);
    if (!firm) text += fmt::format(" No margin: {}; times and losses are not told apart below {} %.", near_, 100 * kMargin);
    return {mood, std::move(text)};
  }

  Statement undecided(const Claim& claim, const std::string& why) const {
    return {Statement::Mood::kNote, fmt::format("Undecided: \"{}\" ({}). Not tested, since {}.", claim.says, claim.source, why)};
  }

  ExpressionValue figure(std::string_view key) {
    const size_t dot = key.rfind('.');
    const std::string_view name = key.substr(0, dot), what = key.substr(dot + 1);
    const auto found = std::ranges::find_if(cases_, [&](const CaseOutcome& c) { return c.config.name == name; });
    if (found == cases_.end()) return absent(fmt::format("there is no case called {}", name));
    if (const auto bytes = bytes_of_class(*found, what)) return noted(key, *bytes, bytes_text(*bytes));
    const CaseColumn* column = find_column(what);
    if (column == nullptr) return absent(fmt::format("there is no figure called {}", what));
    const Value value = column->get(*found);
    inexact_ = inexact_ || (std::holds_alternative<double>(value) && column->unit != Unit::kBytes);
    if (const auto* n = std::get_if<int64_t>(&value)) return noted(key, static_cast<double>(*n), human_text(value, column->unit));
    if (const auto* x = std::get_if<double>(&value)) return noted(key, *x, human_text(value, column->unit));
    if (const auto* b = std::get_if<bool>(&value)) return *b;
    if (const auto* text = std::get_if<std::string>(&value)) return *text;
    // Steps that did not come to the loss say something: it takes longer than any that did.
    if (what.ends_with("_to_loss") && found->measured && !found->measured->losses.empty() && found->loss_target.loss > 0)
      return noted(key, std::numeric_limits<double>::infinity(), "never");
    return absent(fmt::format("{} has no {}{}", name, what, found->reason.empty() ? "" : fmt::format(" ({})", found->reason)));
  }
  ExpressionValue absent(std::string why) {
    if (missing_.empty()) missing_ = std::move(why);
    return std::monostate{};
  }
  ExpressionValue noted(std::string_view key, double value, const std::string& text) {
    const std::string entry = fmt::format("{} = {}", key, text);
    if (figures_.find(entry) == std::string::npos) figures_ += (figures_.empty() ? "" : ", ") + entry;
    return value;
  }

  std::span<const CaseOutcome> cases_;
  std::string figures_;
  std::string missing_;
  std::string near_;      ///< comparisons without margin
  bool neither_ = false;  ///< whether a comparison was of two losses that were never reached
  bool inexact_ = false;  ///< whether a figure of the comparison under way is no exact count
};

}  // namespace

std::vector<Statement> verdicts(const std::vector<Claim>& claims, std::span<const CaseOutcome> cases) {
  Judge judge(cases);
  std::vector<Statement> all;
  for (const Claim& claim : claims) all.push_back(judge.judge(claim));
  return all;
}

}  // namespace shardlab::cli
