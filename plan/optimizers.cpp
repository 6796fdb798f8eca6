#include "plan/optimizers.h"

#include <algorithm>
#include <variant>

namespace shardlab {
namespace {

constexpr OptimizerState kOneMoment[] = {{"m"}};
constexpr OptimizerState kTwoMoments[] = {{"m"}, {"v"}};
constexpr OptimizerState kCodedMoments[] = {
    {"m", DType::u8}, {"v", DType::u8}, {"m_scale", DType::f32, true}, {"v_scale", DType::f32, true}};

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
    // blend 3, sign, times lr, subtract, m 3
    {.id = Optimizer::kLion,
     .name = "lion",
     .title = "Lion",
     .state = kOneMoment,
     .flops = 9,
     .has_betas = true,
     .beta2 = 0.99f,
     .source = "Chen et al. 2023"},
    // AdamW 14; each moment once times its scale, once divided by it
    {.id = Optimizer::kAdamW8bit,
     .name = "adamw8bit",
     .title = "AdamW with moments in 8 bits",
     .state = kCodedMoments,
     .flops = 18,
     .has_betas = true,
     .has_epsilon = true,
     .source = "Dettmers et al. 2022"},
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
  if (std::holds_alternative<Lion>(work)) return &row_of(Optimizer::kLion);
  if (std::holds_alternative<AdamW8bit>(work)) return &row_of(Optimizer::kAdamW8bit);
  if (std::holds_alternative<Sgd>(work)) return &row_of(Optimizer::kSgd);
  return nullptr;
}

bool has_blocks(const OptimizerRow& row) { return std::ranges::any_of(row.state, &OptimizerState::by_block); }

bool updates_whole_parameters(const Layout& l) {
  return l.tp == 1 && l.ep == 1 && l.zero == 0 && l.parameter_server.servers == 0 && l.offload.optimizer == OffloadTo::kNone;
}

bool is_block_state(const Buffer& buffer) {
  if (buffer.kind != BufferClass::kMoment) return false;
  const std::string_view part = std::string_view(buffer.name).substr(buffer.name.rfind('.') + 1);
  return std::ranges::any_of(kRows, [&](const OptimizerRow& row) {
    return std::ranges::any_of(row.state, [&](const OptimizerState& state) { return state.by_block && state.name == part; });
  });
}

double state_bytes_per_parameter(const OptimizerRow& row) {
  double bytes = 0;
  for (const OptimizerState& state : row.state)
    bytes += bits_of(state.dtype) / 8.0 / (state.by_block ? static_cast<double>(kMomentBlock) : 1.0);
  return bytes;
}

}  // namespace shardlab
