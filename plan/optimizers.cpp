#include "plan/optimizers.h"

#include <variant>

namespace shardlab {
namespace {

constexpr OptimizerState kTwoMoments[] = {{"m"}, {"v"}};

constexpr OptimizerRow kRows[] = {
    // m 3, v 4, corrections 2, root, epsilon, quotient, times lr, subtract
    {.id = Optimizer::kAdamW,
     .name = "adamw",
     .title = "AdamW",
     .state = kTwoMoments,
     .flops = 14,
     .has_betas = true,
     .has_epsilon = true,
     .source = "Loshchilov & Hutter 2019"},
    // times lr, subtract
    {.id = Optimizer::kSgd, .name = "sgd", .title = "SGD", .state = {}, .flops = 2, .source = "Robbins & Monro 1951"},
};

}  // namespace

std::span<const OptimizerRow> optimizers() { return kRows; }

const OptimizerRow& row_of(Optimizer optimizer) { return kRows[static_cast<size_t>(optimizer)]; }

std::optional<Optimizer> optimizer_named(std::string_view name) {
  for (const OptimizerRow& row : kRows)
    if (row.name == name) return row.id;
  return std::nullopt;
}

const OptimizerRow* update_of(const Work& work) {
  if (std::holds_alternative<AdamW>(work)) return &row_of(Optimizer::kAdamW);
  if (std::holds_alternative<Sgd>(work)) return &row_of(Optimizer::kSgd);
  return nullptr;
}

double state_bytes_per_parameter(const OptimizerRow& row) {
  double bytes = 0;
  for (const OptimizerState& state : row.state) bytes += bits_of(state.dtype) / 8.0;
  return bytes;
}

}  // namespace shardlab
