// The attention graph that cuDNN is given: products, elementwise operations and reductions, from which its runtime-fused engines
// recognise attention. Pure functions, so the graph can be read, tested and carried out without the library.
//
// Source: the graphs of cudnn-frontend (CompositeSDPANode, CompositeSDPABackwardNode), which cuDNN's engines match. The backend
// interface has an attention operation of its own, which takes a causal mask from cuDNN 9.21 on only.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/cudnn_names.h"
#include "kernels/cuda/kernels.h"
#include "plan/base/attention_calls.h"

namespace shardlab::gpu::cudnn {

/// The array behind a tensor of a graph when the graph is executed.
enum class Place : uint8_t {
  kVirtual,  ///< nothing: it exists inside the engine
  kScalar,   ///< a number given by value
  kQuery,
  kKey,
  kValue,
  kOut,
  kLse,
  kOutGradient,
  kQueryGradient,
  kKeyGradient,
  kValueGradient,
  kQuerySum,  ///< dq in fp32, to which blocks add: `AttentionCalls::dq_bytes`
  kRowSum,    ///< sum of dout * out of each row: `AttentionCalls::row_sum_bytes`
};

/// Extents and strides in elements: (batch, heads, rows, columns).
struct GraphTensor {
  std::string name;
  Place place = Place::kVirtual;
  DataType type = DataType::kF32;
  std::array<int64_t, 4> extents{}, strides{};
  float scalar = 0;
};

/// y = op(inputs). Products are of the last two dims; heads of B are shared by as many of A as it has fewer.
struct GraphOp {
  enum class Kind : uint8_t { kProduct, kPointwise, kReduction, kReshape } kind = Kind::kPointwise;
  Pointwise mode = Pointwise::kIdentity;
  Reduce reduce = Reduce::kAdd;
  int axis = -1;                          ///< of kIndex
  DataType precision = DataType::kF32;    ///< in which it computes
  std::array<int, 3> inputs{-1, -1, -1};  ///< numbers of tensors. kSelect: where the third is true the first, else the second
  int output = -1;
};

struct Graph {
  std::vector<GraphTensor> tensors;
  std::vector<GraphOp> ops;
};

/// How the shape is split in calls.
AttentionCalls calls_of(const AttentionShape& s);

/// Causal attention of one call: q, k, v -> o, lse. `version`: cuDNN's, which decides what stands for minus infinity.
Graph forward_graph(const AttentionShape& s, DType type, int64_t version);
/// dout, o, lse, q, k, v -> dq, dk, dv.
Graph backward_graph(const AttentionShape& s, DType type, int64_t version);

/// Elements from the beginning of an array (qkv, dqkv, o, dout, lse) to a tensor of call number `call`.
int64_t offset_of(Place place, const AttentionShape& s, int64_t call);

/// Why cuDNN is not asked for a shape ("head_dim 70 is no multiple of 8"), or empty. What it refuses itself is another matter.
std::string refusal(const AttentionShape& s, DType type, bool backward, int64_t version);

/// One line a tensor and one an operation.
std::string to_text(const Graph& graph);

}  // namespace shardlab::gpu::cudnn
