// What the kernels of a layer and of the ends of the model do on one rank, by the formulas of plan/work.h evaluated from the
// configuration, priced. Internal to the closed form of a step.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/case.h"
#include "simulator/closed_form_parts.h"
#include "simulator/datasheet_rates.h"
#include "simulator/step_walk.h"

namespace shardlab::simulator::forms {

/// How ranks lie: `tp` fastest, then dp (shards, then replicas of them), then stages.
struct Ways {
  Ways(const Case& c, const DatasheetRates& rates);
  using Way = DatasheetRates::Way;
  Way tp, data, replicas, all_stages, ends;
  Way stage;              ///< all ranks of a stage
  std::vector<Way> hops;  ///< from a stage to the next: the slowest
};

/// A collective among `ranks` of `elements` in the whole buffer.
struct Exchange {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  int ranks = 1;
  int64_t elements = 0, element = 4;
};

/// What a layer's forward keeps for its backward, in the order in which it is made; of products in 8 bits then, for each, the
/// rounded input, its scale or scales, and the scale of the weight.
enum KeptTensor : uint8_t {
  kInput,
  kBetweenHalves,
  kNormed,
  kStatistics,
  kQkvMade,
  kAttended,
  kLogSumExp,
  kNormedAgain,
  kStatisticsAgain,
  kHidden,
  kActivated,
  kRounded
};
enum ProductOrder : uint8_t { kQkvProduct, kOutProduct, kUpProduct, kDownProduct, kProducts, kNoProduct = kProducts };
static_assert(kRounded + 3 * kProducts == kMostKept);
constexpr size_t rounded_input(ProductOrder p) { return kRounded + 3 * static_cast<size_t>(p); }
constexpr size_t input_scale(ProductOrder p) { return rounded_input(p) + 1; }
constexpr size_t weight_scale(ProductOrder p) { return rounded_input(p) + 2; }

struct Kept {
  size_t tensor = 0;  ///< KeptTensor, or one of those of a product
  double bytes = 0;
};

/// Prices what a rank does.
class StepKernels {
 public:
  StepKernels(const Case& c, const DatasheetRates& rates);

  Task kernel(const DatasheetRates::Kernel& k, Spent spent) const;
  Task exchange(const Exchange& e, const Ways::Way& way, Spent spent) const;
  /// A kernel that reads and writes next to nothing: it is launched.
  Task trifle() const { return kernel({0, 8}, Spent::kUpdate); }

  Block layer_forward() const;
  /// `adds`: gradients are added to what an earlier micro-batch left.
  Block layer_backward(bool adds, const LayerTreatment& treatment) const;
  /// What such a layer keeps, in order.
  std::vector<Kept> kept(const LayerTreatment& treatment) const;
  /// Between the device and host memory, and between that and a file.
  Task host_copy(double bytes, bool to_device) const {
    return {.seconds = rates_.host_copy_seconds(bytes, to_device),
            .demand = rates_.host_copy_demand(bytes, to_device),
            .spent = Spent::kData};
  }
  Task file_copy(double bytes, bool write) const { return {.seconds = rates_.nvme_seconds(bytes, write), .spent = Spent::kData}; }
  /// The host reads and writes so many bytes.
  Task on_host(double bytes, Spent spent) const { return {.seconds = rates_.host_copy_seconds(bytes, false), .spent = spent}; }
  Block embed_forward() const;
  Block embed_backward(bool adds) const;
  Block head_forward() const;
  Block head_backward(bool adds) const;
  /// The update of `elements` parameters, and what rounds them where fp32 copies are kept.
  void add_update(int64_t elements, Block& b) const;
  /// Delayed scales of fp8: what makes the step's from past sizes, before all else; and what notes the step's sizes, at its end.
  void add_scales(int64_t layers, Block& b) const;
  void add_remembering(int64_t layers, Block& b) const;

  const Ways& ways() const { return ways_; }
  double launch_s() const { return rates_.efficiency().launch_s; }
  /// The residual stream on its way to the next stage, or its gradient on its way back.
  Message message(const Ways::Way& hop) const {
    const double bytes = x_ * e_;
    return {rates_.message_seconds(bytes, hop), rates_.message_demand(bytes, hop, true), rates_.message_demand(bytes, hop, false)};
  }

 private:
  struct Linear {
    double in, out;
    bool bias = false;
    bool row = false;     ///< tp cuts its input; else its output
    bool narrow = false;  ///< its factors are rounded to 8 bits
    ProductOrder product = kNoProduct;
    bool rounded = false;  ///< its weight, by a forward that was made again
  };
  struct LayerLinears {
    Linear qkv, out, up, down;
  };
  LayerLinears layer_linears() const;
  void add(Block& b, double flops, double bytes, Spent spent, bool product = false) const;
  void norm(Block& b, Spent spent) const;
  void norm_backward(Block& b, bool residual, bool adds) const;
  void linear(Block& b, const Linear& l, Spent spent) const;
  void linear_input(Block& b, const Linear& l) const;
  void linear_weight(Block& b, const Linear& l, bool adds) const;
  // Of products whose factors are rounded (step_kernels_fp8.cpp). A factor is some rows and columns.
  struct Factor {
    double rows, columns;
    bool weight = false;
    bool cut = false;  ///< a rank has a slice of it, and knows the largest size of the slice alone
    double elements() const { return rows * columns; }
  };
  Factor input_of(const Linear& l) const { return {tokens_, l.in, false, l.row}; }
  Factor weight_of(const Linear& l) const { return {l.out, l.in, true, true}; }
  Factor gradient_of(const Linear& l) const { return {tokens_, l.out, false, !l.row}; }
  double narrow_bytes(const Factor& f) const;
  double scale_bytes(const Factor& f) const;
  void measure(Block& b, const Factor& f, Spent spent) const;
  /// `scale`: the tensor that holds its scale from an earlier rounding, or none.
  void quantise(Block& b, const Factor& f, Spent spent, size_t scale = kMostKept) const;
  /// What makes an input again rounds it again, as it was.
  void quantise_input(Block& b, const Linear& l) const;
  void round(Block& b, const Factor& f, Spent spent) const;
  void multiply(Block& b, const Factor& x, const Factor& y, double other_bytes, double flops, Spent spent) const;
  void all_reduce(Block& b, double elements, double element, Spent spent = Spent::kTensor) const;
  void dropout(Block& b, Spent spent) const;
  void attention(Block& b, Spent spent) const;
  void activation(Block& b, Spent spent) const;
  /// The layer's forward up to its last activation, and where `all` the rest.
  void forward_ops(Block& b, Spent spent, bool all) const;
  void backward_bias(Block& b, bool adds) const;

  const Case& c_;
  const DatasheetRates& rates_;
  Ways ways_;
  bool gpt_, fp8_;
  double e_, g_;  ///< bytes of an element, and of a gradient's
  double tokens_, h_, x_, qkv_, o_, up_, f_, vocab_, stats_, lse_;
  double sequences_, heads_, kv_heads_, head_dim_;
};

}  // namespace shardlab::simulator::forms
