#include "plan/op.h"

#include "plan/op_fields.h"

namespace shardlab {

std::string_view kind_of(const Work& work) {
  static constexpr std::array<std::string_view, std::variant_size_v<Work>> kNames{"load_batch",
                                                                                  "embed",
                                                                                  "positions",
                                                                                  "norm",
                                                                                  "linear",
                                                                                  "rope",
                                                                                  "attention",
                                                                                  "split_heads",
                                                                                  "attention_block",
                                                                                  "attention_merge",
                                                                                  "activation",
                                                                                  "residual",
                                                                                  "dropout",
                                                                                  "cross_entropy",
                                                                                  "add",
                                                                                  "fill",
                                                                                  "sum_scalars",
                                                                                  "squared_norm",
                                                                                  "sgd",
                                                                                  "adamw",
                                                                                  "lion",
                                                                                  "adamw8bit",
                                                                                  "copy",
                                                                                  "kernel",
                                                                                  "",
                                                                                  "send",
                                                                                  "recv",
                                                                                  "regroup",
                                                                                  "route",
                                                                                  "dispatch",
                                                                                  "grouped_linear",
                                                                                  "combine",
                                                                                  "head_norm",
                                                                                  "strips",
                                                                                  "expert_load",
                                                                                  "gate",
                                                                                  "latent_heads",
                                                                                  "choose_experts"};
  static constexpr std::array<std::string_view, 5> kCollectives{"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                                                "all_to_all"};
  if (const auto* c = std::get_if<Collective>(&work)) return kCollectives[static_cast<size_t>(c->kind)];
  return kNames[work.index()];
}

Phase phase_of(const Work& work) {
  return std::visit(
      []<class W>(const W& w) {
        if constexpr (has_phase<const W>)
          return w.phase;
        else
          return Phase::kNone;
      },
      work);
}

}  // namespace shardlab
