// Another project's program: a case from words, its plan, and the price of its step.
#include <fmt/format.h>

#include <cstdio>

#include "answers/planned.h"
#include "simulator/interpreter/cost_model.h"
#include "simulator/interpreter/predict.h"
#include "sweeps/sweep.h"

using namespace shardlab;

int main() {
  sweeps::LoadOptions options;
  options.overrides = {"model=gpt2", "machine=h100", "dp=2", "zero=1", "seq_len=256"};
  const auto config = sweeps::case_from_words(options);
  if (!config.ok()) return std::fprintf(stderr, "%s\n", to_string(config.error()).c_str()), 2;
  const auto placed = answers::prepare(*config);
  if (!placed.ok()) return std::fprintf(stderr, "%s\n", to_string(placed.error()).c_str()), 2;
  const auto costs = simulator::cost_model_for(*config);
  if (!costs.ok()) return std::fprintf(stderr, "%s\n", to_string(costs.error()).c_str()), 2;
  const auto predicted = simulator::predict(*config, *placed->plan, placed->programs, answers::largest_arena(*placed), **costs);
  fmt::print("{},{}\n", predicted.figures.step_s, predicted.figures.peak_bytes);
  return 0;
}
