// The cost of one layer on one rank: time of its phases, bytes it keeps, bytes it sends. This is the slow half of an estimate. It
// is worked out once for each way in which a layer can be cut, and remembered.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "simulator/estimator/analytic/analytic.h"
#include "simulator/interpreter/device_model.h"
#include "simulator/interpreter/fabric.h"

namespace shardlab::simulator::analytic {

/// A count as the formulas take it, and a size in bytes as the results give it: whole, and within what 64 bits hold.
inline double of(int64_t v) { return static_cast<double>(v); }
inline int64_t whole(double bytes) { return static_cast<int64_t>(std::clamp(bytes, 0.0, 9e18) + 0.5); }

/// The data that all layers of a study share.
struct LayerStudy {
  const ModelShape& shape;
  const FrameworkProfile& profile;
  const FrameworkProfile::Host& host;  ///< the profile's, on the machine's host
  const DeviceModel& device;
  const Fabric& fabric;
  Group everyone;  ///< all devices of the machine
};

/// The parts of a point on which a layer's cost depends.
struct LayerKey {
  int32_t tp = 1, cp = 1, ep = 1, expert_tp = 1, micro_batch = 1;
  int64_t seq_len = 1;
  int64_t devices = 1;  ///< that wait for one another
  double expert_skew = 1;
  Precision precision = Precision::kBf16;
  Recompute recompute;
  CpKind cp_kind = CpKind::kZigzag;
  bool sequence_parallel = false, tensor_overlap = false;
  AlgorithmChoice algorithm = AlgorithmChoice::kAuto;
  friend bool operator==(const LayerKey&, const LayerKey&) = default;
};
LayerKey layer_key(const Point& point, const FrameworkProfile& profile);

/// Seconds of one phase of one layer and micro-batch.
struct PhaseCost {
  double compute_s = 0;  ///< device time of all kernels
  double tensor_s = 0;   ///< exposed collectives of tensor parallelism ...
  double context_s = 0;  ///< ... context parallelism
  double expert_s = 0;   ///< ... and expert parallelism
  double hidden_s = 0;   ///< collectives that run beside compute
  double host_s = 0;     ///< what the host needs to start it all

  double device_s() const { return compute_s + tensor_s + context_s + expert_s; }
  /// The device waits where the host is slower.
  double wait_s() const { return host_s > device_s() ? host_s - device_s() : 0; }
  double total_s() const { return device_s() + wait_s(); }
  PhaseCost& operator+=(const PhaseCost& o) {
    compute_s += o.compute_s, tensor_s += o.tensor_s, context_s += o.context_s, expert_s += o.expert_s;
    hidden_s += o.hidden_s, host_s += o.host_s;
    return *this;
  }
};

/// Bytes sent by one rank for one layer and micro-batch, forward, backward and recompute together.
struct LayerWire {
  double tensor = 0, context = 0, expert = 0;
};

struct LayerCost {
  PhaseCost forward, recompute;
  PhaseCost input, weight;  ///< backward: for the input, for the weights
  LayerWire wire;
  double kept = 0;       ///< bytes from forward to backward, the input included
  double remade = 0;     ///< bytes that recompute makes again
  double transient = 0;  ///< bytes beyond both while backward runs
  double passing = 0;    ///< bytes while forward runs, beyond the kept ones
  double matmuls = 0;    ///< share of the time of its kernels
  double attention = 0;  ///< the same of fused attention
  double matmul_s = 0;   ///< seconds of one matmul, each counted by its time
  double late_s = 0;     ///< seconds by which the slowest of LayerKey::devices is behind the typical one
  double shapes = 0;     ///< elements of one matrix of each shape of its feed-forward
  /// Elements on one rank, adapters aside.
  int64_t matrix = 0, replicated = 0, expert = 0;
  int64_t frozen = 0, frozen_expert = 0;      ///< of them
  int64_t adapters = 0, expert_adapters = 0;  ///< beside them
  int64_t dense_held() const { return matrix + replicated + adapters; }
  int64_t expert_held() const { return expert + expert_adapters; }
  int64_t parameters() const { return dense_held() + expert_held(); }
  int64_t trained() const { return parameters() - frozen - frozen_expert; }
  double compute_s() const { return forward.compute_s + recompute.compute_s + input.compute_s + weight.compute_s; }
};

/// One tensor of a layer: bytes that stay from forward to backward, and bytes that backward makes again.
struct KeptTensor {
  std::string_view name;
  double kept = 0, remade = 0;
};

/// The tensors that a layer's forward makes for its backward, in order.
class KeptTensors {
 public:
  explicit KeptTensors(Recompute recompute) : recompute_(recompute) {}
  /// `modules`: the modules whose recompute makes the tensor again. `alternate`: the part that operator-wise checkpointing keeps.
  /// The first tensor is the layer's input.
  void add(std::string_view name, double bytes, uint16_t modules, double alternate = 0);
  std::span<const KeptTensor> all() && = delete;  // a list that is gone
  std::span<const KeptTensor> all() const& { return {tensors_.data(), static_cast<size_t>(count_)}; }

 private:
  Recompute recompute_;
  int count_ = 0;
  std::array<KeptTensor, 48> tensors_;
};
/// Whether two copies exist of rows that sequence parallelism gathers or scatters: one in the order of the ranks' pieces, one in
/// the order of the rows. If communication is part of the matmul, pieces of a single sequence need no second copy.
bool copies_rows(const FrameworkProfile& profile, const LayerKey& key);
KeptTensors kept_tensors(const LayerStudy& study, const LayerKey& key, bool moe);

/// One end of the model: the embedding, the final norm and head (with the memory of the logits), or the loss (time alone).
struct EndCost {
  PhaseCost forward, backward;
  LayerWire wire;
  double late_s = 0;           ///< seconds by which the slowest device is behind the typical one, as in LayerCost
  double kept = 0;             ///< bytes from forward to backward
  double at_loss = 0;          ///< bytes while the loss runs, beyond the kept ones
  double logits = 0;           ///< the bytes of `kept` and `at_loss` that hold logits, at the peak
  double logits_once = 0;      ///< of logits in 16 bit
  double logits_forward = 0;   ///< of logits, at the peak of the loss's forward
  double logits_backward = 0;  ///< and of its backward
  double logits_gradient = 0;  ///< of logits, while the head's matmuls run backward
  double logits_output = 0;    ///< of logits that outlive the backward
  double input_gradient = 0;   ///< bytes of the gradient that the head's backward makes for its input
  int64_t matrix = 0, replicated = 0;
  bool frozen = false;
  int64_t parameters() const { return matrix + replicated; }
  int64_t trained() const { return frozen ? 0 : parameters(); }
};

struct Block {
  LayerCost dense, moe;
  EndCost embedding, head, loss;
  double attention_shapes = 0;   ///< elements of one matrix of each shape of an attention
  double boundary = 0;           ///< bytes of the residual stream that a stage sends on
  double logits = 0;             ///< bytes of the logits that a stage sends on whose loss another computes
  double boundary_gather_s = 0;  ///< to put it together again, where each tensor-parallel rank sends its part
};

/// Everything of one key. Costs some tens of microseconds.
Block block_cost(const LayerStudy& study, const LayerKey& key);

}  // namespace shardlab::simulator::analytic
