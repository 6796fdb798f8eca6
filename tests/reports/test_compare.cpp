// Verdicts on changes: what is noise, what is not, and what a bound makes of it.
#include <cmath>

#include "reports/compare.h"
#include "tests/namespaces.h"
#include "tests/reports/sample.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

Metric metric(std::string_view name) {
  const auto found = metric_named(name);
  REQUIRE(found.ok());
  return *found;
}

/// The sample with a measured step of `step_s` and the given spread over three repeats.
CaseOutcome timed(double step_s, double spread) {
  CaseOutcome o = small_outcome();
  o.measured->step_s = step_s;
  o.measured->step_spread = spread;
  o.measured->samples = 30;
  o.measured->repeats = 3;
  return o;
}

Change change(std::string_view name, const CaseOutcome& a, const CaseOutcome& b) {
  const auto found = change_of(metric(name), a, b);
  REQUIRE(found.has_value());
  return *found;
}

TEST_CASE("a metric is a figure's column, or its name without measured and predicted") {
  REQUIRE(metric("step_s").measured->name == "measured_step_s");
  REQUIRE(metric("step_s").column->name == "predicted_step_s");
  REQUIRE(metric("predicted_step_s").measured == nullptr);
  REQUIRE(metric("loss_last").column->name == "loss_last");
  REQUIRE(metric("tokens_per_s").better == 1);
  REQUIRE(metric("mfu").better == 1);
  REQUIRE(metric("peak_bytes").better == -1);
  for (const std::string_view word : {"tp", "status", "name", "parameters", "nothing"}) {
    const auto none = metric_named(word);
    REQUIRE_FALSE(none.ok());
    REQUIRE(none.error().hint.find("measured_step_s") != std::string::npos);
  }
  for (const std::string_view name : default_metrics()) REQUIRE(metric_named(name).ok());
}

TEST_CASE("measured figures are compared where both sides have them, predicted ones otherwise") {
  CaseOutcome a = timed(1.0, 0.01), b = timed(2.0, 0.01);
  REQUIRE(change("step_s", a, b).column == "measured_step_s");
  b.measured.reset();
  const Change predicted = change("step_s", a, b);
  REQUIRE(predicted.column == "predicted_step_s");
  REQUIRE(predicted.verdict == Verdict::kSame);
  b.predicted.reset();
  REQUIRE_FALSE(change_of(metric("step_s"), a, b).has_value());
}

TEST_CASE("a measured change within three standard errors is noise, and beyond them it is not") {
  // Standard error of a median: spread / 2.5631 * 1.2533 / sqrt(repeats), of either side.
  const double spread = 0.05, error = spread / 2.5631 * 1.2533 / std::sqrt(3.0), noise = 3 * error * std::sqrt(2.0);
  const Change c = change("step_s", timed(1, spread), timed(1, spread));
  REQUIRE(c.verdict == Verdict::kSame);
  REQUIRE(std::abs(c.noise - noise) < 1e-12);
  // The later side's error is relative to its own step.
  REQUIRE(change("step_s", timed(1, spread), timed(1 + 0.95 * noise, spread)).verdict == Verdict::kNoise);
  REQUIRE(change("step_s", timed(1, spread), timed(1 - 0.95 * noise, spread)).verdict == Verdict::kNoise);
  REQUIRE(change("step_s", timed(1, spread), timed(1 + 1.2 * noise, spread)).verdict == Verdict::kWorse);
  REQUIRE(change("step_s", timed(1, spread), timed(1 - 1.2 * noise, spread)).verdict == Verdict::kBetter);
  REQUIRE(change("tokens_per_s", timed(1, spread), timed(1 + 1.3 * noise, spread)).verdict == Verdict::kWorse);
  // More repeats, less noise.
  CaseOutcome a = timed(1, spread), b = timed(1 + 0.95 * noise, spread);
  a.measured->repeats = b.measured->repeats = 12;
  REQUIRE(change("step_s", a, b).verdict == Verdict::kWorse);
}

TEST_CASE("parts of a step are as uncertain as the step; figures without a recorded spread stay unsure") {
  CaseOutcome a = timed(1, 0.1), b = timed(1, 0.1);
  a.measured->exposed_comm_s = 0.01;
  b.measured->exposed_comm_s = 0.05;  // five times as much, and still less than the step moves
  REQUIRE(change("measured_exposed_comm_s", a, b).verdict == Verdict::kNoise);
  a.measured->resident_bytes = 1000;
  b.measured->resident_bytes = 2000;
  REQUIRE(change("resident_bytes", a, b).verdict == Verdict::kUnsure);
  a.measured->samples = 2;
  b.measured->step_s = 3;
  REQUIRE(change("step_s", a, b).verdict == Verdict::kUnsure);
}

TEST_CASE("predictions, bytes and losses are exact: a difference that can be read is a change, and bounds see every one") {
  CaseOutcome a = small_outcome(), b = small_outcome();
  b.predicted->peak_bytes += 1;
  b.measured.reset();
  REQUIRE(change("peak_bytes", a, b).verdict == Verdict::kWorse);
  REQUIRE(change("peak_bytes", b, a).verdict == Verdict::kBetter);
  b = small_outcome();
  b.measured->losses.back() -= 1e-3;
  REQUIRE(change("loss_last", a, b).verdict == Verdict::kBetter);
  b.measured->losses.back() = a.measured->losses.back() + 1e-9;
  const Change unread = change("loss_last", a, b);
  REQUIRE(unread.verdict == Verdict::kSame);
  REQUIRE(unread.difference() > 0);
  REQUIRE(parse_threshold("loss_last:0")->crossed(unread));
  REQUIRE_FALSE(parse_threshold("loss_last:+1e-6")->crossed(unread));
  a.predicted->bubble_fraction = 0;
  b.predicted->bubble_fraction = 0.1;
  REQUIRE(std::isinf(change("predicted_bubble_fraction", a, b).relative()));
}

