// The optimizers, one row each: what an optimizer keeps beside a parameter, what its update computes, and which settings it reads.
// Strategies, `verify`, the work of ops, the back ends' checks, the estimator and the exporters read the rows.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "plan/base/dtype.h"
#include "plan/base/moment_codes.h"
#include "plan/buffer.h"
#include "plan/case.h"
#include "plan/op.h"

namespace shardlab {

/// One buffer of state. An update reads it behind gradient and parameter, in the order of the row, and writes it in place.
struct OptimizerState {
  std::string_view name;  ///< behind the name of the buffer that is updated: "m" in "layer3.attn.wqkv.m"
  DType dtype = DType::f32;
  bool by_block = false;  ///< one element for each block of `kMomentBlock` elements of what the rank updates; else one each

  /// Elements beside n that are updated.
  int64_t elements(int64_t n) const { return by_block ? moment_blocks(n) : n; }
};

struct OptimizerRow {
  Optimizer id;
  std::string_view name;   ///< in sweep files and reports
  std::string_view title;  ///< in documents
  std::span<const OptimizerState> state;
  int64_t flops = 0;                            ///< of an element, without weight decay
  int64_t decay_flops = 2;                      ///< of an element, of weight decay
  bool has_betas = false, has_epsilon = false;  ///< whether it reads `beta1` and `beta2`, and `epsilon`
  float beta2 = 0.95f;                          ///< where a case says nothing
  std::string_view source;                      ///< the paper
};

/// The rows, in the order of `Optimizer`.
std::span<const OptimizerRow> optimizers();
const OptimizerRow& row_of(Optimizer optimizer);
/// The optimizer of this name in sweep files; nothing for an unknown name.
std::optional<Optimizer> optimizer_named(std::string_view name);

/// The optimizer whose update an op is; null: the op is no update.
const OptimizerRow* update_of(const Work& work);
/// Operands of an update before its factor: gradient, parameter, state.
inline size_t update_operands(const OptimizerRow& row) { return 2 + row.state.size(); }

/// Whether some state has one element for each block. Blocks follow the rank's buffers, so another layout has other blocks.
bool has_blocks(const OptimizerRow& row);

/// Whether every rank updates whole parameters: each parameter is then cut in the blocks of one rank. Ranks of tensor and expert parallelism
/// update slices, ranks under ZeRO and servers the slices of buckets or units, an optimizer on the host whole buckets.
bool updates_whole_parameters(const Layout& layout);

/// Whether a buffer holds an optimizer's state by block.
bool is_block_state(const Buffer& buffer);
/// Placement along an axis of a buffer with one element for each block of a value, whose own placement is `of_value`.
inline Placement block_placement(Placement of_value) {
  return of_value.kind == Place::kReplicate ? Placement::replicate() : Placement::local();
}

/// Bytes of state for each parameter. Blocks are taken to be full.
double state_bytes_per_parameter(const OptimizerRow& row);

}  // namespace shardlab
