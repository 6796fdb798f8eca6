// Delayed scales of fp8: what is remembered, by whom, and that all agree.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "plan/precision.h"
#include "tests/namespaces.h"
#include "tests/stability/training.h"
#include "tests/test.h"

namespace shardlab::testing {
namespace {

Case delayed_case(const Ranks& ranks) {
  Case c = stability_case(ranks);
  c.train.precision = Precision::kFp8;
  c.train.fp8_scaling = Fp8Scaling::kDelayed;
  return c;
}

/// The histories of a run, by buffer: a row a tensor, newest first.
std::map<std::string, std::vector<float>> histories(const Training& run) {
  std::map<std::string, std::vector<float>> all;
  for (auto& [name, values] : run.state())
    if (name.parameter == kRunState && name.part.starts_with("amax.")) all[name.part] = values;
  return all;
}

std::map<std::string, std::vector<float>> after(const Ranks& ranks, int steps) {
  Training run(delayed_case(ranks));
  for (int s = 0; s < steps; ++s) run.step(s);
  return histories(run);
}

float newest(const std::vector<float>& history, int64_t row) { return history[static_cast<size_t>(row * kFp8Window)]; }

TEST_CASE("a history moves once a step, however many micro-batches it has, and every tensor has entered it") {
  for (const Ranks& ranks :
       {Ranks{}, Ranks{.accumulation = 4}, Ranks{.dp = 2, .pp = 2, .accumulation = 2, .recompute = Recompute::kFull}}) {
    INFO(line_of(ranks));
    const auto all = after(ranks, 3);
    CHECK(all.size() == 4);  // forward and backward of two layers
    for (const auto& [name, history] : all) {
      INFO(name);
      REQUIRE(history.size() == (name.ends_with("forward") ? 8 : 4) * kFp8Window);
      for (size_t i = 0; i < history.size(); ++i) {
        const bool past = static_cast<int64_t>(i) % kFp8Window < 3;
        CHECK(std::isfinite(history[i]));
        CHECK((history[i] > 0) == past);
      }
    }
  }
}

TEST_CASE("the sizes of the global batch, under every layout: ranks that hold other sequences or slices agree") {
  const auto one = after({}, 2);
  for (const Ranks& ranks :
       {Ranks{.dp = 2}, Ranks{.accumulation = 2}, Ranks{.dp = 4, .zero = 3}, Ranks{.dp = 2, .pp = 2, .zero = 1}}) {
    INFO(line_of(ranks));
    CHECK(after(ranks, 2) == one);
  }
}

TEST_CASE("slices of a matrix are scaled as the whole: tp ranks know the largest size of all of it") {
  // Of the first step, in which parameters are those of one rank, and so is what the first layer reads.
  const auto one = after({}, 1);
  for (const Ranks& ranks : {Ranks{.tp = 2}, Ranks{.tp = 4}, Ranks{.dp = 2, .tp = 2}}) {
    INFO(line_of(ranks));
    const auto cut = after(ranks, 1);
    for (const char* layer : {"amax.layers.0.forward", "amax.layers.1.forward"})
      for (const int64_t weight : {1, 3, 5, 7}) CHECK(newest(cut.at(layer), weight) == newest(one.at(layer), weight));
    CHECK(newest(cut.at("amax.layers.0.forward"), 0) == newest(one.at("amax.layers.0.forward"), 0));
    for (const auto& [name, history] : one)
      for (int64_t row = 0; row < static_cast<int64_t>(history.size()) / kFp8Window; ++row)
        CHECK(newest(cut.at(name), row) == Approx(newest(history, row)).epsilon(name.ends_with("forward") ? 0.1 : 0.3));
  }
}

TEST_CASE("twenty steps of fp8 on slices stay finite: more than a window") {
  for (const Fp8Scaling scaling : {Fp8Scaling::kCurrent, Fp8Scaling::kDelayed}) {
    Case c = delayed_case({.dp = 2, .tp = 2, .accumulation = 2});
    c.train.fp8_scaling = scaling;
    Training run(c);
    float first = 0, last = 0;
    for (int s = 0; s < 20; ++s) {
      last = run.step(s).loss.value_or(NAN);
      REQUIRE(std::isfinite(last));
      if (s == 0) first = last;
    }
    CHECK(last < first);
  }
}

TEST_CASE("what overflowed is not remembered") {
  Case c = delayed_case({});
  Training run(c, {Plant{.rank = 0, .step = 1, .value = INFINITY, .kernel = "fp8_remember"}});
  for (int s = 0; s < 2; ++s) run.step(s);
  const auto all = histories(run);
  int64_t zeroes = 0;
  for (const auto& [name, history] : all) zeroes += newest(history, 0) == 0;
  CHECK(zeroes == 4);  // the first tensor of each list
  for (const auto& [name, history] : all)
    for (const float v : history) CHECK(std::isfinite(v));
}

}  // namespace
}  // namespace shardlab::testing