TEST_CASE("bounds are crossed in their direction, beyond their size and beyond noise") {
  const auto bound = [](std::string_view text) {
    const auto parsed = parse_threshold(text);
    INFO(text);
    REQUIRE(parsed.ok());
    return *parsed;
  };
  const auto crossed = [&](std::string_view text, const CaseOutcome& a, const CaseOutcome& b) {
    const Threshold t = bound(text);
    return t.crossed(*change_of(t.metric, a, b));
  };
  const CaseOutcome one = timed(1, 0.001), slower = timed(1.06, 0.001), noisy = timed(1.06, 0.2);
  REQUIRE(crossed("step_s:+5%", one, slower));
  REQUIRE(crossed("step_s:5%", one, slower));  // without a sign: the worse direction
  REQUIRE_FALSE(crossed("step_s:+7%", one, slower));
  REQUIRE_FALSE(crossed("step_s:-5%", one, slower));
  REQUIRE(crossed("step_s:-5%", slower, one));
  REQUIRE(crossed("tokens_per_s:5%", one, slower));
  REQUIRE(crossed("tokens_per_s:-5%", one, slower));
  REQUIRE_FALSE(crossed("step_s:+5%", one, noisy));
  REQUIRE(crossed("step_s:+0.05", one, slower));
  REQUIRE_FALSE(crossed("step_s:+0.07", one, slower));
  CaseOutcome larger = small_outcome();
  larger.measured->peak_bytes += 1;
  REQUIRE(crossed("peak_bytes:0", small_outcome(), larger));
  REQUIRE_FALSE(crossed("peak_bytes:+1Ki", small_outcome(), larger));
  REQUIRE_FALSE(crossed("peak_bytes:0", small_outcome(), small_outcome()));
  for (const std::string_view bad :
       {"step_s", "step_s:", "step_s:fast", "step_s:+-5%", "tp:+1", ":+5%", "step_error_pct:5", "step_s:++1"}) {
    INFO(bad);
    REQUIRE_FALSE(parse_threshold(bad).ok());
  }
}

TEST_CASE("the median's interval is that of order statistics") {
  REQUIRE_FALSE(median_change({1, 2, 3, 4, 5}).interval.has_value());  // 2 / 32 > 0.05
  const MedianChange six = median_change({6, 1, 5, 2, 4, 3});
  REQUIRE(six.median == 3.5);
  REQUIRE(six.interval == std::pair<double, double>{1, 6});  // 2 / 64 <= 0.05
  std::vector<double> many;
  for (int i = 1; i <= 20; ++i) many.push_back(i);
  // P(X <= 5) of binomial(20, 1/2) is 0.0207, P(X <= 6) is 0.0577: from the sixth to the fifteenth.
  REQUIRE(median_change(many).interval == std::pair<double, double>{6, 15});
  // P(X <= 469) of binomial(1000, 1/2) is 0.0268, P(X <= 468) is 0.0231: from the 469th to the 532nd of 1,000.
  many.clear();
  for (int i = 1; i <= 1000; ++i) many.push_back(i);
  REQUIRE(median_change(many).interval == std::pair<double, double>{469, 532});
}

TEST_CASE("cases pair by id, then by a name that is unique on either side") {
  const auto figures = [](std::string id, std::string name) {
    CaseFigures f;
    f.case_id = std::move(id);
    f.name = std::move(name);
    return f;
  };
  const std::vector<CaseFigures> a{figures("1", "x"), figures("2", "y"), figures("3", "z"), figures("4", "z"),
                                   figures("5", "gone")};
  const std::vector<CaseFigures> b{figures("7", "y"), figures("1", "renamed"), figures("8", "z"), figures("9", "new")};
  const Pairing p = pair_up(a, b);
  REQUIRE(p.pairs.size() == 2);
  REQUIRE((p.pairs[0].a == 0 && p.pairs[0].b == 1 && !p.pairs[0].by_name));
  REQUIRE((p.pairs[1].a == 1 && p.pairs[1].b == 0 && p.pairs[1].by_name));
  REQUIRE(p.only_a == std::vector<size_t>{2, 3, 4});
  REQUIRE(p.only_b == std::vector<size_t>{2, 3});
}

TEST_CASE("settings in which two cases differ are named with both values") {
  Case a = small_outcome().config, b = a;
  REQUIRE(differing_keys(a, b).empty());
  b.layout.zero = 2;
  b.train.learning_rate.peak = 0.5f;
  b.name = "another";
  const auto keys = differing_keys(a, b);
  REQUIRE(keys.size() == 2);
  REQUIRE(keys[0] == "layout.zero 0 -> 2");
  REQUIRE(keys[1].starts_with("train.learning_rate.peak "));
}

}  // namespace
}  // namespace shardlab::testing
