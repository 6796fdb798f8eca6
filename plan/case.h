// One fully resolved experiment: a point of a sweep after every axis, default and derived value is set.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/base/result.h"
#include "plan/machine.h"
#include "plan/model.h"

namespace shardlab {

enum class Schedule : uint8_t { kNone, kAfab, k1F1B };
enum class Recompute : uint8_t { kNone, kFull };
enum class Optimizer : uint8_t { kAdamW, kSgd };
enum class AlgorithmChoice : uint8_t { kAuto, kRing, kHalvingDoubling, kDirect };

std::string_view name_of(Family v);
std::string_view name_of(Schedule v);         ///< "none", "afab", "1f1b"
std::string_view name_of(Recompute v);        ///< "none", "full"
std::string_view name_of(Optimizer v);        ///< "adamw", "sgd"
std::string_view name_of(AlgorithmChoice v);  ///< "auto", "ring", "halving-doubling", "direct"

/// Where ranks go and how state is kept: the layout keys of design section 3.
struct Layout {
  int dp = 1, tp = 1, pp = 1, vpp = 1, cp = 1, ep = 1;
  int zero = 0;                         ///< 0 or 1 today
  Schedule schedule = Schedule::kNone;  ///< kNone iff pp == 1
  bool sequence_parallel = false;
  Recompute recompute = Recompute::kNone;
  bool overlap = true;       ///< reduce each bucket as soon as its last gradient is there, on its own stream
  int64_t bucket_bytes = 0;  ///< gradients reduced together; 0: one bucket per parameter
  AlgorithmChoice collective_algorithm = AlgorithmChoice::kAuto;
  friend bool operator==(const Layout&, const Layout&) = default;

  int world_size() const { return dp * tp * pp * cp; }
};

struct LearningRate {
  enum class Kind : uint8_t { kConstant, kCosine } kind = Kind::kConstant;
  float peak = 1e-3f;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  ///< of kCosine
  float floor = 0;          ///< of kCosine
  friend bool operator==(const LearningRate&, const LearningRate&) = default;
};

/// Learning rate of optimizer step `step`, counted from 0.
float learning_rate_at(const LearningRate& lr, int64_t step);

struct Train {
  int64_t seq_len = 0;
  int64_t global_batch_tokens = 0;  ///< seq_len * micro_batch * grad_accumulation * dp
  int64_t micro_batch = 1;          ///< sequences of one micro-batch on one rank
  int64_t grad_accumulation = 1;    ///< micro-batches of one step on one rank
  std::string precision = "fp32";
  Optimizer optimizer = Optimizer::kAdamW;
  LearningRate learning_rate;
  float weight_decay = 0;
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f;
  float dropout = 0;
  bool grad_norm = false;  ///< the squared norm of the gradient is computed each step
  uint64_t seed = 1;
  friend bool operator==(const Train&, const Train&) = default;
};

/// Real input: a text file or folder (byte-level) or a file of uint16 tokens.
struct DataSource {
  std::string text;    ///< path of a file or folder, or empty
  std::string tokens;  ///< path of a .bin of uint16, or empty
  friend bool operator==(const DataSource&, const DataSource&) = default;
};

struct Measure {
  int64_t warmup = 3;
  int64_t steps = 10;
  int64_t repeat = 3;
  double timeout_s = 300;
  int64_t validate_sequences = 0;  ///< sequences of the validation split scored after training, 0 for none
  friend bool operator==(const Measure&, const Measure&) = default;
};

struct Case {
  std::string name;
  Model model;
  Layout layout;
  Train train;
  DataSource data;
  Measure measure;
  Machine machine;
  std::string profile = "shardlab";
  std::string backend = "cpu";  ///< cpu, dry, cuda
  std::string transport = "threads";
  bool canonical = false;  ///< own fixed-order matmul and direct collectives: bitwise across layouts
  int threads_per_rank = 1;

  /// Micro-batches of one step over all data-parallel ranks.
  int64_t sequences_per_step() const { return train.micro_batch * train.grad_accumulation * layout.dp; }
};

/// Device-space bytes that one rank may use: the device's memory or, where the ranks of a local machine outnumber its devices,
/// their equal part of what all devices have.
int64_t memory_per_rank(const Case& c);

/// Refuses what cannot be lowered: heads not divisible by tp, layers fewer than stages, batch not divisible, a value that
/// no strategy of this version implements. Every message states the values and what to change.
Result<void> check(const Case& c);

}  // namespace shardlab
